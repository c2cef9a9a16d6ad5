"""Below memory: a file is whole or is not there, and trouble is a reason, not an exception."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.core import url_to_fs
from hypothesis import given, settings
from hypothesis import strategies as st
from store_world import IDENTITY, World, make_round, restored

from tokendance.store import EntryKey, Identity, Mirror, Store
from tokendance.store.tiers import disk
from tokendance.store.tiers.base import Blob, Loaded, Reason, TierQueue
from tokendance.store.tiers.disk import DiskTier
from tokendance.store.tiers.remote import RemoteTier
from tokendance.types import SessionId


class Medium:
    """Where a tier keeps its blobs: what it opens, and the files behind its back."""

    def __init__(self, kind: str, root: Path) -> None:
        self._kind, self._root = kind, root
        url = {"file": f"file://{root}", "memory": f"memory://{root.name}"}.get(kind, str(root))
        self._url = url
        self._fs, self._path = url_to_fs(url)

    def open(self, capacity: int | None = None) -> DiskTier | RemoteTier:
        if self._kind == "disk":
            return DiskTier(self._root, capacity)
        return RemoteTier(self._url, capacity)

    def names(self) -> list[str]:
        return sorted(path.rsplit("/", 1)[-1] for path in self._fs.find(self._path))

    def get(self, name: str) -> bytearray:
        return bytearray(self._fs.cat_file(f"{self._path}/{name}"))

    def put(self, name: str, raw: bytes) -> None:
        self._fs.pipe_file(f"{self._path}/{name}", bytes(raw))


@pytest.fixture(params=["disk", "file", "memory"])
def medium(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Medium:
    return Medium(request.param, tmp_path_factory.mktemp("medium"))


def blob(name: str = "a", rows: int = 50) -> Blob:
    g = torch.Generator().manual_seed(rows)
    k = torch.randn(rows, 2, 8, generator=g)
    tensors = {
        "k.0": k.to(torch.bfloat16),
        "ks.0": k[..., 0].to(torch.float16),
        "v.0": (k * 50).to(torch.int8),
        "tokens": torch.arange(rows, dtype=torch.int32),
        "none": torch.empty(0, 2, 8, dtype=torch.bfloat16),
    }
    return Blob(name, {"who": "Zoë", "pieces": [[0, 1, 2, 3, False]], "n": rows}, tensors)


def same(got: Loaded, want: Blob) -> bool:
    return (
        got.blob is not None
        and got.blob.meta == want.meta
        and got.blob.tensors.keys() == want.tensors.keys()
        and all(
            torch.equal(t, got.blob.tensors[n]) and t.dtype == got.blob.tensors[n].dtype
            for n, t in want.tensors.items()
        )
    )


def test_a_tier_gives_back_what_it_took(medium: Medium) -> None:
    tier = medium.open()
    assert tier.write(blob()) is Reason.OK
    assert same(tier.read("a"), blob())
    assert medium.names() == ["a.safetensors"]
    again = medium.open()
    assert again.catalog() == {"a": blob().meta} and again.held == tier.held > 0
    assert same(again.read("a"), blob())
    again.delete("a")
    again.delete("a")
    assert again.read("a").reason is Reason.MISSING and again.held == 0
    assert medium.names() == []


@pytest.mark.parametrize("kind", ["disk", "memory"])
@settings(max_examples=60)
@given(data=st.data())
def test_no_damaged_file_is_ever_read(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any changed byte, cut or added tail is noticed; what is read is what was written."""
    medium = Medium(kind, tmp_path_factory.mktemp("damage"))
    medium.open().write(blob())
    raw = medium.get("a.safetensors")
    how = data.draw(st.sampled_from(["flip", "cut", "append"]))
    at = data.draw(st.integers(0, len(raw) - 1))
    if how == "flip":
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del raw[at:]
    else:
        raw += bytes(data.draw(st.integers(1, 9)))
    medium.put("a.safetensors", raw)
    tier = medium.open()
    listed = tier.catalog().get("a")
    assert listed in (None, blob().meta)
    got = tier.read("a")
    if got.reason is Reason.OK:
        assert same(got, blob())  # a byte of padding, or of the header's white space
    else:
        assert got.reason is (Reason.MISSING if listed is None else Reason.CORRUPT)
        assert medium.names() == []


def test_catalog_drops_what_it_cannot_read(medium: Medium) -> None:
    tier = medium.open()
    tier.write(blob("a"))
    tier.write(blob("b"))
    medium.put("a.safetensors", b"\x10" * 40)
    medium.put("empty.safetensors", b"")
    assert set(medium.open().catalog()) == {"b"}
    assert medium.names() == ["b.safetensors"]


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_store_tiers import blob
from tokendance.store.tiers.disk import DiskTier
tier = DiskTier(sys.argv[1])
number = 0
while True:
    tier.write(blob(f"{number % 7}", 3000 + number % 13))
    if number % 3 == 2:
        tier.delete(f"{(number + 3) % 7}")
    number += 1
    print(number, flush=True)
"""


def test_killed_while_writing_leaves_only_whole_files(tmp_path: Path) -> None:
    """kill -9 at many moments of a writing process; every file that is found is whole."""
    here = str(Path(__file__).parent)
    rng = np.random.default_rng(0)
    process: subprocess.Popen[str] | None = None
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), here], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(float(rng.uniform(0.01, 0.3)))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        tier = DiskTier(tmp_path)
        assert not list(tmp_path.glob("*.partial"))
        names = tier.catalog()
        assert names
        for name, meta in names.items():
            assert same(tier.read(name), blob(name, int(meta["n"])))


def test_a_partial_file_is_no_file(medium: Medium) -> None:
    medium.put("a.partial", b"half")
    tier = medium.open()
    assert tier.read("a").reason is Reason.MISSING
    assert medium.names() == []


@pytest.mark.parametrize("stage", ["save_file", "_sync", "replace"])
def test_full_disk_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    tier = DiskTier(tmp_path)
    tier.write(blob("kept"))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    owner: Any = disk.os if stage == "replace" else disk
    monkeypatch.setattr(owner, stage, full)
    assert tier.write(blob("a")) is Reason.FULL
    monkeypatch.undo()
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["kept"]
    assert same(tier.read("kept"), blob("kept"))
    assert tier.write(blob("a")) is Reason.OK


def test_full_medium_makes_room_for_what_is_newer(medium: Medium) -> None:
    """Sessions that never come back do not keep the disk from the living."""
    world = World(np.random.default_rng(6), pages=2048)
    held, queue = spilled(medium.open(150_000), world)
    for number in range(12):
        round_ = family(world, f"s{number}", f"{number}.")
        held.put_family(round_.plan, round_.caches)
        held.flush()
        for owner in expected(world, round_):
            held.evict(held.latest(owner))  # type: ignore[arg-type]
    counters = held.stats().counters
    assert counters["spilled"] == 36 and "tier_full" not in counters
    assert len(held.prefetch(SessionId("s11"))) == 3
    assert held.prefetch(SessionId("s0")) == {}
    held.flush()
    assert medium.open().held <= 150_000
    queue.close()


def test_a_really_full_file_system(tmp_path: Path) -> None:
    """The library's own error for a write that the system refuses, by a limit on file size."""
    code = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from test_store_tiers import blob
from tokendance.store.tiers.disk import DiskTier
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tier = DiskTier(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
print(repr(tier.write(blob("big", 5000)).value), repr(tier.write(blob("small", 9)).value))
print(sorted(tier.catalog()))
"""
    here = str(Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), here], capture_output=True, text=True
    )
    assert run.stdout.splitlines() == ["'full' ''", "['small']"], run.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["small.safetensors"]


def test_capacity_is_kept(medium: Medium) -> None:
    tier = medium.open(3 * blob().nbytes)
    outcomes = [tier.write(blob(str(i))) for i in range(5)]
    assert outcomes[0] is Reason.OK and outcomes[-1] is Reason.FULL
    assert tier.held <= 3 * blob().nbytes


class FakeTier:
    """A tier in memory whose methods can be made slow or broken."""

    capacity = None

    def __init__(self) -> None:
        self.blobs: dict[str, Blob] = {}
        self.before: Callable[[], None] = lambda: None

    def write(self, item: Blob) -> Reason:
        self.before()
        tensors = {name: tensor.clone() for name, tensor in item.tensors.items()}
        self.blobs[item.name] = Blob(item.name, item.meta, tensors)
        return Reason.OK

    def read(self, name: str) -> Loaded:
        self.before()
        found = self.blobs.get(name)
        return Loaded(found, Reason.OK if found else Reason.MISSING)

    def delete(self, name: str) -> None:
        self.before()
        self.blobs.pop(name, None)

    def catalog(self) -> dict[str, Any]:
        return {name: item.meta for name, item in self.blobs.items()}


def test_bytes_in_flight_are_bounded_and_slowness_is_a_reason() -> None:
    tier, gate, done = FakeTier(), threading.Event(), []
    tier.before = lambda: gate.wait(10) and None
    size = blob().nbytes
    queue = TierQueue(tier, max_inflight=2 * size)
    reasons = [queue.write([blob(str(i))], done.append) for i in range(4)]
    assert reasons == [Reason.OK, Reason.OK, Reason.BUSY, Reason.BUSY]
    assert queue.inflight == 2 * size
    assert queue.flush(0.01) is Reason.SLOW
    gate.set()
    assert queue.flush(10) is Reason.OK
    queue.close()
    assert done == [[Reason.OK], [Reason.OK]] and queue.inflight == 0


def test_a_blob_larger_than_the_bound_passes_alone() -> None:
    queue = TierQueue(FakeTier(), max_inflight=1)
    assert queue.write([blob()], lambda _: None) is Reason.OK
    queue.close()


def test_a_failing_tier_is_left_alone_for_a_while() -> None:
    tier = FakeTier()

    def broken() -> None:
        raise ConnectionError("gone")

    tier.before = broken
    queue = TierQueue(tier, patience=3, pause_s=0.2)
    seen: list[Any] = []
    for _ in range(3):
        assert queue.read(["x"], 1, seen.append) is Reason.OK
        queue.flush()
    assert [loaded.reason for (loaded,) in seen] == [Reason.ERROR] * 3
    assert queue.read(["x"], 1, seen.append) is Reason.PAUSED
    time.sleep(0.25)
    tier.before = lambda: None
    assert queue.write([blob("x")], seen.append) is Reason.OK
    queue.flush()
    assert seen[-1] == [Reason.OK]
    queue.delete(["x"])
    queue.close()


def family(world: World, session: str, tag: str) -> Any:
    shared = [world.tokens(40)]
    return make_round(world, [9, 12, 15], shared, session=session, tag=tag)


def expected(world: World, round_: Any) -> dict[Any, torch.Tensor]:
    return {c.owner: world.rows(c.slots) for c in round_.caches.values()}


def spilled(tier: Any, world: World, **kwargs: Any) -> tuple[Store, Any]:
    """A store that keeps a copy of everything below."""
    queue = TierQueue(tier)
    options = {"budget": 1 << 24, "block": 8, "lower": queue, "spill_at": 0.0, **kwargs}
    return Store(IDENTITY, **options), queue


@pytest.mark.parametrize("int8", [False, True])
def test_a_family_survives_a_restart(medium: Medium, int8: bool) -> None:
    world = World(np.random.default_rng(2), pages=256)
    round_ = family(world, "s", "")
    first, queue = spilled(medium.open(), world, int8=int8)
    kept = first.put_family(round_.plan, round_.caches)
    want = {}
    for item in kept:
        with first.lease(item.key) as entry:
            want[item.key] = restored(entry)
    held = first.stats().held
    queue.close()

    second, queue = spilled(medium.open(), world, int8=int8)
    reasons = second.prefetch(SessionId("s"))
    assert set(reasons) == set(want) and set(reasons.values()) == {Reason.OK}
    second.flush()
    assert second.stats().held == held
    assert second.stats().mirrors == 2 and second.stats().counters["loaded"] == 3
    for key, rows in want.items():
        with second.lease(key) as entry:
            assert torch.equal(restored(entry), rows)
    match = second.find_prefix(next(iter(round_.caches.values())).token_ids)
    assert match is not None and match.key == kept[0].key
    assert second.release(SessionId("s")).entries == 3
    second.flush()
    assert medium.open().catalog() == {}
    queue.close()


def test_other_ranks_files_are_left_alone(medium: Medium) -> None:
    world = World(np.random.default_rng(2), pages=256)
    round_ = family(world, "s", "")
    first, queue = spilled(medium.open(), world)
    first.put_family(round_.plan, round_.caches)
    queue.close()
    queue = TierQueue(medium.open())
    other = Store(Identity("tiny", tp_rank=1, tp_size=2), budget=1 << 24, lower=queue)
    assert other.prefetch(SessionId("s")) == {}
    queue.close()
    assert len(medium.open().catalog()) == 3


def test_a_lost_master_takes_its_mirrors_files_along(medium: Medium) -> None:
    world = World(np.random.default_rng(2), pages=256)
    round_ = family(world, "s", "")
    first, queue = spilled(medium.open(), world)
    master, *mirrors = first.put_family(round_.plan, round_.caches)
    queue.close()
    names = medium.open().catalog()
    (name,) = [n for n, meta in names.items() if meta["key"] == master.key.hex()]
    raw = medium.get(f"{name}.safetensors")
    raw[-5] ^= 255
    medium.put(f"{name}.safetensors", raw)

    second, queue = spilled(medium.open(), world)
    second.prefetch(SessionId("s"))
    second.flush()
    assert second.stats().counters["tier_corrupt"] == 1
    assert second.stats().entries == 0 and second.stats().held == 0
    assert second.prefetch(SessionId("s")) == {}
    second.flush()
    assert medium.open().catalog() == {}
    queue.close()

    third, queue = spilled(medium.open(), world)
    assert third.prefetch(SessionId("s")) == {} and mirrors
    queue.close()


def test_evicted_sessions_come_back_within_the_budget(medium: Medium) -> None:
    world = World(np.random.default_rng(3), pages=1024)
    probe = Store(IDENTITY, budget=1 << 24, block=8)
    round_ = family(world, "p", "p.")
    probe.put_family(round_.plan, round_.caches)
    one = probe.stats().held
    held, queue = spilled(medium.open(), world, budget=int(2.2 * one))
    want = {}
    for name in "abcde":
        round_ = family(world, name, f"{name}.")
        held.put_family(round_.plan, round_.caches)
        want[name] = expected(world, round_)
        held.flush()
    counters = held.stats().counters
    assert counters.get("lost", 0) == 0 and counters["evicted"] >= 6
    for name in "abcde":
        missing = held.prefetch(SessionId(name))
        held.flush()
        assert held.stats().held <= held.memory.budget
        for owner, rows in want[name].items():
            key = held.latest(owner)
            if key is None:
                assert missing  # no room beside what this clock still needs
                continue
            with held.lease(key) as entry:
                assert torch.equal(restored(entry), rows)
    queue.close()


@pytest.mark.parametrize("trouble", ["error", "full", "slow"])
def test_serving_does_not_notice_a_bad_tier(trouble: str) -> None:
    world = World(np.random.default_rng(3), pages=512)
    tier, gate = FakeTier(), threading.Event()

    def before() -> None:
        if trouble == "slow":
            gate.wait(10)
        else:
            raise OSError(errno.ENOSPC if trouble == "full" else errno.EIO, "no")

    tier.before = before
    held, queue = spilled(tier, world)
    round_ = family(world, "s", "")
    kept = held.put_family(round_.plan, round_.caches)
    assert [k.kind for k in kept] == ["master", "mirror", "mirror"]
    assert held.flush(0.01 if trouble == "slow" else 5) is (
        Reason.SLOW if trouble == "slow" else Reason.OK
    )
    for owner, rows in expected(world, round_).items():
        with held.lease(held.latest(owner)) as entry:  # type: ignore[arg-type]
            assert torch.equal(restored(entry), rows)
    if trouble != "slow":
        assert sum(n for c, n in held.stats().counters.items() if c.startswith("tier_")) >= 1
    gate.set()
    held.flush()
    queue.close()
    ledger = held._custody.ledger
    assert all(r.leases == 0 for r in ledger.records())


def test_mirrors_spill_after_their_trimmed_master(medium: Medium) -> None:
    """The master's agent leaves; what is spilled then is the trunk and the mirrors on it."""
    world = World(np.random.default_rng(4), pages=256)
    queue = TierQueue(medium.open())
    held = Store(IDENTITY, budget=1 << 24, block=8, lower=queue, spill_at=1.0)
    round_ = family(world, "s", "")
    kept = held.put_family(round_.plan, round_.caches)
    assert held.evict(kept[0].key)  # type: ignore[arg-type]
    held._spill_at = 0.0
    again = family(world, "t", "t.")
    held.put_family(again.plan, again.caches)
    held.flush()
    queue.close()
    queue = TierQueue(medium.open())
    second = Store(IDENTITY, budget=1 << 24, block=8, lower=queue)
    assert set(second.prefetch(SessionId("s"))) == {k.key for k in kept[1:]}
    second.flush()
    for item in kept[1:]:
        with second.lease(item.key) as entry:  # type: ignore[arg-type]
            assert isinstance(entry, Mirror)
            assert torch.equal(restored(entry), world.rows(round_.caches[item.request_id].slots))
    second.release(SessionId("s"))
    second.flush()
    left = medium.open().catalog()
    assert {EntryKey(bytes.fromhex(m["key"])) for m in left.values()} == {
        held.latest(c.owner) for c in again.caches.values()
    }
    queue.close()
