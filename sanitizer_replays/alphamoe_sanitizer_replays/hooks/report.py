"""What the hook did in each process, as small JSON files, and the lines that tell it at the end.

Each process that has the hook keeps one file beside the captures and replaces it when something changed, so that a
worker which is killed, or ends without Python's exit functions, is told of too. One process, the root, prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from alphamoe_sanitizer_replays.hooks.settings import HookSettings

FOLDER = ".hook"
PROGRAM = "alphamoe-trace capture"


@dataclass
class TargetStatus:
    """What one process knows of one callable or operator."""

    loaded: bool = False
    """Its module was imported, or its operator registered."""
    wrapped: bool = False
    refused: str = ""
    """Why it cannot be wrapped."""
    calls: int = 0
    """A lower bound where the process was killed."""
    not_eager: list[str] = field(default_factory=list)
    """Why calls were let pass: a stream was capturing, torch.compile traced."""
    not_asked: list[str] = field(default_factory=list)
    """Which filter let calls pass."""
    failures: list[str] = field(default_factory=list)
    """Why calls could not be captured."""
    captured: dict[str, int] = field(default_factory=dict)
    """Captures written, by ``rank R M``."""


class Board:
    """The status file of this process. Nothing here raises: a full disk must not reach the host."""

    def __init__(self, out: Path, root: str, targets: tuple[str, ...]) -> None:
        """Prepare; the folder is made at the first :meth:`save`."""
        self.targets = {name: TargetStatus() for name in targets}
        self._out = out
        self._root = root
        self._lock = threading.RLock()
        self._told: set[str] = set()

    def add(self, target: str, kind: str, text: str) -> bool:
        """Add a reason to one of a target's lists and save when it is new; returns whether it was."""
        reasons: list[str] = getattr(self.targets[target], kind)
        with self._lock:
            if text in reasons or len(reasons) >= 8:
                return False
            reasons.append(text)
        self.save()
        return True

    def warn(self, text: str) -> None:
        """Print one line on stderr, once."""
        if text in self._told:
            return
        self._told.add(text)
        say(text)

    def save(self) -> None:
        """Replace the status file."""
        content = {
            "root": self._root,
            "pid": os.getpid(),
            "executable": sys.executable,
            "targets": {name: asdict(status) for name, status in self.targets.items()},
        }
        folder = self._out / FOLDER
        with contextlib.suppress(Exception), self._lock:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{os.getpid()}.tmp"
            temporary.write_text(json.dumps(content), encoding="utf-8")
            temporary.replace(folder / f"{os.getpid()}.json")

    def after_fork(self) -> None:
        """Begin anew in a forked child, whose calls are its own."""
        self._lock = threading.RLock()
        self._told = set()
        for status in self.targets.values():
            status.calls = 0
            status.not_eager, status.not_asked, status.failures, status.captured = [], [], [], {}
        self.save()


def say(text: str) -> None:
    """Print one line on stderr, whatever state that is in."""
    with contextlib.suppress(Exception):  # a host's stream may raise what it likes
        sys.stderr.write(f"{PROGRAM}: {' '.join(text.split())[:600]}\n")
        sys.stderr.flush()


@dataclass(frozen=True)
class Summary:
    """What all processes of one root captured."""

    lines: tuple[str, ...]
    captured: int
    """Captures of all targets."""
    missing: tuple[str, ...]
    """Targets of which there is none."""


def summary(settings: HookSettings, root: str) -> Summary:
    """Tell what all processes of one root captured: a line for each target, and for each M that no call had."""
    processes = _read(settings.out / FOLDER, root)
    lines, total, missing = [], 0, []
    for target in (*settings.callables, *settings.ops):
        found = [process["targets"][target] for process in processes if target in process.get("targets", {})]
        captured: dict[str, int] = {}
        for status in found:
            for place, count in status["captured"].items():
                captured[place] = captured.get(place, 0) + count
        if captured:
            count = sum(captured.values())
            total += count
            calls = "1 call" if count == 1 else f"{count} calls"
            lines.append(f"captured {calls} of {target} ({', '.join(sorted(captured))}) in {settings.out}")
            taken = {place.rpartition(" ")[2] for place in captured}
            absent = [str(M) for M in settings.only_m if str(M) not in taken]
            if absent:
                others = sorted({text for status in found for text in status["not_asked"]})
                seen = f" ({'; '.join(others)})" if others else ""
                lines.append(f"no call of {target} with M {', '.join(absent)} was captured{seen}")
            continue
        missing.append(target)
        lines.append(f"nothing was captured: {_why(target, found, processes)}")
    return Summary(tuple(lines), total, tuple(missing))


def _why(target: str, found: list[dict[str, Any]], processes: list[dict[str, Any]]) -> str:
    def reasons(kind: str) -> str:
        return "; ".join(sorted({text for status in found for text in status[kind]}))

    if not found:
        for process in processes:
            if process.get("unloadable"):
                return f"{process['executable']} cannot import the hook: install alphamoe-trace there"
        return "no Python process loaded the hook (python -I and -E ignore PYTHONPATH)"
    if text := reasons("failures"):
        return f"no call of {target} could be taken: {text}"
    if any(status["calls"] for status in found):
        if text := reasons("not_asked"):
            return f"{target} was called, but not as asked: {text}"
        if text := reasons("not_eager"):
            return f"{target} was never called eagerly: {text}"
        return f"{target} was called, but no call ended"
    if refused := sorted({status["refused"] for status in found if status["refused"]}):
        return f"{target} cannot be wrapped: {'; '.join(refused)}"
    if any(status["wrapped"] for status in found):
        return f"{target} was never called eagerly"
    if "::" in target:
        return f"no operator {target} was registered"
    return f"the module of {target} was never imported"


def _read(folder: Path, root: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and content.get("root") == root:
                found.append(content)
    return found
