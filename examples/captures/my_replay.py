"""A replay plug-in of one's own: bitwise equality, since this operator adds without atomics.

Named by ``--plugin my_replay:Bitwise``, or by an entry point of the group ``alphamoe_trace.replays``.
"""

from alphamoe_sanitizer_replays.plugins.torch_op import TorchOp


class Bitwise(TorchOp):
    """Replays ``moe_example::add_residual`` and asks for the captured bytes."""

    name = "my_replay:Bitwise"

    def tolerance(self, output: str, dtype: str) -> float:
        """Allow no difference at all."""
        return 0.0
