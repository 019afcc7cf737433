"""Workspaces: bounded eager buffers, and graph buffers that live as long as their graph."""

import gc
import weakref

import pytest
import torch

from alphamoe_backend.workspaces import Workspaces, buffer
from alphamoe_tracers.errors import AlphaMoEError

CPU = torch.device("cpu")
F32 = torch.float32


def test_eager_keeps_only_the_latest_shape() -> None:
    """A new shape replaces the old buffer of the name, so that eager memory does not grow with the shapes seen."""
    workspaces = Workspaces()
    first = workspaces.get("out", (4, 8), F32, CPU)
    assert workspaces.get("out", (4, 8), F32, CPU) is first
    gone = weakref.ref(first)
    del first
    for M in (5, 6, 7):
        workspaces.get("out", (M, 8), F32, CPU)
    gc.collect()
    assert gone() is None
    assert workspaces.held_bytes() == {"eager": 7 * 8 * 4}


def test_names_and_dtypes_do_not_share() -> None:
    """Two names, or one name in two dtypes, are different buffers."""
    workspaces = Workspaces()
    a, b = workspaces.get("a", (4,), F32, CPU), workspaces.get("b", (4,), F32, CPU)
    assert a.data_ptr() != b.data_ptr()
    assert workspaces.get("a", (4,), torch.bfloat16, CPU).dtype == torch.bfloat16


def test_graph_buffers_live_until_their_graph_is_released() -> None:
    """Buffers of a graph are kept by shape, untouched by eager use, until the graph is released."""
    workspaces = Workspaces()
    with workspaces.graph("k"):
        small, large = workspaces.get("out", (2, 8), F32, CPU), workspaces.get("out", (4, 8), F32, CPU)
        assert workspaces.get("out", (2, 8), F32, CPU) is small
    assert workspaces.get("out", (2, 8), F32, CPU) is not small
    workspaces.get("out", (9, 8), F32, CPU)
    assert workspaces.held_bytes()["k"] == small.nbytes + large.nbytes
    workspaces.release("k")
    assert "k" not in workspaces.held_bytes()


def test_a_failed_capture_releases_its_buffers() -> None:
    """A capture that fails leaves no buffers under its key, and eager use goes on."""
    workspaces = Workspaces()
    with pytest.raises(ZeroDivisionError), workspaces.graph("k"):
        get_and_fail(workspaces)
    assert workspaces.held_bytes() == {"eager": 0}
    workspaces.get("out", (2,), F32, CPU)
    assert workspaces.held_bytes() == {"eager": 8}


def get_and_fail(workspaces: Workspaces) -> None:
    """Take a buffer, then fail as a capture might."""
    workspaces.get("out", (2, 8), F32, CPU)
    raise ZeroDivisionError


def test_captures_do_not_nest() -> None:
    """A graph's scope inside another graph's scope is refused."""
    workspaces = Workspaces()
    with workspaces.graph("a"), pytest.raises(AlphaMoEError, match="b was begun inside the capture of a"):
        workspaces.graph("b").__enter__()


def test_without_workspaces_each_buffer_is_fresh() -> None:
    """Without an owner two buffers of one name are different memory."""
    a, b = buffer(None, "out", (64,), F32, CPU), buffer(None, "out", (64,), F32, CPU)
    assert a.data_ptr() != b.data_ptr()
