"""Entries: a dense one, and a mirror that is a reference to a dense one plus its own rows.

    mirror rows   | own | = master rows, moved | own block | = master rows | own ... |
    pieces          at -> own plane        at -> row of the master

Both are light: building one copies nothing, and nothing dense exists until `restore` or
`dense_layer` is asked for it (M15). K of a stored row is rotated for the position `birth`, and a
restore rotates it once, from there.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tokendance.store.base import EntryKey
from tokendance.store.blocks import Packed, Plane, gather
from tokendance.types import Rows, subtract_rows

Index = NDArray[np.int64]


class Piece(NamedTuple):
    """Rows [start, start + length) of an entry.

    at: first row in the entry's own planes, or the first *row of the master* if shared.
    birth: position that the K of the first row is rotated for.
    """

    start: int
    length: int
    at: int
    birth: int
    shared: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length


def new_name() -> str:
    """A name that no other content ever has, in this process or on disk."""
    return secrets.token_hex(16)


@dataclass(eq=False, slots=True)
class Dense:
    """All rows of one request, or of a trunk: the rows of a former master that mirrors need.

    tokens: int32 [rows], token ids; pieces: sorted, a trunk's have gaps.
    exact_rows: leading rows that are bit-equal to what the engine alone computes.
    """

    key: EntryKey
    tokens: torch.Tensor
    pieces: tuple[Piece, ...]
    k: Plane
    v: Plane
    exact_rows: int
    name: str = field(default_factory=new_name)

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def nbytes(self) -> int:
        return int(self.tokens.nbytes) + self.k.nbytes + self.v.nbytes

    @property
    def base(self) -> Dense:
        return self

    def sources(self) -> Sources:
        where, birth = expand(self.pieces, self.rows)
        return Sources(where, where, birth)


@dataclass(eq=False, slots=True)
class Mirror:
    """A request's rows as differences to `master`. v_pieces is k_pieces where K and V touch the
    same blocks (M13)."""

    key: EntryKey
    tokens: torch.Tensor
    k_pieces: tuple[Piece, ...]
    v_pieces: tuple[Piece, ...]
    k: Plane
    v: Plane
    exact_rows: int
    master: Dense
    name: str = field(default_factory=new_name)

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def nbytes(self) -> int:
        return int(self.tokens.nbytes) + self.k.nbytes + self.v.nbytes

    @property
    def base(self) -> Dense:
        return self.master

    def needs(self) -> list[Rows]:
        """Rows of the master that this mirror is made of, unsorted."""
        pieces = {*self.k_pieces, *self.v_pieces}
        return [Rows(p.at, p.at + p.length) for p in pieces if p.shared]

    def sources(self) -> Sources:
        stored, _ = expand(self.master.pieces, self.master.rows)
        split = self.master.k.rows
        k, birth = self._resolve(self.k_pieces, stored, split)
        if self.v_pieces is self.k_pieces:
            return Sources(k, k, birth)
        return Sources(k, self._resolve(self.v_pieces, stored, split)[0], birth)

    def _resolve(self, pieces: Iterable[Piece], stored: Index, split: int) -> tuple[Index, Index]:
        where, birth = expand(pieces, self.rows)
        for piece in pieces:
            rows = slice(piece.start, piece.end)
            if piece.shared:
                where[rows] = stored[piece.at : piece.at + piece.length]
            else:
                where[rows] += split
        if (where < 0).any():
            raise LookupError("a mirror needs rows that its master no longer holds")
        return where, birth


Entry = Dense | Mirror


class Sources(NamedTuple):
    """Where each row is: int64 [rows] into the base's planes followed by the entry's own planes.

    v is k where the lists are shared. birth: int64 [rows], position K is rotated for. Rows that
    are not stored (the gaps of a trunk) have -1.
    """

    k: Index
    v: Index
    birth: Index


def expand(pieces: Iterable[Piece], rows: int) -> tuple[Index, Index]:
    """`at` and `birth` of every row; -1 where no piece is."""
    at = np.full(rows, -1, dtype=np.int64)
    birth = np.full(rows, -1, dtype=np.int64)
    for p in pieces:
        steps = np.arange(p.length)
        at[p.start : p.end] = p.at + steps
        birth[p.start : p.end] = p.birth + steps
    return at, birth


class Span(NamedTuple):
    """Rows [start, start + length) of a mirror are rows [master_start, ...) of its master."""

    start: int
    length: int
    master_start: int

    @property
    def rows(self) -> Rows:
        return Rows(self.start, self.start + self.length)


def mirror_pieces(rows: int, spans: Iterable[Span], master: Dense) -> tuple[Piece, ...]:
    """Pieces of a mirror: `spans` (sorted, disjoint) from the master, everything else its own."""
    spans = list(spans)
    pieces, at = [], 0
    for run in subtract_rows(Rows(0, rows), (s.rows for s in spans)):
        pieces.append(Piece(run.start, len(run), at, run.start))
        at += len(run)
    for span in spans:
        pieces.extend(_shared_pieces(span, master))
    return tuple(sorted(pieces))


def _shared_pieces(span: Span, master: Dense) -> Iterable[Piece]:
    """One piece per stretch of the master that was born together."""
    for own in master.pieces:
        first = max(own.start, span.master_start)
        last = min(own.end, span.master_start + span.length)
        if first < last:
            start = span.start + first - span.master_start
            yield Piece(start, last - first, first, own.birth + first - own.start, shared=True)


def own_runs(pieces: Iterable[Piece]) -> list[Rows]:
    """The rows that a mirror keeps itself."""
    return [Rows(p.start, p.end) for p in pieces if not p.shared]


def packed_layer(entry: Entry, layer: int, sources: Sources) -> tuple[Packed, Packed]:
    """One layer of every row, unrotated, as it is packed (new tensors)."""
    rows = [torch.from_numpy(s) for s in (sources.k, sources.v)]
    return (
        gather(entry.base.k.layer(layer), entry.k.layer(layer), rows[0]),
        gather(entry.base.v.layer(layer), entry.v.layer(layer), rows[1]),
    )


def dense_pieces(birth: Index) -> tuple[Piece, ...]:
    """Pieces of a dense entry whose row r is stored at r, from the position each K is made for."""
    rows = len(birth)
    if rows == 0:
        return ()
    breaks = np.flatnonzero(np.diff(birth) != 1) + 1
    edges = [0, *breaks.tolist(), rows]
    return tuple(Piece(a, b - a, a, int(birth[a])) for a, b in pairwise(edges))
