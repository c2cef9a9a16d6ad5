"""The pipeline: what is loaded, what is written, where to, and which errors come out."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from store_world import (
    DIM,
    HEADS,
    IDENTITY,
    LAYERS,
    PAGE,
    ROTARY,
    Round,
    World,
    make_round,
    restored,
    slots_of,
)

from tokendance.restore import PagedPlanes, Placement, Report, Restorer
from tokendance.restore.kernels import reference
from tokendance.store import Entry, Store
from tokendance.types import RequestId, Rows

ROW = LAYERS * 2 * HEADS * DIM * 2


class Accessor:
    """A KVAccess that shows no tensors, like an engine whose pages are packed in its own way."""

    num_layers = LAYERS
    page_size = PAGE

    def __init__(self, inner: PagedPlanes) -> None:
        self.inner = inner
        self.writes: list[tuple[int, int]] = []

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner.read(layer, slots)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.writes.append((layer, len(slots)))
        self.inner.write(layer, slots, k, v)


@pytest.fixture
def world() -> World:
    return World(np.random.default_rng(21), pages=1024)


def target(pages: int = 400) -> PagedPlanes:
    return PagedPlanes.empty(LAYERS, pages, PAGE, HEADS, DIM, torch.bfloat16)


class Held:
    """A stored round with every entry leased, and a slot for each of its rows."""

    def __init__(self, world: World, round_: Round, **kwargs: object) -> None:
        self.store = Store(IDENTITY, budget=1 << 26, block=8, **kwargs)  # type: ignore[arg-type]
        kept = self.store.put_family(round_.plan, round_.caches)
        self.stack = ExitStack()
        self.entries: list[Entry] = []
        self.placements: list[Placement] = []
        page = 0
        for item in kept:
            assert item.key is not None
            entry = self.stack.enter_context(self.store.lease(item.key))
            assert entry is not None
            count = -(-entry.rows // PAGE)
            blocks = tuple(range(page, page + count))[::-1]
            page += count
            self.entries.append(entry)
            self.placements.append(Placement(entry, slots_of(blocks, entry.rows)))
        self.want = [world.rows(round_.caches[k.request_id].slots) for k in kept]

    def check(self, kv: PagedPlanes) -> None:
        for placement, want in zip(self.placements, self.want):
            got = torch.stack([torch.stack(kv.read(i, placement.slots)) for i in range(LAYERS)])
            assert torch.equal(got, want)


def test_a_round_loads_its_master_once(world: World) -> None:
    held = Held(world, make_round(world, [9, 12, 15, 20], [world.tokens(60)]))
    kv = target()
    report = Restorer(kv, ROTARY).restore(held.placements)
    held.check(kv)
    own = sum(e.rows - 60 for e in held.entries[1:])
    assert report.loaded == (held.entries[0].rows + own) * ROW
    assert report.written == sum(e.rows for e in held.entries) * ROW
    assert report.rows == sum(e.rows for e in held.entries)
    alone = [Restorer(target(), ROTARY).restore([p]).loaded for p in held.placements]
    assert sum(alone) == report.loaded + 3 * 60 * ROW


def test_only_the_slots_are_written(world: World) -> None:
    held = Held(world, make_round(world, [9, 12], [world.tokens(60)]))
    kv = target()
    for plane in (*kv.k, *kv.v):
        plane.fill_(5.0)
    Restorer(kv, ROTARY).restore(held.placements)
    rest = torch.ones(400 * PAGE, dtype=torch.bool)
    for placement in held.placements:
        rest[placement.slots] = False
    assert all((plane.flatten(0, 1)[rest] == 5.0).all() for plane in (*kv.k, *kv.v))


def test_an_engine_with_its_own_layout_gets_whole_layers(world: World) -> None:
    held = Held(world, make_round(world, [9, 12], [world.tokens(60)]))
    access = Accessor(target())
    Restorer(access, ROTARY).restore(held.placements)
    held.check(access.inner)
    assert access.writes == [(i, e.rows) for i in range(LAYERS) for e in held.entries]


@pytest.mark.parametrize("int8", [False, True])
def test_dense_restore_gives_the_same_bits(world: World, int8: bool) -> None:
    held = Held(world, make_round(world, [9, 12], [world.tokens(60)]), int8=int8)
    fused, dense = target(), target()
    report = Restorer(fused, ROTARY).restore(held.placements)
    reports = [Restorer(dense, ROTARY).restore_dense(p) for p in held.placements]
    for a, b in zip((*fused.k, *fused.v), (*dense.k, *dense.v)):
        assert torch.equal(a, b)
    assert sum(r.written for r in reports) == report.written


def test_kernels_agree_on_a_round(world: World) -> None:
    round_ = make_round(world, [9, 12, 30], [world.tokens(60)], recompute=((5, 9),))
    held = Held(world, round_)
    kv = target()
    report = Restorer(kv, ROTARY, kernel=reference.KERNEL).restore(held.placements)
    assert report.kernel == "torch"
    held.check(kv)


def test_a_part_of_an_entry_loads_that_part(world: World) -> None:
    held = Held(world, make_round(world, [9, 12], [world.tokens(60)]))
    lead = held.entries[0]
    kv = target()
    slots = torch.arange(20)
    report = Restorer(kv, ROTARY).restore([Placement(lead, slots, Rows(30, 50), 30)])
    assert report.loaded == 20 * ROW
    got = torch.stack([torch.stack(kv.read(i, slots)) for i in range(LAYERS)])
    assert torch.equal(got, held.want[0][:, :, 30:50])


def test_two_families_in_one_call(world: World) -> None:
    a = Held(world, make_round(world, [9, 12], [world.tokens(60)], tag="a."))
    b = Held(world, make_round(world, [5, 7], [world.tokens(50)], tag="b."))
    offset = max(int(p.slots.max()) for p in a.placements) // PAGE + 1
    b.placements = [Placement(p.entry, p.slots + offset * PAGE) for p in b.placements]
    kv = target()
    report = Restorer(kv, ROTARY).restore([*a.placements, *b.placements])
    a.check(kv)
    b.check(kv)
    parts = [Restorer(target(), ROTARY).restore(x.placements).loaded for x in (a, b)]
    assert report.loaded == sum(parts)


def test_an_entry_may_be_placed_twice(world: World) -> None:
    held = Held(world, make_round(world, [9, 12], [world.tokens(60)]))
    mirror = held.entries[1]
    kv = target()
    first, second = torch.arange(mirror.rows), torch.arange(mirror.rows) + 400
    report = Restorer(kv, ROTARY).restore(
        [Placement(mirror, first), Placement(mirror, second, position=7)]
    )
    assert report.loaded == (60 + mirror.rows - 60) * ROW
    for layer in range(LAYERS):
        assert torch.equal(kv.read(layer, first)[0], held.want[1][layer, 0])
        assert torch.equal(kv.read(layer, second)[1], held.want[1][layer, 1])


def test_nothing_to_restore_is_no_error(world: World) -> None:
    held = Held(world, make_round(world, [9, 12], [world.tokens(60)]))
    restorer = Restorer(target(), ROTARY)
    assert restorer.restore([])[:3] == (0, 0, 0)
    none = Placement(held.entries[1], torch.arange(0), Rows(5, 5))
    assert isinstance(restorer.restore([none]), Report)


def test_misfits_are_refused_before_anything_is_written(world: World) -> None:
    held = Held(world, make_round(world, [9, 12, 14], [world.tokens(60)]))
    mirror = held.entries[1]
    kv = target()
    restorer = Restorer(kv, ROTARY)
    for slots, rows in ((10, Rows(0, 11)), (5, Rows(mirror.rows - 3, mirror.rows + 2))):
        with pytest.raises(ValueError, match="slots for rows"):
            restorer.restore([Placement(mirror, torch.arange(slots), rows)])
    assert all((plane == 0).all() for plane in (*kv.k, *kv.v))


def test_rows_a_trunk_has_lost_are_refused(world: World) -> None:
    round_ = make_round(world, [40, 12, 14], [world.tokens(60)])
    held = Held(world, round_)
    held.stack.close()
    owner = round_.caches[RequestId("a0")].owner
    key = held.store.latest(owner)
    assert key is not None and held.store.evict(key)
    with held.store.lease(held.store.latest(round_.caches[RequestId("a1")].owner)) as entry:  # type: ignore[arg-type]
        assert entry is not None
        trunk = entry.base
        with pytest.raises(LookupError, match="trunk"):
            restored(trunk)
        assert torch.equal(restored(trunk, rows=Rows(40, 100)), held.want[0][:, :, 40:100])
