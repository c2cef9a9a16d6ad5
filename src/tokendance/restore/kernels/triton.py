"""Restore kernels for GPUs: one program takes a few rows of one head, of K alone or of K and V.

Every row is read once and written once, so the bound is the memory; nothing here is tuned to a
model. Importing this module needs triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokendance.restore.kernels.base import Kernel, Rows, Slots, Turn

_BLOCK = 32  # rows a program takes; a block of a mirror is as long


@triton.jit
def _load(master, own, source, split, head, x, live, heads, dim):  # type: ignore[no-untyped-def]
    """Elements x of `head` of rows `source`, from either tensor."""
    from_own = source >= split
    row = tl.where(from_own, source - split, source)
    offset = (row[:, None] * heads + head) * dim + x[None, :]
    a = tl.load(master + offset, mask=live & ~from_own[:, None], other=0.0)
    b = tl.load(own + offset, mask=live & from_own[:, None], other=0.0)
    return tl.where(from_own[:, None], b, a)


@triton.jit  # type: ignore[untyped-decorator]
def _place_kernel(  # type: ignore[no-untyped-def]
    k_pages,
    v_pages,
    k_offsets,
    v_offsets,
    k_head_stride,
    v_head_stride,
    k_master,
    k_own,
    v_master,
    v_own,
    source,
    split,
    which,
    cos,
    sin,
    rows,
    heads,
    dim,
    half,
    PAIR: tl.constexpr,
    TURN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    inside = row < rows
    src = tl.load(source + row, mask=inside, other=0)
    to_k = tl.load(k_offsets + row, mask=inside, other=0) + head * k_head_stride
    x = tl.arange(0, DIM)
    if TURN:
        i = tl.arange(0, HALF)
        live = inside[:, None] & (i < half)[None, :]
        if INTERLEAVED:
            first, second = 2 * i, 2 * i + 1
        else:
            first, second = i, i + half
        line = tl.load(which + row, mask=inside, other=0)
        a = _load(k_master, k_own, src, split, head, first, live, heads, dim)
        b = _load(k_master, k_own, src, split, head, second, live, heads, dim)
        table = line[:, None] * half + i[None, :]
        c = tl.load(cos + table, mask=live, other=1.0)
        s = tl.load(sin + table, mask=live, other=0.0)
        fa, fb = a.to(tl.float32), b.to(tl.float32)
        still = (line == 0)[:, None]
        new_a = tl.where(still, a, (fa * c - fb * s).to(a.dtype))
        new_b = tl.where(still, b, (fb * c + fa * s).to(b.dtype))
        tl.store(k_pages + to_k[:, None] + first[None, :], new_a, mask=live)
        tl.store(k_pages + to_k[:, None] + second[None, :], new_b, mask=live)
        rest = inside[:, None] & ((x >= 2 * half) & (x < dim))[None, :]
    else:
        rest = inside[:, None] & (x < dim)[None, :]
    k = _load(k_master, k_own, src, split, head, x, rest, heads, dim)
    tl.store(k_pages + to_k[:, None] + x[None, :], k, mask=rest)
    if PAIR:
        to_v = tl.load(v_offsets + row, mask=inside, other=0) + head * v_head_stride
        whole = inside[:, None] & (x < dim)[None, :]
        v = _load(v_master, v_own, src, split, head, x, whole, heads, dim)
        tl.store(v_pages + to_v[:, None] + x[None, :], v, mask=whole)


def _launch(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: Slots,
    k_rows: Rows,
    v_rows: Rows,
    source: torch.Tensor,
    turn: Turn | None,
    pair: bool,
) -> None:
    heads, dim = k_pages.shape[2:]
    half = turn.rotary.rotary_dim // 2 if turn is not None else 0
    tables: tuple[Any, ...] = (source, source, source)
    if turn is not None:
        tables = (turn.which, turn.cos, turn.sin)
    _place_kernel[(triton.cdiv(len(slots), _BLOCK), heads)](
        k_pages,
        v_pages,
        slots.offsets(k_pages),
        slots.offsets(v_pages),
        k_pages.stride(2),
        v_pages.stride(2),
        *k_rows,
        *v_rows,
        source,
        k_rows.master.shape[0],
        *tables,
        len(slots),
        heads,
        dim,
        half,
        PAIR=pair,
        TURN=turn is not None,
        INTERLEAVED=turn is not None and turn.rotary.interleaved,
        BLOCK=_BLOCK,
        HALF=triton.next_power_of_2(max(1, half)),
        DIM=triton.next_power_of_2(dim),
    )


def place_plane(
    pages: torch.Tensor, slots: Slots, rows: Rows, source: torch.Tensor, turn: Turn | None
) -> None:
    if len(slots):
        _launch(pages, pages, slots, rows, rows, source, turn, pair=False)


def place_pair(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: Slots,
    k_rows: Rows,
    v_rows: Rows,
    source: torch.Tensor,
    turn: Turn | None,
) -> None:
    if len(slots):
        _launch(k_pages, v_pages, slots, k_rows, v_rows, source, turn, pair=True)


KERNEL = Kernel("triton", place_plane, place_pair)
