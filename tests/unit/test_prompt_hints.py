"""Hints: what is taken, and that every refusal names the field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendance.prompt.hints import HintError, Hints

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
names = [f.name for f in fields(Hints)]


def test_a_full_set() -> None:
    hints = Hints.parse(
        {
            "session": "town",
            "round": 4,
            "agent": "maria",
            "size": 8,
            "mode": "exact",
            "segments": [3, 149],
            "backend": "region",
        }
    )
    assert hints == Hints("town", "4", "maria", 8, "exact", (3, 149), "region")


@pytest.mark.parametrize("value", [None, {}])
def test_no_hints(value: Any) -> None:
    assert Hints.parse(value) == Hints()


@given(st.dictionaries(st.sampled_from(names) | st.text(max_size=8), json_values) | json_values)
def test_anything_is_taken_or_refused_by_name(value: Any) -> None:
    try:
        hints = Hints.parse(value)
    except HintError as error:
        assert error.field == "tokendance" or error.field in value
        assert str(error).startswith(f"{error.field}: ")
        return
    assert hints.size is None or hints.size >= 1
    assert hints.mode in (None, "auto", "exact")
    assert hints.segments is None or all(length > 0 for length in hints.segments)


@pytest.mark.parametrize(
    ("hints", "field", "says"),
    [
        ([], "tokendance", "takes an object, not a list"),
        ({"sesion": "a"}, "sesion", "did you mean session"),
        ({"zzz": 1}, "zzz", "known: ['session'"),
        ({"session": 1}, "session", "takes a string"),
        ({"session": ""}, "session", "1 to 256 characters"),
        ({"session": "x" * 257}, "session", "1 to 256 characters"),
        ({"round": 1.5}, "round", "takes a string or an integer"),
        ({"agent": True}, "agent", "not a boolean"),
        ({"size": "8"}, "size", "takes an integer, not a string"),
        ({"size": 0}, "size", "takes 1 to"),
        ({"size": True}, "size", "not a boolean"),
        ({"mode": "fast"}, "mode", "'auto' or 'exact'"),
        ({"mode": ["auto"]}, "mode", "'auto' or 'exact'"),
        ({"retain": "always"}, "retain", "'pin' or 'release'"),
        ({"segments": 3}, "segments", "takes a list of lengths"),
        ({"segments": [3, 0]}, "segments", "at least 1, not 0"),
        ({"segments": [True]}, "segments", "at least 1, not True"),
    ],
)
def test_refusals(hints: Any, field: str, says: str) -> None:
    with pytest.raises(HintError) as caught:
        Hints.parse(hints)
    assert caught.value.field == field
    assert says in str(caught.value)
