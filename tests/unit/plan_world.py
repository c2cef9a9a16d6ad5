"""Requests without an engine, and what any plan for them has to satisfy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise

from tokendance.plan.planner import MIN_COPY_ROWS
from tokendance.plan.reuse_plan import ReusePlan, check_plan
from tokendance.plan.ticket import Ticket
from tokendance.types import AgentId, RequestId, SegmentKey, Span

PAGE = 4
_pages = count()

Part = tuple[int, ...]


def key_of(part: Part) -> SegmentKey:
    return SegmentKey(repr(part).encode())


def ticket_of(
    name: str,
    parts: Sequence[Part],
    *,
    agent: str | None = None,
    key: Callable[[Part], SegmentKey] = key_of,
    computed: Callable[[], int] = lambda: 0,
) -> Ticket:
    """A request whose prompt is `parts`, one segment each, with pages of its own."""
    spans, tokens = [], []
    for part in parts:
        if part:
            spans.append(Span(len(tokens), len(tokens) + len(part), key(part)))
        tokens.extend(part)
    ticket = Ticket(RequestId(name), AgentId(agent or name), tokens, tuple(spans), 0.0, computed)
    ticket.blocks = tuple(next(_pages) for _ in range(-(-len(tokens) // PAGE)))
    return ticket


def state_of(tickets: Sequence[Ticket]) -> list[object]:
    """Everything a ticket holds but what it looks up once, to see that nothing changes it."""
    names = [n for n in Ticket.__slots__ if n != "computed" and not n.startswith("_")]
    return [[copy.copy(getattr(t, n)) for n in names] for t in tickets]


def settle(plan: ReusePlan, admitted: Sequence[Ticket]) -> None:
    """Tell the tickets what the plan made of them, as the round book does."""
    for ticket, member in zip(admitted, plan.members):
        inexact = [c.start for c in member.copies if not c.exact]
        ticket.settle(tuple(c.rows for c in member.copies), inexact[0] if inexact else None)


def check_round(
    plan: ReusePlan,
    admitted: Sequence[Ticket],
    resident: Sequence[Ticket],
    approximate_from: Mapping[RequestId, int | None] | None = None,
) -> None:
    """All that holds for every plan, from the token ids alone.

    approximate_from: what the tickets had when the plan was made, if they have changed since.
    """
    check_plan(plan, PAGE)
    limits = approximate_from or {t.request_id: t.approximate_from for t in admitted}
    tickets = {t.request_id: t for t in (*admitted, *resident)}
    assert [m.request_id for m in plan.members] == [t.request_id for t in admitted]
    used = {c.source for m in plan.members for c in m.copies}
    assert set(range(len(admitted))) | used == set(range(len(plan.tables)))
    if plan.leader is not None:
        assert not resident and plan.leader == 0 and plan.members[0].copies == ()
    computed = {t.request_id: _without(t, t.copied) for t in resident}
    exact = {
        t.request_id: [t.approximate_from is None or r < t.approximate_from for r in range(t.end)]
        for t in resident
    }
    for ticket, member in zip(admitted, plan.members):
        assert plan.tables[member.table].blocks == ticket.blocks
        filled = [0] * member.end
        truth = [True] * member.end
        limit = limits[member.request_id]
        for run in member.compute:
            for row in range(*run):
                filled[row] += 1
        for piece in member.copies:
            source = plan.tables[piece.source].request_id
            theirs = tickets[source].token_ids
            assert piece.length >= MIN_COPY_ROWS
            for row in range(piece.start, piece.end):
                origin = row - piece.delta
                filled[row] += 1
                assert ticket.token_ids[row] == theirs[origin]
                assert computed[source][origin]
                if piece.exact:
                    assert origin == row and exact[source][row]
                    assert ticket.token_ids[: row + 1] == theirs[: row + 1]
                else:
                    assert limit is not None and row >= limit
                    truth[row] = False
        assert filled == [0] * member.cached + [1] * (member.end - member.cached)
        _merged(member.copies)
        computed[member.request_id] = _without(ticket, [c.rows for c in member.copies])
        copied = [row for c in member.copies for row in range(*c.rows)]
        first = truth.index(False) if False in truth else member.end
        exact[member.request_id] = [
            truth[row] if row in copied else row < first for row in range(member.end)
        ]


def _without(ticket: Ticket, copied: Sequence[tuple[int, int]]) -> list[bool]:
    return [not any(a <= row < b for a, b in copied) for row in range(ticket.end)]


def _merged(copies: Sequence) -> None:
    for left, right in pairwise(copies):
        same = left.source == right.source and left.delta == right.delta
        assert not (same and left.end == right.start and left.exact == right.exact)
