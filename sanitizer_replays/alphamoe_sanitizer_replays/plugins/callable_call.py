"""The replay plug-in ``callable``: a Python function by its import path ``module:name``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from alphamoe_sanitizer_replays.plugins.generic_call import GenericCall, import_module
from alphamoe_tracers.errors import EvidenceError, UsageError

if TYPE_CHECKING:
    from alphamoe_sanitizer_replays.captures.records import Capture


class CallableCall(GenericCall):
    """Calls the function that was captured."""

    name = "callable"

    def find(self, capture: Capture) -> Callable[..., Any]:
        """Import the function's module and give the function.

        Raises:
            EvidenceError: the capture names no import path.
            UsageError: there is no such module or function here.
        """
        module, _, path = (capture.callable or "").partition(":")
        if not module or not path:
            raise EvidenceError(f"the capture names no callable: {capture.callable!r}")
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise UsageError(f"{module} has no function {path} here", "is its version that of the capture?")
        function: Callable[..., Any] = found
        return function


PLUGIN = CallableCall()
