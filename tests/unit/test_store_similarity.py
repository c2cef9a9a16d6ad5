"""Masters found without a plan (M14): tokens find the candidate, K/V decides what is shared."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from store_world import IDENTITY, LAYERS, ROTARY, World, cache, restored

from tokendance.store import Cache, EntryKey, Mirror, Store
from tokendance.store.similarity import TokenIndex, window_hashes
from tokendance.types import SessionId


@pytest.fixture
def world() -> World:
    return World(np.random.default_rng(11), pages=1024)


def store(**kwargs: object) -> Store:
    return Store(IDENTITY, **{"budget": 1 << 26, "block": 8, **kwargs})  # type: ignore[arg-type]


def copy_rows(world: World, source: Cache, rows: slice, target: Cache, start: int) -> None:
    """K/V as the collective pass would move it."""
    into = target.slots[start : start + len(source.slots[rows])]
    for layer in range(LAYERS):
        k, v = world.kv.read(layer, source.slots[rows])
        world.kv.write(layer, into, ROTARY.rotate(k, start - rows.start), v)


words = st.lists(st.integers(0, 3), max_size=60)


@given(stored=st.lists(words, min_size=1, max_size=4), query=words, window=st.integers(2, 6))
def test_matches_are_true_disjoint_and_complete(
    stored: list[list[int]], query: list[int], window: int
) -> None:
    index = TokenIndex(window)
    texts = {EntryKey(bytes([i])): np.array(t, dtype=np.int32) for i, t in enumerate(stored)}
    for key, tokens in texts.items():
        index.add(key, tokens)
    asked = np.array(query, dtype=np.int32)
    found = index.matches(asked)
    covered: set[int] = set()
    for match in found:
        run = range(match.start, match.start + match.length)
        assert match.length >= window and not covered & set(run)
        covered |= set(run)
        theirs = texts[match.key][match.entry_start : match.entry_start + match.length]
        assert np.array_equal(asked[run.start : run.stop], theirs)
    if len(asked):
        for tokens in texts.values():
            # Any window of the grid that the query holds is in some match, or beside one.
            for row in range(0, len(tokens) - window + 1, window):
                for at in range(len(asked) - window + 1):
                    if np.array_equal(asked[at : at + window], tokens[row : row + window]):
                        assert covered & set(range(at, at + window))
    for key in texts:
        index.remove(key)
    assert index.matches(asked) == [] and not index._places


def test_hashes_depend_on_order_and_length() -> None:
    a = np.array([1, 2, 3, 4, 1, 2, 3, 0], dtype=np.int32)
    hashes = window_hashes(a, 3)
    assert hashes[0] == hashes[4] and len(set(hashes.tolist())) == 5
    assert len(window_hashes(a, 9)) == 0


def test_text_that_repeats_itself_stays_cheap() -> None:
    index = TokenIndex(4)
    for number in range(200):
        index.add(EntryKey(bytes([number])), np.ones(400, dtype=np.int32))
    assert max(map(len, index._places.values())) <= 64
    assert index.matches(np.ones(1000, dtype=np.int32))[0].length == 400
    for number in range(200):
        index.remove(EntryKey(bytes([number])))
    assert not index._places


def test_equal_prefix_with_equal_bits_is_mirrored_and_exact(world: World) -> None:
    held = store()
    first = cache(world, "a", world.tokens(80))
    second = cache(world, "b", [*first.token_ids[:60], *world.tokens(20)])
    copy_rows(world, first, slice(0, 60), second, 0)
    held.put(first)
    kept = held.put(second)
    assert kept.kind == "mirror" and kept.key is not None
    with held.lease(kept.key) as entry:
        assert isinstance(entry, Mirror) and entry.exact_rows == 80
        assert entry.v_pieces is entry.k_pieces
        assert sum(p.length for p in entry.k_pieces if p.shared) == 60
        assert torch.equal(restored(entry), world.rows(second.slots))


def test_equal_tokens_with_other_kv_share_nothing(world: World) -> None:
    held = store()
    first = cache(world, "a", world.tokens(80))
    second = cache(world, "b", [*first.token_ids[:60], *world.tokens(20)])
    held.put(first)
    assert held.put(second).kind == "dense"


def test_k_and_v_have_separate_lists_where_they_differ(world: World) -> None:
    held = store()
    first = cache(world, "a", world.tokens(80))
    second = cache(world, "b", [*first.token_ids[:64], *world.tokens(16)])
    copy_rows(world, first, slice(0, 64), second, 0)
    changed = second.slots[10:11]
    k, v = world.kv.read(1, changed)
    world.kv.write(1, changed, k + 1, v)
    held.put(first)
    kept = held.put(second)
    with held.lease(kept.key) as entry:  # type: ignore[arg-type]
        assert isinstance(entry, Mirror) and entry.v_pieces is not entry.k_pieces
        assert (entry.k.rows, entry.v.rows) == (16 + 8, 16)
        assert torch.equal(restored(entry), world.rows(second.slots))
        held_before = held.memory.held
    assert held.promote(kept.key)  # type: ignore[arg-type]
    with held.lease(kept.key) as entry:  # type: ignore[arg-type]
        assert entry is not None
        assert torch.equal(restored(entry), world.rows(second.slots))
    assert held.memory.held > held_before


def moved_pair(world: World) -> tuple[Cache, Cache]:
    first = cache(world, "a", world.tokens(80))
    lead = world.tokens(13)
    second = cache(world, "b", [*lead, *first.token_ids[:64]], exact_rows=13)
    copy_rows(world, first, slice(0, 64), second, 13)
    return first, second


def test_moved_rows_share_v_only_unless_a_tolerance_is_given(world: World) -> None:
    first, second = moved_pair(world)
    held = store()
    held.put(first)
    kept = held.put(second)
    with held.lease(kept.key) as entry:  # type: ignore[arg-type]
        assert isinstance(entry, Mirror)
        assert (entry.k.rows, entry.v.rows) == (77, 13)
        assert entry.exact_rows == 13
        assert torch.equal(restored(entry), world.rows(second.slots))


def test_moved_rows_are_compared_after_one_rotation(world: World) -> None:
    first, second = moved_pair(world)
    held = store(tolerance=0.01, rotary=ROTARY)
    held.put(first)
    kept = held.put(second)
    with held.lease(kept.key) as entry:  # type: ignore[arg-type]
        assert isinstance(entry, Mirror) and entry.k.rows == entry.v.rows == 13
        assert torch.equal(restored(entry), world.rows(second.slots))
    noisy = dataclasses.replace(second, token_ids=[*second.token_ids[:-1], 7])
    for layer in range(LAYERS):
        k, v = world.kv.read(layer, noisy.slots[30:31])
        world.kv.write(layer, noisy.slots[30:31], k * 1.2, v)
    entry = held.get(held.put(noisy).key)  # type: ignore[arg-type]
    assert isinstance(entry, Mirror)
    own = {r for p in entry.k_pieces if not p.shared for r in range(p.start, p.end)}
    assert {30, *range(13)} <= own and len(own) <= 13 + 8 + 8


def test_exact_rows_are_never_replaced_by_nearly_equal_ones(world: World) -> None:
    held = store(tolerance=0.5, rotary=ROTARY)
    first = cache(world, "a", world.tokens(80))
    second = cache(world, "b", [*first.token_ids[:64], *world.tokens(16)])
    copy_rows(world, first, slice(0, 64), second, 0)
    for layer in range(LAYERS):
        k, v = world.kv.read(layer, second.slots)
        world.kv.write(layer, second.slots, k * 1.01, v * 1.01)
    held.put(first)
    assert held.put(second).kind == "dense"


def test_a_late_agent_finds_the_region_at_any_offset(world: World) -> None:
    held = store()
    first = cache(world, "a", world.tokens(120))
    key = held.put(first).key
    region = first.token_ids[30:90]
    query = [*world.tokens(17), *region, *world.tokens(9)]
    (match,) = held.find_spans(query)
    assert match == (17, key, 30, 60)
    with held.lease(match.key) as entry:
        assert entry is not None
        from tokendance.types import Rows

        got = restored(entry, rows=Rows(30, 90), position=17)
    want = world.rows(first.slots[30:90])
    turned = ROTARY.rotate(want[:, 0].flatten(0, 1), -13).reshape(want[:, 0].shape)
    assert torch.equal(got[:, 0], turned)
    assert torch.equal(got[:, 1], want[:, 1])


def test_prefix_is_the_longest_and_goes_with_its_entry(world: World) -> None:
    held = store()
    long = cache(world, "a", world.tokens(90), session="long")
    short = cache(world, "b", [*long.token_ids[:40], *world.tokens(5)], session="short")
    held.put(short)
    key = held.put(long).key
    query = [*long.token_ids[:70], *world.tokens(30)]
    assert held.find_prefix(query) == (0, key, 0, 70)
    held.release(SessionId("long"))
    left = held.find_prefix(query)
    assert left is not None and left.length == 40
    held.release(SessionId("short"))
    assert held.find_prefix(query) is None
