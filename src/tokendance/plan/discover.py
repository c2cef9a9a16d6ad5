"""Shared text in prompts that nobody has marked (M4, M5).

A framework that is not changed sends one long text per agent. When such a prompt arrives, the text
it shares with a prompt seen before is found by content; both prompts are cut there, and from then
on they share segments like marked ones. Token ids are never changed: where a tokenizer splits the
edge of a quotation in another way, the cut simply falls inside of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokendance.plan.match import WINDOW, Match, Tokens, common_runs
from tokendance.plan.ticket import State, Ticket, common_prefix
from tokendance.types import RequestId, SegmentKey, Span

MIN_RUN = 2 * WINDOW
"""Shorter texts are found in too many places by chance (a greeting, a line of a template)."""

MAX_LOOKS = 8
"""Prompts that one prompt is compared with; the first nearly always serves."""

Key = Callable[[Sequence[int]], SegmentKey]
"""Content address of token ids, see prompt.segments.SegmentKeys.key."""


@dataclass(slots=True)
class _Seen:
    turn: int
    salt: str
    ticket: Ticket
    tokens: Tokens


class Discovery:
    """Prompts whose text may stand in others, per tenant."""

    def __init__(self) -> None:
        self._turn = 0
        self._seen: dict[RequestId, _Seen] = {}
        self._holders: dict[tuple[str, int], set[RequestId]] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, salt: str, ticket: Ticket, tokens: Tokens) -> None:
        self._turn += 1
        self._seen[ticket.request_id] = _Seen(self._turn, salt, ticket, tokens)
        for mark in tokens.fingerprints:
            self._holders.setdefault((salt, mark), set()).add(ticket.request_id)

    def remove(self, request_id: RequestId) -> None:
        """Undo `add`. Idempotent."""
        seen = self._seen.pop(request_id, None)
        if seen is None:
            return
        for mark in seen.tokens.fingerprints:
            holders = self._holders[seen.salt, mark]
            holders.discard(request_id)
            if not holders:
                del self._holders[seen.salt, mark]

    def replace(self, ticket: Ticket) -> None:
        """The same prompt, or its beginning, stands on under another ticket."""
        seen = self._seen.get(ticket.request_id)
        if seen is not None:
            seen.ticket = ticket

    def find(
        self, salt: str, ticket: Ticket, tokens: Tokens, minimum: int
    ) -> tuple[Ticket, list[Match]] | None:
        """A prompt that shares much with this one behind their common beginning, and where.

        None if nobody shares `minimum` tokens. Of those that share nearly as much as the best, the
        first that came is taken: a round's prompts are then all cut against the same one.
        """
        votes = Counter(
            request_id
            for mark in tokens.fingerprints
            for request_id in self._holders.get((salt, mark), ())
        )
        best = max(votes.values(), default=0)
        alike = (self._seen[request_id] for request_id, count in votes.items() if 2 * count >= best)
        for other in sorted(alike, key=lambda seen: seen.turn)[:MAX_LOOKS]:
            if other.ticket.state is not State.WAITING and not other.ticket.computed():
                continue  # its pages are gone
            prefix = common_prefix(ticket.token_ids, other.ticket.token_ids)
            runs = common_runs(tokens, other.tokens, MIN_RUN, start=prefix)
            held = other.ticket.end  # the last row is never there to be taken
            runs = [r._replace(length=min(r.length, held - r.source_start)) for r in runs]
            runs = [run for run in runs if run.length >= WINDOW]
            if sum(run.length for run in runs) >= minimum:
                return other.ticket, runs
        return None


def cut(ticket: Ticket, pieces: Sequence[tuple[int, int]], key: Key) -> tuple[Span, ...]:
    """The prompt's segments, cut once more at the ends of `pieces` (start, length)."""
    old = {span.start for span in ticket.spans} | {span.end for span in ticket.spans}
    new = {place for start, length in pieces for place in (start, start + length)}
    places = sorted({0, len(ticket.token_ids), *old, *new})
    known = {(span.start, span.end): span for span in ticket.spans}
    return tuple(
        known.get((a, b)) or Span(a, b, key(ticket.token_ids[a:b])) for a, b in pairwise(places)
    )
