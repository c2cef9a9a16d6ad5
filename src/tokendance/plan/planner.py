"""From the members of a round that the engine admitted in one step to a ReusePlan (M6, M10).

Every shared segment is computed by the first member that has it, in that member's context, and
every later member takes it by reference with one rotation of K. With the leader first, the leader
computes the whole region and the others only their private rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokendance.plan.reuse_plan import Copy, Member, PageTable, ReusePlan
from tokendance.plan.ticket import Ticket, common_prefix, own_spans
from tokendance.types import RequestId, RoundId, Rows, SegmentKey, Span

MIN_COPY_ROWS = 4
"""Shorter pieces are computed: an own run of the forward pass costs more than the rows it saves."""

MAX_SOURCES = 8
"""Requests looked at for one segment; the first that has it nearly always serves."""


def plan_round(
    round_id: RoundId,
    admitted: Sequence[Ticket],
    resident: Sequence[Ticket],
    pages: Callable[[Ticket], tuple[int, ...]] = lambda ticket: ticket.blocks,
) -> ReusePlan:
    """Decide the source of every row.

    admitted: members of this step, leader first. resident: members of earlier steps whose pages
    are all computed, leader first; as sources they come before the admitted ones. pages(ticket):
    the pages that a resident request holds now; asked for sources only. Mutates nothing.
    """
    offers = _Offers(admitted, resident)
    tables = [PageTable(t.request_id, t.blocks) for t in admitted]
    table_of = {t.request_id: i for i, t in enumerate(admitted)}
    members = []
    for index, ticket in enumerate(admitted):
        pieces = _pieces(ticket, offers)
        for piece in pieces:
            source = piece.source
            if source.request_id not in table_of:
                table_of[source.request_id] = len(tables)
                tables.append(PageTable(source.request_id, pages(source)))
        copies = tuple(
            Copy(table_of[p.source.request_id], p.source_start, p.start, p.length, p.exact)
            for p in pieces
        )
        members.append(
            Member(
                request_id=ticket.request_id,
                agent=ticket.agent,
                table=index,
                token_ids=ticket.token_ids,
                cached=ticket.cached,
                end=ticket.end,
                copies=copies,
                reason="" if copies else ("leader" if offers.empty else "nothing shared"),
                backend=ticket.backend,
            )
        )
        offers.add(ticket, copies)
    leader = 0 if admitted and not resident else None
    return ReusePlan(round_id, tuple(members), tuple(tables), leader)


class _Offer(NamedTuple):
    """A segment that a request computes or has computed; rows before `exact_until` are exact."""

    ticket: Ticket
    span: Span
    exact_until: int


class _Piece(NamedTuple):
    """A copy whose source has no page table yet."""

    source: Ticket
    source_start: int
    start: int
    length: int
    exact: bool

    @property
    def end(self) -> int:
        return self.start + self.length


class _Offers:
    """The segments that later members may take, per key in order of preference."""

    def __init__(self, admitted: Sequence[Ticket], resident: Sequence[Ticket]) -> None:
        self._by_key: dict[SegmentKey, list[_Offer]] = {}
        self.empty = True
        wanted = {key for ticket in admitted for key in ticket.segment_keys()}
        for ticket in resident:
            self.empty = False
            until = ticket.end if ticket.approximate_from is None else ticket.approximate_from
            for key in wanted & ticket.own.keys():
                self._put(_Offer(ticket, ticket.own[key], until))

    def add(self, ticket: Ticket, copies: Sequence[Copy]) -> None:
        """What a member computes, given what it copies."""
        self.empty = False
        until = min((c.start for c in copies if not c.exact), default=ticket.end)
        for span in own_spans(ticket, (copy.rows for copy in copies)).values():
            self._put(_Offer(ticket, span, until))

    def of(self, key: SegmentKey) -> Sequence[_Offer]:
        return self._by_key.get(key, ())

    def _put(self, offer: _Offer) -> None:
        offers = self._by_key.setdefault(offer.span.key, [])
        if len(offers) < MAX_SOURCES:
            offers.append(offer)


def _pieces(ticket: Ticket, offers: _Offers) -> list[_Piece]:
    """The copies of one member; token ids are compared, a key is only a hint."""
    prefixes: dict[RequestId, int] = {}
    pieces: list[_Piece] = []
    for span in ticket.spans:
        start, end = max(span.start, ticket.cached), min(span.end, ticket.end)
        if start < end:
            for offer in offers.of(span.key):
                piece = _take(ticket, span, Rows(start, end), offer, prefixes)
                if piece is not None:
                    _append(pieces, piece)
                    break
    return [p for p in pieces if p.length >= MIN_COPY_ROWS and (p.exact or _same(ticket, p))]


def _take(
    ticket: Ticket, span: Span, rows: Rows, offer: _Offer, prefixes: dict[RequestId, int]
) -> _Piece | None:
    """Rows of a span from an offer of the same segment, None if they may not be taken."""
    source = offer.ticket
    shift = offer.span.start - span.start
    if shift == 0 and rows.end <= min(offer.span.end, offer.exact_until):
        prefix = prefixes.get(source.request_id)
        if prefix is None:
            prefix = common_prefix(ticket.token_ids, source.token_ids)
            prefixes[source.request_id] = prefix
        if rows.end <= prefix:
            # The same tokens from row 0 on: the copy is what computing would give.
            return _Piece(source, rows.start, rows.start, len(rows), True)
    if ticket.approximate_from is None:
        return None
    start = max(rows.start, ticket.approximate_from)
    length = min(rows.end, offer.span.end - shift, source.end - shift) - start
    return _Piece(source, start + shift, start, length, False) if length > 0 else None


def _append(pieces: list[_Piece], piece: _Piece) -> None:
    """Add a piece, joined to the last one if both continue the same rows of the same source."""
    if pieces:
        last = pieces[-1]
        if (
            last.source is piece.source
            and last.end == piece.start
            and last.source_start + last.length == piece.source_start
            and last.exact == piece.exact
        ):
            pieces[-1] = last._replace(length=last.length + piece.length)
            return
    pieces.append(piece)


def _same(ticket: Ticket, piece: _Piece) -> bool:
    """Whether source and target hold the same tokens; False only if two keys collide."""
    theirs = piece.source.token_ids[piece.source_start : piece.source_start + piece.length]
    return ticket.token_ids[piece.start : piece.end] == theirs
