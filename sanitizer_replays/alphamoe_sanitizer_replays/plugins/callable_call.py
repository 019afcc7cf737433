"""The replay plug-in ``callable``: a Python function by its import path ``module:name``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from alphamoe_sanitizer_replays.plugins.generic_call import GenericCall, import_module
from alphamoe_tracers.errors import UsageError

if TYPE_CHECKING:
    from alphamoe_sanitizer_replays.captures.records import Capture


class CallableCall(GenericCall):
    """Calls the function that was captured."""

    name = "callable"

    def takes(self, target: str) -> bool:
        """Functions, ``module:name``."""
        module, _, name = target.partition(":")
        return bool(module and name) and "::" not in target

    def find(self, capture: Capture) -> Callable[..., Any]:
        """Import the function's module and give the function.

        Raises:
            UsageError: there is no such module or function here.
        """
        module, _, path = (capture.callable or "").partition(":")
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise UsageError(f"{module} has no function {path} here", "is its version that of the capture?")
        function: Callable[..., Any] = found
        return function


PLUGIN = CallableCall()
