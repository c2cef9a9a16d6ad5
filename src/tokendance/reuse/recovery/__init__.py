"""Recovery methods (M9): importing this package makes the built-in ones known to the registry."""

from __future__ import annotations

from tokendance.reuse.recovery import cacheblend, full, legolink, naive, region
from tokendance.reuse.recovery.base import Check, Recovery, RecoveryError, create, names, register

__all__ = [
    "Check",
    "Recovery",
    "RecoveryError",
    "cacheblend",
    "create",
    "full",
    "legolink",
    "naive",
    "names",
    "region",
    "register",
]
