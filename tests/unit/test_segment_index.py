"""The index of open rounds by segment."""

from __future__ import annotations

from tokendance.plan.index import SegmentIndex
from tokendance.plan.ticket import Ticket
from tokendance.types import AgentId, RequestId, SegmentKey, Span


def ticket(name: str, *spans: Span) -> Ticket:
    return Ticket(RequestId(name), AgentId(name), list(range(9)), spans, 0.0, lambda: 0)


def test_a_request_without_segments_comes_and_goes() -> None:
    index: SegmentIndex[str] = SegmentIndex()
    bare, cut = ticket("bare"), ticket("cut", Span(0, 9, SegmentKey(b"k")))
    for first, second in ((bare, cut), (cut, bare)):
        index.add("salt", "round", bare)
        index.add("salt", "round", cut)
        index.remove("salt", "round", first)
        index.remove("salt", "round", second)
        assert len(index) == 0 and not index._rounds
