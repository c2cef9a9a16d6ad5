"""The worker side: executes plans on vLLM's own layers.

    start_load_kv(plans) -> save what has finished -> bring back what is stored
                         -> collective pass -> (vLLM's forward computes the last prompt token)

A pass that fails degrades to ordinary computation of the same rows, request by request; if that
fails too, the pages are reported to vLLM, which recomputes or fails the request by its own policy.
The worker knows rows, sources and pages, never agents.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from tokendance.config import Config
from tokendance.engines.vllm.archive import Archive, BroughtBack
from tokendance.engines.vllm.layers import VllmLayers
from tokendance.engines.vllm.messages import Plans, Ran, Report
from tokendance.engines.vllm.metrics import TokenDanceStats
from tokendance.plan.reuse_plan import Member, ReusePlan
from tokendance.reuse.collective import MemberOutcome, run_pass
from tokendance.reuse.recovery import Recovery, create
from tokendance.types import subtract_rows

logger = init_logger(__name__)


class WorkerSide:
    """Runs the plans of a step; owns what the worker process keeps between steps."""

    def __init__(self, layers: VllmLayers, max_rows: int, backend: Recovery) -> None:
        self.layers = layers
        self.archive: Archive | None = None  # with a store
        self._max_rows = max_rows
        self._backends: dict[str, Recovery] = {"": backend}
        self._failed_blocks: set[int] = set()
        self._stats = TokenDanceStats()
        self._report = Report({})

    def keep(self, config: Config, identity: str) -> None:
        """Have a store from now on."""
        self.archive = Archive(self.layers, config, identity, self._stats)

    def step(self, work: Plans) -> None:
        """Everything a step asks for. Never raises."""
        if self.archive is not None:
            self.archive.hold(work.plans)
            if work.saves:
                self._report.saved.update(self.archive.save(work.saves, self._stats))
            if work.sessions:
                self.archive.settle(work.sessions)
        if work.plans:
            self.run(work.plans)

    def run(self, plans: Sequence[ReusePlan]) -> None:
        """Fill the rows of every plan. Never raises."""
        paged = [self._on_pages(plan) for plan in plans]
        back = BroughtBack(paged, {}, set())
        if self.archive is not None:
            back = self.archive.bring_back(paged, self._stats)
            self._report = replace(self._report, gone=self._report.gone | back.gone)
        for plan, pages in zip(plans, back.plans):
            started = time.perf_counter()
            try:
                outcome = run_pass(
                    self.layers,
                    pages,
                    self._max_rows,
                    [self._backend(member.backend) for member in plan.members],
                    _across_ranks,
                )
            except Exception as error:
                self._stats.count_failure(type(error).__name__)
                logger.exception("Collective pass failed; its requests are computed one by one.")
                failed = {m.request_id: Ran(failure=repr(error)) for m in plan.members}
                self._report.ran.update(failed)
                self._compute_alone(plan)
                continue
            ran = {
                done.request_id: _ran(member, done, back.lost.get(done.request_id, 0))
                for member, done in zip(pages.members, outcome.members)
            }
            self._report.ran.update(ran)
            self._stats.observe_pass(plan, ran, outcome, time.perf_counter() - started)
        self._spread_failure(plans)

    def take_failed_blocks(self) -> set[int]:
        """Blocks that hold no valid K/V, once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> Report | None:
        """What was done since the last call, None if nothing was."""
        if self._report == Report({}):
            return None
        report, self._report = self._report, Report({})
        return report

    def take_stats(self) -> TokenDanceStats | None:
        """Counters since the last call, None if nothing ran."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, TokenDanceStats()
        return stats

    def _backend(self, name: str) -> Recovery:
        if name not in self._backends:
            self._backends[name] = create(name)
        return self._backends[name]

    def _compute_alone(self, plan: ReusePlan) -> None:
        for member in plan.members:
            try:
                run_pass(self.layers, self._on_pages(_alone(plan, member)), self._max_rows)
            except Exception as error:
                self._stats.count_failure(f"alone: {type(error).__name__}")
                logger.exception("A request could not be computed; its pages go back to vLLM.")
                first = member.cached // self.layers.block_size
                self._failed_blocks.update(plan.tables[member.table].blocks[first:])

    def _spread_failure(self, plans: Sequence[ReusePlan]) -> None:
        """Rows behind a prefix that could not be computed are worth nothing either."""
        failed = self._failed_blocks
        known = -1
        while failed and len(failed) != known:
            known = len(failed)
            for member, blocks in ((m, p.tables[m.table].blocks) for p in plans for m in p.members):
                first = member.cached // self.layers.block_size
                if not failed.isdisjoint(blocks[:first]):
                    failed.update(blocks[first:])

    def _on_pages(self, plan: ReusePlan) -> ReusePlan:
        """The plan with the manager's blocks as kernel pages, where those are smaller."""
        if self.layers.pages_per_block == 1:
            return plan
        tables = (replace(t, blocks=self.layers.pages(t.blocks)) for t in plan.tables)
        return replace(plan, tables=tuple(tables))


def _ran(member: Member, done: MemberOutcome, lost: int) -> Ran:
    """Rows that are computed although they came back count as lost."""
    back = [copy.rows for copy in member.copies if copy.stored]
    recomputed = sum(map(len, done.recomputed))
    others = sum(len(left) for run in done.recomputed for left in subtract_rows(run, back))
    return Ran(others, lost + recomputed - others, done.deviation)


def _across_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sums over tensor-parallel ranks, so that all of them choose the same rows.

    The first rank's sum counts: ranks may add up in different orders, and one bit decides a row.
    """
    group = get_tp_group()
    return values if group.world_size == 1 else group.broadcast(group.all_reduce(values.clone()))


def _alone(plan: ReusePlan, member: Member) -> ReusePlan:
    """The plan that computes every row of one member itself."""
    only = replace(member, table=0, copies=())
    return ReusePlan(plan.round_id, (only,), (plan.tables[member.table],))
