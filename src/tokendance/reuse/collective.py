"""The collective pass: one forward pass through the engine's layers for a whole round (M7, M11).

Leader and followers go through the layers together, the leader with its rows of the region, the
followers with their private rows only. At every layer, after the pass has written its own K/V and
before attention reads, the leader's fresh K/V of the region is rotated once and written into the
followers' pages:

    layer l:  [write own K/V] -> [copy + rotate region rows] -> [attention] -> [MLP] -> layer l + 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tokendance.plan.reuse_plan import Member, ReusePlan
from tokendance.reuse.base import LayerEngine, PassHooks
from tokendance.reuse.deviation import least
from tokendance.reuse.lockstep import AcrossRanks, CheckedChunk, open_checked
from tokendance.reuse.mover import Mover, moves_of
from tokendance.reuse.recovery.base import Recovery, common_check_layer, with_static
from tokendance.reuse.rows import Chunk, chunks, row_batch
from tokendance.types import RequestId, Rows, merge_rows, subtract_rows


class MemberOutcome(NamedTuple):
    """What became of one member's copies.

    deviation: sum of squared K distances between copied and fresh rows at the check layer, 0 if
        nothing is copied but exact rows, None if nobody looked.
    recomputed: rows the plan copies that were computed instead, in all layers or from the check
        layer on; these differ from their source.
    """

    request_id: RequestId
    deviation: float | None
    recomputed: tuple[Rows, ...]


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """What one pass did.

    computed_rows: computed in every layer. checked_rows: computed below the check layer only.
    copied_rows: copied in every layer, or from the check layer on. Each row is counted once,
    except that checked rows are also copied ones.
    """

    forwards: int
    computed_rows: int
    copied_rows: int
    checked_rows: int = 0
    members: tuple[MemberOutcome, ...] = ()

    @property
    def master(self) -> int | None:
        """The member whose copies deviate least in total (M10); None if no deviation is known."""
        return least([m.deviation for m in self.members])


def run_pass(
    engine: LayerEngine,
    plan: ReusePlan,
    max_rows: int,
    recoveries: Sequence[Recovery] | None = None,
    across_ranks: AcrossRanks = lambda values: values,
) -> PassOutcome:
    """Execute a plan; afterwards rows [cached, end) of every member hold their K/V in every layer.

    max_rows: most rows of one forward pass. recoveries: the backend of each member (M9); without
    any, copies are taken as they are. across_ranks: sums a float32 [rows] tensor over the
    tensor-parallel ranks. Raises RecoveryError before anything is computed, and what the engine
    raises; rows of the plan's members are then undefined.
    """
    work, check_layer = plan, None
    if recoveries is not None:
        check_layer = common_check_layer(recoveries, engine.kv.num_layers)
        work = with_static(plan, recoveries)
    if recoveries is None or check_layer is None:
        parts = [_run_chunk(engine, work, chunk) for chunk in chunks(work, max_rows)]
        return _total(parts, map(_copied, plan.members, work.members))
    return _run_checked(engine, plan, work, max_rows, recoveries, check_layer, across_ranks)


def run_serial(
    engine: LayerEngine,
    plan: ReusePlan,
    max_rows: int,
    recoveries: Sequence[Recovery] | None = None,
    across_ranks: AcrossRanks = lambda values: values,
) -> PassOutcome:
    """One request at a time, the same maths: what run_pass is compared with, not how to serve."""
    outcomes = [
        run_pass(
            engine,
            replace(plan, members=(member,), leader=None),
            max_rows,
            None if recoveries is None else [recoveries[index]],
            across_ranks,
        )
        for index, member in enumerate(plan.members)
    ]
    return _total(outcomes, (member for o in outcomes for member in o.members))


def _run_chunk(engine: LayerEngine, plan: ReusePlan, chunk: Chunk) -> PassOutcome:
    kv, device = engine.kv, engine.device
    mover = Mover(moves_of(plan, chunk.copies, kv.page_size, device), kv, engine.rotary)
    if chunk.runs:
        batch = row_batch(plan, chunk.runs, kv.page_size, device)
        engine.forward(batch, PassHooks(before_attention=mover))
        return PassOutcome(1, len(batch), mover.rows)
    for layer in range(kv.num_layers):
        mover(layer)
    return PassOutcome(0, 0, mover.rows)


def _run_checked(
    engine: LayerEngine,
    plan: ReusePlan,
    static_work: ReusePlan,
    max_rows: int,
    recoveries: Sequence[Recovery],
    check_layer: int,
    across_ranks: AcrossRanks,
) -> PassOutcome:
    """The pass of a group with a check layer; static_work is `plan` with static rows computed."""
    work, checked = open_checked(static_work, recoveries)
    deviation = {i: 0.0 for i, copies in enumerate(checked) if copies}
    recomputed: dict[int, list[Rows]] = {i: [] for i in range(len(plan.members))}
    parts = []
    for chunk in chunks(work, max_rows):
        if not chunk.runs:
            parts.append(_run_chunk(engine, work, chunk))
            continue
        step = CheckedChunk(work, checked, recoveries, chunk, engine, check_layer, across_ranks)
        engine.forward(step.batch, step.hooks)
        done = step.found.computed_rows
        parts.append(PassOutcome(1, done, step.copied_rows, len(step.batch) - done))
        for index, found in step.found.deviation.items():
            deviation[index] += found
            recomputed[index].extend(step.found.recomputed[index])
    members = (
        MemberOutcome(
            static.request_id,
            deviation.get(index, static.deviation),
            tuple(merge_rows(sorted((*static.recomputed, *recomputed[index])))),
        )
        for index, static in enumerate(map(_copied, plan.members, static_work.members))
    )
    return _total(parts, members)


def _total(parts: Sequence[PassOutcome], members: Iterable[MemberOutcome]) -> PassOutcome:
    return PassOutcome(
        forwards=sum(p.forwards for p in parts),
        computed_rows=sum(p.computed_rows for p in parts),
        copied_rows=sum(p.copied_rows for p in parts),
        checked_rows=sum(p.checked_rows for p in parts),
        members=tuple(members),
    )


def _copied(planned: Member, done: Member) -> MemberOutcome:
    """The outcome of copies that nobody looked at; `done` holds those that were made."""
    made = [copy.rows for copy in done.copies]
    return MemberOutcome(
        planned.request_id,
        0.0 if all(copy.exact for copy in done.copies) else None,
        tuple(rows for copy in planned.copies for rows in subtract_rows(copy.rows, made)),
    )
