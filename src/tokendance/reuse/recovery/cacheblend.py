"""CacheBlend: look at one layer where copies deviate most, compute those rows from there on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokendance.reuse.deviation import most_deviating
from tokendance.reuse.recovery.base import Check, Recovery, RecoveryError, register


@register("cacheblend")
@dataclass(frozen=True)
class CacheBlend(Recovery):
    """Computes the `ratio` of every member's copied rows that deviate most (M7, M8).

    of: "k" or "v", what is compared. block: rows are chosen in blocks of so many, counted from the
    start of each copied piece; 1 chooses single tokens, 32 keeps stored differences sparse (M12).
    donors: take text from where it was written, as CacheBlend does; or else from the leader.
    """

    ratio: float = 0.15
    check_layer: int = 1
    of: str = "k"
    block: int = 1
    donors: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise RecoveryError(f"cacheblend: ratio must be in [0, 1], not {self.ratio}")
        if self.check_layer < 1:
            raise RecoveryError(
                "cacheblend: check_layer must be at least 1, layer 0 never deviates"
            )
        if self.of not in ("k", "v"):
            raise RecoveryError(f"cacheblend: 'of' must be 'k' or 'v', not {self.of!r}")
        if self.block < 1:
            raise RecoveryError(f"cacheblend: block must be at least 1, it is {self.block}")

    def select(self, check: Check) -> torch.Tensor:
        deviation = check.k_deviation if self.of == "k" else check.v_deviation
        starts = check.offset % self.block == 0
        starts[1:] |= check.piece[1:] != check.piece[:-1]
        unit = starts.cumsum(0) - starts[:1].long()
        return most_deviating(deviation, check.member, unit, self.ratio)
