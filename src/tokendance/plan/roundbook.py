"""Which requests belong together, when they start, and who leads (M6, M25, M26).

Life of a round:

    join  ->  gathering  -- complete, quorum or deadline -->  running  ->  last member leaves
                                                                |
                         each engine step: next_wave() picks who starts now, leader first

A request is asked for once per engine step (`verdict`), in O(1) apart from the first question of a
round in a step. Everything is decided on the scheduler side, in plain Python; time is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from tokendance.config import Config
from tokendance.plan.planner import plan_round
from tokendance.plan.reuse_plan import ReusePlan
from tokendance.plan.ticket import State, Ticket, order_distance, shared_rows
from tokendance.types import AgentId, RequestId, RoundId, SegmentKey

REMEMBERED = 4096
"""Sessions whose leader, and ended rounds whose agents, are remembered."""

LEADER_PATIENCE_S = 60.0
"""How long followers wait while the engine computes their leader chunk by chunk."""


T = TypeVar("T")


class Verdict(Enum):
    WAIT = "wait"  # not in this step
    ORDINARY = "ordinary"  # the engine's own path
    COLLECTIVE = "collective"  # the collective pass fills its rows


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

    key: object  # in RoundBook._rounds
    round_id: RoundId
    size: int  # announced members, 0 if unknown
    deadline: float  # when to stop waiting for missing members
    family: object  # what stays the same from round to round: salt and session
    salt: str
    agents: set[AgentId] = field(default_factory=set)  # all that ever joined
    tickets: dict[RequestId, Ticket] = field(default_factory=dict)
    running: bool = False
    leader: Ticket | None = None
    wave: set[RequestId] = field(default_factory=set)
    wave_step: int = -1
    patience: float | None = None  # until when followers wait for a leader on the ordinary path

    def waiting(self) -> list[Ticket]:
        return [t for t in self.tickets.values() if t.state is State.WAITING]


class RoundBook:
    """All open rounds. Not thread safe: it belongs to the engine's scheduler thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._rounds: dict[object, Round] = {}
        self._of: dict[RequestId, Round] = {}
        self._by_key: dict[tuple[str, SegmentKey], set[Round]] = {}
        self._leaders: _Memory[AgentId] = _Memory()
        self._ended: _Memory[set[AgentId]] = _Memory()
        self._step = 0
        self._admitted: dict[Round, list[Ticket]] = {}
        self._names = 0

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._of

    def __len__(self) -> int:
        return len(self._of)

    def ticket(self, request_id: RequestId) -> Ticket:
        """The ticket of a request that is in a round; KeyError otherwise."""
        return self._of[request_id].tickets[request_id]

    # -- joining and leaving -------------------------------------------------------------------

    def join_announced(
        self, ticket: Ticket, *, session: str, round_id: str, size: int, salt: str, now: float
    ) -> None:
        """Enter the round that the request's hints name; it is opened if need be."""
        key = (salt, session, round_id)
        round_ = self._rounds.get(key)
        if round_ is None:
            ended = self._ended.get(key) or set()
            late = bool(ended) and ticket.agent not in ended  # the others are done: no use to wait
            deadline = now if late else now + self._config.round_timeout_ms / 1000
            name = RoundId(f"{session}/{round_id}")
            round_ = Round(key, name, size, deadline, (salt, session), salt)
            round_.agents = ended if late else set()
            self._rounds[key] = round_
        round_.size = max(round_.size, size)
        self._enter(round_, ticket)
        if round_.size and len(round_.agents) >= self._config.quorum * round_.size:
            round_.running = True

    def join_by_content(self, ticket: Ticket, *, salt: str, marked: bool, now: float) -> None:
        """Enter an open round that shares enough text with the request, or open one.

        A request that marks its segments waits a moment for others; any other request starts at
        once and leads those that come while it runs.
        """
        round_ = self._matching(ticket, salt)
        if round_ is None:
            self._names += 1
            deadline = now + (self._config.linger_ms / 1000 if marked else 0.0)
            name = RoundId(f"content/{self._names}")
            round_ = Round(name, name, 0, deadline, None, salt, running=not marked)
            self._rounds[name] = round_
        self._enter(round_, ticket)

    def leave(self, request_id: RequestId) -> None:
        """Forget a finished or aborted request; its pages are no source any more. Idempotent."""
        round_ = self._of.pop(request_id, None)
        if round_ is None:
            return
        self._withdraw(round_, round_.tickets[request_id])
        if not round_.tickets:
            del self._rounds[round_.key]
            if round_.family is not None:
                self._ended.put(round_.key, round_.agents)

    def _enter(self, round_: Round, ticket: Ticket) -> None:
        round_.tickets[ticket.request_id] = ticket
        round_.agents.add(ticket.agent)
        self._of[ticket.request_id] = round_
        for key in ticket.segment_keys():
            self._by_key.setdefault((round_.salt, key), set()).add(round_)

    def _withdraw(self, round_: Round, ticket: Ticket) -> None:
        del round_.tickets[ticket.request_id]
        if round_.leader is ticket:
            round_.leader = None
        held = {key for t in round_.tickets.values() for key in t.segment_keys()}
        for key in ticket.segment_keys():
            if key in held:
                continue
            rounds = self._by_key.get((round_.salt, key))
            if rounds is not None:
                rounds.discard(round_)
                if not rounds:
                    del self._by_key[round_.salt, key]

    def _matching(self, ticket: Ticket, salt: str) -> Round | None:
        shared: dict[Round, int] = {}
        for span in ticket.spans:
            for round_ in self._by_key.get((salt, span.key), ()):
                shared[round_] = shared.get(round_, 0) + len(span)
        for round_ in sorted(shared, key=lambda r: shared[r], reverse=True):
            if shared[round_] < self._config.min_shared_tokens:
                return None
            if any(self._pays(ticket, other) for other in round_.tickets.values()):
                return round_
        return None

    # -- starting ------------------------------------------------------------------------------

    def verdict(self, request_id: RequestId, cached: int, budget: Budget, now: float) -> Verdict:
        """What to do with a waiting request in this step; `cached`: its prefix-cache hit, rows."""
        round_ = self._of.get(request_id)
        if round_ is None:
            return Verdict.ORDINARY
        ticket = round_.tickets[request_id]
        if ticket.state is not State.WAITING:  # comes back after a preemption
            return Verdict.ORDINARY
        ticket.cached = cached
        if not round_.running:
            if now < round_.deadline:
                return Verdict.WAIT
            round_.running = True
        if round_.wave_step != self._step:
            round_.wave_step = self._step
            round_.wave = self._next_wave(round_, budget, now)
        if request_id not in round_.wave:
            return Verdict.WAIT
        if ticket.reason or cached >= ticket.end:
            return Verdict.ORDINARY
        if ticket.approximate_from is not None:
            ticket.approximate_from = max(ticket.approximate_from, cached)
        return Verdict.COLLECTIVE

    def _next_wave(self, round_: Round, budget: Budget, now: float) -> set[RequestId]:
        """Pick who starts in this step; a ticket with a reason goes the ordinary way."""
        for ticket in round_.waiting():
            ticket.reason, ticket.approximate_from = "", None
        leader = self._lead(round_)
        self._split(round_, leader)
        followers = [t for t in round_.waiting() if t is not leader]
        if leader.state is not State.WAITING and not _resident(leader):
            return self._behind_leader(round_, followers, now)
        wave = _Wave(budget)
        rows = leader.end - leader.cached
        if leader.state is State.WAITING:
            wave.add(leader, rows)
        ordinary = {t.request_id for t in followers if not self._follow(t, leader, wave)}
        if wave.tickets == [leader] or (rows > budget.rows and leader.state is State.WAITING):
            # Alone, or more than one pass takes: the engine computes it, in chunks if need be.
            leader.reason = "leads"
            return {leader.request_id, *ordinary}
        return {t.request_id for t in wave.tickets} | ordinary

    def _follow(self, ticket: Ticket, leader: Ticket, wave: _Wave) -> bool:
        """Put a follower into the wave if there is room; False if reuse does not pay."""
        rows = [r for r in shared_rows(ticket, leader) if r.end > ticket.cached]
        shared = sum(len(r) for r in rows)
        if shared < max(1, self._config.min_shared_tokens):
            ticket.reason = "shares too little with the leader"
            return False
        if wave.add(ticket, max(0, ticket.end - ticket.cached - shared)):
            ticket.approximate_from = rows[0].start
        return True

    def _split(self, round_: Round, leader: Ticket) -> None:
        """Members whose order is too far from the leader's go on as a round of their own."""
        bound = self._config.max_order_distance
        if bound >= 1.0:
            return
        far = [t for t in round_.waiting() if t is not leader and order_distance(t, leader) > bound]
        if not far:
            return
        self._names += 1
        name = RoundId(f"{round_.round_id}+{self._names}")
        other = Round(name, name, 0, round_.deadline, None, round_.salt, running=True)
        self._rounds[name] = other
        for ticket in far:
            self._withdraw(round_, ticket)
            self._enter(other, ticket)

    def _behind_leader(self, round_: Round, followers: list[Ticket], now: float) -> set[RequestId]:
        """The leader is on its way through the engine: wait for it, but not for ever."""
        if round_.patience is None:
            round_.patience = now + LEADER_PATIENCE_S
        if now < round_.patience:
            return set()
        for ticket in followers:
            ticket.reason = "leader not ready in time"
        return {t.request_id for t in followers}

    def _lead(self, round_: Round) -> Ticket:
        """The round's leader; a new one where there is none or its pages were taken away."""
        leader = round_.leader
        if leader is not None and (leader.state is State.WAITING or leader.computed() > 0):
            return leader
        waiting = round_.waiting()
        exact = [t for t in round_.tickets.values() if _resident(t) and t.approximate_from is None]
        candidates = exact or waiting
        previous = self._leaders.get(round_.family)
        leader = next((t for t in candidates if t.agent == previous), None)
        if leader is None:
            leader = max(candidates, key=lambda t: _coverage(t, waiting))
        round_.leader, round_.patience = leader, None
        if round_.family is not None:
            self._leaders.put(round_.family, leader.agent)
        return leader

    def _pays(self, ticket: Ticket, other: Ticket) -> bool:
        shared = sum(len(rows) for rows in shared_rows(ticket, other))
        return shared >= self._config.min_shared_tokens

    # -- one engine step -----------------------------------------------------------------------

    def admitted(self, request_id: RequestId, blocks: tuple[int, ...], collective: bool) -> None:
        """The engine gave pages to a request; `collective`: the pass fills rows [cached, end)."""
        round_ = self._of.get(request_id)
        if round_ is None:
            return
        ticket = round_.tickets[request_id]
        ticket.blocks = blocks
        ticket.state = State.COLLECTIVE if collective else State.ORDINARY
        if collective:
            self._admitted.setdefault(round_, []).append(ticket)

    def end_step(self, pages: Callable[[RequestId], tuple[int, ...]]) -> Iterator[ReusePlan]:
        """The plans of the members admitted since the last call; starts the next step.

        pages(request_id): the pages that a request holds now.
        """
        self._step += 1
        admitted, self._admitted = self._admitted, {}
        for round_, tickets in admitted.items():
            present = [t for t in tickets if t.request_id in round_.tickets]
            present.sort(key=lambda t: t is not round_.leader)
            resident = [t for t in round_.tickets.values() if t not in present and _resident(t)]
            resident.sort(key=lambda t: t is not round_.leader)
            for ticket in resident:
                ticket.blocks = pages(ticket.request_id)
            if present:
                plan = plan_round(round_.round_id, present, resident)
                for ticket, member in zip(present, plan.members):
                    ticket.copied = tuple(copy.rows for copy in member.copies)
                yield plan


class _Memory(Generic[T]):
    """A small mapping that forgets its oldest entries."""

    def __init__(self) -> None:
        self._items: OrderedDict[object, T] = OrderedDict()

    def get(self, key: object) -> T | None:
        return self._items.get(key)

    def put(self, key: object, value: T) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > REMEMBERED:
            self._items.popitem(last=False)


class _Wave:
    """The members that start in one step, within its budget."""

    def __init__(self, budget: Budget) -> None:
        self._rows = budget.rows
        self._pages = budget.pages
        self._requests = budget.requests
        self._page_size = budget.page_size
        self.tickets: list[Ticket] = []

    def add(self, ticket: Ticket, rows: int) -> bool:
        """Take a member if it fits; the first one always does, so that nobody starves."""
        pages = -(-(ticket.end + 1) // self._page_size) - ticket.cached // self._page_size
        full = rows > self._rows or pages > self._pages or self._requests < 1
        if self.tickets and full:
            return False
        self._requests -= 1
        self._rows -= rows
        self._pages -= pages
        self.tickets.append(ticket)
        return True


def _resident(ticket: Ticket) -> bool:
    """All rows a follower may take are computed and its pages are held."""
    return ticket.state is not State.WAITING and ticket.computed() >= ticket.end


def _coverage(ticket: Ticket, others: list[Ticket]) -> int:
    """How many rows of the others this request's segments could serve."""
    return sum(
        len(span)
        for other in others
        if other is not ticket
        for span in other.spans
        if ticket.where(span.key) is not None
    )
