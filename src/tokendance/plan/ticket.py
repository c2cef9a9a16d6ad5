"""A request as the round book and the planner see it."""

from __future__ import annotations

from array import array
from bisect import bisect, insort
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import NamedTuple

from tokendance.types import (
    AgentId,
    RequestId,
    Rows,
    SegmentKey,
    Span,
    merge_rows,
    subtract_rows,
)


class State(Enum):
    WAITING = "waiting"  # held back until its round starts
    COLLECTIVE = "collective"  # admitted, its rows are filled by a collective pass
    ORDINARY = "ordinary"  # admitted on the engine's own path


class StoredRows(NamedTuple):
    """Leading rows of a prompt that the store holds under a finished request's id; `exact` of them
    are what the engine alone computes."""

    request_id: RequestId
    rows: int
    exact: int


class Quotation(NamedTuple):
    """Rows [start, start + length) of a prompt are rows [source_start, ...) of a finished request,
    the donor, which has computed them itself."""

    donor: Ticket
    source_start: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class Own(NamedTuple):
    """A segment of a prompt, and the parts of it that are not copied."""

    span: Span
    parts: tuple[Rows, ...]


@dataclass(slots=True, eq=False)
class Ticket:
    """One request of a round.

    token_ids: kept as array("q"), whose slices compare at memory speed; an array is not copied.
    spans: its segments, in order, from row 0 on.
    computed(): rows the engine has computed before the current step, 0 while it holds no pages.
    backend: recovery backend it asked for, "" for the server's.
    cached: rows found in the engine's prefix cache at the last look.
    stored: more of its leading rows than that, in the store; None without.
    blocks: its pages, once admitted.
    approximate_from: first row whose K/V may be approximate; None while all rows are exact.
    copied: rows taken from other requests, no source for a third one; see `settle`.
    reason: why it goes the ordinary way.
    polled: the turn of its round in which the engine last asked for it, or in which it joined.
    admitted: the step of its admission.
    held_until: when it stops waiting for a leader that is on its way.
    takes_donors: its backend takes text from where it was written or first read.
    quotations: where that is; sorted, disjoint.
    stand: of a finished request, whether `blocks` still hold its rows; else the store does.
    """

    request_id: RequestId
    agent: AgentId
    token_ids: Sequence[int]
    spans: tuple[Span, ...]
    arrived: float
    computed: Callable[[], int]
    backend: str = ""
    state: State = State.WAITING
    cached: int = 0
    stored: StoredRows | None = None
    blocks: tuple[int, ...] = ()
    approximate_from: int | None = None
    copied: tuple[Rows, ...] = ()
    reason: str = ""
    polled: int = 0
    admitted: int = 0
    held_until: float | None = None
    takes_donors: bool = False
    quotations: tuple[Quotation, ...] = ()
    stand: Callable[[], bool] | None = None
    _first: dict[SegmentKey, Span] = field(default_factory=dict, repr=False)
    _coarse: dict[SegmentKey, Span] = field(default_factory=dict, repr=False)
    _own: Mapping[SegmentKey, Own] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, array):
            self.token_ids = array("q", self.token_ids)
        for span in self.spans:
            self._first.setdefault(span[2], span)

    @property
    def end(self) -> int:
        """The last prompt row, which the engine always computes itself."""
        return len(self.token_ids) - 1

    @property
    def own(self) -> Mapping[SegmentKey, Own]:
        """Of every segment, what others may take; see `own_spans`."""
        if self._own is None:
            self._own = own_spans(self, self.copied)
        return self._own

    def held(self, approximate: bool) -> int:
        """Leading rows that need not be computed, in the prefix cache or in the store."""
        if self.stored is None:
            return self.cached
        stored = self.stored.rows if approximate else self.stored.exact
        return max(self.cached, min(stored, self.end))

    def where(self, key: SegmentKey) -> Span | None:
        """The first occurrence of a segment in this prompt."""
        return self._first.get(key) or self._coarse.get(key)

    def segment_keys(self) -> Set[SegmentKey]:
        """The segments that others may take from it."""
        return self._first.keys() | self._coarse.keys() if self._coarse else self._first.keys()

    def first_spans(self) -> ValuesView[Span]:
        """The first occurrence of every segment, in order."""
        return self._first.values()

    def recut(self, spans: tuple[Span, ...]) -> None:
        """Finer segments of the same prompt; the coarser ones can still be taken from it."""
        self._coarse.update(self._first)
        self.spans, self._first, self._own = spans, {}, None
        for span in spans:
            self._first.setdefault(span.key, span)

    def inherit(self, ticket: Ticket) -> None:
        """The coarser segments of another ticket for the same prompt, as far as it goes."""
        spans = (*ticket._coarse.values(), *ticket._first.values())
        self._coarse.update((span.key, span) for span in spans if span.end <= self.end)

    def settle(self, copied: tuple[Rows, ...], approximate_from: int | None) -> None:
        """Remember what a plan has made of this request."""
        self.copied = copied
        self.approximate_from = approximate_from
        self._own = None


def own_spans(ticket: Ticket, copied: Iterable[tuple[int, int]]) -> Mapping[SegmentKey, Own]:
    """Of every segment, the occurrence of which most is outside `copied` (sorted, disjoint), the
    first of several that are alike."""
    holes = [Rows(*hole) for hole in copied]
    own: dict[SegmentKey, Own] = {}
    first = 0
    for span in ticket.spans:
        while first < len(holes) and holes[first].end <= span.start:
            first += 1
        _note(own, span, islice(holes, first, None))
    for span in ticket._coarse.values():
        _note(own, span, (hole for hole in holes if hole.end > span.start))
    return own


def _note(own: dict[SegmentKey, Own], span: Span, holes: Iterable[Rows]) -> None:
    parts = tuple(subtract_rows(Rows(span.start, span.end), holes))
    known = own.get(span.key)
    if parts and (known is None or sum(map(len, known.parts)) < sum(map(len, parts))):
        own[span.key] = Own(span, parts)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two prompts (of the same sequence type) share."""
    whole, low, size = min(len(a), len(b)), 0, 16
    while low < whole and a[low : low + size] == b[low : low + size]:
        low, size = low + size, size * 2
    high = min(low + size, whole)
    while low < high:  # slices compare in C, so bisection beats a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return min(low, whole)


class Share(NamedTuple):
    """What a request could take from another one: `rows` rows, the first of them at `start`."""

    start: int
    rows: int


def shared_with(ticket: Ticket, source: Ticket) -> Share:
    """Rows of `ticket` that hold a segment of `source`, outside their common prefix and its cache.

    Their common prefix is left out since the engine's own cache serves it, exactly.
    """
    begin, held, limit = _begin(ticket, source), _takeable(source), ticket.end
    first, rows = limit, 0
    for start, end, key in ticket.spans:
        if key in held and begin < end and start < limit:
            start = start if start > begin else begin
            first = start if start < first else first
            rows += (end if end < limit else limit) - start
    return Share(first, rows)


def _begin(ticket: Ticket, source: Ticket) -> int:
    return max(common_prefix(ticket.token_ids, source.token_ids), ticket.cached)


def _takeable(source: Ticket) -> Set[SegmentKey]:
    return source.own.keys() if source.copied else source.segment_keys()


def given_to(ticket: Ticket, begin: int) -> Share:
    """Rows of `ticket` from row `begin` on that its donors hold."""
    return _share_of(_quoted(ticket, begin), ticket.end)


def all_shared(ticket: Ticket, source: Ticket) -> Share:
    """Rows of `ticket` that it could take from another request or from its donors."""
    begin = _begin(ticket, source)
    held, end = _takeable(source), ticket.end
    rows = [Rows(max(s.start, begin), min(s.end, end)) for s in ticket.spans if s.key in held]
    return _share_of([*rows, *_quoted(ticket, begin)], end)


def _quoted(ticket: Ticket, begin: int) -> list[Rows]:
    return [Rows(max(q.start, begin), min(q.end, ticket.end)) for q in ticket.quotations]


def _share_of(rows: Iterable[Rows], end: int) -> Share:
    merged = list(merge_rows(sorted(rows)))
    return Share(merged[0].start if merged else end, sum(map(len, merged)))


def order_distance(ticket: Ticket, leader: Ticket) -> float:
    """Share of the pairs of common segments that stand in another order than in `leader` (0..1)."""
    places: list[int] = []
    inversions = 0
    for key in ticket.segment_keys():
        span = leader.where(key)
        if span is not None:
            inversions += len(places) - bisect(places, span.start)
            insort(places, span.start)
    pairs = len(places) * (len(places) - 1) // 2
    return inversions / pairs if pairs else 0.0
