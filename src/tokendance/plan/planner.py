"""From the members of a round that the engine admitted in one step to a ReusePlan (M6, M10).

Every shared segment is computed by the first member that has it, in that member's context, and
every later member takes it by reference with one rotation of K. With the leader first, the leader
computes the whole region and the others only their private rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokendance.plan.reuse_plan import Copy, Member, PageTable, ReusePlan
from tokendance.plan.ticket import Ticket, common_prefix
from tokendance.types import RoundId, Rows, Span

MIN_COPY_ROWS = 4
"""Shorter pieces are computed: an own run of the forward pass costs more than the rows it saves."""


def plan_round(
    round_id: RoundId, admitted: Sequence[Ticket], resident: Sequence[Ticket]
) -> ReusePlan:
    """Decide the source of every row.

    admitted: members of this step, leader first. resident: members of earlier steps whose pages
    are all computed, leader first; as sources they come before the admitted ones. Mutates nothing.
    """
    tables = [PageTable(t.request_id, t.blocks) for t in (*admitted, *resident)]
    sources = [_Origin(len(admitted) + i, t, t.copied) for i, t in enumerate(resident)]
    members = []
    for table, ticket in enumerate(admitted):
        copies = _copies(ticket, sources)
        members.append(
            Member(
                request_id=ticket.request_id,
                agent=ticket.agent,
                table=table,
                token_ids=ticket.token_ids,
                cached=ticket.cached,
                end=ticket.end,
                copies=copies,
                backend=ticket.backend,
                reason="" if copies else ("leader" if not sources else "nothing shared"),
            )
        )
        sources.append(_Origin(table, ticket, tuple(c.rows for c in copies)))
    leader = 0 if admitted and not resident else None
    return ReusePlan(round_id, tuple(members), tuple(tables), leader)


class _Origin:
    """A request whose computed rows later members may take."""

    def __init__(self, table: int, ticket: Ticket, copied: tuple[Rows, ...]) -> None:
        self.table = table
        self.ticket = ticket
        self.copied = copied

    @property
    def exact_until(self) -> int:
        limit = self.ticket.approximate_from
        return self.ticket.end if limit is None else limit

    def offers(self, rows: Rows) -> bool:
        inside = rows.end <= self.ticket.end
        return inside and not any(c.start < rows.end and rows.start < c.end for c in self.copied)


def _copies(ticket: Ticket, sources: Sequence[_Origin]) -> tuple[Copy, ...]:
    prefixes = [common_prefix(ticket.token_ids, s.ticket.token_ids) for s in sources]
    copies: list[Copy] = []
    for span in ticket.spans:
        for origin, prefix in zip(sources, prefixes):
            copy = _copy_span(ticket, span, origin, prefix)
            if copy is not None:
                _append(copies, copy)
                break
    return tuple(c for c in copies if c.length >= MIN_COPY_ROWS)


def _copy_span(ticket: Ticket, span: Span, origin: _Origin, prefix: int) -> Copy | None:
    """The part of a span that `origin` can give; token ids are compared, a key is only a hint."""
    rows = Rows(max(span.start, ticket.cached), min(span.end, ticket.end))
    if rows.end <= rows.start:
        return None
    if rows.end <= prefix and origin.exact_until >= rows.end:
        # The same tokens from row 0 on: the copy is what computing would give.
        exact = Copy(origin.table, rows.start, rows.start, len(rows), True)
        return exact if origin.offers(rows) else None
    if ticket.approximate_from is None or rows.start < ticket.approximate_from:
        return None
    found = origin.ticket.where(span.key)
    if found is None:
        return None
    shift = found.start - span.start
    wanted = Rows(rows.start + shift, min(rows.end + shift, origin.ticket.end))
    if len(wanted) <= 0 or not origin.offers(wanted):
        return None
    mine = ticket.token_ids[rows.start : rows.start + len(wanted)]
    if mine != origin.ticket.token_ids[wanted.start : wanted.end]:
        return None
    return Copy(origin.table, wanted.start, rows.start, len(wanted))


def _append(copies: list[Copy], copy: Copy) -> None:
    """Add a copy, joined to the last one if both continue the same rows of the same source."""
    if copies:
        last = copies[-1]
        touching = last.end == copy.start and last.source == copy.source
        if touching and last.delta == copy.delta and last.exact == copy.exact:
            copies[-1] = last._replace(length=last.length + copy.length)
            return
    copies.append(copy)
