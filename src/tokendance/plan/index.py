"""Which open rounds hold a segment: how requests without hints find one another (M2, M6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tokendance.plan.ticket import Ticket
from tokendance.types import SegmentKey

R = TypeVar("R", bound=Hashable)


@dataclass(slots=True)
class _Holders(Generic[R]):
    """Who holds one segment, counted by what stands before it: in all, and per round."""

    prefixes: Counter[int] = field(default_factory=Counter)
    rounds: dict[R, Counter[int]] = field(default_factory=dict)


class SegmentIndex(Generic[R]):
    """Segments of the members of rounds, per tenant.

    What stands before a segment is kept as a hash, so that the many requests that only begin
    alike (one system prompt) cost one look and not one per request.
    """

    def __init__(self) -> None:
        self._holders: dict[tuple[str, SegmentKey], _Holders[R]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, salt: str, round_: R, ticket: Ticket) -> None:
        for key, prefix in _places(ticket):
            holders = self._holders.get((salt, key))
            if holders is None:
                holders = self._holders[salt, key] = _Holders()
            holders.prefixes[prefix] += 1
            holders.rounds.setdefault(round_, Counter())[prefix] += 1

    def remove(self, salt: str, round_: R, ticket: Ticket) -> None:
        """Undo `add`."""
        for key, prefix in _places(ticket):
            holders = self._holders[salt, key]
            _decrease(holders.prefixes, prefix)
            prefixes = holders.rounds[round_]
            _decrease(prefixes, prefix)
            if not prefixes:
                del holders.rounds[round_]
                if not holders.rounds:
                    del self._holders[salt, key]

    def shared(self, salt: str, ticket: Ticket) -> dict[R, int]:
        """Rows of the request whose segments a round holds behind another prefix, per round."""
        shared: dict[R, int] = {}
        for key, prefix in _places(ticket):
            holders = self._holders.get((salt, key))
            if holders is None or not _others(holders.prefixes, prefix):
                continue
            span = ticket.where(key)
            assert span is not None
            for round_, prefixes in holders.rounds.items():
                if _others(prefixes, prefix):
                    shared[round_] = shared.get(round_, 0) + len(span)
        return shared


def _places(ticket: Ticket) -> Iterator[tuple[SegmentKey, int]]:
    """First occurrences of the request's segments, each with a hash of what stands before it."""
    prefix = 0
    for span in ticket.spans:
        if ticket.where(span.key) is span:
            yield span.key, prefix
        prefix = hash((prefix, span.key))


def _others(prefixes: Counter[int], prefix: int) -> bool:
    return len(prefixes) > 1 or prefix not in prefixes


def _decrease(counter: Counter[int], item: int) -> None:
    counter[item] -= 1
    if not counter[item]:
        del counter[item]
