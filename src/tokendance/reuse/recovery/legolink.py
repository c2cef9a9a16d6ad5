"""EPIC's LegoLink: the first tokens of a piece are computed, they carry its missing context."""

from __future__ import annotations

from dataclasses import dataclass

from tokendance.plan.reuse_plan import Member
from tokendance.reuse.recovery.base import Recovery, RecoveryError, register
from tokendance.types import Rows


@register("legolink")
@dataclass(frozen=True)
class LegoLink(Recovery):
    """Computes the first `tokens` rows of every copied piece, in every layer.

    A piece is a stretch of rows from one source at one distance: a segment, or several that
    stand together at the source too and so already know one another. donors: as of CacheBlend.
    """

    tokens: int = 16
    donors: bool = True

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise RecoveryError(f"legolink: tokens must not be negative, it is {self.tokens}")

    def static(self, member: Member) -> tuple[Rows, ...]:
        return tuple(
            Rows(copy.start, min(copy.start + self.tokens, copy.end))
            for copy in member.copies
            if not copy.exact
        )
