"""The environment of the processes that run under a tool, or as they would under one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

SPAWNED_VARIABLE = "ALPHAMOE_TRACE_REPLAY_SPAWNED_NS"
"""``time.time_ns()`` of the moment that the process, or the tool around it, was started."""
REPLAY_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "ALPHAMOE_TRACE_NVTX": "0"}
"""What every replay process runs with."""
_PACKAGES = ("alphamoe_sanitizer_replays", "alphamoe_backend", "alphamoe_tracers", "alphamoe_profiler")
_NOT_FOR_A_REPLAY = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "KINETO_USE_DAEMON",
)


def child_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Give the environment of a replay process: no caching allocator, nothing that is injected, no ranges.

    Args:
        base: the environment to start from; the parent's own when null.
    """
    environment = {name: value for name, value in (base or os.environ).items() if name not in _NOT_FOR_A_REPLAY}
    # The parent may run from a source folder that only its own sys.path knows.
    found = [importlib.util.find_spec(package) for package in _PACKAGES]
    roots = [str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin]
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*filter(None, known), *roots]))
    return environment | REPLAY_ENVIRONMENT
