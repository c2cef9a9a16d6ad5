"""The one signature of all restore kernels (M17, M18).

A kernel takes one layer. For every row i it reads row source[i] of `master` followed by `own`,
rotates K by the row's position difference, and writes slot i of the pages: one read and one write
per row, no dense mirror in between. The paper applies the diffs to the master's buffer in place;
here they stay beside it, addressed through `source`, so that one loaded master serves every mirror
of a round (M19).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tokendance.reuse.rotary import Rotary


class Rows(NamedTuple):
    """What a plane is made of: master rows, then own rows, [n, kv_heads, head_dim] each."""

    master: torch.Tensor
    own: torch.Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    """Target slots: int64 [rows] page numbers and rows inside the page."""

    page: torch.Tensor
    row: torch.Tensor
    _offsets: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, slots: torch.Tensor, page_size: int) -> Slots:
        return cls(slots // page_size, slots % page_size)

    def __len__(self) -> int:
        return int(self.page.shape[0])

    def offsets(self, pages: torch.Tensor, unit: int = 1) -> torch.Tensor:
        """From the first element of `pages` to each target row, int64, in elements or in units of
        1 / `unit` elements; computed once per layout, since all layers of a cache have the same."""
        page, row = pages.stride(0) * unit, pages.stride(1) * unit
        if (page, row) not in self._offsets:
            self._offsets[page, row] = self.page * page + self.row * row
        return self._offsets[page, row]


@dataclass(frozen=True, slots=True)
class Turn:
    """Rotation of rows. which: int32 [rows], line of cos and sin (float32 [lines, rotary_dim / 2]);
    line 0 keeps the row's bits."""

    which: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    rotary: Rotary

    @classmethod
    def of(cls, rotary: Rotary, deltas: torch.Tensor) -> Turn | None:
        """deltas: int64 [rows] on the CPU; None if nothing moves."""
        distinct, which = torch.cat((torch.zeros(1, dtype=torch.int64), deltas)).unique(
            return_inverse=True
        )
        if len(distinct) == 1:
            return None
        order = torch.cat((distinct[distinct == 0], distinct[distinct != 0]))
        line = torch.empty(len(distinct), dtype=torch.int32)
        line[torch.searchsorted(distinct, order)] = torch.arange(len(order), dtype=torch.int32)
        cos, sin = (table[:, 0].contiguous() for table in rotary.table(order))
        return cls(line[which[1:]], cos, sin, rotary)

    def to(self, device: torch.device) -> Turn:
        which, cos, sin = (x.to(device) for x in (self.which, self.cos, self.sin))
        return Turn(which, cos, sin, self.rotary)

    def apply(self, k: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """K of `rows`, rotated, in a new tensor."""
        which = self.which[rows].long()
        moved = self.rotary.apply(k, (self.cos[which][:, None], self.sin[which][:, None]))
        return torch.where((which == 0)[:, None, None], k, moved)


PlacePlane = Callable[[torch.Tensor, Slots, Rows, torch.Tensor, Turn | None], None]
"""place_plane(pages, slots, rows, source, turn): pages [pages, page_size, kv_heads, head_dim] of
any strides with head_dim contiguous, source int64 [rows]. Mutates the pages at the slots only."""

PlacePair = Callable[
    [torch.Tensor, torch.Tensor, Slots, Rows, Rows, torch.Tensor, Turn | None], None
]
"""place_pair(k_pages, v_pages, slots, k_rows, v_rows, source, turn): the same for K and V together,
where they share `source`; V is not rotated."""


class Kernel(NamedTuple):
    """One implementation of the pair. Pages, rows and indices are on one device."""

    name: str
    place_plane: PlacePlane
    place_pair: PlacePair
