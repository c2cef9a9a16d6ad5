"""From the members of a round that the engine admitted in one step to a ReusePlan (M6, M10).

Every shared segment is computed by the first member that has it, in that member's context, and
every later member takes it by reference with one rotation of K. With the leader first, the leader
computes the whole region and the others only their private rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokendance.plan.reuse_plan import Copy, Member, PageTable, ReusePlan
from tokendance.plan.ticket import StoredRows, Ticket, common_prefix, own_spans
from tokendance.types import RoundId, Rows, SegmentKey, Span, subtract_rows

MIN_COPY_ROWS = 4
"""Shorter pieces are computed: an own run of the forward pass costs more than the rows it saves."""

MAX_SOURCES = 8
"""Requests looked at for one segment; the first that has it nearly always serves."""


def plan_round(
    round_id: RoundId,
    admitted: Sequence[Ticket],
    resident: Sequence[Ticket],
    *,
    pages: Callable[[Ticket], PageTable] = lambda ticket: PageTable(
        ticket.request_id, ticket.blocks
    ),
    fresh_tail: int = 0,
) -> ReusePlan:
    """Decide the source of every row.

    admitted: members of this step, leader first. resident: members of earlier steps whose rows are
    all computed, leader first; as sources they come before the admitted ones, and a ticket's own
    donors before all others. pages(ticket): where the rows of a resident request or a donor stand
    now; asked for sources only. fresh_tail: last rows of each prompt that nothing inexact is copied
    to. Mutates nothing.
    """
    offers = _Offers(admitted, resident)
    tables = _Tables(admitted, pages)
    members = []
    for index, ticket in enumerate(admitted):
        history = _history(ticket)
        begin = history[-1].end if history else ticket.cached
        pieces = _pieces(ticket, offers, begin, ticket.end - fresh_tail)
        copies = tuple(tables.copy(piece) for piece in (*history, *pieces))
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
        # What comes back exactly is what computing would give, so others may take it from here.
        offers.add(ticket, [*(p for p in history if not p.exact), *pieces])
    leader = 0 if admitted and not resident else None
    return ReusePlan(round_id, tuple(members), tuple(tables.items), leader)


class _Offer(NamedTuple):
    """A segment of which a request computes or has computed `parts`; rows before `exact_until` are
    exact."""

    ticket: Ticket
    span: Span
    parts: tuple[Rows, ...]
    exact_until: int

    @property
    def cut(self) -> bool:
        """Whether something is missing, if only the last row of its prompt: a second choice."""
        return self.span[:2] != self.parts[0] or self.span.end > self.ticket.end


@dataclass(slots=True)
class _Piece:
    """A copy whose source has no page table yet."""

    source: Ticket | StoredRows
    source_start: int
    start: int
    length: int
    exact: bool

    @property
    def end(self) -> int:
        return self.start + self.length


class _Tables:
    """Where rows stand: the pages of the admitted requests, then those of every other source."""

    def __init__(self, admitted: Sequence[Ticket], pages: Callable[[Ticket], PageTable]) -> None:
        self.items = [PageTable(t.request_id, t.blocks) for t in admitted]
        self._pages = pages
        self._at: dict[object, int] = {t: i for i, t in enumerate(admitted)}

    def copy(self, piece: _Piece) -> Copy:
        source = piece.source
        if source not in self._at:
            self._at[source] = len(self.items)
            self.items.append(
                self._pages(source)
                if isinstance(source, Ticket)
                else PageTable(source.request_id, (), stored=True)
            )
        table = self._at[source]
        stored = self.items[table].stored
        return Copy(table, piece.source_start, piece.start, piece.length, piece.exact, stored)


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
                self._put(_Offer(ticket, *ticket.own[key], until))

    def add(self, ticket: Ticket, pieces: Sequence[_Piece]) -> None:
        """What a member computes, given what it copies."""
        self.empty = False
        until = next((p.start for p in pieces if not p.exact), ticket.end)
        for own in own_spans(ticket, [(p.start, p.end) for p in pieces]).values():
            self._put(_Offer(ticket, *own, until))

    def of(self, key: SegmentKey) -> Sequence[_Offer]:
        return self._by_key.get(key, ())

    def _put(self, offer: _Offer) -> None:
        offers = self._by_key.setdefault(offer.span.key, [])
        if len(offers) < MAX_SOURCES or offers[-1].cut:
            offers.append(offer)
            if len(offers) > 1 and offers[-2].cut:
                offers.sort(key=lambda o: o.cut)
                del offers[MAX_SOURCES:]


def _history(ticket: Ticket) -> list[_Piece]:
    """The rows after the prefix hit that the store gives back at their own positions."""
    stored, start = ticket.stored, ticket.cached
    if stored is None:
        return []
    exact = ticket.held(approximate=False)
    pieces = [_Piece(stored, start, start, exact - start, exact=True)] if exact > start else []
    first = ticket.approximate_from
    end = ticket.held(approximate=True)
    if first is not None and first <= exact < end:
        pieces.append(_Piece(stored, exact, exact, end - exact, exact=False))
    return pieces


def _pieces(ticket: Ticket, offers: _Offers, begin: int, fresh: int) -> list[_Piece]:
    """The copies of one member from row `begin` on, inexact ones before row `fresh`; token ids are
    compared, a key is only a hint."""
    prefixes: dict[Ticket, int] = {}
    pieces: list[_Piece] = []
    limit = ticket.end
    quoted = _quoted(ticket, begin, min(limit, fresh))
    for first, end, key in ticket.spans:
        start = first if first > begin else begin
        end = end if end < limit else limit
        if start < end:
            left = list(_between(quoted, start, end)) if quoted else [Rows(start, end)]
            for offer in offers.of(key):
                if not left:
                    break
                shift = offer.span.start - first
                left = [
                    missing
                    for rows in left
                    for missing in _take(pieces, ticket, *rows, offer, shift, prefixes, fresh)
                ]
    pieces = _merged(sorted((*pieces, *quoted), key=lambda piece: piece.start))
    return [p for p in pieces if p.length >= MIN_COPY_ROWS and (p.exact or _same(ticket, p))]


def _quoted(ticket: Ticket, begin: int, end: int) -> list[_Piece]:
    """What a member takes from its donors, as far as it may be inexact."""
    if ticket.approximate_from is None:
        return []
    begin = max(begin, ticket.approximate_from)
    pieces = []
    for donor, source_start, first, length in ticket.quotations:
        start, stop = max(first, begin), min(first + length, end)
        if stop - start >= MIN_COPY_ROWS:
            there = source_start + start - first
            pieces.append(_Piece(donor, there, start, stop - start, exact=False))
    return pieces


def _between(pieces: Sequence[_Piece], start: int, end: int) -> Iterator[Rows]:
    """Rows of [start, end) outside of pieces."""
    return subtract_rows(Rows(start, end), (Rows(p.start, p.end) for p in pieces if p.end > start))


def _take(
    pieces: list[_Piece],
    ticket: Ticket,
    start: int,
    end: int,
    offer: _Offer,
    shift: int,
    prefixes: dict[Ticket, int],
    fresh: int,
) -> Sequence[Rows]:
    """Add rows [start, end), part of a segment, from an offer of it, which stands `shift` rows on.

    Returns what may not be taken. prefixes: common prefixes of `ticket` that are known.
    """
    source, _, parts, exact_until = offer
    if shift == 0 and parts[0].start <= start and end <= parts[0].end and end <= exact_until:
        prefix = prefixes.get(source)
        if prefix is None:
            prefix = common_prefix(ticket.token_ids, source.token_ids)
            prefixes[source] = prefix
        if end <= prefix:  # the same tokens from row 0 on: a copy is what computing would give
            pieces.append(_Piece(source, start, start, end - start, exact=True))
            return ()
    if ticket.approximate_from is None:
        return (Rows(start, end),)
    left = []
    for part in parts:
        first = max(start, ticket.approximate_from, part.start - shift)
        stop = min(end, part.end - shift, source.end - shift, fresh)
        if first < stop:
            pieces.append(_Piece(source, first + shift, first, stop - first, exact=False))
            if start < first:
                left.append(Rows(start, first))
            start = stop
    return (*left, Rows(start, end)) if start < end else left


def _merged(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Sorted pieces, those that go on where another ends joined to it."""
    merged: list[_Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.end == piece.start
            and last.source is piece.source
            and last.source_start + last.length == piece.source_start
            and last.exact is piece.exact
        ):
            last.length += piece.length
        else:
            merged.append(piece)
    return merged


def _same(ticket: Ticket, piece: _Piece) -> bool:
    """Whether source and target hold the same tokens; False only if two keys collide."""
    assert isinstance(piece.source, Ticket)
    theirs = piece.source.token_ids[piece.source_start : piece.source_start + piece.length]
    return ticket.token_ids[piece.start : piece.end] == theirs


def claim_prefixes(admitted: list[Ticket], groups: Iterable[list[Ticket]], page_size: int) -> None:
    """Let no member read prefix pages that a member behind it has yet to fill.

    The engine enters the pages of a request into its prefix cache when it admits it, so a request
    admitted later, but executed earlier (a leader), may have a hit on pages that are still empty.
    It computes those rows itself. admitted: in that order; groups: in order of execution.
    """
    turn = {ticket.request_id: i for i, ticket in enumerate(admitted)}
    later: list[tuple[int, int, int]] = []  # turn, index of the first page it fills, that page
    first = len(turn)
    for ticket in reversed([t for group in groups for t in group]):
        mine, page = turn[ticket.request_id], ticket.cached // page_size
        if first < mine:
            hits = (i for t, i, block in later if t < mine and ticket.blocks[i : i + 1] == (block,))
            ticket.cached = min((i * page_size for i in hits if i < page), default=ticket.cached)
        later.append((mine, page, ticket.blocks[page]))
        first = min(first, mine)
