"""json without its Python half agrees with json."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.tools.server import light

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=9,
)


@given(VALUES)
def test_it_reads_and_writes_what_json_does(value: object) -> None:
    assert light.loads(json.dumps(value)) == value
    assert json.loads(light.dumps(value)) == value


@pytest.mark.parametrize("text", ["", "{", "{}x", "nul", "[1,]", '"open', " "])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not one JSON value"):
        light.loads(text)


def test_what_json_cannot_hold_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        light.dumps({"a": {1}})
