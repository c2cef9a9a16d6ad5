"""Letting a master go without stranding its mirrors.

A master whose agent is gone is *trimmed* to a trunk: the rows its mirrors are made of. Mirrors
address a master by row, so they stay as they are. The last mirror on a trunk is *promoted*: it
takes the trunk's rows in and becomes dense. Both work layer by layer, so the peak is one layer
above what is held, and neither rotates anything: every row keeps its bits and its birth position.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tokendance.store.blocks import Packed, rows_index
from tokendance.store.mirror import (
    Dense,
    Mirror,
    Piece,
    dense_pieces,
    expand,
    new_name,
    packed_layer,
)
from tokendance.types import Rows, merge_rows


def trim(master: Dense, mirrors: Iterable[Mirror]) -> int:
    """Keep only what `mirrors` need of `master`, in place; returns the bytes freed."""
    needed = list(merge_rows(sorted(run for m in mirrors for run in m.needs())))
    stored, _ = expand(master.pieces, master.rows)
    keep = torch.from_numpy(stored)[rows_index(needed)]
    before = master.nbytes
    for plane in (master.k, master.v):
        for index, layer in enumerate(plane.layers):
            plane.replace(index, _take(layer, keep))
    master.pieces = tuple(_trimmed(master.pieces, needed))
    master.name = new_name()
    return before - master.nbytes


def _take(layer: Packed, rows: torch.Tensor) -> Packed:
    return Packed(layer.values[rows], None if layer.scales is None else layer.scales[rows])


def _trimmed(pieces: Iterable[Piece], needed: list[Rows]) -> Iterable[Piece]:
    """The parts of `pieces` in `needed`, stored one after the other."""
    at = 0
    pieces = tuple(pieces)
    for run in needed:
        for piece in pieces:
            first, last = max(run.start, piece.start), min(run.end, piece.end)
            if first < last:
                yield Piece(first, last - first, at, piece.birth + first - piece.start)
                at += last - first


def promote(mirror: Mirror, *, consume_master: bool) -> Dense:
    """The mirror as a dense entry under the same key; its own planes are consumed.

    consume_master frees the master's planes layer by layer on the way; only for a master that no
    other mirror needs.
    """
    sources = mirror.sources()
    master = mirror.master
    for layer in range(len(mirror.k.layers)):
        k, v = packed_layer(mirror, layer, sources)
        mirror.k.replace(layer, k)
        mirror.v.replace(layer, v)
        if consume_master:
            for plane in (master.k, master.v):
                plane.replace(layer, _take(plane.layers[layer], torch.empty(0, dtype=torch.int64)))
    return Dense(
        mirror.key,
        mirror.tokens,
        dense_pieces(sources.birth),
        mirror.k,
        mirror.v,
        mirror.exact_rows,
    )
