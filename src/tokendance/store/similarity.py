"""Finding stored tokens inside a prompt, at any offset (M14).

Windows of every entry, one per `window` rows, are kept by a rolling hash; a prompt is hashed at
every offset, so a stored run of 2 * window - 1 tokens is always found. Every hit is confirmed on
the token ids and extended both ways. One index per tenant, so tenants cannot meet.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tokendance.reuse.rotary import Rotary
from tokendance.store.base import Cache, EntryKey, Match, Tokens
from tokendance.store.blocks import Packed
from tokendance.store.mirror import Dense, Span
from tokendance.types import Rows, merge_rows, subtract_rows

_FACTOR = np.uint64(secrets.randbits(63) | 1)
_MOST_PLACES = 64  # per hash: text that repeats itself must not make a look-up quadratic
_CANDIDATES = 4


def window_hashes(tokens: Tokens, window: int) -> NDArray[np.uint64]:
    """Hash of tokens[i : i + window] for every i; empty if there are fewer tokens."""
    count = len(tokens) - window + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    values = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(window):
        hashes = hashes * _FACTOR + values[offset : offset + count]
    return hashes


class TokenIndex:
    """Rolling-hash index of the token ids of one tenant's entries."""

    def __init__(self, window: int = 32) -> None:
        self.window = window
        self._tokens: dict[EntryKey, Tokens] = {}
        self._places: dict[int, list[tuple[EntryKey, int]]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, key: EntryKey, tokens: Tokens) -> None:
        self._tokens[key] = tokens
        for row, value in self._grid(tokens):
            places = self._places.setdefault(value, [])
            if len(places) < _MOST_PLACES:
                places.append((key, row))

    def remove(self, key: EntryKey) -> None:
        for row, value in self._grid(self._tokens.pop(key)):
            places = self._places.get(value, [])
            if (key, row) in places:
                places.remove((key, row))
            if not places:
                self._places.pop(value, None)

    def _grid(self, tokens: Tokens) -> Iterator[tuple[int, int]]:
        hashes = window_hashes(tokens, self.window)[:: self.window].tolist()
        return zip(range(0, len(tokens), self.window), hashes)

    def matches(self, tokens: Tokens, only: EntryKey | None = None) -> list[Match]:
        """Disjoint matches from left to right; among those found at an offset the longest wins."""
        found: list[Match] = []
        done = 0
        hashes = window_hashes(tokens, self.window).tolist()
        position = 0
        while position < len(hashes):
            places = self._places.get(hashes[position], ())
            best = max(
                (
                    self._extend(tokens, done, position, key, row)
                    for key, row in places
                    if only is None or key == only
                ),
                key=lambda match: match.length,
                default=None,
            )
            if best is None or best.length < self.window:
                position += 1
                continue
            found.append(best)
            done = position = best.start + best.length
        return found

    def _extend(self, tokens: Tokens, done: int, start: int, key: EntryKey, row: int) -> Match:
        """The run around an offset pair on which both agree, not before `done`."""
        stored = self._tokens[key]
        ahead = common_prefix(tokens[start:], stored[row:])
        back = common_prefix(tokens[done:start][::-1], stored[:row][::-1])
        if ahead < self.window:
            return Match(start, key, row, 0)
        return Match(start - back, key, row - back, ahead + back)

    def candidates(self, tokens: Tokens) -> list[tuple[EntryKey, int]]:
        """Entries that hold tokens of a prompt, with the rows they match, best first."""
        hits = Counter(
            key
            for value in set(window_hashes(tokens, self.window).tolist())
            for key in {key for key, _ in self._places.get(value, ())}
        )
        scored = [
            (key, sum(m.length for m in self.matches(tokens, key)))
            for key, _ in hits.most_common(_CANDIDATES)
        ]
        return sorted(scored, key=lambda item: -item[1])

    def prefix(self, tokens: Tokens) -> Match | None:
        """The entry with which the tokens agree longest from row 0 on, at least one window."""
        first = window_hashes(tokens[: self.window], self.window).tolist()
        places = self._places.get(first[0], ()) if first else ()
        best = max(
            (
                Match(0, key, 0, common_prefix(tokens, self._tokens[key]))
                for key, row in places
                if row == 0
            ),
            key=lambda match: match.length,
            default=None,
        )
        return best if best is not None and best.length >= self.window else None


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


class Agreement(NamedTuple):
    """Spans in which a cache's K, and its V, may be taken from a master."""

    k: tuple[Span, ...]
    v: tuple[Span, ...]


def agreement(
    cache: Cache,
    master: Dense,
    spans: list[Span],
    tolerance: float,
    block: int,
    rotary: Rotary | None = None,
) -> Agreement:
    """Compare K/V, not only tokens: equal tokens in another context have another K/V.

    A block is taken from the master where every layer agrees: bit for bit, or up to `tolerance`
    (relative, Frobenius norm over the block of a layer) if that is above 0. K at another position
    is compared after one rotation, which never leaves all bits: without `rotary` or at tolerance 0
    it counts as different, while V may still be shared.
    """
    k_spans: list[Span] = []
    v_spans: list[Span] = []
    held = master.sources()
    for span in spans:
        window = slice(span.master_start, span.master_start + span.length)
        if not (held.birth[window] == np.arange(window.start, window.stop)).all():
            continue
        turn = _Turn(span.start - span.master_start, rotary if tolerance > 0 else None)
        stored = torch.from_numpy(held.k[window])
        k_differs, v_differs = _differing(cache, master, span, stored, turn, tolerance, block)
        k_spans.extend(_kept(span, k_differs, block))
        v_spans.extend(_kept(span, v_differs, block))
    return Agreement(tuple(k_spans), tuple(v_spans))


class _Turn(NamedTuple):
    delta: int
    rotary: Rotary | None

    def apply(self, k: torch.Tensor) -> torch.Tensor | None:
        """K of the master at the mirror's position; None if that cannot be compared."""
        if self.delta == 0:
            return k
        return self.rotary.rotate(k, self.delta) if self.rotary is not None else None


def _differing(
    cache: Cache,
    master: Dense,
    span: Span,
    stored: torch.Tensor,
    turn: _Turn,
    tolerance: float,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [blocks] each for K and V."""
    rows = torch.arange(span.start, span.start + span.length)
    differs = torch.zeros(2, -(-span.length // block), dtype=torch.bool)
    for layer in range(cache.kv.num_layers):
        k, v = (values.cpu() for values in cache.read(layer, rows))
        their_k = turn.apply(_rows_of(master.k.layer(layer), stored, k.dtype))
        their_v = _rows_of(master.v.layer(layer), stored, v.dtype)
        for plane, mine, theirs in ((0, k, their_k), (1, v, their_v)):
            if theirs is None:
                differs[plane] = True
            else:
                differs[plane] |= _block_differs(mine, theirs, tolerance, block)
    return differs[0], differs[1]


def _rows_of(packed: Packed, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scales = None if packed.scales is None else packed.scales[rows]
    return Packed(packed.values[rows], scales).unpack(dtype)


def _block_differs(a: torch.Tensor, b: torch.Tensor, tolerance: float, block: int) -> torch.Tensor:
    """bool [blocks]: which blocks of rows differ by more than the tolerance."""
    count = -(-a.shape[0] // block)
    number = torch.arange(a.shape[0]) // block
    if tolerance <= 0:
        rows = (a != b).flatten(1).any(1).float()
        return torch.zeros(count).index_add_(0, number, rows) > 0
    error = (a.float() - b.float()).flatten(1).square().sum(1)
    size = b.float().flatten(1).square().sum(1)
    total = torch.zeros(2, count).index_add_(1, number, torch.stack((error, size)))
    return total[0] > tolerance**2 * total[1]


def _kept(span: Span, differs: torch.Tensor, block: int) -> Iterator[Span]:
    flagged = merge_rows(
        Rows(span.start + i * block, min(span.start + (i + 1) * block, span.start + span.length))
        for i in differs.nonzero().flatten().tolist()
    )
    for run in subtract_rows(span.rows, flagged):
        yield Span(run.start, len(run), run.start - span.start + span.master_start)
