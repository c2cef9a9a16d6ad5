"""The store's side of the tier below memory: what lies there, what goes there, what comes back.

A file never changes. A mirror's file names the file of its master, which stays as long as a
mirror's file needs it. Whatever goes wrong below is counted by reason and costs no more than the
entry concerned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tokendance.store.base import EntryKey, Identity, Owner
from tokendance.store.mirror import Dense, Mirror
from tokendance.store.records import Record
from tokendance.store.spill import from_blob, owners_of, to_blob
from tokendance.store.tiers.base import Blob, Loaded, Reason, TierQueue
from tokendance.types import SessionId

if TYPE_CHECKING:
    from tokendance.store.custody import Custody


class Lower:
    """Files of one rank in one tier; files of another model or rank are left alone.

    The caller of every method but the callbacks holds the store's lock; the callbacks take it.
    """

    def __init__(
        self,
        queue: TierQueue,
        identity: Identity,
        counters: Counter[str],
        lock: AbstractContextManager[Any],
    ) -> None:
        self.queue = queue
        self._identity = identity
        self._counters = counters
        self._lock = lock
        self._metas: dict[str, Mapping[str, Any]] = {}
        self._by_key: dict[EntryKey, str] = {}
        self._users: Counter[str] = Counter()  # master's file -> mirrors' files that name it
        self._loading: set[str] = set()
        self._recover()

    def of_session(self, session: SessionId) -> list[EntryKey]:
        """Keys of what the session has here."""
        return [
            key
            for key, name in self._by_key.items()
            if any(owner.session == session for owner in owners_of(self._metas[name]))
        ]

    def sessions(self) -> set[SessionId]:
        """Those that have something here."""
        return {owner.session for meta in self._metas.values() for owner in owners_of(meta)}

    def spill_cold(self, custody: Custody, spill_at: float) -> None:
        """Copy the coldest entries down until all but `spill_at` of the budget could be dropped."""
        records = sorted(custody.ledger.by_key.values(), key=lambda r: r.clock)
        safe = sum(r.entry.nbytes for r in records if self.holds(r))
        excess = custody.memory.held - safe - int(spill_at * custody.memory.budget)
        for record in (r for r in records if not self.holds(r) and not r.spilling):
            if excess <= 0:
                return
            excess -= record.entry.nbytes
            self._spill(custody, record)

    def holds(self, record: Record) -> bool:
        """A copy of the entry is here."""
        return record.spilled is not None and record.spilled in self._metas

    def supersede(self, keep: Mapping[Owner, list[EntryKey]]) -> None:
        """These owners have newer entries: of their files only those of `keep` are of use."""
        for key, name in list(self._by_key.items()):
            owners = owners_of(self._metas[name])
            self._disown(name, {o for o in owners if o in keep and key not in keep[o]})

    def release(self, session: SessionId) -> None:
        """Delete what only this session owns."""
        for name in list(self._by_key.values()):
            owners = owners_of(self._metas[name])
            self._disown(name, {owner for owner in owners if owner.session == session})

    def forget(self, name: str) -> None:
        """An entry's file is of no use any more; a master's stays while a mirror's needs it."""
        meta = self._metas.get(name)
        if meta is None:
            return
        key = EntryKey(bytes.fromhex(meta["key"]))
        if self._by_key.get(key) == name:
            del self._by_key[key]
        if self._users[name]:
            return
        del self._metas[name]
        self.queue.delete([name])
        master = meta["master"]
        if master is not None:
            self._users[master] -= 1
            if not self._users[master] and master not in self._by_key.values():
                del self._users[master]
                self.forget(master)

    def load(self, custody: Custody, keys: list[EntryKey]) -> dict[EntryKey, Reason]:
        """Start bringing entries back, one batch per master, which memory may lack as well."""
        batches: dict[str | None, list[EntryKey]] = {}
        for key in keys:
            batches.setdefault(self._metas[self._by_key[key]]["master"], []).append(key)
        reasons = {}
        for master, members in batches.items():
            reason = self._load_batch(custody, master, [self._by_key[key] for key in members])
            reasons.update(dict.fromkeys(members, reason))
        return reasons

    def _load_batch(self, custody: Custody, master: str | None, names: list[str]) -> Reason:
        names = [name for name in names if name not in self._loading]
        if master is not None and custody.ledger.dense_named(master) is None:
            names = [master, *(name for name in names if name != master)]
        if not names:
            return Reason.OK

        def done(loaded: list[Loaded]) -> None:
            with self._lock:
                self._loading.difference_update(names)
                for name, found in zip(names, loaded):
                    self._admit(custody, name, found)
                custody.drop_idle_trunks()

        nbytes = sum(int(self._metas[name]["nbytes"]) for name in names)
        reason = self.queue.read(names, nbytes, done)
        if reason is Reason.OK:
            self._loading.update(names)
        return reason

    def _spill(self, custody: Custody, record: Record) -> None:
        batch = [record]
        if isinstance(record.entry, Mirror):
            master = custody.ledger.master_of(record.entry)
            if master.entry.name not in self._metas and not master.spilling:
                batch.insert(0, master)
        blobs = [self._blob(custody, item) for item in batch]
        self._make_room(sum(_file_size(blob.meta) for blob in blobs))

        def done(reasons: list[Reason]) -> None:
            with self._lock:
                for item, blob, reason in zip(batch, blobs, reasons):
                    item.spilling = False
                    self._written(item, blob, reason)
                custody.claim(record, -1)

        reason = self.queue.write(blobs, done)
        if reason is Reason.OK:
            for item in batch:
                item.spilling = True
            custody.claim(record, 1)
        else:
            self._counters[f"tier_{reason}"] += 1

    def _blob(self, custody: Custody, record: Record) -> Blob:
        trunk = record in custody.ledger.trunks
        return to_blob(record.entry, record.owners, self._identity, record.tenant, trunk=trunk)

    def _written(self, record: Record, blob: Blob, reason: Reason) -> None:
        if reason is not Reason.OK:
            self._counters[f"tier_{reason}"] += 1
            if reason is Reason.FULL:
                self._relieve(_file_size(blob.meta))
            return
        master = blob.meta["master"]
        if master is not None and master not in self._metas:
            self.queue.delete([blob.name])
            return
        self._enter(blob.name, blob.meta)
        if not blob.meta["trunk"]:
            record.spilled = blob.name
        self._counters["spilled"] += 1

    def _enter(self, name: str, meta: Mapping[str, Any]) -> None:
        if name in self._metas:
            return
        key = EntryKey(bytes.fromhex(meta["key"]))
        old = self._by_key.get(key) if not meta["trunk"] else None
        self._metas[name] = meta
        if meta["master"] is not None:
            self._users[meta["master"]] += 1
        if not meta["trunk"]:
            self._by_key[key] = name
        if old is not None:
            self.forget(old)

    def _make_room(self, nbytes: int) -> None:
        """Delete ahead of a write what would not fit beside it."""
        capacity = self.queue.tier.capacity
        if capacity is not None:
            held = sum(_file_size(meta) for meta in self._metas.values())
            self._relieve(held + self.queue.inflight + nbytes - capacity)

    def _relieve(self, nbytes: int) -> None:
        """Give up the oldest files that no other needs, and then the masters they needed."""
        while nbytes > 0:
            name = next((n for n in self._metas if not self._users[n]), None)
            if name is None:
                return
            nbytes -= _file_size(self._metas[name])
            self.forget(name)

    def _disown(self, name: str, owners: set[Owner]) -> None:
        meta = self._metas[name]
        rest = owners_of(meta) - owners
        if not owners or not rest:
            if owners:
                self.forget(name)
            return
        self._metas[name] = {**meta, "owners": [list(owner) for owner in sorted(rest)]}

    def _admit(self, custody: Custody, name: str, loaded: Loaded) -> None:
        blob, meta = loaded.blob, self._metas.get(name)
        if blob is None or meta is None:
            self._counters[f"tier_{loaded.reason or Reason.MISSING}"] += 1
            if loaded.reason in (Reason.CORRUPT, Reason.MISSING):
                self._lost(name)
            return
        key = EntryKey(bytes.fromhex(meta["key"]))
        keyed = self._by_key.get(key) == name and custody.record(key) is None
        needed = self._users[name] and custody.ledger.dense_named(name) is None
        master = custody.ledger.dense_named(meta["master"]) if meta["master"] else None
        if not (keyed or needed) or (meta["master"] and master is None):
            return
        if master is not None:
            master.clock = custody.clock
        if not custody.make_room(int(meta["nbytes"])):
            self._counters["tier_no_room"] += 1
            return
        base = master.entry if master is not None and isinstance(master.entry, Dense) else None
        record = Record(from_blob(blob, custody.memory, base), meta["tenant"], custody.clock)
        record.spilled = name if keyed else None
        custody.admit(record, owners_of(meta) if keyed else None)
        self._counters["loaded"] += 1

    def _lost(self, name: str) -> None:
        """A file is gone: so are the mirrors that name it."""
        for user in [n for n, meta in self._metas.items() if meta["master"] == name]:
            self.forget(user)
        self._users.pop(name, None)
        self.forget(name)

    def _recover(self) -> None:
        """Take over what an earlier process left, mirrors only with their masters."""
        mine = self._identity.digest().hex()
        found = {
            name: meta
            for name, meta in self.queue.tier.catalog().items()
            if meta.get("identity") == mine
        }
        for mirrors in (False, True):
            for name, meta in found.items():
                if (meta["master"] is not None) is not mirrors:
                    continue
                if not mirrors or meta["master"] in found:
                    self._enter(name, meta)
                else:
                    self.queue.delete([name])
        for name in [n for n, m in self._metas.items() if m["trunk"] and not self._users[n]]:
            self.forget(name)


def _file_size(meta: Mapping[str, Any]) -> int:
    """Bytes of a file, with what its header takes at most."""
    return int(meta["nbytes"]) + 2048 + 512 * int(meta["layers"])
