"""Segment keys and boundaries, against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendance.prompt.segments import (
    KEY_BYTES,
    SegmentError,
    SegmentKeys,
    boundaries,
    clip_lengths,
    lengths_of,
)
from tokendance.types import SegmentKey

ids = st.lists(st.integers(0, 200_000), max_size=30)
lengths = st.lists(st.integers(0, 5), max_size=8)


def key(token_ids: list[int], model: str, salt: str) -> SegmentKey:
    return SegmentKeys(model, salt).key(token_ids)


@given(ids, ids, st.text(max_size=5), st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
def test_keys_are_equal_only_if_everything_is(
    a: list[int], b: list[int], model: str, salt: str, other_model: str, other_salt: str
) -> None:
    same = (a, model, salt) == (b, other_model, other_salt)
    assert (key(a, model, salt) == key(b, other_model, other_salt)) == same
    assert len(key(a, model, salt)) == KEY_BYTES


def test_model_and_salt_do_not_run_into_each_other() -> None:
    assert key([1], "ab", "c") != key([1], "a", "bc")


def test_key_is_stable_between_processes() -> None:
    expected = "3f42"
    assert key([1, 2, 3], "model", "salt").hex()[:4] == expected


@given(lengths)
def test_spans_tile_the_prompt(sizes: list[int]) -> None:
    total = sum(sizes)
    tokens = list(range(total))
    spans = SegmentKeys("m").spans(tokens, sizes)
    assert [t for span in spans for t in tokens[span.start : span.end]] == tokens
    assert [len(span) for span in spans] == [size for size in sizes if size]
    for span in spans:
        assert span.key == SegmentKeys("m").key(tokens[span.start : span.end])


def test_equal_segments_have_equal_keys_at_any_offset() -> None:
    first = SegmentKeys("m", "t").spans([9, 9, 9, 1, 2, 3], [3, 3])
    second = SegmentKeys("m", "t").spans([1, 2, 3, 7], [3, 1])
    assert first[1].key == second[0].key
    other_tenant = SegmentKeys("m", "u").spans([1, 2, 3, 7], [3, 1])
    assert first[1].key != other_tenant[0].key


@given(lengths, st.integers(-3, 3).filter(bool))
def test_lengths_have_to_add_up(sizes: list[int], error: int) -> None:
    total = sum(sizes) + error
    with pytest.raises(SegmentError, match="in all"):
        boundaries(sizes, total)


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(SegmentError, match="cannot have -1"):
        boundaries([3, -1], 2)


@given(st.lists(st.integers(-5, 25), max_size=8), st.integers(0, 20))
def test_lengths_of_cuts(cuts: list[int], total: int) -> None:
    pieces, piece = [], 0
    for position in range(total):
        if position in cuts and piece:
            pieces.append(piece)
            piece = 0
        piece += 1
    assert lengths_of(cuts, total) == tuple([*pieces, piece] if total else [])


@given(lengths, st.booleans(), st.data())
def test_clipping_keeps_each_token_in_its_segment(
    sizes: list[int], left: bool, data: st.DataObject
) -> None:
    owner = [index for index, size in enumerate(sizes) for _ in range(size)]
    kept = data.draw(st.integers(0, len(owner)))
    expected = owner[len(owner) - kept :] if left else owner[:kept]
    clipped = clip_lengths(sizes, kept, left=left)
    assert list(clipped) == [expected.count(index) for index in sorted(set(expected))]
