"""The words every room speaks: keys, spans, and where a row's K/V comes from.

Positions count tokens of one prompt from 0. A *row* is one token position of one
request: its K and V in every layer. All ranges are half open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple, NewType

AgentId = NewType("AgentId", str)
RoundId = NewType("RoundId", str)
SessionId = NewType("SessionId", str)
RequestId = NewType("RequestId", str)

SegmentKey = NewType("SegmentKey", bytes)
"""Content address of a segment: token ids, model identity and tenant salt (M2)."""


class Source(StrEnum):
    """Where the K/V of a row comes from; every row has exactly one."""

    PREFIX = "prefix"  # the engine's own prefix cache
    SIBLING = "sibling"  # another request's pages: of the round, or of one that has finished
    STORED = "stored"  # an entry of the store
    COMPUTED = "computed"


class Rows(NamedTuple):
    """The rows [start, end) of one request."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class Span(NamedTuple):
    """One segment inside a prompt: rows [start, end) and what they hold."""

    start: int
    end: int
    key: SegmentKey

    def __len__(self) -> int:
        return self.end - self.start


def merge_rows(rows: Iterable[Rows]) -> Iterator[Rows]:
    """Join touching or overlapping ranges; the input must be sorted by start."""
    current: Rows | None = None
    for item in rows:
        if item.end <= item.start:
            continue
        if current is None:
            current = Rows(*item)
        elif item.start <= current.end:
            current = Rows(current.start, max(current.end, item.end))
        else:
            yield current
            current = Rows(*item)
    if current is not None:
        yield current


def subtract_rows(whole: Rows, holes: Iterable[Rows]) -> Iterator[Rows]:
    """The parts of `whole` outside `holes`; the holes must be sorted by start."""
    start = whole.start
    if start >= whole.end:
        return
    for hole in holes:
        if hole.start > start:
            yield Rows(start, min(hole.start, whole.end))
        start = max(start, hole.end)
        if start >= whole.end:
            return
    if start < whole.end:
        yield Rows(start, whole.end)
