"""`tokendance explain`: what it says about rounds whose outcome is known."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tokendance.cli import explain as command
from tokendance.cli import main
from tokendance.cli.explain import Asked, explain
from tokendance.config import Config

WORKLOADS = Path(__file__).parents[2] / "benchmarks/workloads/small"


def text(length: int, seed: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(1000) for _ in range(length))


SHARED = {name: text(length, i) for i, (name, length) in enumerate((("x", 50), ("y", 40)))}


def asked(name: str, *segments: str, cached: int = 0) -> Asked:
    """Segments by name: shared ones, or own ones of 20 rows."""
    own = 100 + sum(map(ord, name))
    return Asked(
        name,
        tuple((s, SHARED.get(s) or text(20, own + 7 * i)) for i, s in enumerate(segments)),
        cached,
    )


def told(*requests: Asked, **options: Any) -> dict[str, dict[str, Any]]:
    found = explain(requests, Config.from_mapping({"min_shared_tokens": 32, **options}))
    for request, one in zip(requests, found):
        assert sum(one["rows"].values()) == len(request.ids)
        position = 0
        for segment in one["segments"]:
            assert segment["start"] == position
            for piece in segment["pieces"]:
                assert piece["start"] == position
                position = piece["end"]
            assert segment["end"] == position
            computed = any(p["source"] == "computed" for p in segment["pieces"])
            assert bool(segment["reason"]) == computed
        by_source = {
            name: sum(
                p["end"] - p["start"]
                for s in one["segments"]
                for p in s["pieces"]
                if p["source"] == name
            )
            for name in one["rows"]
        }
        assert by_source == one["rows"]
    return {request.name: one for request, one in zip(requests, found)}


def segment(one: dict[str, Any], label: str) -> dict[str, Any]:
    return next(s for s in one["segments"] if s["label"] == label)


def test_a_round_with_a_leader_and_followers() -> None:
    found = told(asked("a", "h", "x", "y", "t"), asked("b", "h", "i", "x", "y", "t"))
    assert [found[n]["role"] for n in "ab"] == ["leader", "follower"]
    assert segment(found["a"], "x")["reason"] == "computed here, once, for b"
    (piece,) = segment(found["b"], "y")["pieces"]
    assert piece == {
        "start": 90,
        "end": 130,
        "source": "sibling",
        "from": "a",
        "moved": 20,
        "exact": False,
    }
    assert found["b"]["rows"] == {"prefix": 0, "sibling": 90, "computed": 60}
    assert segment(found["b"], "h")["reason"] == "no other request holds this text"


def test_rows_of_the_prefix_cache_are_told_apart() -> None:
    requests = asked("a", "x", "t"), asked("b", "h", "x", "t", cached=32)
    found = told(*requests)
    assert [p["source"] for p in segment(found["b"], "x")["pieces"]] == ["prefix", "sibling"]
    assert found["b"]["rows"]["prefix"] == 32


def test_too_little_is_said_with_numbers() -> None:
    found = told(
        asked("a", "h", "x", "y", "t"),
        asked("b", "h", "x", "y", "t"),
        asked("c", "h", "y", "t"),
        min_shared_tokens=64,
    )
    assert found["c"]["role"] == "alone"
    assert segment(found["c"], "y")["reason"] == (
        "shares 40 rows with a, min_shared_tokens is 64 (also in a, b)"
    )


def test_text_that_differs_is_pointed_at() -> None:
    changed = (*SHARED["x"][:17], 1001, *SHARED["x"][18:])
    other = asked("b", "h", "y", "t")
    other = other._replace(segments=(*other.segments[:1], ("x'", changed), *other.segments[1:]))
    found = told(asked("a", "h", "x", "y", "t"), other)
    assert segment(found["b"], "x'")["reason"] == "differs from a segment of a at its token 17"


def test_another_order_is_a_group_of_its_own() -> None:
    requests = asked("a", "h", "x", "y", "t"), asked("b", "h", "y", "x", "t")
    found = told(*requests)
    assert found["b"]["role"] == "follower" and found["b"]["order_distance"] == 1.0
    found = told(*requests, max_order_distance=0.5)
    assert found["b"]["rows"]["sibling"] == 0
    assert "orders differ more than max_order_distance" in segment(found["b"], "x")["reason"]


def test_short_segments_and_the_last_row() -> None:
    short = ("s", text(2, 77))
    requests = [
        one._replace(segments=(one.segments[0], short, *one.segments[1:]))
        for one in (asked("a", "h", "x", "y"), asked("b", "h", "i", "x", "y"))
    ]
    found = told(*requests)
    assert segment(found["b"], "s")["reason"].startswith("has 2 rows")
    assert segment(found["b"], "y")["reason"] == "the engine computes the last prompt row itself"


def test_shared_text_that_nobody_has_marked() -> None:
    shared = text(200, 5)
    requests = [
        Asked(name, (("", (*text(own, own), *shared, *text(9, own + 1))),), read=str)
        for name, own in (("a", 30), ("b", 45))
    ]
    found = told(*requests)
    assert found["b"]["rows"] == {"prefix": 0, "sibling": 200, "computed": 54}
    assert [s["start"] for s in found["b"]["segments"]] == [0, 45, 245]
    assert found["b"]["segments"][1]["label"] == found["a"]["segments"][1]["label"] != ""
    assert told(*requests, discover=False)["b"]["rows"]["sibling"] == 0


def test_one_request_alone() -> None:
    (one,) = told(asked("a", "h", "x", "t")).values()
    assert one["role"] == "alone"
    assert one["rows"]["computed"] == 90


class Letters:
    """Every character is a token."""

    bos: tuple[int, ...] = ()

    def __init__(self, model: str) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


def test_a_trace_as_json_and_as_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tokendance.bench.render.HFTokenizer", Letters)
    trace = ["explain", "--trace", str(WORKLOADS / "5_information_outbreak.jsonl")]
    assert main([*trace, "--round", "1", "--json"]) == 0
    requests = json.loads(capsys.readouterr().out)["requests"]
    assert [r["role"] for r in requests].count("leader") == 1
    assert [r["role"] for r in requests].count("follower") == len(requests) - 1
    followers = [r["rows"] for r in requests if r["role"] == "follower"]
    assert all(rows["sibling"] > 100 and rows["prefix"] % 32 == 0 for rows in followers)
    assert main([*trace, "--round", "1"]) == 0
    assert "follower" in capsys.readouterr().out
    assert main([*trace, "--round", "99"]) == 1
    assert "has rounds 0 to" in capsys.readouterr().err


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 1
    assert "either --trace or files" in capsys.readouterr().err
    assert main(["explain", "a.txt", "--tokendance", '{"mood": 1}']) == 1
    assert "unknown TokenDance option" in capsys.readouterr().err
    assert main(["explain", "not-there.txt", "--model", "nowhere/nothing"]) == 1
    assert command.__doc__ is not None
