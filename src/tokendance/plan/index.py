"""Which open rounds hold a segment: how requests without hints find one another (M2, M6)."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

from tokendance.plan.ticket import Ticket
from tokendance.types import SegmentKey

R = TypeVar("R", bound=Hashable)

MOST_ROUNDS = 16
"""Rounds looked at for one segment, newest first. A segment that is worth sharing is in one round;
those that are in many, such as the header of the answer, are too short to make one."""


class SegmentIndex(Generic[R]):
    """Segments of the members of rounds, per tenant.

    What stands before a segment is kept as a hash, since requests that only begin alike (one system
    prompt) are no round; how many members of the round have it so is counted.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, dict[SegmentKey, dict[R, dict[int, int]]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rounds.values()))

    def add(self, salt: str, round_: R, ticket: Ticket) -> None:
        for key, prefix in _places(ticket):
            by_key = self._rounds.setdefault(salt, {})
            prefixes = by_key.setdefault(key, {}).setdefault(round_, {})
            prefixes[prefix] = prefixes.get(prefix, 0) + 1

    def remove(self, salt: str, round_: R, ticket: Ticket) -> None:
        """Undo `add`."""
        by_key = self._rounds.get(salt, {})
        for key, prefix in _places(ticket):
            rounds = by_key[key]
            prefixes = rounds[round_]
            prefixes[prefix] -= 1
            if not prefixes[prefix]:
                del prefixes[prefix]
            if not prefixes:
                del rounds[round_]
            if not rounds:
                del by_key[key]
        if not by_key:
            self._rounds.pop(salt, None)

    def shared(self, salt: str, ticket: Ticket) -> dict[R, int]:
        """Rows of the request whose segments a round holds behind another prefix, per round."""
        by_key = self._rounds.get(salt, {})
        shared: dict[R, int] = {}
        for (key, prefix), span in zip(_places(ticket), ticket.first_spans()):
            newest_first = reversed(by_key.get(key, {}).items())
            for round_, prefixes in islice(newest_first, MOST_ROUNDS):
                if len(prefixes) > 1 or prefix not in prefixes:
                    shared[round_] = shared.get(round_, 0) + span.end - span.start
        return shared


def _places(ticket: Ticket) -> list[tuple[SegmentKey, int]]:
    """First occurrences of the request's segments, each with a hash of what stands before it."""
    places: dict[SegmentKey, int] = {}
    prefix = 0
    for _, _, key in ticket.spans:
        if key not in places:
            places[key] = prefix
        prefix = hash((prefix, key))
    return list(places.items())
