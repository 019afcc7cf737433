"""What this machine can do and what is missing, found without touching CUDA in this process.

Whatever could crash or hang (importing torch, loading libcupti, NVRTC) is asked in processes of their own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from alphamoe_profiler.memory import GpuSurvey, survey_gpus
from alphamoe_profiler.prompts import load_gsm8k
from alphamoe_profiler.run_identity import torch_cuda_version
from alphamoe_profiler.source import source_revision
from alphamoe_profiler.trace_config import GPU_MODEL, ROOM_BYTES
from alphamoe_tracers.errors import AlphaMoEError

State = Literal["ok", "missing", "broken"]
PROBE_TIMEOUT_S = 60.0
MIN_FREE_DISK_BYTES = 1 << 30
MIN_FREE_MEMORY_BYTES = 4 << 30

# Each prints one JSON object. Errors end the probe, and their last line is shown.
_PROBES = {
    "torch": "import json, torch\n"
    "print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda,"
    " 'devices': torch.cuda.device_count() if torch.cuda.is_available() else 0}))",
    "cupti": "import json\nfrom alphamoe_tracers import libcupti\ntrouble = ''\n"
    "try:\n    libcupti.load().now_ns()\nexcept Exception as error:\n    trouble = str(error)\n"
    "print(json.dumps({'mapped': libcupti.mapped_libraries(), 'trouble': trouble}))",
    "nvrtc": "import json\nfrom cuda.core import Program, ProgramOptions\n"
    'code = Program(\'extern "C" __global__ void probe() {}\', "c++", ProgramOptions(arch="sm_90a"))\n'
    "print(json.dumps({'bytes': len(code.compile('cubin').code)}))",
    "nvtx": "import json, nvtx\nprint(json.dumps({'domain': type(nvtx.get_domain('alphamoe')).__name__}))",
    "triton": "import json, triton\nprint(json.dumps({'version': triton.__version__}))",
}


class Check(msgspec.Struct, frozen=True):
    """One line of the doctor's answer."""

    name: str
    state: State
    detail: str
    remedy: str = ""
    """What to do about it, where something is missing or broken."""
    needed_for: Literal["cpu", "gpu", "extra"] = "cpu"
    """``cpu``: no run works without it. ``gpu``: no witnesses without it. ``extra``: a further command needs it."""


class Diagnosis(msgspec.Struct, frozen=True):
    """Everything that was looked at."""

    checks: tuple[Check, ...]

    @property
    def cpu_run_works(self) -> bool:
        """Whether ``alphamoe-trace --ranks 4 --prompt gsm8k:17`` can run here at all."""
        return all(check.state == "ok" for check in self.checks if check.needed_for == "cpu")

    @property
    def gpu_run_works(self) -> bool:
        """Whether a run here can be witnessed."""
        return self.cpu_run_works and all(check.state == "ok" for check in self.checks if check.needed_for == "gpu")


def diagnose() -> Diagnosis:
    """Look at everything; takes a few seconds (torch is imported in a process beside)."""
    probes = {name: _start_probe(code) for name, code in _PROBES.items()}
    survey = survey_gpus()
    checks = [_python(), _packages(), _gsm8k(), _disk(), _memory(), _sanitizer()]
    answers = {name: _finish_probe(process) for name, process in probes.items()}
    checks += [
        _torch(*answers["torch"]),
        *_gpus(survey),
        _cupti(*answers["cupti"]),
        *_permission(),
        _nvrtc(*answers["nvrtc"]),
        _nvtx(*answers["nvtx"]),
        _triton(*answers["triton"]),
    ]
    order = {"cpu": 0, "gpu": 1, "extra": 2}
    return Diagnosis(tuple(sorted(checks, key=lambda check: order[check.needed_for])))


Answer = tuple[dict[str, Any] | None, str]


def _start_probe(code: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


def _finish_probe(process: subprocess.Popen[bytes]) -> Answer:
    """Return what a probe printed, or null and why it printed nothing."""
    try:
        out, err = process.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None, f"no answer within {PROBE_TIMEOUT_S:g} s"
    lines = err.decode(errors="replace").strip().splitlines()
    if process.returncode != 0:
        return None, lines[-1] if lines else f"ended with code {process.returncode}"
    try:
        answer = json.loads(out.decode(errors="replace").strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None, "answered nothing that can be read"
    return (answer, "") if isinstance(answer, dict) else (None, "answered nothing that can be read")


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", version)


def _packages() -> Check:
    needed = ("msgspec", "numpy", "pandas", "pyarrow", "rich", "mistral_common", "sentencepiece")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return Check("packages", "missing", ", ".join(missing), "pip install -c constraints.txt -e .")
    tree = source_revision().tree_sha256 or ""
    return Check("packages", "ok", f"all there; code under test has tree {tree[:12]}")


def _gsm8k() -> Check:
    try:
        return Check("gsm8k", "ok", load_gsm8k().source)
    except AlphaMoEError as error:
        return Check("gsm8k", "missing", str(error), error.hint or "use --prompt text:... instead")


def _disk(folder: Path | None = None) -> Check:
    free = shutil.disk_usage(folder or Path.cwd()).free
    detail = f"{free / 2**30:.1f} GiB free here"
    if free < MIN_FREE_DISK_BYTES:
        return Check("disk", "missing", detail, "make room, or write elsewhere with --out")
    return Check("disk", "ok", detail)


def _memory(meminfo: Path = Path("/proc/meminfo")) -> Check:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return Check("memory", "ok", "unknown on this system")
    detail = f"{free / 2**30:.1f} GiB available"
    if free < MIN_FREE_MEMORY_BYTES:
        return Check("memory", "missing", detail, "four ranks take about 2 GiB; use fewer with --ranks")
    return Check("memory", "ok", detail)


def _torch(answer: dict[str, Any] | None, why: str) -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "missing", "not installed", "pip install torch")
    if answer is None:
        return Check("torch", "broken", why, "reinstall torch")
    built = f"for CUDA {answer['cuda']}" if answer["cuda"] else "a CPU build"
    return Check("torch", "ok", f"{answer['version']}, {built}, sees {answer['devices']} CUDA devices")


def _gpus(survey: GpuSurvey) -> Iterable[Check]:
    if not survey.gpus:
        remedy = "runs here work on the CPU and are INCONCLUSIVE: record on a machine with a GPU"
        yield Check("cuda device", "missing", survey.reason or "none", remedy, "gpu")
        return
    driver = survey.driver or "unknown"
    yield Check("driver", "ok", driver, needed_for="gpu")
    if torch_cuda_version() is None:
        yield Check("torch with CUDA", "missing", "this torch is a CPU build", "install a CUDA build of torch", "gpu")
    for number, gpu in enumerate(survey.gpus):
        info = gpu.info
        room = f"{gpu.free_bytes / 2**30:.0f} GiB free"
        if gpu.free_bytes < ROOM_BYTES:
            room += f" (the default {GPU_MODEL} needs {ROOM_BYTES >> 30}; tiny is run instead)"
        kernel = _implementation(info.compute_capability)
        yield Check(f"cuda:{number}", "ok", f"{info.name}, {room}; AlphaMoE kernel: {kernel}", needed_for="gpu")


def _implementation(capability: str | None) -> str:
    """Say which implementation of the fused kernel a device of this compute capability runs."""
    if capability == "9.0":
        return "ours, for Hopper"
    if capability in ("10.0", "10.3"):
        found = importlib.util.find_spec("flashinfer")
        return "FlashInfer's" if found else "FlashInfer's, which is not installed: the torch reference runs"
    return f"none for compute capability {capability}: the torch reference runs, without the symbol"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cupti(answer: dict[str, Any] | None, why: str) -> Check:
    versions = f"cupti-python {_version('cupti-python')}, nvidia-cuda-cupti {_version('nvidia-cuda-cupti')}"
    if importlib.util.find_spec("cupti") is None:
        return Check("cupti", "missing", versions, "pip install 'cupti-python>=13,<14'", "gpu")
    if answer is None:
        return Check("cupti", "broken", f"{versions}: {why}", "install the nvidia-cuda-cupti that fits it", "gpu")
    mapped = [str(path) for path in answer["mapped"]]
    if len(mapped) > 1:
        detail = f"{versions}; two libraries are loaded: {', '.join(mapped)}"
        return Check("cupti", "broken", detail, "take the other libcupti out of LD_LIBRARY_PATH", "gpu")
    if answer["trouble"] and not answer["trouble"].startswith("no CUDA device"):
        detail = f"{versions}: {answer['trouble']}"
        return Check("cupti", "broken", detail, "another profiler, or a libcupti newer than the driver?", "gpu")
    where = mapped[0] if mapped else "the library is loaded where there is a driver"
    return Check("cupti", "ok", f"{versions}, {where}", needed_for="gpu")


def _permission(parameters: Path = Path("/proc/driver/nvidia/params")) -> Iterable[Check]:
    try:
        restricted = "RmProfilingAdminOnly: 1" in parameters.read_text()
    except OSError:  # no NVIDIA driver, or one that does not say
        return
    detail = "performance counters are for administrators; activity records, all that is used here, are for everyone"
    yield Check("permission", "ok", detail if restricted else "profiling is open to every user", needed_for="gpu")


def _nvrtc(answer: dict[str, Any] | None, why: str) -> Check:
    version = f"nvidia-cuda-nvrtc {_version('nvidia-cuda-nvrtc')}, cuda-core {_version('cuda-core')}"
    if answer is None:
        return Check("nvrtc", "broken", f"{version}: {why}", "pip install nvidia-cuda-nvrtc cuda-core", "gpu")
    return Check("nvrtc", "ok", f"{version}, compiles for sm_90a", needed_for="gpu")


def _nvtx(answer: dict[str, Any] | None, why: str) -> Check:
    if answer is None:
        return Check("nvtx", "missing", why, "pip install nvtx", "gpu")
    injected = os.environ.get("NVTX_INJECTION64_PATH")
    if injected and "cupti" not in Path(injected).name:
        detail = f"NVTX_INJECTION64_PATH={injected} is another tool's: ranges go there and kernels get no layer"
        return Check("nvtx", "broken", detail, "unset NVTX_INJECTION64_PATH for the run", "gpu")
    return Check("nvtx", "ok", f"nvtx {_version('nvtx')}; the run injects libcupti itself", needed_for="gpu")


def _triton(answer: dict[str, Any] | None, why: str) -> Check:
    if answer is None:
        return Check("triton", "missing", why, "pip install triton, for --moe-runner-backend triton", "extra")
    return Check("triton", "ok", str(answer["version"]), needed_for="extra")


def _sanitizer(default: Path = Path("/usr/local/cuda/bin/compute-sanitizer")) -> Check:
    """Look where ``alphamoe-trace sanitize`` looks, and ask what is found for its version."""
    named = os.environ.get("ALPHAMOE_COMPUTE_SANITIZER")
    home = os.environ.get("CUDA_HOME")
    places = [named] if named else ["compute-sanitizer", f"{home}/bin/compute-sanitizer" if home else "", str(default)]
    found = next((path for place in places if place and (path := shutil.which(place))), None)
    if found is None:
        detail = f"$ALPHAMOE_COMPUTE_SANITIZER={named}: no such program" if named else "not found"
        remedy = "install the CUDA toolkit's compute-sanitizer, or name it in $ALPHAMOE_COMPUTE_SANITIZER: sanitize"
        return Check("compute-sanitizer", "missing", detail, f"{remedy} is INCONCLUSIVE without it", "extra")
    try:
        answer = subprocess.run([found, "--version"], capture_output=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = b""
    version = re.search(rb"Version (\d+(?:\.\d+)+)", answer[:10_000])
    if version is None:
        remedy = "reinstall it: nothing that a tool of unknown version finds clean counts"
        return Check("compute-sanitizer", "broken", f"{found} does not say its version", remedy, "extra")
    return Check("compute-sanitizer", "ok", f"{version[1].decode()}, {found}", needed_for="extra")
