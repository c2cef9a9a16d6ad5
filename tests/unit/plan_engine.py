"""A scheduler that treats the round book as vLLM's does: FIFO, chunks, pages, preemption.

It keeps its own account of everything, so that what the book answers can be judged from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from plan_world import PAGE, Part, check_round, ticket_of

from tokendance.config import Config
from tokendance.plan.reuse_plan import ReusePlan
from tokendance.plan.roundbook import LEADER_PATIENCE_S, Budget, RoundBook, Verdict
from tokendance.plan.rounds import PASSED_OVER
from tokendance.plan.ticket import State, Ticket
from tokendance.types import RequestId


@dataclass(eq=False)
class Request:
    ticket: Ticket
    arrived: float
    patience: float  # how long it may wait for members of its round
    outputs: int
    hit: int = 0  # rows in the prefix cache
    pages: tuple[int, ...] = ()  # that it gets, one after the other
    blocked: bool = False  # the engine itself does not ask for it
    retries: int = 0  # collective answers that the adapter turns into "later"
    total: int = 0
    computed: int = 0
    held: int = 0  # pages
    preemptions: int = 0
    admitted: int | None = None
    limit: int | None = None  # its approximate_from when it was admitted
    unexcused: int = 0  # steps it was told to wait for no good reason
    behind_leader: float | None = None

    @property
    def id(self) -> RequestId:
        return self.ticket.request_id


@dataclass
class Engine:
    """pool: pages. tokens: of one step. chunk: of one request. rows: of one collective pass."""

    config: Config
    pool: int = 400
    tokens: int = 64
    chunk: int = 10_000
    rows: int = 200
    max_requests: int = 16
    now: float = 0.0
    step_number: int = 0
    reserved: int = 0  # pages that somebody else holds
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    done: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.book = RoundBook(self.config)
        self._names = count()

    # -- requests ------------------------------------------------------------------------------

    def add(
        self,
        parts: Sequence[Part],
        *,
        round_: tuple[str, str, str, int] | None = None,
        marked: bool | None = None,
        outputs: int = 1,
        pages: int = 0,
        salt: str = "",
    ) -> Request:
        """round_: session, round, agent, size. marked: None leaves the book out."""
        name = f"r{next(self._names)}"
        ticket = ticket_of(name, parts, agent=round_[2] if round_ else None)
        request = Request(ticket, self.now, 0.0, outputs, min(pages, ticket.end // PAGE) * PAGE)
        request.pages, ticket.blocks = (*ticket.blocks, *range(-1, -40, -1)), ()
        ticket.computed = lambda: request.computed
        request.total = ticket.end + 1
        if round_ is not None:
            session, name, _, size = round_
            self.book.join_announced(
                ticket, session=session, round_id=name, size=size, salt=salt, now=self.now
            )
            request.patience = self.config.round_timeout_ms / 1000
        elif marked is not None:
            self.book.join_by_content(ticket, salt=salt, marked=marked, now=self.now)
            request.patience = self.config.linger_ms / 1000 if marked else 0.0
        self.waiting.append(request)
        return request

    def finish(self, request: Request) -> None:
        """Finished or aborted, in whatever state."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        request.held = 0
        self.done.append(request)
        self.book.leave(request.id)
        self.book.leave(request.id)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        request.held, request.computed = 0, 0
        request.preemptions += 1
        self.waiting.insert(0, request)

    @property
    def free(self) -> int:
        return self.pool - self.reserved - sum(r.held for r in self.running)

    # -- one step ------------------------------------------------------------------------------

    def step(self) -> tuple[ReusePlan, ...]:
        scheduled, preempted, budget = self._run_on()
        collective: list[Request] = []
        told_to_wait: list[Request] = []
        stopped = True
        if not preempted:
            stopped = self._admit(scheduled, collective, told_to_wait, budget)
        plans = self.book.end_step(lambda name: self._blocks(self._find(name)))
        self._judge_plans(plans, collective)
        self._judge_waits(plans, told_to_wait, stopped)
        for request, tokens in scheduled.items():
            request.computed += tokens
            if request.computed == request.total:
                request.total += 1
                request.outputs -= 1
                if request.outputs <= 0:
                    self.finish(request)
        self.step_number += 1
        return plans

    def _run_on(self) -> tuple[dict[Request, int], bool, int]:
        budget, preempted = self.tokens, False
        scheduled: dict[Request, int] = {}
        for request in list(self.running):
            tokens = min(request.total - request.computed, budget, self.chunk)
            if request not in self.running or tokens == 0:
                continue
            while not self._reserve(request, request.computed + tokens):
                victim, preempted = self.running[-1], True
                budget += scheduled.pop(victim, 0)
                self.preempt(victim)
                if victim is request:
                    break
            else:
                scheduled[request] = tokens
                budget -= tokens
        return scheduled, preempted, budget

    def _admit(
        self,
        scheduled: dict[Request, int],
        collective: list[Request],
        told_to_wait: list[Request],
        budget: int,
    ) -> bool:
        """The loop over waiting requests; whether it stopped for lack of room."""
        for request in list(self.waiting):
            if budget == 0 or len(self.running) >= self.max_requests:
                return True
            if request.blocked:
                continue
            verdict = self._ask(request)
            if verdict is Verdict.COLLECTIVE and request.retries:
                request.retries -= 1
                continue
            if verdict is Verdict.WAIT:
                told_to_wait.append(request)
                continue
            start = request.ticket.end if verdict is Verdict.COLLECTIVE else request.hit
            tokens = min(request.total - start, budget, self.chunk)
            if not self._reserve(request, start + tokens):
                return True
            self.waiting.remove(request)
            self.running.append(request)
            request.computed = start
            scheduled[request] = tokens
            budget -= tokens
            if request.admitted is None:
                request.admitted = self.step_number
                request.limit = request.ticket.approximate_from
                taken = verdict is Verdict.COLLECTIVE
                if taken:
                    collective.append(request)
                self.book.admitted(request.id, self._blocks(request), taken)
        return False

    def _ask(self, request: Request) -> Verdict:
        if request.preemptions or request.id not in self.book:
            return Verdict.ORDINARY
        budget = Budget(self.rows, self.free, PAGE, self.max_requests - len(self.running))
        verdict = self.book.verdict(request.id, request.hit, budget, self.now)
        if verdict is Verdict.COLLECTIVE:
            assert request.hit < request.ticket.end
        return verdict

    def _reserve(self, request: Request, rows: int) -> bool:
        pages = max(request.held, -(-rows // PAGE))
        have = self.pool - self.reserved
        have -= sum(r.held for r in self.running if r is not request)
        if pages > have:
            return False
        request.held = pages
        return True

    def _blocks(self, request: Request) -> tuple[int, ...]:
        return request.pages[: request.held]

    def _find(self, name: RequestId) -> Request:
        return next(r for r in self.running if r.id == name)

    # -- judging -------------------------------------------------------------------------------

    def _judge_plans(self, plans: Sequence[ReusePlan], collective: list[Request]) -> None:
        by_id = {r.id: r for r in self.running}
        named = [m.request_id for plan in plans for m in plan.members]
        assert sorted(named) == sorted(r.id for r in collective)
        for plan in plans:
            members = [by_id[m.request_id].ticket for m in plan.members]
            sources = [by_id[t.request_id] for t in plan.tables[len(members) :]]
            for source in sources:
                assert source.admitted is not None and source.admitted < self.step_number
                assert source.computed >= source.ticket.end
            rounds = {id(self.book._of[t.request_id]) for t in members}
            rounds |= {id(self.book._of[s.id]) for s in sources}
            assert len(rounds) == 1
            limits = {t.request_id: by_id[t.request_id].limit for t in members}
            check_round(plan, members, [s.ticket for s in sources], limits)
            for table in plan.tables:
                assert table.blocks == self._blocks(by_id[table.request_id])

    def _judge_waits(
        self, plans: Sequence[ReusePlan], told_to_wait: list[Request], stopped: bool
    ) -> None:
        """A request waits for members, for room, or a while for its leader; for nothing else."""
        rows = sum(plan.computed_rows for plan in plans)
        for request in told_to_wait:
            round_ = self.book._of[request.id]
            need = -(-(request.ticket.end + 1) // PAGE)
            room = not stopped and need <= self.free and len(self.running) < self.max_requests
            room = room and rows + request.ticket.end <= self.rows
            started = any(
                t.state is not State.WAITING and t.admitted == self.step_number
                for t in round_.tickets.values()
            )
            leader = round_.leader
            on_its_way = leader is not None and leader.state is not State.WAITING
            if self.now < request.arrived + request.patience or not room or started:
                request.unexcused = 0
            elif on_its_way and leader.computed() < leader.end:
                if request.behind_leader is None:
                    request.behind_leader = self.now
                assert self.now < request.behind_leader + LEADER_PATIENCE_S
            else:
                request.unexcused += 1
                assert request.unexcused <= PASSED_OVER + 1

    def drain(self) -> None:
        """Everybody gets through once nothing stands in the way; nothing is left behind."""
        self.reserved = 0
        for request in self.waiting:
            request.blocked, request.retries = False, 0
        for _ in range(100 + 60 * len(self.waiting + self.running)):
            if not self.waiting and not self.running:
                break
            self.now += 0.1
            self.step()
        assert not self.waiting and not self.running
        book = self.book
        assert len(book) == 0
        assert not (book._rounds or book._of or len(book._index) or book._admitted)


# -- rounds of one session, for tests of one situation each --------------------------------------


def text(length: int, seed: int) -> Part:
    """Texts of one seed begin alike."""
    return tuple(100 * seed + i for i in range(length))


A, B, C = (text(20, 40 + i) for i in range(3))
CONFIG = Config(min_shared_tokens=8, round_timeout_ms=500, linger_ms=50)


def private(who: int, length: int = 6) -> Part:
    return text(length, 10 + who)


def prompt(who: int, *shared: Part) -> list[Part]:
    return [private(who), *(shared or (A, B, C)), text(2, 60 + who)]


def engine_of(config: Config = CONFIG, **options: int) -> Engine:
    return Engine(config, **{"pool": 10_000, "tokens": 1000, "rows": 1000, **options})


def enter(engine: Engine, who: int, size: int = 0, **options: Any) -> Request:
    name = options.pop("name", "1")
    parts = options.pop("parts", None) or prompt(who)
    return engine.add(parts, round_=("s", name, f"a{who}", size), **{"outputs": 5, **options})


def members(plans: Sequence[ReusePlan]) -> list[list[str]]:
    return [[m.request_id for m in plan.members] for plan in plans]


def roles(engine: Engine) -> dict[str, str]:
    return {r.id: r.ticket.state.value for r in engine.running}
