"""A baseline: every segment's K/V as its author left it."""

from __future__ import annotations

from dataclasses import dataclass

from tokendance.reuse.recovery.base import Recovery, register


@register("naive")
@dataclass(frozen=True)
class Naive(Recovery):
    """Computes nothing again and takes K/V from donors, each in a context of its own."""

    donors: bool = True
