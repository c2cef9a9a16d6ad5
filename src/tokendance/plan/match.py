"""Finding the same tokens in two prompts without being told where they stand (M4, M5).

Windows of WINDOW tokens are hashed with a rolling polynomial; equal hashes are candidates, and what
is reported is confirmed token by token. Where a tokenizer splits the edge of a quoted text in
another way, the differing tokens are simply not part of the match.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

WINDOW = 16
"""Tokens that have to agree before anything is a match."""

SAMPLE = 8
"""One window hash in SAMPLE is a fingerprint; the choice depends on the hash alone."""

_BASE = np.uint64(0x9E3779B97F4A7C15)


class Match(NamedTuple):
    """Tokens [start, start + length) of one prompt are tokens [source_start, ...) of another."""

    start: int
    source_start: int
    length: int


class Tokens:
    """A prompt's token ids, prepared for matching."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = np.fromiter(ids, dtype=np.int64)

    @cached_property
    def windows(self) -> npt.NDArray[np.uint64]:
        """uint64 [len - WINDOW + 1]: the hash of the window that starts at each token."""
        count = len(self.ids) - WINDOW + 1
        if count <= 0:
            return np.empty(0, dtype=np.uint64)
        spread = (self.ids.astype(np.uint64) + np.uint64(1)) * _BASE
        spread ^= spread >> np.uint64(29)
        hashes = np.zeros(count, dtype=np.uint64)
        for place in range(WINDOW):
            hashes *= _BASE
            hashes += spread[place : place + count]
        return hashes ^ (hashes >> np.uint64(32))

    @cached_property
    def fingerprints(self) -> frozenset[int]:
        """A sample of the window hashes; two prompts that share a long text share some."""
        chosen = self.windows[self.windows % np.uint64(SAMPLE) == 0]
        return frozenset(chosen.tolist())

    @cached_property
    def _sorted(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        order = np.argsort(self.windows, kind="stable")  # equal hashes: first occurrence first
        return self.windows[order], order

    def find(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """int64 [len(hashes)]: where each window first stands in this prompt, -1 if nowhere."""
        keys, order = self._sorted
        if not len(keys):
            return np.full(len(hashes), -1, dtype=np.int64)
        place = np.minimum(np.searchsorted(keys, hashes), len(keys) - 1)
        return np.where(keys[place] == hashes, order[place], -1)


def common_runs(target: Tokens, source: Tokens, minimum: int, start: int = 0) -> list[Match]:
    """Texts of at least `minimum` (>= WINDOW) tokens of `target` that also stand in `source`.

    Sorted, disjoint in the target, from row `start` on. Greedy from the left, each as long as it
    goes on; a text that stands in the source several times is taken where it stands first.
    """
    places = source.find(target.windows[start:])
    runs: list[Match] = []
    hits = np.flatnonzero(places >= 0) + start
    position = start
    while True:
        index = np.searchsorted(hits, position)
        if index == len(hits):
            return runs
        at = int(hits[index])
        match = extend(target.ids, source.ids, at, int(places[at - start]), position)
        if match.length >= minimum:
            runs.append(match)
        position = max(match.start + match.length, at + 1)


def extend(
    target: npt.NDArray[np.int64], source: npt.NDArray[np.int64], at: int, there: int, floor: int
) -> Match:
    """The longest agreement around target[at] and source[there], not reaching below `floor`."""
    room = min(len(target) - at, len(source) - there)
    length = _agreement(target[at : at + room], source[there : there + room])
    room = min(at - floor, there)
    back = _agreement(target[at - room : at][::-1], source[there - room : there][::-1])
    return Match(at - back, there - back, back + length)


def _agreement(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> int:
    """Leading tokens that agree; looks at little more than those, however long the rest is."""
    done, step = 0, 64
    while done < len(a):
        differing = np.flatnonzero(a[done : done + step] != b[done : done + step])
        if len(differing):
            return done + int(differing[0])
        done, step = done + step, 2 * step
    return len(a)
