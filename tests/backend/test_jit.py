"""The cubin cache: one compilation for many processes, and no trust in what lies on the disk."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphamoe_backend.environ import CACHE_DIR
from alphamoe_backend.kernels import jit, launch
from alphamoe_tracers.errors import AlphaMoEError, UsageError

pytest.importorskip("cuda.bindings", reason="NVRTC is for Linux only")
DEFINES = launch.variant("t8_c8").defines()
ONE_COMPILE = (
    "from alphamoe_backend.kernels import jit, launch\n"
    "cubin = jit.compile_cubin(launch.SOURCE_NAME, 'sm_90a', launch.variant('t8_c8').defines())\n"
    "print(cubin.sha256, cubin.from_cache)\n"
)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with CACHE_DIR.override(str(tmp_path / "cubins")):
        yield tmp_path / "cubins"


def compile_once() -> jit.Cubin:
    return jit.compile_cubin(launch.SOURCE_NAME, "sm_90a", DEFINES)


def test_a_second_compile_comes_from_the_disk(cache: Path) -> None:
    """The same source, definitions and compiler give the stored cubin and what was known about it."""
    first, second = compile_once(), compile_once()
    assert (first.from_cache, second.from_cache) == (False, True)
    assert (first.code, first.registers) == (second.code, second.registers)
    assert [path.suffix for path in cache.iterdir()].count(".cubin") == 1


def test_other_definitions_are_another_entry(cache: Path) -> None:
    """A variant never gets the cubin of another."""
    first = compile_once()
    other = jit.compile_cubin(launch.SOURCE_NAME, "sm_90a", launch.variant("t64_w").defines())
    assert not other.from_cache
    assert other.sha256 != first.sha256
    assert other.source_sha256 == first.source_sha256


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "garbage"])
def test_a_damaged_entry_is_compiled_again(cache: Path, damage: str) -> None:
    """A flipped byte, a cut file, an empty one and plain garbage all lead to a fresh, equal cubin and a sound entry."""
    first = compile_once()
    (entry,) = cache.glob("*.cubin")
    data = bytearray(entry.read_bytes())
    data[-100] ^= 0xFF
    entry.write_bytes({"flip": bytes(data), "cut": bytes(data[:5000]), "empty": b"", "garbage": b"\xff" * 99}[damage])
    again = compile_once()
    assert not again.from_cache
    assert again.code == first.code
    assert compile_once().from_cache


def test_four_processes_at_once_compile_once(cache: Path) -> None:
    """Three of four wait for the one that compiles, and all get the same cubin."""
    roots = os.pathsep.join(path for path in sys.path if path.endswith(("backend", "tracers")))
    env = dict(os.environ, PYTHONPATH=roots)
    running = [
        subprocess.Popen([sys.executable, "-c", ONE_COMPILE], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    lines = [process.communicate(timeout=120)[0].split() for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert len({sha256 for sha256, _ in lines}) == 1
    assert sorted(from_cache for _, from_cache in lines) == ["False", "True", "True", "True"]
    assert not list(cache.glob("*.tmp"))


def test_a_cache_that_cannot_be_made_only_costs_time(tmp_path: Path) -> None:
    """With a file where the folder should be the cubin is compiled and not kept."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    with CACHE_DIR.override(str(blocker / "cubins")):
        assert not compile_once().from_cache
        assert not compile_once().from_cache


def test_a_source_that_does_not_compile_shows_the_compilers_words() -> None:
    """The message holds NVRTC's own log, with the line."""
    with pytest.raises(AlphaMoEError, match=r"broken\.cu\(1\)"):
        jit._compile("broken", b"__global__ void k() { no_such_thing(); }", "sm_90a", {})


def test_an_unknown_source_is_refused(cache: Path) -> None:
    """The hint lists the sources that there are."""
    with pytest.raises(AlphaMoEError, match="no CUDA source named 'nothing'"):
        jit.compile_cubin("nothing", "sm_90a", {})


def test_nothing_is_known_of_cubins_that_were_not_loaded(cache: Path) -> None:
    """Compiling is not loading: a module's source is only vouched for once this process loaded it."""
    cubin = compile_once()
    assert cubin.sha256 not in jit.known_sources()


def test_a_header_counts_as_source_and_keeps_its_line_numbers() -> None:
    """Headers are put in place once, so that the hash covers them, and a complaint names their own line."""
    text = jit.source_text(launch.SOURCE_NAME).decode()
    assert "#include" not in text
    assert text.count("constexpr int THREADS") == text.count("copies_commit() {") == 1
    shape = jit.source_text("w8a8_shape", ".cuh").decode()
    broken = shape.replace("constexpr int THREADS = 256;", "constexpr int THREADS = nonsense;")
    with pytest.raises(AlphaMoEError, match=r"w8a8_shape\.cuh\(\d+\): error: identifier \"nonsense\""):
        jit._compile("broken", broken.encode(), "sm_90a", DEFINES)


def _sections(code: bytes) -> dict[str, bytes]:
    from elftools.elf.elffile import ELFFile

    return {section.name: section.data() for section in ELFFile(io.BytesIO(code)).iter_sections()}


def test_line_information_leaves_the_machine_code_as_it_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without it the code of each variant is the same bytes; only with it there is a table of lines."""
    for variant in launch.variants():
        with_lines = _sections(jit.compile_cubin(launch.SOURCE_NAME, "sm_90a", variant.defines()).code)
        with monkeypatch.context() as patched:
            patched.setitem(jit._OPTIONS, "lineinfo", False)
            without = _sections(jit.compile_cubin(launch.SOURCE_NAME, "sm_90a", variant.defines()).code)
        text = f".text.{launch.SYMBOL}"
        assert with_lines[text] == without[text]
        assert ".debug_line" in with_lines
        assert ".debug_line" not in without


def test_a_replaced_source_brings_its_own_headers_and_takes_the_rest_from_the_package(tmp_path: Path) -> None:
    """A header beside the file wins over the package's; the hash tells the two sources apart; undoing it undoes it."""
    before = jit.source_text(launch.SOURCE_NAME)
    copy = tmp_path / "mine.cu"
    package = Path(jit.__file__).parent
    copy.write_text((package / f"{launch.SOURCE_NAME}.cu").read_text())
    (tmp_path / "ptx.cuh").write_text((package / "ptx.cuh").read_text() + "// mine\n")
    jit.replace_source(launch.SOURCE_NAME, copy)
    try:
        text = jit.source_text(launch.SOURCE_NAME).decode()
        assert text.count("// mine") == 1
        assert '#line 1 "mine.cu"' in text
        assert "constexpr int THREADS" in text
    finally:
        jit.replace_source(launch.SOURCE_NAME, None)
    assert jit.source_text(launch.SOURCE_NAME) == before


def test_a_replacement_needs_a_known_source_and_a_file(tmp_path: Path) -> None:
    """An unknown name and a missing file are each refused at once."""
    with pytest.raises(AlphaMoEError, match="no CUDA source named 'nothing'"):
        jit.replace_source("nothing", tmp_path / "mine.cu")
    with pytest.raises(UsageError, match="no such source file"):
        jit.replace_source(launch.SOURCE_NAME, tmp_path / "mine.cu")


def test_any_text_compiles_and_is_kept_under_its_own_name(cache: Path) -> None:
    """A source from elsewhere is cached like the package's, by its text."""
    source = b'extern "C" __global__ void k(int *p) { *p = VALUE; }'
    first, again = (jit.compile_source("mine", source, "sm_90a", {"VALUE": 3}) for _ in range(2))
    other = jit.compile_source("mine", source + b"\n// other", "sm_90a", {"VALUE": 3})
    assert (first.from_cache, again.from_cache, other.from_cache) == (False, True, False)
    assert [path.name.startswith("mine-sm_90a-") for path in cache.glob("*.cubin")] == [True, True]
