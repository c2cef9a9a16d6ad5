"""The collective pass: one forward pass through the engine's layers for a whole round (M7, M11).

Leader and followers go through the layers together, the leader with its rows of the region, the
followers with their private rows only. At every layer, after the pass has written its own K/V and
before attention reads, the leader's fresh K/V of the region is rotated once and written into the
followers' pages:

    layer l:  [write own K/V] -> [copy + rotate region rows] -> [attention] -> [MLP] -> layer l + 1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tokendance.plan.reuse_plan import ReusePlan
from tokendance.reuse.base import KVAccess, LayerEngine, PassHooks
from tokendance.reuse.rotary import Rotary
from tokendance.reuse.rows import Chunk, chunks, row_batch, slots_of
from tokendance.types import Rows

COPY_ROWS = 2048
"""Rows moved per call: enough to amortise the call, few enough to stay in a CPU's cache."""


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """What one pass did: forward passes, rows computed, rows copied (each counted once)."""

    forwards: int
    computed_rows: int
    copied_rows: int


def run_pass(engine: LayerEngine, plan: ReusePlan, max_rows: int) -> PassOutcome:
    """Execute a plan; afterwards rows [cached, end) of every member hold their K/V in every layer.

    Raises what the engine raises; rows of the plan's members are then undefined.
    """
    copied = computed = forwards = 0
    for chunk in chunks(plan, max_rows):
        mover = _Mover(plan, chunk, engine.kv, engine.rotary, engine.device)
        if chunk.runs:
            batch = row_batch(plan, chunk.runs, engine.kv.page_size, engine.device)
            engine.forward(batch, PassHooks(before_attention=mover))
            computed += len(batch)
            forwards += 1
        else:
            for layer in range(engine.kv.num_layers):
                mover(layer)
        copied += mover.rows
    return PassOutcome(forwards, computed, copied)


class _Mover:
    """Copies and rotates the shared rows of one chunk, layer by layer.

    Slots and rotation tables are the same in all layers and are made once.
    """

    def __init__(
        self, plan: ReusePlan, chunk: Chunk, kv: KVAccess, rotary: Rotary, device: torch.device
    ) -> None:
        self._kv = kv
        self._rotary = rotary
        source, target, delta = [], [], []
        for index, copy in chunk.copies:
            rows = Rows(copy.source_start, copy.source_start + copy.length)
            source.append(slots_of(plan.tables[copy.source], rows, kv.page_size))
            own = plan.tables[plan.members[index].table]
            target.append(slots_of(own, copy.rows, kv.page_size))
            delta.append(np.full(copy.length, copy.delta, dtype=np.int64))
        self.rows = sum(len(part) for part in source)
        self._parts: list[tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]] = []
        if not self.rows:
            return
        tensors = [torch.from_numpy(np.concatenate(p)).to(device) for p in (source, target, delta)]
        for src, dst, by in zip(*(t.split(COPY_ROWS) for t in tensors)):
            self._parts.append((src, dst, rotary.table(by)))

    def __call__(self, layer: int) -> None:
        for source, target, table in self._parts:
            k, v = self._kv.read(layer, source)
            self._kv.write(layer, target, self._rotary.apply(k, table), v)
