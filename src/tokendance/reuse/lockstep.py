"""A group through a check layer together: the paper's lock-step selective recompute (M7, M8).

Layers below the check layer run on all rows, the copied ones too. At the check layer the copied K/V
of the whole group is rotated in one call and shown to the backends beside the fresh one; from there
on the rows they choose are computed and the others are copied, layer by layer.

    layer < c:   all rows computed
    layer = c:   [fresh K/V of all rows] -> rotate, compare, select -> go on with fewer rows
    layer >= c:  [write own K/V] -> [copy + rotate the rest] -> [attention] -> [MLP]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tokendance.plan.reuse_plan import Copy, ReusePlan
from tokendance.reuse.base import LayerEngine, PassHooks, RowBatch
from tokendance.reuse.deviation import totals
from tokendance.reuse.mover import Mover, moves_of
from tokendance.reuse.recovery.base import Check, Recovery
from tokendance.reuse.rows import Chunk, row_batch
from tokendance.types import Rows

AcrossRanks = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found at the check layer: summed K deviation, and the rows chosen, per member."""

    deviation: dict[int, float]
    recomputed: dict[int, tuple[Rows, ...]]
    computed_rows: int  # rows that went through all layers


def open_checked(
    plan: ReusePlan, recoveries: Sequence[Recovery]
) -> tuple[ReusePlan, tuple[tuple[Copy, ...], ...]]:
    """The plan in which rows that a check looks at are computed, as they are below its layer.

    Also returns, per member, the copies that are looked at: those that are not exact.
    """
    checked = tuple(
        tuple(c for c in m.copies if r.check_layer is not None and not c.exact)
        for m, r in zip(plan.members, recoveries)
    )
    members = tuple(
        replace(m, copies=tuple(c for c in m.copies if c not in mine))
        for m, mine in zip(plan.members, checked)
    )
    return replace(plan, members=members), checked


class CheckedChunk:
    """One chunk of an opened plan on its way through the layers; `hooks` drive it."""

    def __init__(
        self,
        plan: ReusePlan,
        checked: Sequence[Sequence[Copy]],
        recoveries: Sequence[Recovery],
        chunk: Chunk,
        engine: LayerEngine,
        check_layer: int,
        across_ranks: AcrossRanks,
    ) -> None:
        self._plan, self._chunk, self._engine = plan, chunk, engine
        self._recoveries, self._layer, self._across = recoveries, check_layer, across_ranks
        size, device = engine.kv.page_size, engine.device
        self.batch = row_batch(plan, chunk.runs, size, device)
        self._static = Mover(moves_of(plan, chunk.copies, size, device), engine.kv, engine.rotary)
        self._rest = Mover(moves_of(plan, (), size, device), engine.kv, engine.rotary)
        self._pieces = list(_pieces(checked, chunk.runs))
        self.found = Checked({}, {}, len(self.batch))

    @property
    def copied_rows(self) -> int:
        return self._static.rows + self._rest.rows

    @property
    def hooks(self) -> PassHooks:
        if not self._pieces:
            return PassHooks(before_attention=self._static)
        return PassHooks(self._before_attention, self._layer, self._on_check)

    def _before_attention(self, layer: int) -> None:
        self._static(layer)
        if layer >= self._layer:
            self._rest(layer)

    def _on_check(self, k: torch.Tensor, v: torch.Tensor) -> tuple[RowBatch, torch.Tensor]:
        kv, rotary, layer = self._engine.kv, self._engine.rotary, self._layer
        size, device = kv.page_size, self._engine.device
        moves = moves_of(self._plan, ((p.member, p.copy) for p in self._pieces), size, device)
        rows = _joined([np.arange(p.row, p.row + p.copy.length) for p in self._pieces], device)
        # A source may be a row of this very batch, which the engine has not written yet; but rows
        # that were brought back before the pass are their own source, and must not be lost.
        fresh = torch.ones(len(self.batch), dtype=torch.bool, device=device)
        fresh[rows[moves.source == moves.target]] = False
        kv.write(layer, self.batch.slots[fresh], k[fresh], v[fresh])
        cached_k, cached_v = kv.read(layer, moves.source)
        lengths = [p.copy.length for p in self._pieces]
        check = Check(
            member=_joined([np.full(p.copy.length, p.member) for p in self._pieces], device),
            position=self.batch.positions[rows],
            piece=_joined([np.full(n, i) for i, n in enumerate(lengths)], device),
            offset=_joined([p.offset + np.arange(p.copy.length) for p in self._pieces], device),
            fresh_k=k[rows],
            fresh_v=v[rows],
            cached_k=rotary.apply(cached_k, rotary.table(moves.delta)),
            cached_v=cached_v,
            across_ranks=self._across,
        )
        chosen = select(check, {p.member: self._recoveries[p.member] for p in self._pieces})
        self._rest = Mover(moves.where(~chosen), kv, rotary)
        keep = torch.ones(len(self.batch), dtype=torch.bool, device=device)
        keep[rows] = chosen
        return self._narrow(check, chosen, keep)

    def _narrow(
        self, check: Check, chosen: torch.Tensor, keep: torch.Tensor
    ) -> tuple[RowBatch, torch.Tensor]:
        """Note what was found and make the batch of the layers from here on."""
        members = sorted({p.member for p in self._pieces})
        sums = totals(check.k_deviation, check.member, len(self._plan.members))
        positions, owners = check.position[chosen].cpu().numpy(), check.member[chosen].cpu().numpy()
        runs: list[tuple[int, Rows]] = []
        start, kept = 0, keep.cpu().numpy()
        for index, run in self._chunk.runs:
            inside = np.flatnonzero(kept[start : start + len(run)]) + run.start
            runs.extend((index, part) for part in runs_of(inside))
            start += len(run)
        self.found = Checked(
            {m: sums[m] for m in members},
            {m: tuple(runs_of(positions[owners == m])) for m in members},
            int(kept.sum()),
        )
        batch = row_batch(self._plan, runs, self._engine.kv.page_size, self._engine.device)
        return batch, keep.nonzero()[:, 0]


def select(check: Check, recoveries: Mapping[int, Recovery]) -> torch.Tensor:
    """bool [rows] of a check, each distinct backend asked once for all the members it serves."""
    backends = list(recoveries.values())
    if all(backend == backends[0] for backend in backends):
        return backends[0].select(check)
    chosen = torch.zeros_like(check.member, dtype=torch.bool)
    for backend in (b for i, b in enumerate(backends) if b not in backends[:i]):
        served = [member for member, own in recoveries.items() if own == backend]
        mine = torch.isin(check.member, torch.tensor(served, device=check.member.device))
        chosen[mine] = backend.select(check.part(mine))
    return chosen


def runs_of(positions: np.ndarray) -> Iterator[Rows]:
    """Ascending positions as maximal runs."""
    if len(positions):
        for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
            yield Rows(int(run[0]), int(run[-1]) + 1)


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a checked copy that lies in one run of a chunk."""

    member: int
    copy: Copy
    offset: int  # of its first row in the planned copy
    row: int  # of its first row in the batch


def _pieces(
    checked: Sequence[Sequence[Copy]], runs: Iterable[tuple[int, Rows]]
) -> Iterator[_Piece]:
    row = 0
    for index, run in runs:
        for copy in checked[index]:
            start, end = max(copy.start, run.start), min(copy.end, run.end)
            if start < end:
                offset = start - copy.start
                part = Copy(copy.source, copy.source_start + offset, start, end - start)
                yield _Piece(index, part, offset, row + start - run.start)
        row += len(run)


def _joined(parts: list[np.ndarray], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)
