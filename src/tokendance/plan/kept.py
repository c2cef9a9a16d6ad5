"""Finished leaders whose rows still stand, in the engine's pool or in the store (M25, M26).

An engine frees the pages of a finished request but keeps their content until it needs the room. As
long as they stand, a finished leader serves agents that come late, and agents that are asked one
after another, as if it were still running. The same holds while the store has its rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tokendance.plan.rounds import Round
from tokendance.plan.ticket import State, Ticket
from tokendance.types import RequestId


class Held(NamedTuple):
    """Rows [0, rows) of a finished request stand in `blocks` for as long as `stand()` says so.

    stored(exact): its first rows that stand in the store, exact or not, or the exact ones of them.
    """

    rows: int
    blocks: tuple[int, ...]
    stand: Callable[[], bool]
    stored: Callable[[bool], int] = lambda exact: 0


class KeptLeaders:
    """The latest finished leaders, at most `limit`, each in the round that it led."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[RequestId, tuple[Round, Ticket]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._kept

    def round_of(self, request_id: RequestId) -> Round | None:
        kept = self._kept.get(request_id)
        return kept[0] if kept is not None else None

    def add(self, round_: Round, ticket: Ticket) -> None:
        self._kept[ticket.request_id] = round_, ticket

    def remove(self, request_id: RequestId) -> None:
        self._kept.pop(request_id, None)

    def overdue(self) -> Iterator[tuple[Round, Ticket]]:
        """Takes out those beyond the limit and, from the oldest on, those whose rows are gone."""
        while self._kept:
            round_, ticket = next(iter(self._kept.values()))
            if len(self._kept) <= self._limit and ticket.computed():
                return
            self._kept.popitem(last=False)
            yield round_, ticket


def kept_leader(ticket: Ticket, held: Held) -> Ticket | None:
    """The prompt of a finished leader as a source; None if less than two rows of it stand."""
    kept = standing(ticket, ticket.token_ids, held, exact=True)
    if kept is not None:
        kept.recut(tuple(span for span in ticket.spans if span.end <= kept.end))
        kept.inherit(ticket)
    return kept


def standing(ticket: Ticket, token_ids: Sequence[int], held: Held, *, exact: bool) -> Ticket | None:
    """What stands of a finished request now, as a source without segments; None if that is less
    than two rows.

    token_ids: array("q") of its prompt, or of all its tokens. exact: of what is stored, only exact
    rows count.
    """
    end = min(len(token_ids) - 1, max(held.rows if held.stand() else 0, held.stored(exact)))
    if end < 1:
        return None

    def stand() -> bool:
        return end <= held.rows and held.stand()

    return Ticket(
        request_id=ticket.request_id,
        agent=ticket.agent,
        token_ids=token_ids[: end + 1],
        spans=(),
        arrived=ticket.arrived,
        computed=lambda: end if stand() or held.stored(exact) >= end else 0,
        backend=ticket.backend,
        state=State.ORDINARY,
        blocks=held.blocks,
        approximate_from=ticket.approximate_from,
        admitted=ticket.admitted,
        stand=stand,
    )
