"""Restore kernels in plain torch: what every other one is tested against."""

from __future__ import annotations

import torch

from tokendance.restore.kernels.base import Kernel, Rows, Slots, Turn

_CHUNK = 512
"""Rows at a time, so that a chunk's float32 copy stays in cache: 1.4x over one piece for 2048 rows
of 4 x 128 on one AVX2 core; 64 to 4096 were tried, `tokendance bench restore --kernel torch`."""


def gather(rows: Rows, source: torch.Tensor) -> torch.Tensor:
    """Rows of master followed by own, as a new tensor."""
    split = rows.master.shape[0]
    if rows.own.shape[0] == 0:
        return rows.master[source]
    if split == 0:
        return rows.own[source]
    mine = source >= split
    out = rows.master[source.clamp(max=split - 1)]
    out[mine] = rows.own[source[mine] - split]
    return out


def place_plane(
    pages: torch.Tensor, slots: Slots, rows: Rows, source: torch.Tensor, turn: Turn | None
) -> None:
    for start in range(0, len(slots), _CHUNK):
        part = slice(start, start + _CHUNK)
        values = gather(rows, source[part])
        if turn is not None:
            values = turn.apply(values, part)
        pages[slots.page[part], slots.row[part]] = values


def place_pair(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: Slots,
    k_rows: Rows,
    v_rows: Rows,
    source: torch.Tensor,
    turn: Turn | None,
) -> None:
    place_plane(k_pages, slots, k_rows, source, turn)
    place_plane(v_pages, slots, v_rows, source, None)


KERNEL = Kernel("torch", place_plane, place_pair)
