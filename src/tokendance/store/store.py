"""The store: one master and small mirrors per family, in host memory, within a byte budget.

Everything runs under one lock. What may be evicted, and what happens to masters then, is in
custody.py; the tier below memory is in lower.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from tokendance.plan.reuse_plan import ReusePlan
from tokendance.reuse.rotary import Rotary
from tokendance.store.base import (
    Cache,
    EntryKey,
    Identity,
    Kept,
    Match,
    Owner,
    Receipt,
    Stats,
    Tokens,
    entry_key,
    tenant_of,
)
from tokendance.store.blocks import BLOCK, keep_rows, row_bytes, rows_index
from tokendance.store.custody import Custody
from tokendance.store.family import Layout, confirm, disjoint, inherited, layouts
from tokendance.store.lower import Lower
from tokendance.store.mirror import Dense, Entry, Mirror, Piece, Span, mirror_pieces, own_runs
from tokendance.store.records import Record, kind_of
from tokendance.store.similarity import agreement, common_prefix
from tokendance.store.tiers.base import Reason, TierQueue
from tokendance.store.tiers.memory import HostMemory
from tokendance.types import RequestId, Rows, SessionId

MIN_SAVING = 0.1
"""A mirror that saves less than this share of its dense size is stored dense (M16): it would hold
on to a master for nothing. `tokendance bench restore --sweep` shows that a mirror restores as fast
as a dense entry at every share, so only bytes decide."""


class Basis(NamedTuple):
    """What an entry is a mirror of. v is k where K and V share their rows."""

    master: Record
    k: tuple[Piece, ...]
    v: tuple[Piece, ...]
    exact_rows: int


class Store:
    """Keeps the K/V of one rank.

    budget: bytes of host memory; `memory.held` never exceeds it at rest (a trim needs one layer of
        scratch).
    int8: keep values as int8 per token and head; every entry is approximate then.
    tolerance, rotary: for puts without a plan, see similarity.agreement.
    keep_rounds: entries of one agent that stay; older ones are dropped as soon as nobody reads
    them.
    lower: tier for what does not fit; entries go there in the background when `spill_at` of the
        budget is held.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        budget: int,
        block: int = BLOCK,
        int8: bool = False,
        min_saving: float = MIN_SAVING,
        tolerance: float = 0.0,
        rotary: Rotary | None = None,
        keep_rounds: int = 1,
        lower: TierQueue | None = None,
        spill_at: float = 0.8,
    ) -> None:
        self.identity = identity
        self.memory = HostMemory(budget)
        self._block, self._int8, self._min_saving = block, int8, min_saving
        self._tolerance, self._rotary = tolerance, rotary
        self._spill_at = spill_at
        self._lock = threading.RLock()
        counters: Counter[str] = Counter()
        self._lower = Lower(lower, identity, counters, self._lock) if lower is not None else None
        self._custody = Custody(self.memory, keep_rounds, block, self._lower, counters)

    def put_family(self, plan: ReusePlan, caches: Mapping[RequestId, Cache]) -> list[Kept]:
        """Store the requests of a round, as the plan relates them; members without a cache are
        left out.

        The caches' pages must stay untouched until this returns. What does not fit is left out with
        a reason. Raises only what reading a cache raises.
        """
        if not caches:
            return []
        with self._lock:
            self._custody.clock += 1
            page_size = next(iter(caches.values())).kv.page_size
            order = layouts(plan, page_size, self._is_master, self._block)
            leaving = {cache.owner for cache in caches.values()}
            pairs = [(layout, caches.get(layout.request_id)) for layout in order]
            kept = [self._put(lay, cache, leaving) for lay, cache in pairs if cache is not None]
            self._settle_owners(caches, kept)
            return [self._as_it_is(item) for item in kept]

    def put(self, cache: Cache) -> Kept:
        """Store one request without a plan: a master is sought among the stored tokens (M14)."""
        with self._lock:
            self._custody.clock += 1
            kept = self._put(None, cache, {cache.owner})
            self._settle_owners({cache.request_id: cache}, [kept])
            return kept

    def get(self, key: EntryKey) -> Entry | None:
        """The entry in memory, light; read its rows only under a lease."""
        with self._lock:
            record = self._custody.record(key)
            self._custody.counters["hit" if record is not None else "miss"] += 1
            return record.entry if record is not None else None

    @contextmanager
    def lease(self, key: EntryKey) -> Iterator[Entry | None]:
        """The entry, kept as it is, and its master with it, until the block ends; None if it is
        not in memory."""
        with self._lock:
            record = self._custody.record(key)
            if record is not None:
                self._custody.claim(record, 1)
        try:
            yield record.entry if record is not None else None
        finally:
            if record is not None:
                with self._lock:
                    self._custody.claim(record, -1)

    def latest(self, owner: Owner) -> EntryKey | None:
        """The newest entry of an agent."""
        with self._lock:
            return self._custody.ledger.latest(owner)

    def find_prefix(
        self, token_ids: Iterable[int], salt: bytes = b"", *, exact: bool = False
    ) -> Match | None:
        """The entry that agrees longest with a prompt from row 0 on; exact: only exact rows."""
        with self._lock:
            index = self._custody.indexes.get(tenant_of(salt))
            match = index.prefix(_tokens(token_ids)) if index is not None else None
            record = self._custody.record(match.key) if match is not None else None
            if match is None or record is None or not exact:
                return match
            rows = min(match.length, record.entry.exact_rows)
            return match._replace(length=rows) if rows else None

    def find_spans(self, token_ids: Iterable[int], salt: bytes = b"") -> list[Match]:
        """Stored runs of a prompt's tokens at any offset, for an agent that joins late. Rows found
        at another position, or in another context, are approximate there."""
        with self._lock:
            index = self._custody.indexes.get(tenant_of(salt))
            return index.matches(_tokens(token_ids)) if index is not None else []

    def pin(self, session: SessionId) -> bool:
        """Keep what this session has in memory until it is unpinned or released; False if it has
        nothing there."""
        with self._lock:
            known = bool(self._custody.ledger.of_session(session))
            if known:
                self._custody.ledger.pinned.add(session)
            return known

    def unpin(self, session: SessionId) -> None:
        with self._lock:
            self._custody.ledger.pinned.discard(session)

    def release(self, session: SessionId) -> Receipt:
        """Forget a session in every tier; entries that other sessions own as well stay."""
        with self._lock:
            before = self.memory.held
            keys = self._custody.ledger.leave(session)
            deferred = self._custody.retire(keys)
            if self._lower is not None:
                self._lower.release(session)
            return Receipt(len(keys) - deferred, before - self.memory.held, deferred)

    def clear(self) -> None:
        """Forget everything in every tier, for instance because the model has other weights now.
        What is being read goes when its lease ends."""
        with self._lock:
            below = self._lower.sessions() if self._lower is not None else set()
            for session in self._custody.ledger.sessions() | below:
                self.unpin(session)
                self.release(session)

    def prefetch(self, session: SessionId) -> dict[EntryKey, Reason]:
        """Start loading what the session has in the tier below. OK means under way; what arrives
        without room for it is counted and stays below."""
        with self._lock:
            if self._lower is None:
                return {}
            held = self._custody.ledger.by_key
            keys = [k for k in self._lower.of_session(session) if k not in held]
            return self._lower.load(self._custody, keys)

    def promote(self, key: EntryKey) -> bool:
        """Make a mirror dense, for instance because its agent leads from now on; False if it is no
        mirror, is being read or would not fit."""
        with self._lock:
            record = self._custody.record(key)
            if record is None or record.leases or not isinstance(record.entry, Mirror):
                return False
            return self._custody.promote(record)

    def evict(self, key: EntryKey) -> bool:
        """Drop an entry from memory; False if it is not there or is being read."""
        with self._lock:
            record = self._custody.record(key)
            if record is None or record.leases:
                return False
            self._custody.drop(record)
            return True

    def stats(self) -> Stats:
        with self._lock:
            held, budget = self.memory.held, self.memory.budget
            return self._custody.ledger.stats(held, budget, self._custody.counters)

    def flush(self, timeout: float | None = None) -> Reason:
        """Wait for the tier below."""
        return self._lower.queue.flush(timeout) if self._lower is not None else Reason.OK

    def _put(self, layout: Layout | None, cache: Cache, leaving: set[Owner]) -> Kept:
        tokens = _tokens(cache.token_ids)
        key = entry_key(self.identity, cache.salt, tokens)
        limits = [cache.rows, cache.exact_rows, layout.exact_rows if layout else None]
        exact = 0 if self._int8 else min(limit for limit in limits if limit is not None)
        known = self._custody.record(key)
        if known is not None:
            if _as_good(known.entry, layout, exact):
                return self._keep(known, cache)
            if known.leases:
                return Kept(cache.request_id, None, "", 0, "the entry to replace is being read")
            known.clock = self._custody.clock  # it stays until there is room for the better one
        if layout is None:
            basis = self._search(key, cache, tokens, exact)
        else:
            basis = self._planned(key, layout, cache, tokens, exact)
        rows = _rows_to_keep(cache, basis)
        nbytes = tokens.nbytes + row_bytes(cache, self._int8, *map(len, rows))
        if basis is not None:
            basis.master.clock = self._custody.clock
        # A master leaves rows to its mirrors, so that what it frees is not known beforehand.
        freed = known.entry.nbytes if known is not None and not known.mirrors else 0
        if not self._custody.make_room(nbytes - freed, leaving):
            return Kept(cache.request_id, None, "", 0, "the byte budget is full")
        if known is not None:
            self._custody.drop(known)
        record = Record(self._build(key, tokens, cache, exact, basis, rows), tenant_of(cache.salt))
        record.cached = layout.cached if layout is not None else 0
        self._custody.add(record)
        return self._keep(record, cache)

    def _build(
        self,
        key: EntryKey,
        tokens: Tokens,
        cache: Cache,
        exact: int,
        basis: Basis | None,
        rows: tuple[torch.Tensor, torch.Tensor],
    ) -> Entry:
        k, v = keep_rows(self.memory, cache, *rows, self._int8)
        ids = self.memory.copy(torch.from_numpy(tokens))
        if basis is None:
            return Dense(key, ids, (Piece(0, cache.rows, 0, 0),), k, v, exact)
        master = basis.master.entry
        assert isinstance(master, Dense)
        return Mirror(key, ids, basis.k, basis.v, k, v, basis.exact_rows, master)

    def _keep(self, record: Record, cache: Cache) -> Kept:
        self._custody.touch(record, cache.owner, cache.request_id)
        return Kept(cache.request_id, record.entry.key, kind_of(record), record.entry.nbytes)

    def _as_it_is(self, kept: Kept) -> Kept:
        """A dense entry is a master once the mirrors are there."""
        record = self._custody.record(kept.key) if kept.key is not None else None
        return kept._replace(kind=kind_of(record)) if record is not None else kept

    def _is_master(self, request_id: RequestId) -> bool:
        record = self._custody.record_of(request_id)
        return record is not None and isinstance(record.entry, Dense)

    def _planned(
        self, key: EntryKey, layout: Layout, cache: Cache, tokens: Tokens, exact: int
    ) -> Basis | None:
        """The mirror that the plan describes; None if it does not pay (M16) or cannot be had."""
        record = self._custody.record_of(layout.master)
        if record is None or record.tenant != tenant_of(cache.salt):
            return None
        if not isinstance(record.entry, Dense) or record.entry.key == key:
            return None
        wanted = [*layout.spans, *self._inherited(key, layout, cache, tokens, record)]
        spans = confirm(disjoint(wanted), tokens, record.entry.tokens.numpy())
        if not self._pays(sum(s.length for s in spans), cache.rows):
            return None
        pieces = mirror_pieces(cache.rows, spans, record.entry)
        return Basis(record, pieces, pieces, _mirror_exact(pieces, record.entry, exact))

    def _inherited(
        self, key: EntryKey, layout: Layout, cache: Cache, tokens: Tokens, master: Record
    ) -> Iterable[Span]:
        """Rows of the mirror's cached prefix that its last entry shared with the master's last one.
        The owners' newest entries are still the last round's, until all of a family is put."""
        before = self._newest(cache.owner, key)
        (lead,) = master.owners if len(master.owners) == 1 else (None,)
        lead_before = self._newest(lead, key) if lead is not None else None
        if not isinstance(before, Mirror) or not isinstance(lead_before, Dense):
            return ()
        cached = min(layout.cached, common_prefix(tokens, before.tokens.numpy()))
        new, old = master.entry.tokens.numpy(), lead_before.tokens.numpy()
        return inherited(before, cached, lead_before, min(master.cached, common_prefix(new, old)))

    def _newest(self, owner: Owner, but: EntryKey) -> Entry | None:
        keys = [key for key in self._custody.ledger.history(owner) if key != but]
        record = self._custody.record(keys[-1]) if keys else None
        return record.entry if record is not None else None

    def _search(self, own: EntryKey, cache: Cache, tokens: Tokens, exact: int) -> Basis | None:
        """A master by token similarity, and what K and V really have in common with it. A cache
        that is exact throughout is only ever compared bit for bit."""
        index = self._custody.indexes.get(tenant_of(cache.salt))
        tolerance = self._tolerance if exact < cache.rows else 0.0
        if index is None:
            return None
        for key, rows in index.candidates(tokens):
            record = self._custody.ledger.by_key[key]
            master = record.entry
            if key == own or not isinstance(master, Dense) or not self._pays(rows, cache.rows):
                continue
            spans = [Span(m.start, m.length, m.entry_start) for m in index.matches(tokens, key)]
            same = agreement(cache, master, spans, tolerance, self._block, self._rotary)
            if not self._pays(sum(s.length for s in (*same.k, *same.v)) / 2, cache.rows):
                continue
            k = mirror_pieces(cache.rows, same.k, master)
            v = k if same.k == same.v else mirror_pieces(cache.rows, same.v, master)
            if tolerance > 0:
                exact = min([exact, *(s.start for s in (*same.k, *same.v))])
            return Basis(record, k, v, exact)
        return None

    def _pays(self, shared_rows: float, rows: int) -> bool:
        return shared_rows > 0 and shared_rows >= self._min_saving * rows

    def _settle_owners(self, caches: Mapping[RequestId, Cache], kept: Iterable[Kept]) -> None:
        """What was kept becomes its agent's newest entry; what nobody needs any more goes."""
        old: list[EntryKey] = []
        for item in kept:
            record = self._custody.record(item.key) if item.key is not None else None
            if record is not None:
                old += self._custody.ledger.own(record, caches[item.request_id].owner)
        self._custody.retire(old)
        if self._lower is not None:
            owners = {cache.owner for cache in caches.values()}
            self._lower.supersede({o: self._custody.ledger.history(o) for o in owners})
            self._lower.spill_cold(self._custody, self._spill_at)


def _tokens(token_ids: Iterable[int]) -> Tokens:
    return np.fromiter(token_ids, dtype=np.int32)


def _as_good(entry: Entry, layout: Layout | None, exact: int) -> bool:
    """The entry can stay in place of what is put. A master must be exact throughout for that:
    mirrors are made of these very rows, which an approximate entry computed another time has
    not."""
    if entry.exact_rows < exact:
        return False
    wanted_as_mirror = layout is None or layout.master is not None
    return wanted_as_mirror or (isinstance(entry, Dense) and entry.exact_rows == entry.rows)


def _mirror_exact(pieces: Iterable[Piece], master: Dense, exact: int) -> int:
    """Leading rows that stay exact: shared rows do where the master's are and nothing moved."""
    for piece in (p for p in pieces if p.shared):
        still = piece.at == piece.birth == piece.start
        exact = min(exact, piece.start + (max(0, master.exact_rows - piece.at) if still else 0))
    return exact


def _rows_to_keep(cache: Cache, basis: Basis | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers of K and of V, one tensor where they are the same."""
    if basis is None:
        rows = rows_index([Rows(0, cache.rows)])
        return rows, rows
    k = rows_index(own_runs(basis.k))
    return k, k if basis.v is basis.k else rows_index(own_runs(basis.v))
