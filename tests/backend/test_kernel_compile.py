"""Every CUDA source compiles for sm_90a on a machine without a GPU, under the symbol that a trace is searched for."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator

import pytest

from alphamoe_backend.environ import CACHE_DIR
from alphamoe_backend.kernels import jit, launch

pytest.importorskip("cuda.bindings", reason="NVRTC is for Linux only")
VARIANTS = {variant.name: variant for variant in launch.variants()}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get(CACHE_DIR.name)
    os.environ[CACHE_DIR.name] = str(tmp_path_factory.mktemp("cubins"))
    yield
    if before is None:
        del os.environ[CACHE_DIR.name]
    else:
        os.environ[CACHE_DIR.name] = before


def functions(code: bytes) -> list[str]:
    """List the names of the functions that a cubin shows to others; helpers of the compiler are local."""
    from elftools.elf.elffile import ELFFile

    symbols = ELFFile(io.BytesIO(code)).get_section_by_name(".symtab")
    wanted = {"type": "STT_FUNC", "bind": "STB_GLOBAL"}
    return [symbol.name for symbol in symbols.iter_symbols() if dict(symbol["st_info"]) == wanted]


def test_the_fused_kernel_is_the_only_source_of_the_package() -> None:
    """A new source needs variants and a compile test of its own."""
    assert jit.source_names() == (launch.SOURCE_NAME,)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_defines_exactly_the_one_symbol(name: str) -> None:
    """The cubin of each variant holds one function, and its name is the unmangled symbol."""
    cubin = jit.compile_cubin(launch.SOURCE_NAME, "sm_90a", VARIANTS[name].defines())
    assert functions(cubin.code) == [launch.SYMBOL]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_neither_spills_nor_outgrows_its_share_of_the_registers(name: str) -> None:
    """The assembler reports registers that let the stated number of CTAs share a multiprocessor, and no spills."""
    cubin = jit.compile_cubin(launch.SOURCE_NAME, "sm_90a", VARIANTS[name].defines())
    assert cubin.spill_bytes == 0
    assert 0 < cubin.registers * launch.THREADS * VARIANTS[name].ctas_per_sm <= 65536


def layout_problem(variant: launch.Variant, off_by: int) -> str:
    """Assert the launch rule's shared memory in the source, at three hidden sizes; give NVRTC's complaint."""
    head = jit.source_text("w8a8_shape", ".cuh").decode()
    asserted = "".join(
        f"static_assert(SCALES_AT + {H // 128} * (TOKENS + 3) * 4 == {variant.dynamic_smem_bytes(H) + off_by});\n"
        for H in (128, 2048, launch.MAX_H)
    )
    source = head + asserted + 'extern "C" __global__ void nothing() {}\n'
    try:
        jit._compile("layout", source.encode(), "sm_90a", variant.defines())
    except jit.AlphaMoEError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", VARIANTS)
def test_the_launch_rule_and_the_source_agree_on_shared_memory(name: str) -> None:
    """The bytes that the launch rule asks for are those that the source lays out; four more do not compile."""
    assert layout_problem(VARIANTS[name], 0) == ""
    assert "static assertion failed" in layout_problem(VARIANTS[name], 4)


def test_the_argument_buffer_has_the_kernel_parameters_in_order() -> None:
    """Names and kinds of the packed arguments are those of the source's parameter list."""
    import ctypes

    from alphamoe_backend.kernels.launcher import _Arguments

    text = jit.source_text(launch.SOURCE_NAME).decode()
    parameters = re.search(rf"{launch.SYMBOL}\((.*?)\)", text, re.DOTALL)
    assert parameters is not None
    declared = [" ".join(parameter.split()) for parameter in parameters[1].split(",")]
    kinds = {ctypes.c_void_p: "*", ctypes.c_int: "int ", ctypes.c_float: "float "}
    assert [field[0] for field in _Arguments._fields_] == [re.split(r"[ *]", text)[-1] for text in declared]
    for (_, kind), text in zip(_Arguments._fields_, declared, strict=True):
        assert ("*" in text) == (kind is ctypes.c_void_p)
        assert kinds[kind] in text
