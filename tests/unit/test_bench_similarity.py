"""`tokendance bench similarity`: what is counted, and K/V against the tiny model's own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from test_bench_backends import POOL, Words, count, tiny_round

from tokendance.bench import similarity
from tokendance.bench.rounds import LastRound, leader_plan
from tokendance.bench.similarity import Origins, count_rounds, on_engine, same_blocks, shared_tokens
from tokendance.bench.town import write_town
from tokendance.bench.trace import TraceError
from tokendance.cli import main
from tokendance.engines.reference.model import Model
from tokendance.reuse.collective import MemberOutcome, PassOutcome
from tokendance.types import Rows


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_town(tmp_path_factory.mktemp("town") / "town.jsonl", POOL, 3, count)


def test_shared_tokens_are_those_in_runs_of_a_block_that_others_hold() -> None:
    one, two, other = (list(range(start, start + 100)) for start in (0, 1000, 2000))
    assert shared_tokens([one, two, other]) == 0.0
    assert shared_tokens([one, one]) == 1.0
    shared = list(range(5000, 5040))
    prompts = [one + shared, two[:30] + shared + two[30:], other]
    assert shared_tokens(prompts) == 80 / 380
    assert shared_tokens([one + shared[:31], two + shared[:31]]) == 0.0  # less than a block
    assert shared_tokens([shared + shared + one, two, other]) == 0.0  # only in one prompt


def test_same_blocks_counts_whole_blocks_of_a_stretch() -> None:
    master = np.arange(200)
    own = np.arange(1000, 1040)
    moved = np.concatenate((own, master[50:150]))  # blocks of 32, 32, 32 and 4 rows
    assert same_blocks([master, moved], 0) == 100 / 140
    assert same_blocks([moved, master], 1) == 100 / 140  # whoever comes first
    changed = moved.copy()
    changed[[40 + 33, 40 + 99]] = 7000, 7001  # in the second block, and the last row
    assert same_blocks([master, changed], 0) == (32 + 32 + 3) / 140
    swapped = np.concatenate((master[100:], master[:100]))
    assert same_blocks([master, swapped], 0) == 1.0
    assert same_blocks([master, np.arange(500, 600)], 0) == 0.0


def test_origins_follow_rows_through_copies_prefix_caches_and_recomputation(town: Path) -> None:
    round_ = tiny_round(town, 3)
    pages = [tuple(range(100 * i, 100 * i + 60)) for i in range(3)]
    plan, origins = leader_plan(round_, pages), Origins()
    first = origins.add(plan)
    leader, follower = plan.members[0], plan.members[1]
    assert [len(n) for n in first] == [len(p.ids) for p in round_.prompts]
    assert len(set(first[0])) == leader.end + 1  # the leader computes every row
    for copy in follower.copies:
        source = slice(copy.source_start, copy.source_start + copy.length)
        assert (first[1][copy.start : copy.end] == first[0][source]).all()
    share = sum(c.length for c in follower.copies) / (follower.end + 1)
    assert 0.5 < share == same_blocks(first[:2], 0)
    # In the next round the whole prompt but its end is in the prefix cache of each.
    cached = LastRound("next", round_.prompts, (96,) * 3, ())
    second = origins.add(leader_plan(cached, pages))
    assert (second[1][:96] == first[1][:96]).all() and second[1][-1] != first[1][-1]
    assert same_blocks(second[:2], 0) == pytest.approx(share, abs=0.05)
    # A row that a backend computes again is nobody else's, and costs its block.
    row = follower.copies[0].start
    done = [MemberOutcome(m.request_id, 0.0, ()) for m in plan.members]
    done[1] = done[1]._replace(recomputed=(Rows(row, row + 1),))
    third = Origins().add(plan, PassOutcome(1, 0, 0, members=tuple(done)))
    assert third[1][row] not in third[0] and (third[1] == first[1]).sum() < len(third[1])
    assert same_blocks(third[:2], 0) < same_blocks(first[:2], 0)


def test_rounds_of_a_town(town: Path) -> None:
    first, second = count_rounds(town, Words())
    assert (first["round"], second["round"], second["agents"]) == (0, 1, 10)
    assert first["shared_tokens"] == 0.0 and first["family_ratio"] == 1.0
    assert 0.7 < second["shared_tokens"] < 0.9 and second["family_ratio"] > 2
    assert second["same_blocks"] == pytest.approx(second["shared_tokens"], abs=0.05)


def test_reused_rows_are_compared_with_computed_ones(
    town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model.from_hf(tiny.hf_model())
    monkeypatch.setattr(similarity, "last_round", lambda *_: tiny_round(town, 3))
    found = on_engine(town, Words(), model, 3, lambda text: None)
    alone = on_engine(town, Words(), model, 3, lambda text: None, ["region"])
    assert "cacheblend" not in alone and alone["region"] == found["region"]
    region, blend = found["region"], found["cacheblend"]
    for figures in (region, blend):
        # K and V of layer 0 depend on token and position alone; deeper ones on the context.
        assert figures["k_cosine_by_layer"][0] == figures["v_cosine_by_layer"][0] == 1.0
        assert figures["k_cosine_by_layer"][2] < 0.999 and figures["v_cosine_by_layer"][2] < 0.999
        assert figures["k_cosine"] == pytest.approx(np.mean(figures["k_cosine_by_layer"]), abs=1e-3)
    assert found["engine_agents"] == 3
    assert region["same_blocks"] > 1.5 * blend["same_blocks"]  # single rows cost whole blocks


def test_rows_that_are_computed_again_have_cosine_one(
    town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model.from_hf(tiny.hf_model())
    monkeypatch.setattr(similarity, "last_round", lambda *_: tiny_round(town, 3))
    everything = similarity.Method("full", "leader", 1.0)
    monkeypatch.setattr(similarity, "METHODS", {"region": everything})
    full = on_engine(town, Words(), model, 3, lambda text: None, ["region"])["region"]
    assert full["k_cosine"] == full["v_cosine"] == 1.0
    assert full["same_blocks"] == 0.0


def test_agents_that_share_nothing_are_an_error(
    town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = tiny_round(town, 2)
    alone = [replace(p, pieces=(p.pieces[0],)) for p in round_.prompts]
    lonely = LastRound("lonely", tuple(alone), (0, 0), ())
    monkeypatch.setattr(similarity, "last_round", lambda *_: lonely)
    with pytest.raises(TraceError, match="share nothing"):
        on_engine(town, Words(), Model.from_hf(tiny.hf_model()), 2, lambda text: None)


def test_the_command(
    town: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("tokendance.bench.render.HFTokenizer", lambda folder: Words())
    monkeypatch.setattr(Model, "load", lambda folder: Model.from_hf(tiny.hf_model()))
    monkeypatch.setattr(similarity, "last_round", lambda path, *_: tiny_round(town, 2))
    out = tmp_path / "results/similarity.json"
    command = ["bench", "similarity", "--model", str(tmp_path), "--out", str(out)]
    command += ["--trace", str(town)]
    assert main([*command, "--agents", "1"]) == 1
    assert "two at least" in capsys.readouterr().err
    assert main(command) == 0
    result = json.loads(out.read_text())
    assert {"machine", "versions", "command", "model", "repetitions", "rows"} <= result.keys()
    first, last = result["rows"]
    assert first["k_cosine"] is None and 0 < last["k_cosine"] < 1
    assert last["v_cosine"] == last["region"]["v_cosine"]
    assert str(tmp_path) not in out.read_text()
    assert main([*command, "--no-engine"]) == 0
    assert [r["k_cosine"] for r in json.loads(out.read_text())["rows"]] == [None, None]
    assert [path.name for path in out.parent.iterdir()] == [out.name]
