"""Masters and mirrors: what a plan becomes, what it costs, and what happens when a master goes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_world import (
    HEADS,
    IDENTITY,
    LAYERS,
    PAGE,
    ROTARY,
    Round,
    World,
    cache,
    make_round,
    move,
    restored,
    slots_of,
)

from tokendance.plan.reuse_plan import Copy, Member, PageTable, ReusePlan, check_plan
from tokendance.store import Cache, Dense, Mirror, Owner, Store
from tokendance.store.base import EntryGone, entry_key
from tokendance.store.blocks import grid_blocks
from tokendance.store.family import confirm, family_bound, layouts
from tokendance.store.mirror import Span
from tokendance.types import AgentId, RequestId, RoundId, Rows, SessionId

BIG = 1 << 26


@pytest.fixture
def world() -> World:
    return World(np.random.default_rng(5), pages=2048)


def store(**kwargs: object) -> Store:
    return Store(IDENTITY, **{"budget": BIG, "block": 8, **kwargs})  # type: ignore[arg-type]


def same_as_pages(held: Store, world: World, round_: Round) -> None:
    for live in round_.caches.values():
        key = held.latest(live.owner)
        assert key is not None
        with held.lease(key) as entry:
            assert entry is not None
            assert torch.equal(restored(entry), world.rows(live.slots))


def test_family_is_one_master_and_its_differences(world: World) -> None:
    shared = [world.tokens(60), world.tokens(70)]
    round_ = make_round(world, [9, 21, 14, 30], shared)
    check_plan(round_.plan, PAGE)
    held = store()
    kept = held.put_family(round_.plan, round_.caches)
    assert [k.kind for k in kept] == ["master", "mirror", "mirror", "mirror"]
    same_as_pages(held, world, round_)
    row = LAYERS * 2 * HEADS * 16 * 2
    own = [c.rows - 130 for c in round_.caches.values()]
    assert [k.nbytes for k in kept[1:]] == [
        n * row + 4 * c.rows for n, c in zip(own[1:], list(round_.caches.values())[1:])
    ]
    stats = held.stats()
    assert stats.held == sum(k.nbytes for k in kept)
    assert stats.dense_equivalent == sum(c.rows * (row + 4) for c in round_.caches.values())
    private = np.mean([n / c.rows for n, c in zip(own[1:], list(round_.caches.values())[1:])])
    assert stats.family_ratio == pytest.approx(family_bound(4, float(private)), rel=0.05)


def test_recomputed_rows_flag_blocks_on_the_grid_of_the_region(world: World) -> None:
    round_ = make_round(world, [10, 13], [world.tokens(40)], recompute=((9, 11), (25, 26)))
    held = store(block=8)
    _, kept = held.put_family(round_.plan, round_.caches)
    assert kept.key is not None
    mirror = held.get(kept.key)
    assert isinstance(mirror, Mirror)
    shared = sorted((p.start - 13, p.end - 13) for p in mirror.k_pieces if p.shared)
    assert shared == [(0, 8), (16, 24), (32, 40)]
    assert mirror.v_pieces is mirror.k_pieces
    same_as_pages(held, world, round_)


@given(
    runs=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), max_size=6),
    origin=st.integers(0, 50),
    block=st.integers(1, 40),
)
def test_grid_blocks_cover_what_is_flagged_and_nothing_far(
    runs: list[tuple[int, int]], origin: int, block: int
) -> None:
    region = Rows(origin, origin + 100)
    flagged = sorted(
        Rows(origin + a, min(origin + a + n, region.end)) for a, n in runs if a + n <= 110
    )
    got = {row for run in grid_blocks(flagged, region, block) for row in range(*run)}
    hit = {(row - origin) // block for run in flagged for row in range(*run)}
    want = {r for r in range(*region) if (r - origin) // block in hit}
    assert got == want


def test_other_orders_are_mirrored_segment_by_segment(world: World) -> None:
    shared = [world.tokens(n) for n in (30, 25, 41)]
    round_ = make_round(world, [5, 8, 11], shared, orders=[[0, 1, 2], [2, 0, 1], [1, 2, 0]])
    held = store()
    kept = held.put_family(round_.plan, round_.caches)
    same_as_pages(held, world, round_)
    row = LAYERS * 2 * HEADS * 16 * 2
    for item, live in list(zip(kept, round_.caches.values()))[1:]:
        assert item.kind == "mirror"
        assert item.nbytes == (live.rows - 96) * row + 4 * live.rows


def test_provenance_ends_at_the_first_moved_row(world: World) -> None:
    round_ = make_round(world, [10, 13], [world.tokens(40)])
    held = store()
    lead, follower = held.put_family(round_.plan, round_.caches)
    assert lead.key is not None and follower.key is not None
    leading, following = held.get(lead.key), held.get(follower.key)
    assert leading is not None and leading.exact_rows == leading.rows
    assert following is not None and following.exact_rows == 13
    tokens = next(c for r, c in round_.caches.items() if r == "a1").token_ids
    assert held.find_prefix(tokens) == (0, follower.key, 0, following.rows)
    match = held.find_prefix(tokens, exact=True)
    assert match is not None and match.length == 13


def test_birth_positions_are_the_masters(world: World) -> None:
    round_ = make_round(world, [10, 13], [world.tokens(40)])
    held = store()
    _, kept = held.put_family(round_.plan, round_.caches)
    assert kept.key is not None
    mirror = held.get(kept.key)
    assert mirror is not None
    birth = mirror.sources().birth
    assert birth[13:53].tolist() == list(range(10, 50))
    assert birth[:13].tolist() == list(range(13))


def test_pages_shared_by_the_engine_are_stored_once(world: World) -> None:
    """A common prefix in the engine's prefix cache lies in the same pages: exact, unmoved."""
    head = world.tokens(4 * PAGE)
    round_ = make_round(world, [6, 9], [world.tokens(40)])
    lead, follower = round_.plan.members
    tables = list(round_.plan.tables)
    shared_pages = world.table(4 * PAGE)
    world.fill(slots_of(shared_pages, 4 * PAGE))
    members, caches = [], {}
    for index, member in enumerate((lead, follower)):
        live = round_.caches[member.request_id]
        old = tables[index].blocks
        tables[index] = PageTable(member.request_id, shared_pages + old)
        copies = tuple(
            c._replace(source_start=c.source_start + 16, start=c.start + 16) for c in member.copies
        )
        members.append(
            dataclasses.replace(
                member,
                token_ids=(*head, *member.token_ids),
                cached=16,
                end=member.end + 16,
                copies=copies,
            )
        )
        rows = live.rows + 16
        caches[member.request_id] = dataclasses.replace(
            live,
            token_ids=[*head, *live.token_ids],
            slots=slots_of(shared_pages + old, rows),
        )
    plan = ReusePlan(RoundId("r"), tuple(members), tuple(tables), 0)
    check_plan(plan, PAGE)
    held = store()
    _, kept = held.put_family(plan, caches)
    assert kept.key is not None
    mirror = held.get(kept.key)
    assert isinstance(mirror, Mirror)
    assert min(p for p in mirror.k_pieces if p.shared)[:4] == (0, 16, 0, 0)
    assert mirror.exact_rows == 16 + 9
    same_as_pages(held, world, Round(plan, caches))


def test_low_sharing_is_stored_dense(world: World) -> None:
    round_ = make_round(world, [300, 300], [world.tokens(20)])
    assert [k.kind for k in store().put_family(round_.plan, round_.caches)] == ["dense", "dense"]
    rich = make_round(world, [300, 300], [world.tokens(20)], tag="2.")
    lenient = store(min_saving=0.05)
    assert [k.kind for k in lenient.put_family(rich.plan, rich.caches)] == ["master", "mirror"]


def test_tokens_are_confirmed(world: World) -> None:
    """A plan that claims equal rows where the tokens differ gets its own rows, not another's."""
    round_ = make_round(world, [10, 13], [world.tokens(40)])
    live = round_.caches[RequestId("a1")]
    tokens = list(live.token_ids)
    tokens[20] += 1
    round_.caches[RequestId("a1")] = dataclasses.replace(live, token_ids=tokens)
    held = store()
    assert [k.kind for k in held.put_family(round_.plan, round_.caches)] == ["dense", "dense"]
    same_as_pages(held, world, round_)


def test_tenants_never_meet(world: World) -> None:
    round_ = make_round(world, [10, 13], [world.tokens(40)])
    live = round_.caches[RequestId("a1")]
    round_.caches[RequestId("a1")] = dataclasses.replace(live, salt=b"other")
    held = store()
    kinds = [k.kind for k in held.put_family(round_.plan, round_.caches)]
    assert kinds == ["dense", "dense"]
    lead = round_.caches[RequestId("a0")]
    assert held.find_prefix(lead.token_ids, b"other") is None
    assert held.find_spans(lead.token_ids, b"third") == []
    alone = dataclasses.replace(lead, salt=b"third", request_id=RequestId("z"))
    assert held.put(alone).kind == "dense"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "2"},
        {"dtype": "float16"},
        {"rope": "yarn"},
        {"adapter": "a"},
        {"tp_rank": 1},
        {"tp_size": 2},
    ],
    ids=lambda c: next(iter(c)),
)
def test_keys_carry_everything_that_makes_kv_differ(change: dict[str, object]) -> None:
    tokens = np.arange(9, dtype=np.int32)
    other = dataclasses.replace(IDENTITY, **change)  # type: ignore[arg-type]
    assert entry_key(IDENTITY, b"", tokens) != entry_key(other, b"", tokens)
    assert entry_key(IDENTITY, b"", tokens) != entry_key(IDENTITY, b"s", tokens)
    assert entry_key(IDENTITY, b"", tokens) != entry_key(IDENTITY, b"", tokens[:8])


def test_master_that_goes_leaves_what_its_mirrors_need(world: World) -> None:
    round_ = make_round(world, [40, 12, 15], [world.tokens(50)])
    held = store()
    kept = held.put_family(round_.plan, round_.caches)
    before = held.stats().held
    assert kept[0].key is not None and held.evict(kept[0].key)
    assert held.get(kept[0].key) is None
    row = LAYERS * 2 * HEADS * 16 * 2
    lead = round_.caches[RequestId("a0")]
    assert before - held.stats().held == (lead.rows - 50) * row
    expected = {k.key: world.rows(round_.caches[k.request_id].slots) for k in kept[1:]}
    for key, rows in expected.items():
        with held.lease(key) as entry:
            assert isinstance(entry, Mirror)
            assert torch.equal(restored(entry), rows)
    # With one mirror left, trunk and mirror become one dense entry of the same size.
    assert held.evict(kept[1].key)
    with held.lease(kept[2].key) as entry:
        assert isinstance(entry, Dense)
        assert torch.equal(restored(entry), expected[kept[2].key])
    assert held.evict(kept[2].key)
    assert held.stats().held == 0


def test_promoted_mirror_keeps_its_bits_and_births(world: World) -> None:
    round_ = make_round(world, [10, 13, 16], [world.tokens(40)], recompute=((3, 5),))
    held = store()
    kept = held.put_family(round_.plan, round_.caches)
    key = kept[1].key
    assert key is not None
    births = held.get(key).sources().birth.copy()  # type: ignore[union-attr]
    assert held.promote(key) and not held.promote(key)
    dense = held.get(key)
    assert isinstance(dense, Dense)
    assert dense.sources().birth.tolist() == births.tolist()
    same_as_pages(held, world, round_)


def test_a_lease_keeps_entry_and_master(world: World) -> None:
    round_ = make_round(world, [10, 13], [world.tokens(40)])
    held = store()
    master, mirror = held.put_family(round_.plan, round_.caches)
    assert master.key is not None and mirror.key is not None
    with held.lease(mirror.key) as entry:
        assert not held.evict(mirror.key) and not held.evict(master.key)
        receipt = held.release(SessionId("s"))
        assert receipt == (0, 0, 2)
        assert entry is not None
        assert torch.equal(restored(entry), world.rows(round_.caches[RequestId("a1")].slots))
    assert held.stats().held == 0 and held.get(mirror.key) is None
    with pytest.raises(EntryGone):
        restored(entry)
    with held.lease(mirror.key) as gone:
        assert gone is None


def test_the_newest_round_of_an_agent_replaces_the_older(world: World) -> None:
    held, sizes = store(), set()
    for number in range(4):
        round_ = make_round(world, [9, 12], [world.tokens(40)], tag=f"{number}.")
        held.put_family(round_.plan, round_.caches)
        sizes.add(held.stats().held)
        assert held.stats().entries == 2
        same_as_pages(held, world, round_)
    assert len(sizes) == 1
    keeper = store(keep_rounds=2)
    for number in range(4):
        round_ = make_round(world, [9, 12], [world.tokens(40)], tag=f"k{number}.")
        keeper.put_family(round_.plan, round_.caches)
    assert keeper.stats().entries == 4


def test_budget_evicts_the_oldest_session_and_never_the_pinned(world: World) -> None:
    def put(held: Store, session: str) -> list[str]:
        round_ = make_round(world, [20, 25], [world.tokens(60)], session=session, tag=f"{session}.")
        return [k.kind for k in held.put_family(round_.plan, round_.caches)]

    probe = store()
    put(probe, "probe")
    one = probe.stats().held
    held = store(budget=int(2.5 * one))
    put(held, "a")
    put(held, "b")
    assert held.pin(SessionId("a"))
    put(held, "c")
    present = {s: held.latest(Owner(SessionId(s), AgentId("a0"))) is not None for s in "abc"}
    assert present == {"a": True, "b": False, "c": True}
    assert held.stats().held <= held.memory.budget
    held.pin(SessionId("c"))
    assert put(held, "d") == ["", ""] or held.stats().held <= held.memory.budget
    assert held.latest(Owner(SessionId("d"), AgentId("a0"))) is None
    assert held.latest(Owner(SessionId("a"), AgentId("a0"))) is not None
    held.unpin(SessionId("a"))
    assert put(held, "e") == ["master", "mirror"]
    assert held.latest(Owner(SessionId("a"), AgentId("a0"))) is None


def test_release_frees_and_leaves_other_owners(world: World) -> None:
    held = store()
    mine = cache(world, "a", world.tokens(40), session="one")
    theirs = dataclasses.replace(mine, owner=Owner(SessionId("two"), AgentId("b")))
    first = held.put(mine)
    second = held.put(theirs)
    assert first.key == second.key and held.stats().entries == 1
    assert held.release(SessionId("one")) == (0, 0, 0)
    size = held.stats().held
    assert held.release(SessionId("two")) == (1, size, 0)
    assert held.stats().held == 0


def test_exact_entry_replaces_an_approximate_one(world: World) -> None:
    live = cache(world, "a", world.tokens(40), exact_rows=10)
    held = store()
    key = held.put(live).key
    assert key is not None and held.get(key).exact_rows == 10  # type: ignore[union-attr]
    held.put(dataclasses.replace(live, exact_rows=4))
    assert held.get(key).exact_rows == 10  # type: ignore[union-attr]
    world.fill(live.slots)
    held.put(dataclasses.replace(live, exact_rows=None))
    with held.lease(key) as entry:
        assert entry is not None and entry.exact_rows == 40
        assert torch.equal(restored(entry), world.rows(live.slots))


def test_a_member_may_lead_a_family_of_its_own() -> None:
    """Two groups in one plan: the second leader is worth more as a master than as a mirror."""

    def member(index: int, copies: tuple[Copy, ...]) -> Member:
        name = f"m{index}"
        return Member(RequestId(name), AgentId(name), index, tuple(range(101)), 0, 100, copies)

    tables = tuple(
        PageTable(RequestId(f"m{i}"), tuple(range(i * 30, i * 30 + 30))) for i in range(4)
    )
    members = (
        member(0, ()),
        member(1, (Copy(0, 0, 10, 20),)),
        member(2, (Copy(1, 40, 30, 50),)),
        member(3, (Copy(1, 40, 45, 50),)),
    )
    plan = ReusePlan(RoundId("r"), members, tables, 0)
    found = {lay.request_id: lay for lay in layouts(plan, 4, lambda _: False)}
    assert [found[RequestId(f"m{i}")].master for i in range(4)] == [None, None, "m1", "m1"]
    assert found[RequestId("m3")].spans == (Span(45, 50, 40),)
    assert [lay.exact_rows for lay in found.values()] == [None, 10, 30, 45]


def test_a_round_may_continue_an_earlier_steps_family(world: World) -> None:
    """Members that joined late take the region from pages of a request that is stored already."""
    round_ = make_round(world, [10, 13, 16], [world.tokens(40)])
    held = store()
    lead = round_.plan.members[0]
    first = ReusePlan(RoundId("1"), (lead,), round_.plan.tables[:1], 0)
    held.put_family(first, {lead.request_id: round_.caches[lead.request_id]})
    late = dataclasses.replace(round_.plan, members=round_.plan.members[1:], leader=None)
    caches = {m.request_id: round_.caches[m.request_id] for m in late.members}
    assert [k.kind for k in held.put_family(late, caches)] == ["mirror", "mirror"]
    same_as_pages(held, world, round_)


def test_a_prefix_that_was_shared_stays_shared_in_the_next_round(world: World) -> None:
    """Histories grow: what a round copied is the next round's cached prefix, in the same pages."""
    first = make_round(world, [10, 13], [world.tokens(40)], decoded=0, tag="1.")
    held = store()
    held.put_family(first.plan, first.caches)
    members: list[Member] = []
    tables: list[PageTable] = []
    caches: dict[RequestId, Cache] = {}
    news = world.tokens(30)
    for index, old in enumerate(first.plan.members):
        live = first.caches[old.request_id]
        name = RequestId(f"2.a{index}")
        keep = live.rows // PAGE * PAGE
        tokens = [*live.token_ids, *world.tokens(3 + index), *news, 1]
        blocks = first.plan.tables[index].blocks[: keep // PAGE] + world.table(len(tokens) - keep)
        start = live.rows + 3 + index
        slots = slots_of(blocks, len(tokens))
        world.fill(slots[keep:])
        copies = (Copy(0, members[0].end - 30, start, 30),) if members else ()
        for copy in copies:
            move(world, copy, tables[0].blocks, blocks)
        tables.append(PageTable(name, blocks))
        end = len(tokens) - 1
        members.append(Member(name, old.agent, index, tuple(tokens), keep, end, copies))
        caches[name] = Cache(name, live.owner, tokens, world.kv, slots)
    plan = ReusePlan(RoundId("2"), tuple(members), tuple(tables), 0)
    check_plan(plan, PAGE)
    kept = held.put_family(plan, caches)
    assert [k.kind for k in kept] == ["master", "mirror"]
    same_as_pages(held, world, Round(plan, caches))
    mirror = held.get(kept[1].key)  # type: ignore[arg-type]
    assert isinstance(mirror, Mirror)
    shared = [(p.start, p.end) for p in mirror.k_pieces if p.shared]
    # All of the first region is in whole cached pages of both, and the new one follows.
    assert shared == [(13, 53), (62, 92)]


def test_int8_is_small_close_and_approximate(world: World) -> None:
    round_ = make_round(world, [10, 13], [world.tokens(40)])
    held = store(int8=True)
    plain = store()
    plain.put_family(round_.plan, round_.caches)
    kept = held.put_family(round_.plan, round_.caches)
    per_row = HEADS * 16
    rows = [round_.caches[RequestId("a0")].rows, round_.caches[RequestId("a1")].rows - 40]
    tokens = 4 * sum(c.rows for c in round_.caches.values())
    assert held.stats().held == sum(rows) * LAYERS * 2 * (per_row + 2 * HEADS) + tokens
    for item in kept:
        with held.lease(item.key) as entry:  # type: ignore[arg-type]
            assert entry is not None and entry.exact_rows == 0
            got = restored(entry).float()
        want = world.rows(round_.caches[item.request_id].slots).float()
        top = want.abs().amax(-1, keepdim=True)
        # Half a step of 1/127, twice for a rotated pair, plus bf16 rounding.
        assert ((got - want).abs() <= top * (1.5 / 127 + 2 / 256)).all()
    assert held.evict(kept[0].key)  # type: ignore[arg-type]
    with held.lease(kept[1].key) as entry:  # type: ignore[arg-type]
        assert isinstance(entry, Dense)
        assert torch.equal(restored(entry).float(), got)


@settings(max_examples=40)
@given(
    private=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    shared=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    recompute=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 12)), max_size=4),
    block=st.sampled_from([1, 4, 8, 32]),
    shift=st.integers(-5, 40),
)
def test_any_round_comes_back_bit_equal_and_moves_once(
    private: list[int],
    shared: list[int],
    recompute: list[tuple[int, int]],
    block: int,
    shift: int,
) -> None:
    world = World(np.random.default_rng(sum(private)), pages=512)
    runs = tuple(sorted((a, a + n) for a, n in recompute))
    round_ = make_round(world, private, [world.tokens(n) for n in shared], recompute=runs)
    held = store(block=block, min_saving=0.0)
    held.put_family(round_.plan, round_.caches)
    same_as_pages(held, world, round_)
    live = list(round_.caches.values())[-1]
    key = held.latest(live.owner)
    with held.lease(key) as entry:  # type: ignore[arg-type]
        assert entry is not None
        part = Rows(entry.rows // 3, entry.rows)
        got = restored(entry, rows=part, position=part.start + shift)
        # From the birth position in one rotation: bits equal those of rotating the stored row.
        base, birth = world.rows(live.slots), entry.sources().birth
        still = np.flatnonzero(birth == np.arange(entry.rows))
        for row in still[still >= part.start][:5]:
            want = ROTARY.rotate(base[:, 0, row], shift)
            assert torch.allclose(got[:, 0, row - part.start].float(), want.float(), rtol=0.01)
        assert torch.equal(got[:, 1], base[:, 1, part.start :])


def test_a_request_that_is_stored_in_part_is_still_a_mirror() -> None:
    """The plan copies rows beyond those that are stored."""
    tokens = np.arange(30, dtype=np.int32)
    assert confirm([Span(4, 40, 4)], tokens, np.arange(60, dtype=np.int32)) == (Span(4, 26, 4),)
    assert confirm([Span(30, 5, 30)], tokens, np.arange(60, dtype=np.int32)) == ()
