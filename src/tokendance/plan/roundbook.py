"""Which requests belong together, when they start, and who leads (M6, M25, M26).

Life of a round:

    join  ->  gathering  -- complete, quorum or deadline -->  running  ->  last member leaves
                                                                |
                         each engine step: next_wave() picks who starts now, leader first

A request is asked for once per engine step (`verdict`), in O(1) apart from the first question of a
round in a step. Everything is decided on the scheduler side, in plain Python; time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from heapq import nlargest
from itertools import islice

from tokendance.config import Config
from tokendance.plan.discover import Discovery, Key, cut
from tokendance.plan.donors import Donors
from tokendance.plan.index import SegmentIndex
from tokendance.plan.kept import Held, KeptLeaders, kept_leader
from tokendance.plan.match import Tokens
from tokendance.plan.planner import claim_prefixes, plan_round
from tokendance.plan.reuse_plan import PageTable, ReusePlan
from tokendance.plan.rounds import Budget as Budget
from tokendance.plan.rounds import Memory, Round, Wave, elect, leads_still, needed, resident
from tokendance.plan.ticket import (
    Share,
    State,
    Ticket,
    all_shared,
    common_prefix,
    given_to,
    order_distance,
    shared_with,
)
from tokendance.types import AgentId, RequestId, RoundId, Span

LEADER_PATIENCE_S = 60.0
"""How long after its first wait for a leader that the engine is computing a follower gives up."""

MAX_LOOKS = 8
"""Rounds, and members of a leaderless round, that a request without hints is compared with."""


class Verdict(Enum):
    WAIT = "wait"  # not in this step
    ORDINARY = "ordinary"  # the engine's own path
    COLLECTIVE = "collective"  # the collective pass fills its rows


class RoundBook:
    """All open rounds. Not thread safe: it belongs to the engine's scheduler thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._minimum = max(1, config.min_shared_tokens)
        self._rounds: dict[Hashable, Round] = {}
        self._of: dict[RequestId, Round] = {}
        self._index: SegmentIndex[Round] = SegmentIndex()
        self._leaders: Memory[AgentId] = Memory()
        self._ended: Memory[set[AgentId]] = Memory()
        self._kept = KeptLeaders(config.keep_leaders)
        self._discovery = Discovery()
        self._donors = Donors(config.keep_donors)
        self._step = 0
        self._page_size = 1
        self._admitted: list[tuple[Round, Ticket]] = []
        self._names = 0

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._of

    def __len__(self) -> int:
        """Requests that are under way."""
        return len(self._of)

    @property
    def kept(self) -> int:
        """Finished leaders that are kept as sources."""
        return len(self._kept)

    def ticket(self, request_id: RequestId) -> Ticket:
        """The ticket of a request that is in a round or is kept; KeyError otherwise."""
        round_ = self._of.get(request_id) or self._kept.round_of(request_id)
        if round_ is None:
            raise KeyError(request_id)
        return round_.tickets[request_id]

    # -- joining and leaving -------------------------------------------------------------------

    def join_announced(
        self, ticket: Ticket, *, session: str, round_id: str, size: int, salt: str, now: float
    ) -> None:
        """Enter the round that the request's hints name; it is opened if need be."""
        key = (salt, session, round_id)
        round_ = self._rounds.get(key)
        if round_ is not None and ticket.agent in round_.agents and not self._live(round_):
            self._close(round_)  # the same name for another round: its leader is no use
            round_ = None
        if round_ is None:
            ended = self._ended.get(key) or set()
            late = bool(ended) and ticket.agent not in ended  # the others are done: no use to wait
            round_ = Round(
                key,
                RoundId(f"{session}/{round_id}"),
                now if late else now + self._config.round_timeout_ms / 1000,
                salt,
                family=(salt, session),
                announced=True,
                agents=ended if late else set(),
            )
            self._rounds[key] = round_
        round_.size = max(round_.size, size)
        round_.agents.add(ticket.agent)
        self._enter(round_, ticket)
        if round_.size and len(round_.agents) >= needed(self._config.quorum, round_.size):
            round_.running = True

    def join_by_content(self, ticket: Ticket, *, salt: str, marked: bool, now: float) -> None:
        """Enter an open round without hints that shares enough with the request, or open one.

        A request that marks its segments waits a moment for others; any other request starts at
        once and leads those that come while it runs.
        """
        round_ = self._matching(ticket, salt)
        if round_ is None:
            deadline = now + (self._config.linger_ms / 1000 if marked else 0.0)
            round_ = self._open("content", deadline, salt, found_by_content=True)
        if not marked:
            round_.running = True
        self._enter(round_, ticket)

    def discover(self, ticket: Ticket, *, salt: str, key: Key) -> None:
        """Cut a prompt where it shares text with one seen before, and that one too (M4).

        To be called before the request joins. key: content address of token ids.
        """
        tokens = Tokens(ticket.token_ids)
        found = self._discovery.find(salt, ticket, tokens, self._minimum)
        if found is not None:
            other, runs = found
            ticket.recut(cut(ticket, [(run.start, run.length) for run in runs], key))
            self._recut(other, cut(other, [(r.source_start, r.length) for r in runs], key))
        self._discovery.add(salt, ticket, tokens)

    def attribute(self, ticket: Ticket, *, salt: str) -> None:
        """Find who has written what a prompt quotes, if its backend wants to know (M5)."""
        if ticket.takes_donors and len(self._donors):
            ticket.quotations = self._donors.quoted(salt, ticket)

    def leave(self, request_id: RequestId) -> None:
        """Forget a finished or aborted request; its pages are no source any more. Idempotent."""
        round_ = self._of.pop(request_id, None)
        if round_ is not None:
            self._forget(round_, round_.tickets[request_id])

    def retire(self, request_id: RequestId, held: Held, token_ids: Sequence[int]) -> None:
        """A request has finished. If it led its round, what is held of it stays a source, and for
        backends with donors in any case.

        token_ids: all its tokens, decoded ones too.
        """
        round_ = self._of.get(request_id)
        if round_ is None:
            return
        ticket = round_.tickets[request_id]
        if ticket.takes_donors:
            self._donors.add(round_.salt, ticket, token_ids, held)
        led = round_.leader is ticket and ticket.approximate_from is None
        kept = kept_leader(ticket, held) if led and self._config.keep_leaders else None
        if kept is None:
            return self.leave(request_id)
        del self._of[request_id]
        if round_.found_by_content:
            self._index.remove(round_.salt, round_, ticket)
            self._index.add(round_.salt, round_, kept)
        self._discovery.replace(kept)
        round_.succeed(kept)
        self._kept.add(round_, kept)
        for old_round, old in list(self._kept.overdue()):
            self._forget(old_round, old)

    def _live(self, round_: Round) -> bool:
        return any(request_id in self._of for request_id in round_.tickets)

    def _close(self, round_: Round) -> None:
        for ticket in list(round_.tickets.values()):
            self._forget(round_, ticket)
        self._ended.forget(round_.key)

    def _forget(self, round_: Round, ticket: Ticket) -> None:
        self._kept.remove(ticket.request_id)
        self._discovery.remove(ticket.request_id)
        self._withdraw(round_, ticket)
        if not round_.tickets:
            del self._rounds[round_.key]
            if round_.announced and round_.running:
                self._ended.put(round_.key, round_.agents)

    def _recut(self, ticket: Ticket, spans: tuple[Span, ...]) -> None:
        """Other segments of a request that is in a round."""
        round_ = self._of.get(ticket.request_id) or self._kept.round_of(ticket.request_id)
        assert round_ is not None
        if round_.found_by_content:
            self._index.remove(round_.salt, round_, ticket)
        ticket.recut(spans)
        if round_.found_by_content:
            self._index.add(round_.salt, round_, ticket)
        round_.forget_shares()

    def _open(
        self,
        name: str,
        deadline: float,
        salt: str,
        *,
        family: Hashable = None,
        found_by_content: bool = False,
    ) -> Round:
        """A round that nobody has named."""
        self._names += 1
        key = RoundId(f"{name}/{self._names}")
        round_ = Round(key, key, deadline, salt, family=family, found_by_content=found_by_content)
        self._rounds[key] = round_
        return round_

    def _enter(self, round_: Round, ticket: Ticket) -> None:
        round_.tickets[ticket.request_id] = ticket
        ticket.polled = round_.turn
        self._of[ticket.request_id] = round_
        if round_.found_by_content:
            self._index.add(round_.salt, round_, ticket)

    def _withdraw(self, round_: Round, ticket: Ticket) -> None:
        round_.withdraw(ticket)
        if round_.found_by_content:
            self._index.remove(round_.salt, round_, ticket)

    def _matching(self, ticket: Ticket, salt: str) -> Round | None:
        shared = self._index.shared(salt, ticket)
        for round_ in nlargest(MAX_LOOKS, shared, key=lambda r: shared[r]):
            if shared[round_] < self._minimum:
                return None
            others: Iterable[Ticket] = (
                (round_.leader,) if round_.leader else (islice(round_.tickets.values(), MAX_LOOKS))
            )
            if any(shared_with(ticket, other).rows >= self._minimum for other in others):
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
        asked_first = round_.wave_step != self._step
        round_.wave_step = self._step
        # Only here: those who were told to wait a moment ago would miss the start of the others.
        if asked_first and now >= round_.deadline:
            round_.running = True
        if not round_.running:
            return Verdict.WAIT
        round_.turn += asked_first
        ticket.polled = round_.turn
        if asked_first:
            self._page_size = budget.page_size
            round_.wave = self._next_wave(round_, budget, now)
        if request_id not in round_.wave:
            return Verdict.WAIT
        if ticket.reason or cached >= ticket.end:
            ticket.approximate_from = None
            return Verdict.ORDINARY
        if ticket.approximate_from is not None:
            stored = ticket.held(approximate=False), ticket.held(approximate=True)
            first = min(ticket.approximate_from, stored[0] if stored[0] < stored[1] else ticket.end)
            ticket.approximate_from = max(first, cached)
        return Verdict.COLLECTIVE

    def _next_wave(self, round_: Round, budget: Budget, now: float) -> set[RequestId]:
        """Pick who starts in this step; a ticket with a reason goes the ordinary way."""
        leader = self._lead(round_)
        self._split(round_, leader)
        self._keep_standing(round_.waiting())
        wave, ordinary = Wave(budget), set()
        ready = resident(leader, self._step)
        if leader.state is State.WAITING:
            rows = self._rows_of_leader(round_, leader)
            wave.add(leader, rows)
            # More than one pass takes: the engine computes it, in chunks, and the others wait.
            ready = leader.cached < leader.end and rows <= budget.rows
        followers = 0
        for ticket in round_.waiting():
            if ticket is leader:
                continue
            if wave.full:
                break
            of_leader = round_.share(ticket)
            share = all_shared(ticket, leader) if ticket.quotations else of_leader
            needs_leader = of_leader.rows >= self._minimum
            ticket.reason = self._obstacle(round_, ticket, share, ready or not needs_leader, now)
            if ticket.reason:
                ordinary.add(ticket.request_id)
            elif (ready or not needs_leader) and wave.add(ticket, _computes(ticket, share)):
                ticket.approximate_from = share.start
                followers += needs_leader
        if leader.state is State.WAITING:
            has_donors = ready and leader.approximate_from is not None
            alone = "no other member to share with" if len(round_.tickets) == 1 else "leads"
            leader.reason = "" if followers or has_donors else alone
        if followers and round_.family is not None:
            self._leaders.put(round_.family, leader.agent)
        return {t.request_id for t in wave.tickets} | ordinary

    def _keep_standing(self, tickets: Iterable[Ticket]) -> None:
        """Forget quotations whose donors have gone since they were looked at."""
        for ticket in tickets:
            if ticket.quotations:
                ticket.quotations = tuple(self._donors.standing(ticket.quotations))

    def _rows_of_leader(self, round_: Round, leader: Ticket) -> int:
        """What a leader computes. It is exact, unless its backend takes quoted text from donors."""
        leader.approximate_from = None
        exact = leader.end - leader.held(approximate=False)
        if not leader.quotations:
            return exact
        # What all begin with is computed exactly, once: the prefix cache has it for the others.
        others = (t.token_ids for t in round_.waiting() if t is not leader)
        common = max((common_prefix(leader.token_ids, ids) for ids in others), default=0)
        given = given_to(leader, max(common, leader.held(approximate=True)))
        if given.rows < self._minimum:
            return exact
        leader.approximate_from = given.start
        return _computes(leader, given)

    def _obstacle(
        self, round_: Round, ticket: Ticket, share: Share, ready: bool, now: float
    ) -> str:
        """Why a follower takes nothing, "" if it does or waits for its leader."""
        if share.rows < self._minimum:
            return "shares too little with the leader"
        leader = round_.leader
        assert leader is not None
        if ready or leader.state is State.WAITING:
            return ""
        if ticket.held_until is None:
            ticket.held_until = now + LEADER_PATIENCE_S
        return "" if now < ticket.held_until else "leader not ready in time"

    def _split(self, round_: Round, leader: Ticket) -> None:
        """Members whose order is too far from the leader's go on as a round of their own."""
        bound = self._config.max_order_distance
        if bound >= 1.0:
            return
        for ticket in round_.waiting():
            if ticket is leader or order_distance(ticket, leader) <= bound:
                continue
            if round_.apart is None or round_.apart.key not in self._rounds:
                round_.apart = self._open(
                    f"{round_.round_id}+",
                    round_.deadline,
                    round_.salt,
                    family=None if round_.family is None else (round_.family, "apart"),
                    found_by_content=round_.found_by_content,
                )
                round_.apart.running = True
            self._withdraw(round_, ticket)
            self._enter(round_.apart, ticket)

    def _lead(self, round_: Round) -> Ticket:
        """The round's leader; a new one where there is none or its pages were taken away."""
        if not leads_still(round_):
            previous = self._leaders.get(round_.family)
            round_.follow(elect(round_, previous, self._step, self._minimum))
        assert round_.leader is not None
        return round_.leader

    # -- one engine step -----------------------------------------------------------------------

    def admitted(self, request_id: RequestId, blocks: tuple[int, ...], collective: bool) -> None:
        """The engine gave pages to a request; `collective`: the pass fills rows [cached, end)."""
        round_ = self._of.get(request_id)
        if round_ is None:
            return
        ticket = round_.tickets[request_id]
        ticket.blocks, ticket.admitted = blocks, self._step
        ticket.state = State.COLLECTIVE if collective else State.ORDINARY
        if collective:
            self._admitted.append((round_, ticket))

    def end_step(self, pages: Callable[[RequestId], tuple[int, ...]]) -> tuple[ReusePlan, ...]:
        """The plans of the members admitted since the last call; starts the next step.

        pages(request_id): the pages that a running request holds now.
        """
        admitted = [(r, t) for r, t in self._admitted if t.request_id in r.tickets]
        groups: dict[Round, list[Ticket]] = {}
        for round_, ticket in admitted:
            groups.setdefault(round_, []).append(ticket)
        for round_, tickets in groups.items():
            tickets.sort(key=lambda t: t is not round_.leader)
        claim_prefixes([t for _, t in admitted], groups.values(), self._page_size)
        plans = tuple(self._plan(*group, pages) for group in groups.items())
        self._admitted = []
        self._step += 1
        return plans

    def _plan(
        self,
        round_: Round,
        tickets: list[Ticket],
        pages: Callable[[RequestId], tuple[int, ...]],
    ) -> ReusePlan:
        sources = [t for t in round_.tickets.values() if resident(t, self._step)]
        sources.sort(key=lambda t: t is not round_.leader)

        def table(ticket: Ticket) -> PageTable:
            if ticket.stand is None:
                return PageTable(ticket.request_id, pages(ticket.request_id))
            stands = ticket.stand()
            return PageTable(ticket.request_id, ticket.blocks if stands else (), not stands)

        self._keep_standing(tickets)
        tail = self._config.fresh_tail
        plan = plan_round(round_.round_id, tickets, sources, pages=table, fresh_tail=tail)
        for ticket, member in zip(tickets, plan.members):
            inexact = [copy.start for copy in member.copies if not copy.exact]
            taken = tuple(c.rows for c in member.copies if not (c.stored and c.exact))
            ticket.settle(taken, inexact[0] if inexact else None)
        leader = round_.leader
        passed_over = leader is None or leader.state is State.WAITING
        if passed_over and tickets[0].approximate_from is None:
            round_.follow(tickets[0])  # the engine took others first: the region is here now
        return plan


def _computes(ticket: Ticket, share: Share) -> int:
    stored = ticket.held(approximate=True) - ticket.cached
    return max(0, ticket.end - ticket.cached - max(stored, share.rows))
