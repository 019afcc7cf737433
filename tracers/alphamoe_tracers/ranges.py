"""NVTX ranges as instrumented code opens them.

NVTX asks for a tool once, at its first call in a process: set the environment
(:func:`alphamoe_tracers.cupti.prepare_environment`) before the first range is pushed. Where no tool listens a range
costs some tens of nanoseconds. The record side (pairing, enclosing ranges) is in :mod:`alphamoe_tracers.range_pairing`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from alphamoe_tracers.range_pairing import RangePairer, enclosing, with_depths

__all__ = ["DOMAIN", "RangeDomain", "RangePairer", "enclosing", "with_depths"]

DOMAIN = "alphamoe"
_CACHED_ATTRIBUTES = 4096


class RangeDomain:
    """Push/pop ranges of one NVTX domain.

    NVTX's own return values are ignored: tools return -1 for depths they do not count. A push and its pop must happen
    on one thread. Without the ``nvtx`` package, without a tool, or with ``enabled=False`` both do nothing.
    """

    def __init__(self, name: str = DOMAIN, enabled: bool = True) -> None:
        self._name = name
        self._domain: Any = None
        self._attributes: dict[tuple[str, int | None], Any] = {}
        self._state = "unresolved" if enabled else "off"

    @property
    def listening(self) -> bool:
        """Whether a tool took this domain at its first use."""
        if self._state == "unresolved":
            self._resolve()
        return self._state == "on"

    def push(self, name: str, payload: int | None = None) -> None:
        """Open a range on the calling thread.

        Args:
            name: one of a bounded set of names (each is registered with the tool once).
            payload: a number that the tool records with the range, for example a step id.
        """
        if self._state == "off":
            return
        if self._state == "unresolved":
            self._resolve()
            if self._state == "off":
                return
        attributes = self._attributes.get((name, payload))
        if attributes is None:
            attributes = self._domain.get_event_attributes(name, payload=payload)
            if len(self._attributes) < _CACHED_ATTRIBUTES:
                self._attributes[name, payload] = attributes
        self._domain.push_range(attributes)

    def pop(self) -> None:
        """Close the innermost open range of this domain on the calling thread."""
        if self._state == "on":
            self._domain.pop_range()

    def range(self, name: str, payload: int | None = None) -> _OpenRange:
        """Return a context manager that pushes on entry and pops on exit, also when the body raises."""
        return _OpenRange(self, name, payload)

    def _resolve(self) -> None:
        try:
            import nvtx
        except ImportError:
            self._state = "off"
            return
        domain = nvtx.get_domain(self._name)
        # The nvtx package hands out a stand-in where no tool was injected; calling it would only cost time.
        self._state = "off" if type(domain).__name__ == "DummyDomain" else "on"
        self._domain = domain


class _OpenRange:
    """One range around a block of code."""

    __slots__ = ("_domain", "_name", "_payload")

    def __init__(self, domain: RangeDomain, name: str, payload: int | None) -> None:
        self._domain = domain
        self._name = name
        self._payload = payload

    def __enter__(self) -> None:
        self._domain.push(self._name, self._payload)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._domain.pop()
