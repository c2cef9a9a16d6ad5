"""Diff-aware storage (M12-M16): one master and small mirrors per family of agents."""

from tokendance.store.base import Cache, EntryKey, Identity, Kept, Match, Owner, Receipt, Stats
from tokendance.store.mirror import Dense, Entry, Mirror
from tokendance.store.store import Store

__all__ = [
    "Cache",
    "Dense",
    "Entry",
    "EntryKey",
    "Identity",
    "Kept",
    "Match",
    "Mirror",
    "Owner",
    "Receipt",
    "Stats",
    "Store",
]
