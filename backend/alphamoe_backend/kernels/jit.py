"""Compile CUDA sources with NVRTC through cuda.core, keep the cubins, load them and know what they were compiled from.

Compiling needs no GPU. The disk cache (``ALPHAMOE_TRACE_CACHE_DIR``, else ``~/.cache/alphamoe-trace``) is keyed by the
source, architecture, definitions and NVRTC version; an entry carries the hash of its cubin and is compiled again when
it does not match. Of several processes that want one entry, one compiles and the others wait for it. Everything is
compiled with line information, which tools name findings by and which leaves the machine code as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from alphamoe_backend.environ import CACHE_DIR
from alphamoe_tracers.errors import AlphaMoEError, UsageError

_FORMAT = "alphamoe-cubin-1"
# Generic lambdas are host functions to NVRTC without --device-as-default-execution-space.
_OPTIONS: dict[str, Any] = {
    "std": "c++17",
    "device_as_default_execution_space": True,
    "lineinfo": True,
    "ptxas_options": ["-v"],
}
_USAGE = re.compile(r"Used (\d+) registers")
_INCLUDE = re.compile(r'#include "([\w.]+)"')
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class _Header(msgspec.Struct, frozen=True):
    format: str
    key: str
    cubin_sha256: str
    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Cubin:
    """One compiled variant of a source."""

    code: bytes
    sha256: str
    """Of ``code``; what a trace of loaded modules shows."""
    source_sha256: str
    """Of the .cu file with its local headers in place (:func:`source_text`)."""
    arch: str
    registers: int
    """Registers a thread, from the assembler's own report (0 where it gave none)."""
    spill_bytes: int
    """Bytes a thread that were spilled to local memory, stores and loads together."""
    from_cache: bool


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel of a module that is loaded in the current context."""

    function: Any
    """``cuda.bindings.driver.CUfunction``."""
    cubin: Cubin
    module: Any
    """Kept, because an unloaded module takes its functions along."""


_known: dict[str, str] = {}
_replaced: dict[str, Path] = {}
_loaded: dict[tuple[str, str, tuple[tuple[str, int], ...], str, int, int], LoadedKernel] = {}
_lock = threading.Lock()


def known_sources() -> dict[str, str]:
    """Map the sha256 of every cubin that this process loaded to the sha256 of the source it was compiled from."""
    return dict(_known)


def source_names() -> tuple[str, ...]:
    """List the CUDA sources of this package, without their suffix."""
    return tuple(
        sorted(
            entry.name.removesuffix(".cu")
            for entry in resources.files(__package__).iterdir()
            if entry.name.endswith(".cu")
        )
    )


def replace_source(source_name: str, path: Path | None) -> None:
    """Let this process compile a file of the user's instead of a source of this package; null undoes it.

    Headers that the file includes are looked for beside it first, then in this package.

    Raises:
        UsageError: there is no such file.
        AlphaMoEError: the package has no such source, or kernels of it are loaded already.
    """
    if source_name not in source_names():
        raise _no_source(source_name)
    if path is not None and not path.is_file():
        raise UsageError(f"{path}: there is no such source file", hint=f"name a copy of {source_name}.cu")
    with _lock:
        if any(slot[0] == source_name for slot in _loaded):
            raise AlphaMoEError(f"{source_name}.cu is loaded already and cannot be replaced in this process")
        if path is None:
            _replaced.pop(source_name, None)
        else:
            _replaced[source_name] = path


def _no_source(source_name: str) -> AlphaMoEError:
    return AlphaMoEError(f"there is no CUDA source named {source_name!r}", hint=", ".join(source_names()))


def _expanded(file_name: str, seen: set[str], beside: Path | None) -> str:
    """Read a file with its local includes in place, each once, and its own line numbers kept for the compiler."""
    seen.add(file_name)
    own = beside is not None and (beside / file_name).is_file()
    text = (beside / file_name if beside and own else resources.files(__package__) / file_name).read_text()
    lines = [f'#line 1 "{file_name}"']
    for number, line in enumerate(text.splitlines(), 1):
        included = _INCLUDE.match(line)
        if included and included[1] not in seen:
            lines += [_expanded(included[1], seen, beside), f'#line {number + 1} "{file_name}"']
        elif included or line.startswith("#pragma once"):
            lines.append("")
        else:
            lines.append(line)
    return "\n".join(lines)


def source_text(source_name: str, suffix: str = ".cu") -> bytes:
    """Read one source with its local headers in place: the whole text that decides what is compiled.

    Raises:
        AlphaMoEError: the package has no such source, or a header of a replaced one is missing.
    """
    replaced = _replaced.get(source_name) if suffix == ".cu" else None
    if replaced is not None:
        return file_text(replaced)
    try:
        return (_expanded(source_name + suffix, set(), None) + "\n").encode()
    except FileNotFoundError:
        raise _no_source(source_name) from None


def file_text(path: Path) -> bytes:
    """Read a source file of the user's with its local headers in place: those beside it first, then the package's.

    Raises:
        AlphaMoEError: it or a header cannot be read.
    """
    try:
        return (_expanded(path.name, set(), path.parent) + "\n").encode()
    except (OSError, UnicodeDecodeError) as error:
        raise AlphaMoEError(f"{path} or a header of it cannot be read: {error}") from None


def nvrtc_version() -> str:
    """Give the version of the NVRTC library, such as ``13.0``."""
    # Not through cuda.core, whose import takes longer than all that a process with a filled cache needs.
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise _no_compiler() from None
    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise AlphaMoEError(f"NVRTC does not tell its version ({error.name})")
    return f"{major}.{minor}"


def _no_compiler() -> AlphaMoEError:
    return AlphaMoEError(
        "compiling the fused kernel needs NVRTC", hint="pip install cuda-core nvidia-cuda-nvrtc (Linux)"
    )


def _cuda_core() -> Any:
    try:
        import cuda.core
    except ImportError:
        raise _no_compiler() from None
    return cuda.core


def _compile(name: str, source: bytes, arch: str, defines: Mapping[str, int]) -> tuple[bytes, str]:
    """Compile one source to a cubin and give it with the assembler's log."""
    core = _cuda_core()
    options = core.ProgramOptions(
        name=f"{name}.cu",
        arch=arch,
        define_macro=[(macro, str(value)) for macro, value in defines.items()] or None,
        **_OPTIONS,
    )
    log = io.StringIO()
    try:
        code: bytes = core.Program(source.decode(), "c++", options).compile("cubin", logs=log).code
    except Exception as error:  # cuda.core raises types of its own private modules, with the compiler's log in the text
        raise AlphaMoEError(f"{name}.cu does not compile for {arch} with {dict(defines)}:\n{error}") from error
    return code, log.getvalue()


def cache_directory() -> Path:
    """Give the folder of compiled kernels; it need not exist."""
    chosen = CACHE_DIR.get()
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "alphamoe-trace"


def _read_entry(path: Path, key: str) -> tuple[_Header, bytes] | None:
    try:
        head, _, code = path.read_bytes().partition(b"\n")
        header = msgspec.json.decode(head, type=_Header)
    except (OSError, msgspec.DecodeError):
        return None
    sound = header.format == _FORMAT and header.key == key and header.cubin_sha256 == hashlib.sha256(code).hexdigest()
    return (header, code) if sound else None


def _write_entry(path: Path, header: _Header, code: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(header) + b"\n" + code)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _one_compiler(path: Path) -> Iterator[None]:
    """Hold the entry's lock file; the system releases it when a holder dies."""
    import fcntl

    with path.with_suffix(".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_cubin(source_name: str, arch: str, defines: Mapping[str, int]) -> Cubin:
    """Compile one variant of a source of this package; see :func:`compile_source`.

    Args:
        source_name: file name in this package, without ``.cu``.

    Raises:
        AlphaMoEError: no such source, or what :func:`compile_source` raises.
    """
    return compile_source(source_name, source_text(source_name), arch, defines)


def compile_source(name: str, source: bytes, arch: str, defines: Mapping[str, int]) -> Cubin:
    """Compile a CUDA source, or take it from the disk cache. A cache that cannot be written is not used.

    Args:
        name: for the cache's file and the compiler's messages, without ``.cu``.
        source: the whole text, local headers in place.
        arch: such as ``sm_90a``.
        defines: macro definitions.

    Raises:
        AlphaMoEError: no NVRTC, or the source does not compile (with the compiler's log).
    """
    source_sha256 = hashlib.sha256(source).hexdigest()
    defines = dict(sorted(defines.items()))
    described = msgspec.json.encode((source_sha256, arch, defines, nvrtc_version(), _OPTIONS))
    key = hashlib.sha256(described).hexdigest()
    path = cache_directory() / f"{name}-{arch}-{key[:24]}.cubin"

    def compiled() -> tuple[_Header, bytes]:
        code, log = _compile(name, source, arch, defines)
        usage, spills = _USAGE.search(log), _SPILLS.search(log)
        header = _Header(
            format=_FORMAT,
            key=key,
            cubin_sha256=hashlib.sha256(code).hexdigest(),
            registers=int(usage[1]) if usage else 0,
            spill_bytes=int(spills[1]) + int(spills[2]) if spills else 0,
        )
        return header, code

    entry = _read_entry(path, key)
    from_cache = entry is not None
    if entry is None:
        with contextlib.ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_one_compiler(path))
                writable = os.access(path.parent, os.W_OK)
            except OSError:
                writable = False
            entry = _read_entry(path, key)
            from_cache = entry is not None
            if entry is None:
                entry = compiled()
                if writable:
                    with contextlib.suppress(OSError):
                        _write_entry(path, *entry)
    header, code = entry
    return Cubin(code, header.cubin_sha256, source_sha256, arch, header.registers, header.spill_bytes, from_cache)


def checked(result: tuple[Any, ...]) -> Any:
    """Unpack a ``cuda.bindings.driver`` result.

    Raises:
        AlphaMoEError: the driver reported an error; the message names it.
    """
    error, *values = result
    if int(error) != 0:
        raise AlphaMoEError(f"the CUDA driver reported {error.name}", hint="run again with CUDA_LAUNCH_BLOCKING=1")
    return values[0] if len(values) == 1 else tuple(values)


def load(
    source_name: str, arch: str, defines: Mapping[str, int], symbol: str, dynamic_smem_bytes: int, device_index: int
) -> LoadedKernel:
    """Load a variant into the context of ``device_index``, which must be current, once a process and device.

    Loading allocates, so do it before a graph is captured.

    Args:
        dynamic_smem_bytes: the most that a launch will ask for.

    Raises:
        AlphaMoEError: compiling or loading failed.
    """
    from cuda.bindings import driver

    slot = (source_name, arch, tuple(sorted(defines.items())), symbol, dynamic_smem_bytes, device_index)
    with _lock:
        if slot not in _loaded:
            cubin = compile_cubin(source_name, arch, defines)
            module = checked(driver.cuModuleLoadData(cubin.code))
            function = checked(driver.cuModuleGetFunction(module, symbol.encode()))
            attributes = driver.CUfunction_attribute
            most, carveout = (
                attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
            )
            checked(driver.cuFuncSetAttribute(function, most, dynamic_smem_bytes))
            checked(driver.cuFuncSetAttribute(function, carveout, 100))  # per cent: two CTAs must fit side by side
            _known[cubin.sha256] = cubin.source_sha256
            _loaded[slot] = LoadedKernel(function, cubin, module)
        return _loaded[slot]
