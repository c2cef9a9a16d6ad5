"""A request as the round book and the planner see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tokendance.types import AgentId, RequestId, Rows, SegmentKey, Span


class State(Enum):
    WAITING = "waiting"  # held back until its round starts
    COLLECTIVE = "collective"  # admitted, its rows are filled by a collective pass
    ORDINARY = "ordinary"  # admitted on the engine's own path


@dataclass(slots=True, eq=False)
class Ticket:
    """One request of a round.

    computed(): rows the engine has computed before the current step, 0 while it holds no pages.
    cached: rows found in the engine's prefix cache at the last look.
    blocks: its pages, once admitted.
    approximate_from: first row whose K/V may be approximate; None while all rows are exact.
    copied: rows taken from other requests, no source for a third one.
    reason: why it goes the ordinary way.
    backend: recovery backend it asked for, "" for the server's.
    """

    request_id: RequestId
    agent: AgentId
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    arrived: float
    computed: Callable[[], int]
    state: State = State.WAITING
    cached: int = 0
    blocks: tuple[int, ...] = ()
    approximate_from: int | None = None
    copied: tuple[Rows, ...] = ()
    reason: str = ""
    backend: str = ""
    _where: dict[SegmentKey, Rows] | None = field(default=None, repr=False)

    @property
    def end(self) -> int:
        """The last prompt row, which the engine always computes itself."""
        return len(self.token_ids) - 1

    def where(self, key: SegmentKey) -> Rows | None:
        """The rows of the first occurrence of a segment in this prompt."""
        if self._where is None:
            self._where = {}
            for span in self.spans:
                self._where.setdefault(span.key, Rows(span.start, span.end))
        return self._where.get(key)

    def segment_keys(self) -> Iterator[SegmentKey]:
        self.where(SegmentKey(b""))
        assert self._where is not None
        return iter(self._where)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two prompts share."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices compare in C, so bisection beats a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_rows(ticket: Ticket, source: Ticket) -> list[Rows]:
    """Rows of `ticket` that hold a segment of `source`, outside their common prefix."""
    prefix = common_prefix(ticket.token_ids, source.token_ids)
    rows = []
    for span in ticket.spans:
        start, end = max(span.start, prefix), min(span.end, ticket.end)
        if start < end and source.where(span.key) is not None:
            rows.append(Rows(start, end))
    return rows


def order_distance(ticket: Ticket, leader: Ticket) -> float:
    """Share of the pairs of common segments that stand in another order than in `leader` (0..1)."""
    places = [
        rows.start for key in ticket.segment_keys() if (rows := leader.where(key)) is not None
    ]
    pairs = len(places) * (len(places) - 1) // 2
    if pairs == 0:
        return 0.0
    inversions = sum(
        places[i] > places[j] for i in range(len(places)) for j in range(i + 1, len(places))
    )
    return inversions / pairs
