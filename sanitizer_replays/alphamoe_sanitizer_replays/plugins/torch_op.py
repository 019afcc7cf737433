"""The replay plug-in ``torch_op``: a torch operator by its name ``namespace::name``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from alphamoe_sanitizer_replays.plugins.generic_call import IMPORT_VARIABLE, GenericCall
from alphamoe_tracers.errors import UsageError

if TYPE_CHECKING:
    from alphamoe_sanitizer_replays.captures.records import Capture


class TorchOp(GenericCall):
    """Calls the operator that was captured, through torch's dispatcher."""

    name = "torch_op"

    def takes(self, target: str) -> bool:
        """Operators, ``namespace::name``."""
        namespace, _, name = target.partition("::")
        return bool(namespace and name)

    def find(self, capture: Capture) -> Callable[..., Any]:
        """Give the operator, which the modules named by the capture registered.

        Raises:
            UsageError: none of that name is registered here.
        """
        import torch

        namespace, _, rest = (capture.callable or "").partition("::")
        name, _, overload = rest.partition(".")
        try:
            found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
        except (AttributeError, RuntimeError) as error:
            raise UsageError(
                f"the operator {capture.callable} is not registered here",
                f"name the module, or the file, that registers it: {IMPORT_VARIABLE}=package.module",
            ) from error
        return found


PLUGIN = TorchOp()
