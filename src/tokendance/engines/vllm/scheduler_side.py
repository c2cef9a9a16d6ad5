"""The scheduler side: vLLM's requests into tickets, verdicts into vLLM's answers, plans out.

It runs in the engine core's process, in Python only; it never touches a tensor.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from tokendance.config import Config
from tokendance.engines.vllm.keeping import Keeping
from tokendance.engines.vllm.messages import Plans, Ran, Report
from tokendance.engines.vllm.metrics import DECLINED, REQUESTS, TokenDanceStats
from tokendance.plan.kept import Held
from tokendance.plan.reuse_plan import Member, PlanError, ReusePlan, check_plan
from tokendance.plan.roundbook import Budget, RoundBook, Verdict
from tokendance.plan.ticket import Ticket
from tokendance.prompt.segments import SegmentKeys
from tokendance.types import AgentId, RequestId, Source

logger = init_logger(__name__)


@dataclass(slots=True)
class Outcome:
    """What became of one request, for its response and for `tokendance explain`."""

    asked: bool  # the client said something about rounds or segments
    session: str = ""
    role: str = "ordinary"
    reason: str = ""
    member: Member | None = None
    ran: Ran | None = None

    def settle(self) -> None:
        """Once it has run: a follower whose sources were all gone has followed nobody."""
        if self.role == "follower" and self.member is not None and self.ran and self.ran.lost:
            rows = self.member.rows_by_source(self.ran.recomputed, self.ran.lost)
            if not rows[Source.SIBLING] + rows[Source.STORED]:
                self.role, self.reason = "ordinary", "what it was to take is gone"

    def as_dict(self) -> dict[str, Any]:
        """`confirmed`: the rows are what the workers ran; else what was planned.

        vLLM ends a request of one output token before it hands over what the workers report.
        """
        ran = self.ran or Ran()
        known: dict[str, Any] = {"role": self.role, "reason": ran.failure or self.reason}
        if self.member is not None:
            member = replace(self.member, copies=()) if ran.failure else self.member
            rows = member.rows_by_source(ran.recomputed, ran.lost)
            known["rows"] = {source.value: count for source, count in rows.items() if count}
            known["confirmed"] = self.ran is not None
        if ran.deviation is not None:
            known["deviation"] = ran.deviation
        return known


class SchedulerSide:
    """One per engine. `disabled`: why reuse is off for this model, "" if it is on.

    takes_donors(backend): whether a backend, "" for the server's, takes text from where it was
    written.
    """

    def __init__(
        self,
        config: Config,
        *,
        block_size: int,
        pass_rows: int,
        max_requests: int,
        identity: str,
        takes_donors: Callable[[str], bool],
    ) -> None:
        self.disabled = ""
        self._config = config
        self._block_size = block_size
        self._pass_rows = pass_rows
        self._max_requests = max_requests
        self._identity = identity
        self._takes_donors = takes_donors
        self._book = RoundBook(config)
        self._manager: Any = None
        self._claimed: set[str] = set()  # collective verdicts of this step
        self._in_flight: dict[str, Any] = {}  # ordinary prefills whose pages fill up in this step
        self._running: dict[str, Any] = {}
        self._hits: dict[str, int] = {}  # prefix hits of requests that wait, in rows
        self._fresh: set[int] = set()  # pages given out in this step
        self._outcomes: dict[str, Outcome] = {}
        self._keeping = Keeping(config, block_size) if config.store_gib else None
        self._stats = TokenDanceStats()

    def bind(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    # -- vLLM asks -----------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """A request has arrived; enter it into its round if it belongs to one."""
        hints = (request.kv_transfer_params or {}).get("tokendance") or {}
        if self.disabled or request.sampling_params is None:
            return
        if self._keeping is not None and hints.get("session"):
            session, salt = str(hints["session"]), request.cache_salt or ""
            self._keeping.arrived(request.request_id, session, salt, hints.get("retain"))
        if not hints and not self._config.discover:
            return
        if hints.get("mode", self._config.mode) == "exact" or not request.prompt_token_ids:
            return
        if request.prompt_embeds is not None:
            return  # where embeddings stand, equal token ids say nothing
        backend = hints.get("backend") or self._config.backend
        if self._config.require_gate and backend != self._config.backend:
            return  # the verdict holds for the server's backend
        named = "" if backend == self._config.backend else backend
        now = time.monotonic()
        salt = request.cache_salt or ""
        tokens = array("q", request.prompt_token_ids)
        keys = SegmentKeys(self._identity, salt)
        ticket = Ticket(
            request_id=RequestId(request.request_id),
            agent=AgentId(str(hints.get("agent") or request.request_id)),
            token_ids=tokens,
            spans=keys.spans(tokens, hints.get("segments") or (len(tokens),)),
            arrived=now,
            computed=lambda: int(request.num_computed_tokens),
            backend=named,
            takes_donors=self._takes_donors(named),
        )
        # Members of one group share a check layer, so another backend makes another group.
        salt = f"{salt}/{ticket.backend}"
        if self._config.discover and not hints.get("marked"):
            self._book.discover(ticket, salt=salt, key=keys.key)
        self._book.attribute(ticket, salt=salt)
        if hints.get("round") is not None:
            self._book.join_announced(
                ticket,
                session=str(hints.get("session", "")),
                round_id=str(hints["round"]),
                size=int(hints.get("size") or 0),
                salt=salt,
                now=now,
            )
        else:
            marked = bool(hints.get("marked"))
            self._book.join_by_content(ticket, salt=salt, marked=marked, now=now)
        session = str(hints.get("session", ""))
        self._outcomes[request.request_id] = Outcome(asked=bool(hints), session=session)

    def matched(self, request: Any, cached: int) -> int | None:
        """Rows beyond `cached` that a pass will fill; 0 for the ordinary path, None to wait."""
        request_id = RequestId(request.request_id)
        self._claimed.discard(request_id)
        self._hits[request_id] = cached
        if request_id not in self._book:
            return 0
        ticket = self._book.ticket(request_id)
        if self._keeping is not None:
            self._keeping.look(request, ticket, self._outcomes[request_id].session, cached)
        if request.num_preemptions > 0:  # output tokens count as prompt now: no pass for them
            return self._brought_back(request, ticket, cached)
        verdict = self._book.verdict(request_id, cached, self._budget(), time.monotonic())
        if verdict is Verdict.WAIT:
            return None
        if verdict is Verdict.ORDINARY:
            return self._brought_back(request, ticket, cached)
        if self._hits_unfinished(request, cached):
            return None
        if ticket.approximate_from is not None:
            _own_namespace(request, ticket.approximate_from // self._block_size)
        self._claimed.add(request_id)
        return ticket.end - cached

    def _brought_back(self, request: Any, ticket: Ticket, cached: int) -> int | None:
        """Rows beyond `cached` that the store gives to a request on the ordinary path."""
        rows = self._keeping.rows_alone(request, ticket, cached) if self._keeping else 0
        return None if rows and self._hits_unfinished(request, cached) else rows

    def allocated(self, request: Any, block_ids: Iterable[int], external: int) -> None:
        """The engine has given pages to a waiting request and starts it in this step."""
        request_id = RequestId(request.request_id)
        self._running[request_id] = request
        collective = request_id in self._claimed and external > 0
        self._claimed.discard(request_id)
        blocks = tuple(block_ids)
        self._fresh.update(blocks[self._hits.pop(request_id, 0) // self._block_size :])
        if not collective:
            self._in_flight[request_id] = request
            if self._keeping is not None and external > 0:
                self._keeping.start_alone(request, blocks)
        if request_id in self._book and request.num_preemptions == 0:
            self._book.admitted(request_id, blocks, collective)

    def work(self, scheduler_output: Any) -> Plans:
        """End of a scheduling step: what the workers have to do in it."""
        for request_id in scheduler_output.preempted_req_ids or ():
            request = self._running.get(request_id)
            if request_id not in scheduler_output.num_scheduled_tokens:  # else resumed at once
                self._running.pop(request_id, None)
                self._in_flight.pop(request_id, None)
            if self._keeping is not None and request is not None and request_id in self._book:
                ticket = self._book.ticket(request_id)
                self._keeping.preempted(request, ticket, self._outcomes[request_id].session)
        plans = tuple(self._sound(plan) for plan in self._book.end_step(self._blocks))
        for plan in plans:
            self._record(plan)
        work = Plans(plans)
        if self._keeping is not None:
            alone = tuple(self._sound(plan) for plan in self._keeping.take_alone())
            for plan in alone:
                self._record_alone(*plan.members)
            given_out = self._fresh.union(_grown(scheduler_output))
            saves = self._keeping.due(plans, given_out, self._running)
            # Others may hit what comes back, so it comes first.
            work = Plans((*alone, *plans), saves, self._keeping.take_orders())
        self._fresh.clear()
        self._in_flight = {
            request_id: request
            for request_id, request in self._in_flight.items()
            if request.num_computed_tokens < request.num_prompt_tokens
        }
        return work

    def ran(self, report: Report) -> None:
        """The workers tell what they did."""
        if self._keeping is not None:
            self._keeping.confirm(report.saved, report.gone)
        for request_id, ran in report.ran.items():
            if request_id in self._outcomes:
                self._outcomes[request_id].ran = ran
            if ran.failure and request_id in self._running:
                # vLLM may have to compute its pages again, while they stand in its prefix cache.
                self._in_flight[request_id] = self._running[request_id]

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request is over; its outcome goes into the response."""
        request_id = RequestId(request.request_id)
        self._running.pop(request_id, None)
        self._in_flight.pop(request_id, None)
        self._hits.pop(request_id, None)
        released = self._keeping is not None and self._keeping.ended(request_id)
        outcome = self._outcomes.pop(request_id, None)
        if outcome is None:
            return None
        ticket = self._book.ticket(request_id)
        reason = ticket.reason
        if self._keeping is not None:
            whole = _answered(request) and not (outcome.ran is not None and outcome.ran.failure)
            known = outcome.asked or outcome.member is not None or ticket.takes_donors
            worth = whole and not released and known
            blocks = self._blocks(request_id) if worth else ()
            self._keeping.finished(request, ticket, outcome.session, blocks)
        self._leave(request)
        if outcome.member is None:
            if not outcome.asked:
                return None  # a stranger to rounds, and nothing was done for it
            outcome.reason = reason or outcome.reason or "no other member to share with"
            self._stats.add(DECLINED, 1, outcome.reason)
        outcome.settle()
        self._stats.add(REQUESTS, 1, outcome.role)
        return {"tokendance": outcome.as_dict()}

    def reset(self) -> None:
        """Forget what is stored."""
        if self._keeping is not None:
            self._keeping.reset()

    def take_stats(self) -> TokenDanceStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, TokenDanceStats()
        return stats

    # -- inside --------------------------------------------------------------------------------

    def _leave(self, request: Any) -> None:
        request_id = RequestId(request.request_id)
        if not _answered(request):
            self._book.leave(request_id)
            return
        pool, blocks = self._manager.block_pool.blocks, self._blocks(request_id)
        hashes = [pool[block].block_hash for block in blocks]
        full = hashes.index(None) if None in hashes else len(hashes)
        blocks, hashes = blocks[:full], hashes[:full]

        def stand() -> bool:
            # Pages given out in this step have their hashes already, but not yet their K/V.
            same = all(pool[block].block_hash == known for block, known in zip(blocks, hashes))
            return same and self._fresh.isdisjoint(blocks)

        held = Held(full * self._block_size, blocks, stand)
        if self._keeping is not None:
            keeping = self._keeping
            held = held._replace(stored=lambda exact: keeping.rows(request_id, exact))
        self._book.retire(request_id, held, request.all_token_ids)

    def _sound(self, plan: ReusePlan) -> ReusePlan:
        """The plan, or one that reuses nothing if it breaks its contract."""
        try:
            check_plan(plan, self._block_size)
        except PlanError as error:
            logger.exception("A plan is unsound; its requests are computed without reuse.")
            self._stats.count_failure(type(error).__name__)
            members = (replace(m, copies=(), reason=str(error)) for m in plan.members)
            return replace(plan, members=tuple(members))
        return plan

    def _budget(self) -> Budget:
        pool = self._manager.block_pool
        return Budget(
            rows=self._pass_rows,
            pages=pool.get_num_free_blocks(),
            page_size=self._block_size,
            requests=self._max_requests - len(self._running),
        )

    def _blocks(self, request_id: str) -> tuple[int, ...]:
        (blocks,) = self._manager.get_block_ids(request_id)
        return tuple(blocks)

    def _hits_unfinished(self, request: Any, cached: int) -> bool:
        """Whether the prefix hit has pages that are computed only later in this step.

        vLLM enters pages into its prefix cache when it schedules their computation. Its own forward
        computes them before it reads them, but the collective pass runs before that forward.
        """
        pages = cached // self._block_size
        for other in self._in_flight.values():
            page = other.num_computed_tokens // self._block_size
            if page < min(pages, len(other.block_hashes)) and (
                other.block_hashes[page] == request.block_hashes[page]
            ):
                return True
        return False

    def _record(self, plan: ReusePlan) -> None:
        for index, member in enumerate(plan.members):
            outcome = self._outcomes[member.request_id]
            follows = any(not (copy.stored and copy.exact) for copy in member.copies)
            outcome.role = "follower" if follows else "leader" if index == 0 else "alone"
            outcome.reason = "" if follows else member.reason
            outcome.member = member

    def _record_alone(self, member: Member) -> None:
        """A request on the ordinary path of which the store gives rows back."""
        outcome = self._outcomes[member.request_id]
        if outcome.member is None:  # else it comes back after a preemption
            ticket = self._book.ticket(member.request_id)
            outcome.member, outcome.reason = replace(member, end=ticket.end), ticket.reason


def _answered(request: Any) -> bool:
    """Whether a request got as far as an answer. vLLM's front end aborts those that reach a stop
    string, so an abort alone says nothing."""
    return bool(request.status != RequestStatus.FINISHED_ABORTED or request.num_output_tokens > 0)


def _grown(scheduler_output: Any) -> Iterable[int]:
    """Pages that running requests got in this step."""
    for groups in scheduler_output.scheduled_cached_reqs.new_block_ids:
        for blocks in groups or ():
            yield from blocks


def _own_namespace(request: Any, first: int) -> None:
    """Give pages from `first` on hashes that only this request has.

    vLLM enters pages into its prefix cache by these hashes as soon as it allocates them. With
    hashes of its own, approximate K/V is never found by another request; later ones chain on.
    """
    secret = request.request_id.encode()
    request.block_hashes[first:] = [
        type(h)(hashlib.blake2b(h + secret, digest_size=32).digest())
        for h in request.block_hashes[first:]
    ]
