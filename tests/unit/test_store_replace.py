"""A put that replaces a less exact entry loses nothing, whether there is room for it or not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from store_world import IDENTITY, World, cache, make_round, restored

from tokendance.store import Store
from tokendance.store.tiers.base import TierQueue
from tokendance.store.tiers.disk import DiskTier
from tokendance.types import RequestId, SessionId


@pytest.fixture
def world() -> World:
    return World(np.random.default_rng(8), pages=512)


def test_a_refused_replacement_leaves_the_old_entry(world: World) -> None:
    """The mirror is small and its exact successor is not; the pinned master leaves no room."""
    round_ = make_round(world, [6, 9], [world.tokens(40)])
    probe = Store(IDENTITY, budget=1 << 24, block=8)
    probe.put_family(round_.plan, round_.caches)
    held = Store(IDENTITY, budget=probe.stats().held, block=8)
    held.put_family(round_.plan, round_.caches)
    assert held.pin(SessionId("s"))
    live = round_.caches[RequestId("a1")]
    want, key = world.rows(live.slots), held.latest(live.owner)
    assert key is not None and held.get(key).exact_rows < live.rows  # type: ignore[union-attr]
    world.fill(live.slots)
    kept = held.put(dataclasses.replace(live, request_id=RequestId("again")))
    assert kept.key is None and kept.reason == "the byte budget is full"
    assert held.latest(live.owner) == key and held.stats().mirrors == 1
    with held.lease(key) as entry:
        assert entry is not None and torch.equal(restored(entry), want)


def test_the_old_entrys_bytes_are_room_for_the_new_one(world: World) -> None:
    """A budget for one entry: it is replaced in place, and nothing else has to go."""
    live = cache(world, "a", world.tokens(40), exact_rows=10)
    probe = Store(IDENTITY, budget=1 << 24, block=8)
    held = Store(IDENTITY, budget=probe.put(live).nbytes, block=8)
    assert held.put(live).key is not None
    world.fill(live.slots)
    kept = held.put(dataclasses.replace(live, exact_rows=None))
    assert kept.key is not None and "lost" not in held.stats().counters
    with held.lease(kept.key) as entry:
        assert entry is not None and entry.exact_rows == 40
        assert torch.equal(restored(entry), world.rows(live.slots))


def test_a_replaced_master_leaves_its_mirrors_whole(world: World) -> None:
    round_ = make_round(world, [6, 9, 12], [world.tokens(40)])
    lead = round_.caches[RequestId("a0")]
    round_.caches[RequestId("a0")] = dataclasses.replace(lead, exact_rows=3)
    held = Store(IDENTITY, budget=1 << 24, block=8)
    held.put_family(round_.plan, round_.caches)
    want = {c.owner: world.rows(c.slots) for c in round_.caches.values()}
    fresh = cache(world, "a0", list(lead.token_ids))
    want[fresh.owner] = world.rows(fresh.slots)
    assert held.put(fresh).kind == "dense"
    for owner, rows in want.items():
        key = held.latest(owner)
        assert key is not None
        with held.lease(key) as entry:
            assert entry is not None and torch.equal(restored(entry), rows)


def test_clear_forgets_everything_in_every_tier(world: World, tmp_path: Path) -> None:
    queue = TierQueue(DiskTier(tmp_path))
    held = Store(IDENTITY, budget=1 << 24, block=8, lower=queue, spill_at=0.0)
    for tag in ("a.", "b."):
        round_ = make_round(world, [6, 9], [world.tokens(40)], tag=tag)
        held.put_family(round_.plan, round_.caches)
    held.flush()
    held.pin(SessionId("s"))
    assert queue.tier.catalog()
    held.clear()
    held.flush()
    assert held.stats().entries == held.stats().held == 0
    assert not queue.tier.catalog() and held.prefetch(SessionId("s")) == {}
