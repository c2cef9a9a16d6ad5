"""Copied rows on their way: from the source's pages, rotated, into the member's pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from tokendance.plan.reuse_plan import Copy, ReusePlan
from tokendance.reuse.base import KVAccess
from tokendance.reuse.rotary import Rotary, RotationTable
from tokendance.reuse.rows import slots_of
from tokendance.types import Rows

COPY_ROWS = 2048
"""Rows moved per call: enough to amortise the call, few enough to stay in a CPU's cache."""


class Moves(NamedTuple):
    """One row copied per entry; all int64 [rows]."""

    source: torch.Tensor  # slot
    target: torch.Tensor  # slot
    delta: torch.Tensor  # positions that K moves by

    def where(self, rows: torch.Tensor) -> Moves:
        """The moves that `rows` (bool [rows]) picks."""
        return Moves(*(part[rows] for part in self))


def moves_of(
    plan: ReusePlan, copies: Iterable[tuple[int, Copy]], page_size: int, device: torch.device
) -> Moves:
    """The slots and distances of `copies` (pairs of member index and copy), in order.

    Rows that stand where they belong, brought back before the pass, are their own source.
    """
    source, target, delta = [], [], []
    for index, copy in copies:
        rows = Rows(copy.source_start, copy.source_start + copy.length)
        source.append(slots_of(plan.tables[copy.source], rows, page_size))
        own = plan.tables[plan.members[index].table]
        target.append(slots_of(own, copy.rows, page_size))
        delta.append(np.full(copy.length, copy.delta, dtype=np.int64))
    empty = [np.empty(0, dtype=np.int64)]
    return Moves(
        *(torch.from_numpy(np.concatenate(p or empty)).to(device) for p in (source, target, delta))
    )


class Mover:
    """Copies and rotates rows of one layer at a time.

    Slots and rotation tables are the same in all layers and are made once.
    """

    def __init__(self, moves: Moves, kv: KVAccess, rotary: Rotary) -> None:
        self._kv = kv
        self._rotary = rotary
        self.rows = len(moves.source)
        self._parts: list[tuple[torch.Tensor, torch.Tensor, RotationTable]] = []
        moves = moves.where(moves.source != moves.target)
        if len(moves.source):
            for source, target, delta in zip(*(part.split(COPY_ROWS) for part in moves)):
                self._parts.append((source, target, rotary.table(delta)))

    def __call__(self, layer: int) -> None:
        for source, target, table in self._parts:
            k, v = self._kv.read(layer, source)
            self._kv.write(layer, target, self._rotary.apply(k, table), v)
