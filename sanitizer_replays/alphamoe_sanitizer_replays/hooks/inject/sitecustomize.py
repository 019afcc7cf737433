"""Arms the capture hook in a process that inherits ``PYTHONPATH``, then runs the ``sitecustomize`` that it hides.

Python imports a module of this name at its start. This folder is taken off ``sys.path`` again; child processes get it
by the environment. Standard library only: it also runs in interpreters where alphamoe-trace is not installed.
"""

import contextlib
import os
import sys
from pathlib import Path


def _arm() -> None:
    try:
        from alphamoe_sanitizer_replays.hooks.hook import arm
    except Exception as error:  # SyntaxError, TypeError: an interpreter older than ours
        _note(error)
        return
    try:
        arm()
    except Exception as error:  # the host comes first
        with contextlib.suppress(Exception):
            sys.stderr.write(f"alphamoe-trace capture: nothing will be captured: {type(error).__name__}: {error}\n")


def _note(error: Exception) -> None:
    """Leave word for the process that reports at the end."""
    import json

    folder = Path(os.environ.get("ALPHAMOE_CAPTURE_OUT") or "alphamoe-captures") / ".hook"
    content = {
        "root": os.environ.get("ALPHAMOE_CAPTURE_ROOT", ""),
        "pid": os.getpid(),
        "executable": sys.executable,
        "unloadable": f"{type(error).__name__}: {error}",
    }
    with contextlib.suppress(Exception):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{os.getpid()}.json").write_text(json.dumps(content), encoding="utf-8")


def _chain() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if any(name.startswith("ALPHAMOE_CAPTURE_") for name in os.environ):  # a misspelt one is told
    _arm()
_chain()
