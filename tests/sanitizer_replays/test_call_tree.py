"""Arguments of a call as a tree: what comes back is what went in, and what cannot come back is refused by type."""

from __future__ import annotations

import enum
import json
import math
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphamoe_sanitizer_replays.captures.call_tree import RefusedValueError, decode, encode_call, encode_result, layouts
from alphamoe_tracers.errors import EvidenceError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["tensor", "list", "x", ""]), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Compare by type too, and a NaN with itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(left, right) for left, right in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other)


@given(st.tuples(plain, plain), st.dictionaries(st.text(max_size=3), plain, max_size=2))
def test_plain_values_come_back_from_json_as_they_were(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Any nesting of plain values, wide integers, NaN and keys named like our own survives JSON with its types."""
    positional, by_name = encode_call(args, kwargs)
    assert same(decode(json.loads(json.dumps(positional.tree)), {}), args)
    assert same(decode(json.loads(json.dumps(by_name.tree, allow_nan=False)), {}), kwargs)


def test_tensors_have_names_and_one_that_occurs_twice_has_one_name() -> None:
    """A tensor passed twice is stored once and passed twice again."""
    x, y = torch.ones(2, 3), torch.zeros(4)
    positional, by_name = encode_call((x, [y]), {"out": x, "dtype": torch.bfloat16, "device": torch.device("cuda:1")})
    assert list(positional.tensors) == ["args.0", "args.1.0"]
    kwargs = decode(by_name.tree, positional.tensors, torch.device("cuda:0"))
    assert kwargs["out"] is x
    assert kwargs["dtype"] is torch.bfloat16
    assert kwargs["device"] == torch.device("cuda:0")


def test_a_result_that_is_an_argument_is_told_by_that_name() -> None:
    """An operator that gives its output argument back makes no second output."""
    out, made = torch.ones(3), torch.zeros(2)
    result = encode_result((out, made), {"args.0": out})
    assert result.tree["tuple"][0]["tensor"] == "args.0"
    assert list(result.tensors) == ["result.1"]


def test_strides_are_kept() -> None:
    """A transposed and an expanded tensor keep the strides that the kernel saw."""
    positional, _ = encode_call((torch.ones(2, 3).t(), torch.ones(1).expand(5)), {})
    assert layouts(positional.tree) == {"args.0": (1, 3), "args.1": (0,)}


def test_views_of_one_storage_are_told() -> None:
    """Two views of one storage are two tensors, and that they share memory is known."""
    base = torch.zeros(8)
    positional, _ = encode_call((base[:4], base[2:]), {})
    assert positional.shared() == [("args.0", "args.1")]


class Mode(enum.IntEnum):
    FAST = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Mode.FAST, "Mode"),
        (Pair(1, 2), "Pair"),
        (object(), "object"),
        ({1: 2}, "key of type int"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "Tensor"),
        (lambda: None, "function"),
    ],
)
def test_any_other_type_is_refused_by_name(value: Any, named: str) -> None:
    """What would come back as something else is refused, and the message has its place and type."""
    with pytest.raises(RefusedValueError, match=rf"args\.1\.x.*{named}|args\.1\.x has a {named}"):
        encode_call((1, {"x": value}), {})


@pytest.mark.parametrize(
    "tree",
    [
        [],
        {},
        {"what": 1},
        {"tensor": "args.9"},
        {"dtype": "nn"},
        {"size": ["x"]},
        {"list": 3},
        {"list": [], "dict": {}},
    ],
)
def test_a_damaged_tree_is_told(tree: Any) -> None:
    """A tree that no capture can hold is damaged evidence, never a guess or a traceback."""
    with pytest.raises(EvidenceError):
        decode(tree, {})
