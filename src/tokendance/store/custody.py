"""Who holds which bytes: entries enter, are claimed, make room for others and leave.

Nothing leaves that somebody reads, that a session pinned or that the put under way has touched. A
master leaves behind the rows that its mirrors are made of (rebase.py), so no mirror is ever without
its master. The caller holds the store's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from tokendance.store.base import EntryKey, Owner
from tokendance.store.lower import Lower
from tokendance.store.mirror import Dense, Entry, Mirror
from tokendance.store.rebase import promote, trim
from tokendance.store.records import Ledger, Record, kind_of
from tokendance.store.similarity import TokenIndex
from tokendance.store.tiers.memory import HostMemory
from tokendance.types import RequestId


class Custody:
    """The entries in memory: ledger, token indexes by tenant, and the bytes they hold."""

    def __init__(
        self,
        memory: HostMemory,
        keep_rounds: int,
        window: int,
        lower: Lower | None,
        counters: Counter[str],
    ) -> None:
        self.memory = memory
        self.ledger = Ledger(keep_rounds)
        self.indexes: dict[str, TokenIndex] = {}
        self.counters = counters
        self.clock = 0
        self.lower = lower
        self._requests: dict[RequestId, EntryKey] = {}
        self._window = window

    def record(self, key: EntryKey) -> Record | None:
        return self.ledger.by_key.get(key)

    def record_of(self, request_id: RequestId | None) -> Record | None:
        """The entry that was last stored for a request."""
        key = self._requests.get(request_id) if request_id is not None else None
        return self.ledger.by_key.get(key) if key is not None else None

    def add(self, record: Record) -> None:
        """Take an entry in under its key."""
        self.ledger.add(record)
        index = self.indexes.setdefault(record.tenant, TokenIndex(self._window))
        index.add(record.entry.key, record.entry.tokens.numpy().astype(np.int32))
        self.counters[f"put_{kind_of(record)}"] += 1

    def admit(self, record: Record, owners: Iterable[Owner] | None) -> None:
        """Take in what came back from the tier below; without owners it is only a master to
        others."""
        if owners is None:
            self.ledger.trunks.add(record)
            self.ledger.masters[id(record.entry)] = record
            return
        self.add(record)
        for owner in owners:
            self.ledger.adopt(record, owner)

    def touch(self, record: Record, owner: Owner, request_id: RequestId) -> None:
        """The put under way needs this entry."""
        record.clock = self.clock
        record.doomed = False
        record.owners.add(owner)
        self._forget_request(record)
        record.request_id = request_id
        self._requests[request_id] = record.entry.key

    def make_room(self, nbytes: int, leaving: Iterable[Owner] = ()) -> bool:
        """Evict until `nbytes` more fit; False if what is protected stands in the way."""
        if nbytes > self.memory.budget:
            return False
        while not self.memory.fits(nbytes):
            victim = next(iter(self.ledger.victims(self.clock, leaving)), None)
            if victim is None:
                return False
            kept = self.lower is not None and self.lower.holds(victim)
            self.counters["evicted" if kept else "lost"] += 1
            self.drop(victim)
        return True

    def retire(self, keys: Iterable[EntryKey]) -> int:
        """Drop for good what nobody owns, mirrors first; returns how many a lease defers."""
        records = [r for r in map(self.record, keys) if r is not None]
        deferred = 0
        for record in sorted(records, key=lambda r: bool(r.mirrors)):
            if record.leases:
                record.doomed = True
                deferred += 1
                continue
            if self.lower is not None and record.spilled is not None:
                self.lower.forget(record.spilled)
            self.drop(record)
        return deferred

    def drop(self, record: Record) -> None:
        """Take an entry out of memory."""
        entry = record.entry
        self.ledger.forget_key(entry.key)
        index = self.indexes[record.tenant]
        index.remove(entry.key)
        if not len(index):
            del self.indexes[record.tenant]
        self._forget_request(record)
        if isinstance(entry, Mirror):
            master = self.ledger.master_of(entry)
            master.mirrors.discard(record)
            self._free(entry)
            self._settle(master)
        elif record.mirrors:
            trim(entry, [m.entry for m in record.mirrors if isinstance(m.entry, Mirror)])
            self.counters["trimmed"] += 1
            self.ledger.trunks.add(record)
            self._settle(record)
        else:
            self._free_dense(record)

    def claim(self, record: Record, count: int) -> None:
        """Lease (or, with a negative count, unlease) an entry and the master it is made of."""
        claimed = [record]
        if isinstance(record.entry, Mirror):
            claimed.append(self.ledger.master_of(record.entry))
        for item in claimed:
            item.leases += count
        for item in claimed:
            if item.doomed and not item.leases and self.record(item.entry.key) is item:
                self.retire([item.entry.key])
            self._settle(item)

    def promote(self, record: Record) -> bool:
        """Make a mirror dense; False if that would not fit."""
        mirror = record.entry
        assert isinstance(mirror, Mirror)
        master = self.ledger.master_of(mirror)
        record.clock = master.clock = self.clock
        grown = mirror.master.nbytes * mirror.rows // max(1, mirror.master.k.rows)
        if not self.make_room(grown) or not isinstance(record.entry, Mirror):
            return isinstance(record.entry, Dense)
        self._promote(record, master)
        self._settle(master)
        return True

    def drop_idle_trunks(self) -> None:
        """Free trunks that nothing came to need."""
        for trunk in [t for t in self.ledger.trunks if not t.mirrors]:
            self._free_dense(trunk)

    def _settle(self, master: Record) -> None:
        """A trunk goes with its last mirror, or into it."""
        if master not in self.ledger.trunks or master.leases:
            return
        if len(master.mirrors) == 1:
            self._promote(next(iter(master.mirrors)), master)
        if not master.mirrors:
            self._free_dense(master)

    def _promote(self, record: Record, master: Record) -> None:
        assert isinstance(record.entry, Mirror)
        alone = master in self.ledger.trunks and len(master.mirrors) == 1
        record.entry = promote(record.entry, consume_master=alone)
        master.mirrors.discard(record)
        self.ledger.masters[id(record.entry)] = record
        self.counters["promoted"] += 1

    def _free_dense(self, record: Record) -> None:
        self.ledger.trunks.discard(record)
        self.ledger.masters.pop(id(record.entry), None)
        self._free(record.entry)

    def _free(self, entry: Entry) -> None:
        entry.k.drop()
        entry.v.drop()
        self.memory.free(entry.tokens)

    def _forget_request(self, record: Record) -> None:
        if record.request_id is not None:
            self._requests.pop(record.request_id, None)
            record.request_id = None
