"""Looks into the pages after every pass: does each row hold what the plan says it holds?

The oracle is the engine's own dense computation of the same tokens, on pages that nobody uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from small_engine import BLOCK, Engine

from tokendance.plan.reuse_plan import Copy, Member, PageTable, ReusePlan
from tokendance.plan.saving import Save, SaveFamily
from tokendance.reuse.base import PassHooks
from tokendance.reuse.rows import row_batch, slots_of
from tokendance.types import AgentId, RequestId, RoundId, Rows

TOLERANCE = 1e-4
AUDIT = RequestId("audit")

KV = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of some rows, per layer."""


class Audit:
    """Checks plans that a worker has just executed.

    members: how many were checked. problems: rows that do not hold what they should. They are kept
    and not raised, because the engine is in the middle of a step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._layers = engine.worker.layers
        self.members = 0
        self.plans: list[ReusePlan] = []
        self.problems: list[str] = []

    def check(self, plan: ReusePlan) -> None:
        for member in plan.members:
            exact = min((c.start for c in member.copies if not c.exact), default=member.end)
            self._check_exact(plan, member, exact)
            for copy in member.copies:
                if not copy.stored:
                    self._check_copy(plan, member, copy)
                elif self._source(plan, copy) is not None:
                    self._check_stored(plan, member, copy)
            self._check_computed(plan, member, exact)
            self.members += 1
        self.plans.append(plan)

    def check_save(self, save: Save) -> None:
        """At the moment of saving, exact rows are still what computing gives."""
        rows = Rows(0, save.exact_rows)
        with self.scratch(rows.end) as table:
            self.compute(table, [*save.token_ids[: rows.end], 0], [rows])
            wanted = self.read(table, rows)
        found = self.read(PageTable(save.request_id, save.blocks), rows)
        self._compare(found, wanted, f"saved rows of {save.request_id}")

    def _check_exact(self, plan: ReusePlan, member: Member, end: int) -> None:
        """Rows before the first approximate one, prefix hits too, are what computing gives."""
        with self.scratch(end) as table:
            self.compute(table, member.token_ids, [Rows(0, end)])
            wanted = self.read(table, Rows(0, end))
        found = self.read(plan.tables[member.table], Rows(0, end))
        self._compare(found, wanted, f"exact rows of {member.request_id}, cached {member.cached}")

    def _check_copy(self, plan: ReusePlan, member: Member, copy: Copy) -> None:
        rows = Rows(copy.source_start, copy.source_start + copy.length)
        self._check_source(plan, copy, rows)
        source = self.read(plan.tables[copy.source], rows)
        wanted = [(self._layers.rotary.rotate(k, copy.delta), v) for k, v in source]
        found = self.read(plan.tables[member.table], copy.rows)
        self._compare(found, wanted, f"{copy} of {member.request_id}")

    def _check_stored(self, plan: ReusePlan, member: Member, copy: Copy) -> None:
        """Rows of a finished source that came out of the store are what it had computed."""
        ticket = self._source(plan, copy)
        rows = Rows(copy.source_start, copy.source_start + copy.length)
        if rows.end > len(ticket.token_ids) or ticket.approximate_from is not None:
            return  # decoded rows, of which the ticket knows nothing, or nobody knows what they are
        with self.scratch(rows.end) as table:
            self.compute(table, [*ticket.token_ids[: rows.end], 0], [Rows(0, rows.end)])
            source = self.read(table, rows)
        wanted = [(self._layers.rotary.rotate(k, copy.delta), v) for k, v in source]
        found = self.read(plan.tables[member.table], copy.rows)
        self._compare(found, wanted, f"{copy} of {member.request_id}, out of the store")

    def _check_source(self, plan: ReusePlan, copy: Copy, rows: Rows) -> None:
        """Rows of a leader from an earlier step are all there; members are checked themselves."""
        name = plan.tables[copy.source].request_id
        if any(member.request_id == name for member in plan.members):
            return
        ticket = self._source(plan, copy) or self._engine.book.ticket(name)
        if ticket.approximate_from is None:
            with self.scratch(rows.end) as table:
                self.compute(table, ticket.token_ids[: rows.end + 1], [Rows(0, rows.end)])
                wanted = self.read(table, rows)
            found = self.read(plan.tables[copy.source], rows)
            self._compare(found, wanted, f"source of {copy} of {plan.members[0].request_id}")

    def _source(self, plan: ReusePlan, copy: Copy) -> Any:
        """The ticket of a copy's source if that is a finished request: a donor, a kept leader."""
        book, name = self._engine.book, plan.tables[copy.source].request_id
        donor = book._donors._donors.get(name)
        if donor is not None and copy.source_start + copy.length <= donor.ticket.end:
            return donor.ticket
        return book.ticket(name) if name in book._kept else None

    def _check_computed(self, plan: ReusePlan, member: Member, exact: int) -> None:
        """Computed rows after that are what the rows before them, copies and all, lead to."""
        runs = [Rows(max(r.start, exact), r.end) for r in member.compute if r.end > exact]
        with self.scratch(member.end) as table:
            whole = Rows(0, member.end)
            self.write(table, whole, self.read(plan.tables[member.table], whole))
            self.compute(table, member.token_ids, runs)
            for run in runs:
                found = self.read(plan.tables[member.table], run)
                self._compare(found, self.read(table, run), f"{run} of {member.request_id}")

    def _compare(self, found: KV, wanted: KV, what: str) -> None:
        for layer, (mine, theirs) in enumerate(zip(found, wanted)):
            for name, a, b in zip("KV", mine, theirs):
                error = float((a.float() - b.float()).abs().max()) if a.numel() else 0.0
                if not error < TOLERANCE:
                    self.problems.append(f"{what}: {name} of layer {layer} is off by {error:.2g}")

    # -- rows ----------------------------------------------------------------------------------

    def compute(self, table: PageTable, token_ids: Sequence[int], runs: Sequence[Rows]) -> None:
        """Compute `runs` on the pages of `table`, as one forward pass."""
        if not runs:
            return
        member = Member(AUDIT, AgentId(AUDIT), 0, tuple(token_ids), 0, len(token_ids) - 1)
        plan = ReusePlan(RoundId(AUDIT), (member,), (table,))
        batch = row_batch(plan, [(0, run) for run in runs], BLOCK, self._layers.device)
        self._layers.forward(batch, PassHooks(before_attention=lambda layer: None))

    def read(self, table: PageTable, rows: Rows) -> KV:
        slots = torch.from_numpy(slots_of(table, rows, BLOCK))
        kv = self._layers.kv
        return [kv.read(layer, slots) for layer in range(kv.num_layers)]

    def write(self, table: PageTable, rows: Rows, values: KV) -> None:
        slots = torch.from_numpy(slots_of(table, rows, BLOCK))
        for layer, (k, v) in enumerate(values):
            self._layers.kv.write(layer, slots, k, v)

    @contextmanager
    def scratch(self, rows: int) -> Iterator[PageTable]:
        """Pages that nobody else uses."""
        yield PageTable(AUDIT, self._engine.scratch[: -(-rows // BLOCK)])


@contextmanager
def audited(engine: Engine) -> Iterator[Audit]:
    """Check every plan right after its pass, as long as the context is open; fail at its end."""
    audit, worker = Audit(engine), engine.worker
    run = worker.run

    def run_and_check(plans: Sequence[ReusePlan]) -> Any:
        run(plans)
        for plan in plans:
            try:
                audit.check(plan)
            except Exception as error:
                audit.problems.append(f"the audit itself: {error!r}")

    worker.run = run_and_check
    try:
        yield audit
    finally:
        del worker.run
    assert not audit.problems, audit.problems


@contextmanager
def audited_saves(engine: Engine) -> Iterator[list[Save]]:
    """Check everything that is stored just before it is; gives what has been stored so far."""
    audit, archive, saves = Audit(engine), engine.worker.archive, list[Save]()
    store = archive.save

    def check_and_save(families: Sequence[SaveFamily], stats: Any) -> Any:
        for save in (save for family in families for save in family.saves):
            saves.append(save)
            audit.check_save(save)
        return store(families, stats)

    archive.save = check_and_save
    try:
        yield saves
    finally:
        del archive.save
    assert not audit.problems, audit.problems
