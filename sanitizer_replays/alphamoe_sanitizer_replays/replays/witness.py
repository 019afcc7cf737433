"""Witness runs: a call is launched once without a tool, under torch's profiler, to see which kernels it starts.

A plug-in for other people's calls cannot say what a call launches, and under a tool no collector may look. So the same
call, in a process of its own with the same inputs, is seen once apart. That proves nothing of what ran under a tool; it
tells the reader why a result is open, and which symbol the call has.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from alphamoe_sanitizer_replays.replays.job import ReplayInputs, prepare_job, stumble
from alphamoe_sanitizer_replays.replays.spec import outputs_file
from alphamoe_sanitizer_replays.results import ReplayResult, Witness
from alphamoe_sanitizer_replays.tool.sanitizer import run_plain
from alphamoe_tracers.errors import AlphaMoEError

FOLDER = "witness"


def run_witness(
    inputs: ReplayInputs,
    folder: Path,
    *,
    device: str,
    variant: str | None,
    source: Path | None,
    timeout_s: float,
) -> Witness:
    """Launch a call once without a tool and give the kernels that it started.

    Args:
        folder: of this run alone.

    Returns:
        The kernels, or why none was seen. Whatever goes wrong is told there: it must not cost the tools their findings.
    """
    try:
        job = prepare_job(inputs, folder, device=device, variant=variant, source=source, witness=True)
        run = run_plain(job.argv, folder=folder, timeout_s=timeout_s, result_file=job.result, variant=variant)
    except (AlphaMoEError, OSError) as error:
        return Witness(problem=f"it could not be made: {error}")
    except Exception as error:  # a plug-in's variants, for example
        return Witness(problem=f"it could not be made: {stumble(error)}")
    if run.timed_out:
        return Witness(problem=f"no end within {run.timeout_s:g} s")
    result = run.result
    if result is None:
        return Witness(problem=run.problems[0] if run.problems else f"it ended by {run.signal or run.exit_code}")
    with contextlib.suppress(OSError):
        outputs_file(job.result).unlink()
    return witness_of(result)


def witness_of(result: ReplayResult) -> Witness:
    """Read what a witness run says of itself."""
    if result.status != "launched":
        return Witness(problem=result.error or "it does not say why it failed")
    if result.witnessed is None:
        return Witness(problem="it was not watched")
    if not result.witnessed:
        where = "on a CPU there is none to see" if result.device == "cpu" else "torch's profiler saw none"
        return Witness(problem=f"the call started no kernel: {where}")
    return Witness(kernels=result.witnessed, seen=result.seen or {})


class Witnesses:
    """The witness runs of a session: one for each capture and variant, when the first replay asks for it."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._locks: dict[tuple[Path, str | None], threading.Lock] = {}
        self._seen: dict[tuple[Path, str | None], Witness] = {}

    def of(
        self,
        inputs: ReplayInputs,
        folder: Path,
        *,
        device: str,
        variant: str | None,
        source: Path | None,
        timeout_s: float,
    ) -> Witness:
        """Give the witness of a call, running it in ``folder / "witness"`` where nobody has yet; others wait."""
        key = (inputs.stored.path, variant)
        with self._lock:
            own = self._locks.setdefault(key, threading.Lock())
        with own:
            if key not in self._seen:
                self._seen[key] = run_witness(
                    inputs, folder / FOLDER, device=device, variant=variant, source=source, timeout_s=timeout_s
                )
            return self._seen[key]
