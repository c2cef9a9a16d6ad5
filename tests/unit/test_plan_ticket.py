"""What two requests have in common, against definitions that look at every token."""

from __future__ import annotations

from array import array
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from plan_world import ticket_of

from tokendance.plan.ticket import common_prefix, order_distance, own_spans, shared_with
from tokendance.types import Rows

parts = st.lists(
    st.sampled_from([(1,), (2, 2), (1, 2, 3), (3, 1), (1, 2, 3, 4, 5), (7,) * 9]), max_size=8
)


@given(st.integers(0, 200), st.lists(st.integers(0, 2), max_size=40), st.integers(0, 60))
def test_common_prefix(shared: int, tail: list[int], cut: int) -> None:
    a = array("q", [*range(shared), *tail])
    for b in (a[: len(a) - cut], array("q", [*range(shared), 9, *tail]), array("q", tail)):
        naive = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        assert common_prefix(a, b) == common_prefix(b, a) == naive


@given(parts, parts, st.integers(0, 20))
def test_shared_rows(mine: list, theirs: list, cached: int) -> None:
    ticket, source = ticket_of("m", [*mine, (8, 8)]), ticket_of("s", [*theirs, (9, 9)])
    ticket.cached = min(cached, ticket.end)
    begin = max(common_prefix(ticket.token_ids, source.token_ids), ticket.cached)
    rows = [
        row
        for span in ticket.spans
        for row in range(span.start, span.end)
        if source.where(span.key) is not None and begin <= row < ticket.end
    ]
    share = shared_with(ticket, source)
    assert share.rows == len(rows)
    if rows:
        assert share.start == rows[0]


@given(parts, parts)
def test_order_distance(mine: list, theirs: list) -> None:
    a, b = ticket_of("a", [*mine, (8,)]), ticket_of("b", [*theirs, (9,)])
    common = [key for key in a.segment_keys() if b.where(key)]
    pairs = list(combinations(common, 2))
    swapped = sum(b.where(x).start > b.where(y).start for x, y in pairs)
    assert order_distance(a, b) == (swapped / len(pairs) if pairs else 0.0)
    assert order_distance(a, a) == 0.0


def test_order_distance_ends() -> None:
    a, b, c = (1,) * 5, (2,) * 5, (3,) * 5
    leader = ticket_of("l", [a, b, c])
    assert order_distance(ticket_of("x", [c, b, a]), leader) == 1.0
    assert order_distance(ticket_of("x", [b, a, c]), leader) == 1 / 3
    assert order_distance(ticket_of("x", [c]), leader) == 0.0


@given(parts, st.lists(st.integers(0, 40), max_size=6, unique=True))
def test_own_spans(mine: list, cuts: list[int]) -> None:
    ticket = ticket_of("t", [*mine, (8,)])
    edges = sorted(cuts)
    copied = [Rows(a, b) for a, b in zip(edges[::2], edges[1::2])]
    own = own_spans(ticket, copied)
    free = [not any(a <= row < b for a, b in copied) for row in range(len(ticket.token_ids))]
    most: dict = {}
    for span in ticket.spans:
        rows = [row for row in range(span.start, span.end) if free[row]]
        if len(rows) > len(most.get(span.key, (span, []))[1]):
            most[span.key] = span, rows
    assert {k: (o.span, [r for p in o.parts for r in range(*p)]) for k, o in own.items()} == most
    assert ticket.own == own_spans(ticket, [])
    ticket.settle(tuple(copied), None)
    assert ticket.own == own
