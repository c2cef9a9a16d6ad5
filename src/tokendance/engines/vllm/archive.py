"""The worker's side of storage: finished requests into the store, stored rows back into pages.

    save         pages of finished requests -> store, a family at a time, as its plan relates it
    bring_back   plan with stored sources -> rows in the members' own pages -> the same plan, in
                 which those rows are their own source

Both run before the passes of a step, and before anything of the step has written to a page. What
the store no longer has is computed; every tensor-parallel rank takes the same rows (M17-M19).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from tokendance.config import Config
from tokendance.engines.vllm.layers import VllmLayers
from tokendance.engines.vllm.metrics import TokenDanceStats
from tokendance.plan.reuse_plan import Copy, Member, PageTable, ReusePlan
from tokendance.plan.saving import Save, SaveFamily, SessionOrder
from tokendance.restore.jobs import Placement
from tokendance.restore.pipeline import Restorer
from tokendance.reuse.rows import slots_of
from tokendance.store.base import Cache, EntryKey, Identity, Owner, tenant_of
from tokendance.store.mirror import Entry
from tokendance.store.store import Store
from tokendance.store.tiers.base import TierQueue
from tokendance.store.tiers.disk import DiskTier
from tokendance.types import AgentId, RequestId, Rows, SessionId

logger = init_logger(__name__)

REMEMBERED = 8192
"""Requests whose entries are remembered by request id."""

SPILL_AT = 0.25
"""Share of the budget from which on what is cold is copied to disk. A family comes at once and may
take a good part of the budget: what makes room for it has to be on disk by then."""

TIER_WAIT_S = 1.0
"""How long a step waits for rows that are on disk; reading them takes a fraction of computing."""


class _Known(NamedTuple):
    key: EntryKey
    session: SessionId


class BroughtBack(NamedTuple):
    """plans: as asked, every stored copy either in place or left out. lost: per member, rows that
    have to be computed. gone: entries that the store no longer has."""

    plans: list[ReusePlan]
    lost: dict[RequestId, int]
    gone: set[RequestId]


class Archive:
    """One per worker process. Nothing here raises into the engine's step."""

    def __init__(
        self, layers: VllmLayers, config: Config, identity: str, stats: TokenDanceStats
    ) -> None:
        group = get_tp_group()
        self._ranks = group
        self._layers = layers
        who = Identity(identity, tp_rank=group.rank_in_group, tp_size=group.world_size)
        self._store = Store(
            who,
            budget=int(config.store_gib * 2**30),
            int8=config.store_int8,
            rotary=layers.rotary,
            lower=_lower(config, who),
            spill_at=SPILL_AT,
        )
        self._restorer = Restorer(layers.planes or layers.kv, layers.rotary, device=layers.device)
        self._known: OrderedDict[RequestId, _Known] = OrderedDict()
        self._pinned: set[SessionId] = set()  # also before they have anything
        self._held = ExitStack()
        stats.measure_copy(layers.device)

    def save(self, families: Sequence[SaveFamily], stats: TokenDanceStats) -> dict[RequestId, bool]:
        """Store finished requests; whether each was kept, on every rank."""
        kept: dict[RequestId, bool] = {}
        for family in families:
            started = time.perf_counter()
            try:
                kept |= self._save(family, stats)
            except Exception as error:
                stats.count_failure(f"save: {type(error).__name__}")
                logger.exception("Finished requests could not be stored; they are computed again.")
                kept |= {save.request_id: False for save in family.saves}
            stats.observe_save(time.perf_counter() - started, self._store.stats())
        names = [save.request_id for family in families for save in family.saves]
        return dict(zip(names, self._agreed([kept.get(name, False) for name in names])))

    def hold(self, plans: Sequence[ReusePlan]) -> None:
        """Before anything else of a step: keep what its plans take, until they have it. What is
        stored may take its place: the next answer of an agent that of its last one."""
        for name in _stored_sources(plans):
            if name in self._known:
                self._held.enter_context(self._store.lease(self._known[name].key))

    def _save(self, family: SaveFamily, stats: TokenDanceStats) -> dict[RequestId, bool]:
        caches = {save.request_id: self._cache(save) for save in family.saves}
        if family.plan is not None:
            results = self._store.put_family(family.plan, caches)
        else:
            results = [self._store.put(cache) for cache in caches.values()]
        for result in results:
            stats.count_saved(result.kind or f"refused: {result.reason}")
            if result.key is not None:
                session = caches[result.request_id].owner.session
                self._known[result.request_id] = _Known(result.key, session)
                if session in self._pinned:
                    self._store.pin(session)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return {result.request_id: result.key is not None for result in results}

    def _cache(self, save: Save) -> Cache:
        table = PageTable(save.request_id, self._layers.pages(save.blocks))
        rows = Rows(0, len(save.token_ids))
        session = _session(save.session, save.salt)
        return Cache(
            request_id=save.request_id,
            owner=Owner(session, AgentId(save.agent)),
            token_ids=save.token_ids,
            kv=self._layers.kv,
            slots=torch.from_numpy(slots_of(table, rows, self._layers.kv.page_size)).to(
                self._layers.device
            ),
            exact_rows=save.exact_rows,
            salt=save.salt.encode(),
        )

    def settle(self, orders: Sequence[SessionOrder]) -> None:
        """Pin, release or prefetch what sessions have, or clear the store."""
        for order in orders:
            session = _session(order.session, order.salt)
            try:
                if order.order == "pin":
                    self._pinned.add(session)
                    self._store.pin(session)
                elif order.order == "release":
                    self._pinned.discard(session)
                    self._store.unpin(session)
                    self._store.release(session)
                elif order.order == "clear":
                    self._pinned.clear()
                    self._store.clear()
                else:
                    self._store.prefetch(session)
            except Exception:
                logger.exception("The store could not %s a session.", order.order)

    def bring_back(self, plans: Sequence[ReusePlan], stats: TokenDanceStats) -> BroughtBack:
        """Put the stored rows of plans (in kernel pages) where they belong."""
        names = _stored_sources(plans)
        if not names:
            return BroughtBack(list(plans), {}, set())
        with self._held.pop_all() as leases:
            entries = self._lease(names, leases)
            have = self._agreed([_serves(e, n, plans) for n, e in zip(names, entries)])
            held = {n: e for n, e, every in zip(names, entries, have) if every and e is not None}
            done = held if all(self._agreed([self._place(plans, held, stats)])) else {}
        placed = [_in_place(plan, done) for plan in plans]
        lost = {
            before.request_id: _stored_rows(before) - _stored_rows(after)
            for plan, made in zip(plans, placed)
            for before, after in zip(plan.members, made.members)
        }
        gone = set(names) - done.keys()
        for name in gone:
            self._known.pop(name, None)
        return BroughtBack(placed, {name: rows for name, rows in lost.items() if rows}, gone)

    def _lease(self, names: Sequence[RequestId], leases: ExitStack) -> list[Entry | None]:
        """The entries of some requests, None for those that are gone. What is on disk is waited
        for, once."""
        found: dict[RequestId, Entry] = {}

        def look() -> set[SessionId]:
            """Lease what is in memory; the sessions of what is not."""
            absent = set()
            for name in names:
                known = self._known.get(name)
                if known is None or name in found:
                    continue
                entry = leases.enter_context(self._store.lease(known.key))
                if entry is not None:
                    found[name] = entry
                else:
                    absent.add(known.session)
            return absent

        try:
            if any([self._store.prefetch(session) for session in look()]):
                self._store.flush(TIER_WAIT_S)
                look()
        except Exception:
            logger.exception("The store cannot be read; what it holds is computed.")
        return [found.get(name) for name in names]

    def _place(
        self,
        plans: Sequence[ReusePlan],
        entries: dict[RequestId, Entry],
        stats: TokenDanceStats,
    ) -> bool:
        """Restore what `entries` give to the plans, all at once, so that a master is read once."""
        page_size, device = self._layers.kv.page_size, self._layers.device
        try:
            placements = [
                Placement(
                    entries[plan.tables[copy.source].request_id],
                    torch.from_numpy(slots_of(plan.tables[member.table], copy.rows, page_size)).to(
                        device
                    ),
                    Rows(copy.source_start, copy.source_start + copy.length),
                    copy.start,
                )
                for plan in plans
                for member in plan.members
                for copy in member.copies
                if _has(entries, plan, member, copy)
            ]
            if placements:
                stats.observe_restore(self._restorer.restore(placements))
        except Exception as error:
            stats.count_failure(f"restore: {type(error).__name__}")
            logger.exception("Stored rows could not be restored; they are computed.")
            return False
        return True

    def _agreed(self, mine: list[bool]) -> list[bool]:
        """What holds on every tensor-parallel rank."""
        if self._ranks.world_size == 1 or not mine:
            return mine
        votes = torch.tensor(mine, dtype=torch.float32, device=self._layers.device)
        every: list[bool] = (self._ranks.all_reduce(votes) >= self._ranks.world_size).tolist()
        return every


def _session(name: str, salt: str) -> SessionId:
    """Two tenants may use one name, and neither must push out the other's entries."""
    return SessionId(f"{tenant_of(salt.encode())}/{name}")


def _stored_sources(plans: Sequence[ReusePlan]) -> list[RequestId]:
    return sorted({t.request_id for plan in plans for t in plan.tables if t.stored})


def _lower(config: Config, who: Identity) -> TierQueue | None:
    if not config.store_folder:
        return None
    rank, capacity = who.digest().hex(), int(config.store_folder_gib * 2**30)
    if "://" not in config.store_folder:
        return TierQueue(DiskTier(Path(config.store_folder).expanduser() / rank, capacity))
    from tokendance.store.tiers.remote import RemoteTier  # fsspec, an extra

    return TierQueue(RemoteTier(f"{config.store_folder.rstrip('/')}/{rank}", capacity))


def _has(entries: dict[RequestId, Entry], plan: ReusePlan, member: Member, copy: Copy) -> bool:
    """Whether an entry holds the rows of a copy, as exact as asked, confirmed on token ids."""
    entry = entries.get(plan.tables[copy.source].request_id) if copy.stored else None
    if entry is None:
        return False
    if copy.exact and copy.source_start + copy.length > entry.exact_rows:
        return False  # another request with these tokens has taken the place of the one asked for
    theirs = entry.tokens[copy.source_start : copy.source_start + copy.length].numpy()
    return np.array_equal(theirs, np.asarray(member.token_ids[copy.start : copy.end]))


def _serves(entry: Entry | None, name: RequestId, plans: Sequence[ReusePlan]) -> bool:
    """Whether an entry holds all that the plans want of it; ranks have to agree on the whole."""
    return entry is not None and all(
        _has({name: entry}, plan, member, copy)
        for plan in plans
        for member in plan.members
        for copy in member.copies
        if copy.stored and plan.tables[copy.source].request_id == name
    )


def _in_place(plan: ReusePlan, entries: dict[RequestId, Entry]) -> ReusePlan:
    """The plan after its stored rows have been brought back; the others are computed."""
    members = tuple(
        replace(
            member,
            copies=tuple(
                copy._replace(source=member.table, source_start=copy.start) if copy.stored else copy
                for copy in member.copies
                if not copy.stored or _has(entries, plan, member, copy)
            ),
        )
        for member in plan.members
    )
    return replace(plan, members=members)


def _stored_rows(member: Member) -> int:
    return sum(copy.length for copy in member.copies if copy.stored)
