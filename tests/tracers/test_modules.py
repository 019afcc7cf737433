"""Module images: hashes, the kernels they hold, and the sources they are tied to."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from alphamoe_tracers.cupti import Collector
from alphamoe_tracers.modules import ModuleLog, kernels_of_image
from alphamoe_tracers.records import ModuleRecord
from alphamoe_tracers.synthetic import SyntheticKernel, SyntheticSource

SOURCE = b"""
template <int N> __global__ void grown(float* x) { x[threadIdx.x] += N; }
template __global__ void grown<3>(float*);
extern "C" __global__ void plain(float* x) { x[0] = 1; }
"""


def module_hashes(out: Path) -> list[str | None]:
    (part,) = (out / "symbols" / "rank=0").iterdir()
    return pq.ParquetFile(part).read().column("module_sha256").to_pylist()


@pytest.fixture(scope="module")
def cubin() -> bytes:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        status, program = nvrtc.nvrtcCreateProgram(SOURCE, b"probe.cu", 0, [], [])
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    status = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90a"])[0]
    assert int(status) == 0
    image = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    nvrtc.nvrtcGetCUBIN(program, image)
    return image


def test_kernels_are_read_from_a_real_cubin(cubin: bytes) -> None:
    """Each kernel's mangled name is found, whatever language linkage it has."""
    assert sorted(kernels_of_image(cubin)) == ["_Z5grownILi3EEvPf", "plain"]


@pytest.mark.parametrize("image", [b"", b"not an image", b"\x7fELF" + bytes(60)])
def test_image_that_is_not_elf_has_no_kernels(image: bytes) -> None:
    """PTX, garbage and a cut image are modules without known kernels."""
    assert kernels_of_image(image) == ()


def test_cut_cubin_is_no_error(cubin: bytes) -> None:
    """An image that ends early still has a hash."""
    assert isinstance(kernels_of_image(cubin[: len(cubin) // 2]), tuple)


def test_symbol_is_tied_to_the_one_module_that_holds_it(tmp_path: Path, cubin: bytes) -> None:
    """One holder gives the hash and the source; two holders give null, since the record does not say which ran."""
    digest = hashlib.sha256(cubin).hexdigest()
    for name, images in (("one", [cubin, cubin]), ("two", [cubin, cubin + b"\0"])):
        source = SyntheticSource()
        collector = Collector(tmp_path / name, 0, source=source, flush_period_s=3600, in_process=True)
        collector.start()
        for image in images:
            source.module(image)
        source.eager(SyntheticKernel("plain"))
        collector.stop({digest: "sha-of-source", "unrelated": "x"})
    assert module_hashes(tmp_path / "one") == [digest]
    lines = (tmp_path / "one" / "modules" / "rank=0.jsonl").read_text().splitlines()
    assert len(lines) == 1
    assert '"source_sha256":"sha-of-source"' in lines[0]
    assert module_hashes(tmp_path / "two") == [None]


def test_module_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    """A module is written when it is seen, not at the end."""
    log = ModuleLog(tmp_path / "modules" / "rank=0.jsonl")
    log.add(b"first", 1)
    log.add(b"first", 2)
    log.add(b"second", 3)
    assert len(log.path.read_text().splitlines()) == 2


def test_finished_log_names_the_kernels_that_ran_and_counts_the_rest(tmp_path: Path, cubin: bytes) -> None:
    """A library's module can hold thousands of kernels; a finished recording keeps the names that it can use."""
    log = ModuleLog(tmp_path / "rank=0.jsonl")
    log.add(cubin, 5)
    log.finish({hashlib.sha256(cubin).hexdigest(): "ab" * 32}, {"plain", "elsewhere"})
    (line,) = log.path.read_text().splitlines()
    record = msgspec.json.decode(line, type=ModuleRecord)
    assert (record.kernels, record.held, record.source_sha256) == (("plain",), 2, "ab" * 32)
