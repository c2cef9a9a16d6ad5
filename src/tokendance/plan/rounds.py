"""One round: its members, its leader, and who starts in one engine step (M6)."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from tokendance.plan.ticket import Share, State, Ticket, shared_with
from tokendance.types import AgentId, RequestId, RoundId, SegmentKey

T = TypeVar("T")

REMEMBERED = 4096
"""Sessions whose leader, and ended rounds whose agents, are remembered."""

PASSED_OVER = 2
"""Turns of a round after which a leader that the engine does not ask for (it waits for something
else, such as the grammar of its output) holds nobody up."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one engine step can take: rows of a pass, free pages of `page_size` rows, requests."""

    rows: int
    pages: int
    page_size: int
    requests: int


@dataclass(eq=False)
class Round:
    """The requests that are handled together."""

    key: Hashable  # in the book
    round_id: RoundId
    deadline: float  # when to stop waiting for missing members
    salt: str
    family: Hashable = None  # what stays the same from round to round
    announced: bool = False  # by hints
    found_by_content: bool = False  # others may find it by what they share
    size: int = 0  # announced members, 0 if unknown
    agents: set[AgentId] = field(default_factory=set)  # announced ones that ever joined
    tickets: dict[RequestId, Ticket] = field(default_factory=dict)
    running: bool = False
    leader: Ticket | None = None
    wave: set[RequestId] = field(default_factory=set)
    wave_step: int = -1
    turn: int = 0  # steps in which the engine asked for a member
    apart: Round | None = None  # where members go whose order is too far from the leader's
    _shares: dict[RequestId, _Look] = field(default_factory=dict)

    def waiting(self) -> list[Ticket]:
        return [t for t in self.tickets.values() if t.state is State.WAITING]

    def withdraw(self, ticket: Ticket) -> None:
        del self.tickets[ticket.request_id]
        self._shares.pop(ticket.request_id, None)
        if self.leader is ticket:
            self.leader = None

    def follow(self, leader: Ticket) -> None:
        if leader is not self.leader:
            self.leader = leader
            self._shares.clear()

    def succeed(self, ticket: Ticket) -> None:
        """The leader goes on under another ticket with the same request id."""
        self.tickets[ticket.request_id] = ticket
        self.leader = ticket
        self.forget_shares()

    def forget_shares(self) -> None:
        self._shares.clear()

    def share(self, ticket: Ticket) -> Share:
        """What a member could take from the leader, looked up once."""
        assert self.leader is not None
        look = self._shares.get(ticket.request_id)
        if look is None or look.cached != ticket.cached:
            look = _Look(ticket.cached, shared_with(ticket, self.leader))
            self._shares[ticket.request_id] = look
        return look.share


class _Look(NamedTuple):
    cached: int
    share: Share


class Wave:
    """The members that start in one step, within its budget."""

    def __init__(self, budget: Budget) -> None:
        self._rows = budget.rows
        self._pages = budget.pages
        self._requests = budget.requests
        self._page_size = budget.page_size
        self.tickets: list[Ticket] = []

    @property
    def full(self) -> bool:
        """Whether the engine itself could not start another request in this step."""
        return bool(self.tickets) and (self._pages < 1 or self._requests < 1)

    def add(self, ticket: Ticket, rows: int) -> bool:
        """Take a member if it fits; the first one always does, so that nobody starves."""
        pages = -(-(ticket.end + 1) // self._page_size) - ticket.cached // self._page_size
        if self.tickets and (rows > self._rows or pages > self._pages or self._requests < 1):
            return False
        self._requests -= 1
        self._rows -= rows
        self._pages -= pages
        self.tickets.append(ticket)
        return True


def needed(quorum: float, size: int) -> int:
    """Members that are enough; the product of floats may lie just above a whole number."""
    return math.ceil(quorum * size - 1e-9)


def resident(ticket: Ticket, step: int) -> bool:
    """All rows a follower may take are computed since an earlier step, and its pages are held."""
    started = ticket.state is not State.WAITING and ticket.admitted < step
    return started and ticket.computed() >= ticket.end


def leads_still(round_: Round) -> bool:
    """Whether the leader can go on as such: it will start soon, or it has started."""
    leader = round_.leader
    if leader is None or leader.state is not State.WAITING:
        return leader is not None and leader.computed() > 0
    return round_.turn - leader.polled <= PASSED_OVER


def elect(round_: Round, previous: AgentId | None, step: int, minimum: int) -> Ticket:
    """The member that can serve the waiting ones best, the previous leader if it is no bad choice.

    Pages that are there are preferred to those that have yet to be computed, if they serve anybody.
    """
    waiting = [t for t in round_.waiting() if round_.turn - t.polled <= PASSED_OVER]
    weights: Counter[SegmentKey] = Counter()
    for ticket in waiting:
        for span in ticket.spans:
            weights[span.key] += len(span)

    def serves(ticket: Ticket) -> int:
        rows = sum(weights[key] for key in ticket.segment_keys() if key in weights)
        return rows - sum(map(len, ticket.spans)) if ticket.state is State.WAITING else rows

    done = [t for t in round_.tickets.values() if t.approximate_from is None and resident(t, step)]
    if done:
        best = max(done, key=serves)
        if any(shared_with(t, best).rows >= minimum for t in waiting):
            return best
    best = max(waiting, key=serves)
    known = next((t for t in waiting if t.agent == previous), None)
    return best if known is None or serves(known) * 2 < serves(best) else known


class Memory(Generic[T]):
    """A small mapping that forgets its oldest entries."""

    def __init__(self) -> None:
        self._items: OrderedDict[object, T] = OrderedDict()

    def get(self, key: object) -> T | None:
        return self._items.get(key)

    def forget(self, key: object) -> None:
        self._items.pop(key, None)

    def put(self, key: object, value: T) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > REMEMBERED:
            self._items.popitem(last=False)
