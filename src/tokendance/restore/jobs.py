"""From placements to what a kernel needs: sources, slots, rotations, and which planes to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tokendance import types
from tokendance.restore.kernels.base import Slots, Turn
from tokendance.reuse.rotary import Rotary
from tokendance.store.blocks import Plane
from tokendance.store.mirror import Entry, Index, Sources


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows of an entry, and where they go. The caller holds a lease on the entry.

    slots: int64 [rows] of the target. rows: which rows of the entry, None all. position: of the
        first row in the new prompt, None where it stood when it was stored.
    """

    entry: Entry
    slots: torch.Tensor
    rows: types.Rows | None = None
    position: int | None = None

    @property
    def span(self) -> types.Rows:
        return self.rows if self.rows is not None else types.Rows(0, self.entry.rows)


class Feed(NamedTuple):
    """Rows [start, end) of a plane, wanted layer by layer."""

    plane: Plane
    start: int
    end: int


class Job(NamedTuple):
    """One placement, ready to run. k_feeds, v_feeds: numbers of the master's and the own feed;
    k_source, v_source: int64 [rows] into these two, one tensor where K and V share it; nbytes:
    what is written."""

    slots: torch.Tensor
    where: Slots
    k_source: torch.Tensor
    v_source: torch.Tensor
    turn: Turn | None
    k_feeds: tuple[int, int]
    v_feeds: tuple[int, int]
    nbytes: int


class Batch(NamedTuple):
    """The jobs of one restore and the feeds they share."""

    jobs: list[Job]
    feeds: list[Feed]


def prepare(
    placements: Sequence[Placement], rotary: Rotary, page_size: int, device: torch.device
) -> Batch:
    """Raises ValueError if rows and slots do not match, LookupError for rows that are not
    stored."""
    for placement in placements:
        rows, slots = placement.span, placement.slots.shape[0]
        if len(rows) != slots or not 0 <= rows.start <= rows.end <= placement.entry.rows:
            raise ValueError(f"{slots} slots for rows [{rows.start}, {rows.end})")
    wanted = [_wanted(placement) for placement in placements]
    ranges = _base_ranges(placements, wanted)
    feeds = _Feeds()
    jobs = []
    for placement, sources in zip(placements, wanted):
        entry = placement.entry
        base, rows = entry.base, ranges[id(entry.base)]
        k = _shifted(sources.k, base.k.rows, rows).to(device)
        shared = sources.v is sources.k
        turn = _turn(placement, sources.birth, rotary)
        jobs.append(
            Job(
                slots=placement.slots,
                where=Slots.of(placement.slots.to(device), page_size),
                k_source=k,
                v_source=k if shared else _shifted(sources.v, base.v.rows, rows).to(device),
                turn=turn.to(device) if turn is not None else None,
                k_feeds=feeds.pair(base.k, rows, entry.k),
                v_feeds=feeds.pair(base.v, rows, entry.v),
                nbytes=len(k) * _row_bytes(entry, len(base.k.layers)),
            )
        )
    return Batch(jobs, feeds.items)


def _wanted(placement: Placement) -> Sources:
    """Sources of the rows to restore; v stays the same object as k where they are shared."""
    whole, span = placement.entry.sources(), placement.span
    k = whole.k[span.start : span.end]
    v = k if whole.v is whole.k else whole.v[span.start : span.end]
    if len(span) and min(k.min(), v.min()) < 0:
        raise LookupError("these rows are not stored: the entry is the trunk of a former master")
    return Sources(k, v, whole.birth[span.start : span.end])


class _Feeds:
    """Every part of a plane that a restore reads, once."""

    def __init__(self) -> None:
        self.items: list[Feed] = []
        self._numbers: dict[tuple[int, int, int], int] = {}

    def number(self, plane: Plane, start: int, end: int) -> int:
        key = (id(plane), start, end)
        if key not in self._numbers:
            self._numbers[key] = len(self.items)
            self.items.append(Feed(plane, start, end))
        return self._numbers[key]

    def pair(self, base: Plane, rows: types.Rows, own: Plane) -> tuple[int, int]:
        """The feeds for a master's rows and for all own rows (none if the entry is the master)."""
        mine = 0 if own is base else own.rows
        return self.number(base, *rows), self.number(own, 0, mine)


def _base_ranges(
    placements: Sequence[Placement], wanted: Sequence[Sources]
) -> dict[int, types.Rows]:
    """By id of each master: the stored rows that any placement needs of it. K and V have one range,
    so that a pair can share its source indices."""
    ranges: dict[int, types.Rows] = {}
    for placement, sources in zip(placements, wanted):
        base = placement.entry.base
        used = np.concatenate((sources.k, sources.v))
        used = used[used < base.k.rows]
        first, last = (int(used.min()), int(used.max()) + 1) if len(used) else (0, 0)
        seen = ranges.setdefault(id(base), types.Rows(first, last))
        ranges[id(base)] = types.Rows(min(seen.start, first), max(seen.end, last))
    return ranges


def _shifted(source: Index, split: int, rows: types.Rows) -> torch.Tensor:
    """Indices into the loaded range of the master followed by the own rows."""
    return torch.from_numpy(
        np.where(source < split, source - rows.start, source - split + len(rows))
    )


def _turn(placement: Placement, birth: Index, rotary: Rotary) -> Turn | None:
    rows = placement.span
    start = rows.start if placement.position is None else placement.position
    return Turn.of(rotary, torch.from_numpy(np.arange(start, start + len(rows)) - birth))


def _row_bytes(entry: Entry, layers: int) -> int:
    per_layer = 0
    for plane in (entry.base.k, entry.base.v):
        heads, dim = plane.layer(0).values.shape[1:]
        per_layer += int(heads * dim) * plane.dtype.itemsize
    return layers * per_layer
