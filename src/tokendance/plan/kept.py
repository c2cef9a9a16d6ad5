"""Finished leaders whose rows still stand, in the engine's pool or in the store (M25, M26).

An engine frees the pages of a finished request but keeps their content until it needs the room. As
long as they stand, a finished leader serves agents that come late, and agents that are asked one
after another, as if it were still running. The same holds while the store has its rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tokendance.plan.rounds import Round
from tokendance.plan.ticket import State, Ticket
from tokendance.types import RequestId


class Held(NamedTuple):
    """Rows [0, rows) of a finished request stand in `blocks` for as long as `stand()` says so, and
    the first `stored()` of them stand in the store."""

    rows: int
    blocks: tuple[int, ...]
    stand: Callable[[], bool]
    stored: Callable[[], int] = lambda: 0


class KeptLeaders:
    """The latest finished leaders, at most `limit`, each in the round that it led."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[RequestId, tuple[Round, Ticket, Held]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._kept

    def round_of(self, request_id: RequestId) -> Round | None:
        kept = self._kept.get(request_id)
        return kept[0] if kept is not None else None

    def stands(self, request_id: RequestId) -> bool:
        """Whether all rows of a kept leader stand in its pages, untouched."""
        _, ticket, held = self._kept[request_id]
        return ticket.end <= held.rows and held.stand()

    def add(self, round_: Round, ticket: Ticket, held: Held) -> None:
        self._kept[ticket.request_id] = round_, ticket, held

    def remove(self, request_id: RequestId) -> None:
        self._kept.pop(request_id, None)

    def overdue(self) -> Iterator[tuple[Round, Ticket]]:
        """Takes out those beyond the limit and, from the oldest on, those whose rows are gone."""
        while self._kept:
            round_, ticket, _ = next(iter(self._kept.values()))
            if len(self._kept) <= self._limit and ticket.computed():
                return
            self._kept.popitem(last=False)
            yield round_, ticket


def kept_ticket(ticket: Ticket, held: Held) -> Ticket | None:
    """A finished request as a source: what of it stands; None if that is less than two rows."""
    end = min(ticket.end, max(held.rows, held.stored()))
    if end < 1:
        return None

    def stand() -> bool:
        return end <= held.rows and held.stand()

    kept = Ticket(
        request_id=ticket.request_id,
        agent=ticket.agent,
        token_ids=ticket.token_ids[: end + 1],
        spans=tuple(span for span in ticket.spans if span.end <= end),
        arrived=ticket.arrived,
        computed=lambda: end if stand() or held.stored() >= end else 0,
        backend=ticket.backend,
        state=State.ORDINARY,
        blocks=held.blocks,
        admitted=ticket.admitted,
    )
    kept.inherit(ticket)
    return kept
