"""The tier over fsspec where the service fails; what all tiers promise is in test_store_tiers."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from store_world import World, restored
from test_store_tiers import blob, expected, family, same, spilled

from tokendance.store.tiers.base import Reason
from tokendance.store.tiers.remote import RemoteTier


class Unreachable(Exception):
    """As services raise: neither an OSError nor anything else that is known here."""


@pytest.fixture
def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(f"memory:/{tmp_path}")


def break_(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(MemoryFileSystem, method, broken)


def files(tier: RemoteTier) -> list[str]:
    return [path.rsplit("/", 1)[-1] for path in tier._fs.find(tier._root)]


@pytest.mark.parametrize("method", ["pipe_file", "mv"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unreachable("no"), Reason.ERROR),
        (TimeoutError(), Reason.ERROR),
        (OSError(errno.ENOSPC, "full"), Reason.FULL),
    ],
)
def test_a_write_that_fails_leaves_nothing(
    tier: RemoteTier,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    error: Exception,
    reason: Reason,
) -> None:
    tier.write(blob("kept"))
    held = tier.held
    break_(monkeypatch, method, error)
    assert tier.write(blob("a")) is reason
    monkeypatch.undo()
    assert files(tier) == ["kept.safetensors"] and tier.held == held
    assert tier.read("a").reason is Reason.MISSING
    assert same(tier.read("kept"), blob("kept"))
    assert tier.write(blob("a")) is Reason.OK


def test_a_move_that_is_interrupted_leaves_nothing(
    tier: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is there and the removal of the other key fails, where a move is no single step."""

    def half(self: MemoryFileSystem, source: str, target: str) -> None:
        self.cp_file(source, target)
        raise Unreachable("no")

    monkeypatch.setattr(MemoryFileSystem, "mv", half)
    assert tier.write(blob("a")) is Reason.ERROR
    assert files(tier) == []


def test_a_service_that_cannot_be_reached_loses_nothing(
    tier: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.write(blob("a"))
    break_(monkeypatch, "cat_file", Unreachable("no"))
    assert tier.read("a").reason is Reason.ERROR
    assert tier.catalog() == {}
    monkeypatch.undo()
    break_(monkeypatch, "rm_file", Unreachable("no"))
    with pytest.raises(Unreachable):
        tier.delete("a")
    assert tier.held > 0
    monkeypatch.undo()
    assert same(tier.read("a"), blob("a")) and tier.catalog() == {"a": blob("a").meta}


def test_a_blob_that_somebody_removed_is_missing(tier: RemoteTier) -> None:
    tier.write(blob("a"))
    tier._fs.rm_file(f"{tier._root}/a.safetensors")
    assert tier.read("a").reason is Reason.MISSING and tier.held == 0


def test_a_head_longer_than_the_first_read_is_read_whole(
    tier: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokendance.store.tiers.remote._HEAD", 16)
    tier.write(blob("a"))
    assert tier.catalog() == {"a": blob("a").meta}


def test_folders_below_are_not_ones_own(tier: RemoteTier) -> None:
    below = RemoteTier(f"memory:/{tier._root}/rank1")
    below.write(blob("theirs"))
    tier.write(blob("ours"))
    again = RemoteTier(f"memory:/{tier._root}")
    assert set(again.catalog()) == {"ours"} and set(below.catalog()) == {"theirs"}


def test_an_unknown_kind_of_url_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        RemoteTier("nowhere://bucket/folder")


def test_serving_goes_on_while_the_service_is_away(
    tier: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(np.random.default_rng(3), pages=512)
    held, queue = spilled(tier, world)
    break_(monkeypatch, "pipe_file", Unreachable("no"))
    round_ = family(world, "s", "")
    held.put_family(round_.plan, round_.caches)
    held.flush(5)
    for owner, rows in expected(world, round_).items():
        with held.lease(held.latest(owner)) as entry:
            assert torch.equal(restored(entry), rows)
    assert held.stats().counters["tier_error"] >= 1
    queue.close()
