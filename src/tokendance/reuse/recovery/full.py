"""The other end: nothing is reused."""

from __future__ import annotations

from dataclasses import dataclass

from tokendance.plan.reuse_plan import Member
from tokendance.reuse.recovery.base import Recovery, register
from tokendance.types import Rows


@register("full")
@dataclass(frozen=True)
class Full(Recovery):
    """Computes every row, exact copies too: what the engine alone would do, in one pass."""

    def static(self, member: Member) -> tuple[Rows, ...]:
        return tuple(copy.rows for copy in member.copies)
