"""From a plan to the batches of one pass: rows -> runs -> virtual sequences (algorithm of M7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokendance.plan.reuse_plan import Copy, PageTable, ReusePlan
from tokendance.reuse.base import RowBatch, VirtualSequence
from tokendance.types import Rows


@dataclass(frozen=True, slots=True)
class Chunk:
    """The runs of one forward pass, and the copies that must be in place for them, per member."""

    runs: tuple[tuple[int, Rows], ...]
    copies: tuple[tuple[int, Copy], ...]


def chunks(plan: ReusePlan, max_rows: int) -> list[Chunk]:
    """Split a plan into passes of at most `max_rows` rows, in the order of the members.

    A copy is made in the chunk of the first run behind it, so its source, an earlier member, has
    been computed by then or is computed in the same chunk, layer by layer.
    """
    done: list[Chunk] = []
    runs: list[tuple[int, Rows]] = []
    copies: list[tuple[int, Copy]] = []
    room = max_rows
    for index, member in enumerate(plan.members):
        pending = list(member.copies)
        for run in member.compute:
            start = run.start
            while start < run.end:
                if room == 0:
                    done.append(Chunk(tuple(runs), tuple(copies)))
                    runs, copies, room = [], [], max_rows
                while pending and pending[0].start < start:
                    copies.append((index, pending.pop(0)))
                end = min(run.end, start + room)
                runs.append((index, Rows(start, end)))
                room -= end - start
                start = end
        copies.extend((index, copy) for copy in pending)
    if runs or copies:
        done.append(Chunk(tuple(runs), tuple(copies)))
    return done


def slots_of(table: PageTable, rows: Rows, page_size: int) -> np.ndarray:
    """The slots (int64 [len(rows)]) of a request's rows."""
    positions = np.arange(rows.start, rows.end, dtype=np.int64)
    blocks = np.asarray(table.blocks, dtype=np.int64)
    return blocks[positions // page_size] * page_size + positions % page_size


def row_batch(
    plan: ReusePlan, runs: Sequence[tuple[int, Rows]], page_size: int, device: torch.device
) -> RowBatch:
    """The tensors of one forward pass over `runs` (pairs of member index and rows)."""
    tokens, positions, slots, sequences = [], [], [], []
    for index, rows in runs:
        member = plan.members[index]
        table = plan.tables[member.table]
        tokens.append(np.asarray(member.token_ids[rows.start : rows.end], dtype=np.int64))
        positions.append(np.arange(rows.start, rows.end, dtype=np.int64))
        slots.append(slots_of(table, rows, page_size))
        sequences.append(VirtualSequence(rows.start, rows.end, table.blocks))

    def tensor(parts: list[np.ndarray]) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return torch.from_numpy(joined).to(device, non_blocking=True)

    return RowBatch(tensor(tokens), tensor(positions), tensor(slots), tuple(sequences))
