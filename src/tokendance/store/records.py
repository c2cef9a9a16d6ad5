"""What the store knows about its entries, and in which order it lets them go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tokendance.store.base import EntryKey, Owner, Stats
from tokendance.store.mirror import Dense, Entry, Mirror
from tokendance.types import RequestId, SessionId


@dataclass(eq=False, slots=True)
class Record:
    """One entry and the claims on it.

    clock: number of the put that last touched it. leases: readers of the entry, or of a mirror made
    of it. mirrors: records of the mirrors made of it, if it is dense. spilled: name of its copy in
    the tier below; spilling: the copy is on its way. doomed: to be dropped when the last lease
    ends. cached: leading rows that the engine's prefix cache held when it was put.
    """

    entry: Entry
    tenant: str
    clock: int = 0
    owners: set[Owner] = field(default_factory=set)
    mirrors: set[Record] = field(default_factory=set)
    leases: int = 0
    spilled: str | None = None
    spilling: bool = False
    cached: int = 0
    request_id: RequestId | None = None
    doomed: bool = False


class Ledger:
    """Every record, by key, with the latest entries of every owner.

    `by_key` are the entries that can be asked for; `trunks` are former masters without a key, held
    by their mirrors alone.
    """

    def __init__(self, keep_rounds: int) -> None:
        self.by_key: dict[EntryKey, Record] = {}
        self.trunks: set[Record] = set()
        self.masters: dict[int, Record] = {}
        self.pinned: set[SessionId] = set()
        self._history: dict[Owner, list[EntryKey]] = {}
        self._keep_rounds = keep_rounds

    def records(self) -> Iterator[Record]:
        yield from self.by_key.values()
        yield from self.trunks

    def add(self, record: Record) -> None:
        entry = record.entry
        self.by_key[entry.key] = record
        if isinstance(entry, Dense):
            self.masters[id(entry)] = record
        else:
            self.master_of(entry).mirrors.add(record)

    def master_of(self, mirror: Mirror) -> Record:
        return self.masters[id(mirror.master)]

    def own(self, record: Record, owner: Owner) -> list[EntryKey]:
        """Make this the owner's latest entry; returns keys that the owner has no use for any
        more."""
        history = self._history.setdefault(owner, [])
        key = record.entry.key
        if key in history:
            history.remove(key)
        history.append(key)
        record.owners.add(owner)
        old = history[: -self._keep_rounds]
        del history[: -self._keep_rounds]
        return [key for key in old if self._disown(key, owner)]

    def _disown(self, key: EntryKey, owner: Owner) -> bool:
        """True if nobody owns the entry now."""
        record = self.by_key.get(key)
        if record is None:
            return False
        record.owners.discard(owner)
        return not record.owners

    def leave(self, session: SessionId) -> list[EntryKey]:
        """Forget a session's owners; returns the keys that nobody owns now."""
        self.pinned.discard(session)
        gone: list[EntryKey] = []
        for owner in [o for o in self._history if o.session == session]:
            for key in self._history.pop(owner):
                if self._disown(key, owner):
                    gone.append(key)
        return gone

    def adopt(self, record: Record, owner: Owner) -> None:
        """An older entry of an owner is back."""
        record.owners.add(owner)
        self._history.setdefault(owner, []).insert(0, record.entry.key)

    def dense_named(self, name: str) -> Record | None:
        """The dense entry with exactly this content."""
        return next((r for r in self.masters.values() if r.entry.name == name), None)

    def forget_key(self, key: EntryKey) -> None:
        """An entry left memory: no owner's history holds it any more."""
        for owner in self.by_key[key].owners:
            history = self._history.get(owner, [])
            if key in history:
                history.remove(key)
            if not history:
                self._history.pop(owner, None)
        del self.by_key[key]

    def history(self, owner: Owner) -> list[EntryKey]:
        return list(self._history.get(owner, ()))

    def latest(self, owner: Owner) -> EntryKey | None:
        history = self._history.get(owner)
        return history[-1] if history else None

    def of_session(self, session: SessionId) -> list[EntryKey]:
        return [
            k for owner, keys in self._history.items() if owner.session == session for k in keys
        ]

    def sessions(self) -> set[SessionId]:
        return {owner.session for owner in self._history}

    def victims(self, before: int, leaving: Iterable[Owner] = ()) -> list[Record]:
        """Evictable records, first to go first: those that the put under way replaces, then the
        longest untouched; inside a round, mirrors before the masters they need.

        before: entries touched at this clock or later stay: the next round needs them.
        """
        going = set(leaving)
        evictable = (
            record
            for record in self.by_key.values()
            if record.leases == 0
            and record.clock < before
            and not any(owner.session in self.pinned for owner in record.owners)
        )
        return sorted(
            evictable,
            key=lambda r: (not r.owners <= going, r.clock, len(r.mirrors) > 0),
        )

    def stats(self, held: int, budget: int, counters: dict[str, int]) -> Stats:
        sizes = {"master": 0, "mirror": 0, "dense": 0}
        equivalent = {"master": 0, "mirror": 0, "dense": 0}
        for record in self.records():
            kind = kind_of(record)
            sizes[kind] += record.entry.nbytes
            if record not in self.trunks:
                equivalent[kind] += dense_bytes(record.entry)
        return Stats(
            entries=len(self.by_key),
            mirrors=sum(kind_of(r) == "mirror" for r in self.by_key.values()),
            master_bytes=sizes["master"],
            mirror_bytes=sizes["mirror"],
            dense_bytes=sizes["dense"],
            held=held,
            budget=budget,
            dense_equivalent=sum(equivalent.values()),
            mirror_equivalent=equivalent["mirror"],
            counters=dict(counters),
        )


def kind_of(record: Record) -> str:
    if isinstance(record.entry, Mirror):
        return "mirror"
    return "master" if record.mirrors else "dense"


def dense_bytes(entry: Entry) -> int:
    """Bytes of the entry if it were dense."""
    per_row = sum(
        plane.nbytes // plane.rows for plane in (entry.base.k, entry.base.v) if plane.rows
    )
    return int(entry.tokens.nbytes) + per_row * entry.rows
