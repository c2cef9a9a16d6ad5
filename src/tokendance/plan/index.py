"""Which open rounds hold a segment: how requests without hints find one another (M2, M6)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from tokendance.plan.ticket import Ticket
from tokendance.types import SegmentKey

R = TypeVar("R", bound=Hashable)

MOST_ROUNDS = 16
"""Rounds looked at for one segment, newest first. A segment that is worth sharing is in one round;
those that are in many, such as the header of the answer, are too short to make one."""


@dataclass(slots=True)
class _Holders(Generic[R]):
    """Who holds one segment, counted by what stands before it: in all, and per round."""

    prefixes: dict[int, int] = field(default_factory=dict)
    rounds: dict[R, dict[int, int]] = field(default_factory=dict)


class SegmentIndex(Generic[R]):
    """Segments of the members of rounds, per tenant.

    What stands before a segment is kept as a hash, so that the many requests that only begin
    alike (one system prompt) cost one look and not one per request.
    """

    def __init__(self) -> None:
        self._holders: dict[str, dict[SegmentKey, _Holders[R]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._holders.values()))

    def add(self, salt: str, round_: R, ticket: Ticket) -> None:
        by_key = self._holders.setdefault(salt, {})
        for key, prefix in _places(ticket):
            holders = by_key.get(key)
            if holders is None:
                holders = by_key[key] = _Holders()
            prefixes = holders.rounds.get(round_)
            if prefixes is None:
                prefixes = holders.rounds[round_] = {}
            prefixes[prefix] = prefixes.get(prefix, 0) + 1
            holders.prefixes[prefix] = holders.prefixes.get(prefix, 0) + 1

    def remove(self, salt: str, round_: R, ticket: Ticket) -> None:
        """Undo `add`."""
        by_key = self._holders[salt]
        for key, prefix in _places(ticket):
            holders = by_key[key]
            _decrease(holders.prefixes, prefix)
            prefixes = holders.rounds[round_]
            _decrease(prefixes, prefix)
            if not prefixes:
                del holders.rounds[round_]
                if not holders.rounds:
                    del by_key[key]
        if not by_key:
            del self._holders[salt]

    def shared(self, salt: str, ticket: Ticket) -> dict[R, int]:
        """Rows of the request whose segments a round holds behind another prefix, per round."""
        by_key = self._holders.get(salt, {})
        shared: dict[R, int] = {}
        for (key, prefix), span in zip(_places(ticket), ticket.first_spans()):
            holders = by_key.get(key)
            if holders is None or not _others(holders.prefixes, prefix):
                continue
            for round_, prefixes in islice(reversed(holders.rounds.items()), MOST_ROUNDS):
                if _others(prefixes, prefix):
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


def _others(prefixes: dict[int, int], prefix: int) -> bool:
    return len(prefixes) > 1 or prefix not in prefixes


def _decrease(counts: dict[int, int], item: int) -> None:
    counts[item] -= 1
    if not counts[item]:
        del counts[item]
