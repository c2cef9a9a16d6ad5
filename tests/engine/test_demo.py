"""The demo's engines and its replay, on real vLLM with the small model."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tokendance.bench.engine_process import Call, EngineError, EngineProcess, EngineSettings
from tokendance.bench.measure import BoundCounter, rows_by_source
from tokendance.bench.render import HFTokenizer, Renderer
from tokendance.bench.replay import Replay, ReplaySettings, RoundReport
from tokendance.bench.summary import summarise
from tokendance.bench.trace import Trace
from tokendance.cli import main
from tokendance.cli.model import DEFAULT_FOLDER, ensure_model

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
WORKLOADS = ROOT / "benchmarks" / "workloads"
BLOCK = 32


@pytest.fixture(scope="module")
def model() -> str:
    return str(ensure_model(ROOT / DEFAULT_FOLDER))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of the outbreak with answers cut short, as decoding takes most of the time."""
    lines = []
    for line in (WORKLOADS / "small" / "5_information_outbreak.jsonl").read_text().splitlines():
        value = json.loads(line)
        if value.get("origin") == "agent":
            value["text"] = value["text"].strip()[:60].strip() + "\n"
        if value["type"] == "trace":
            value["rounds"] = 2
        if value.get("round", 0) < 2:
            lines.append(json.dumps(value))
    path = tmp_path_factory.mktemp("trace") / "outbreak.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


Run = tuple[Replay, list[RoundReport]]


@pytest.fixture(scope="module")
def run(trace: Path, model: str) -> Run:
    replay = Replay(ReplaySettings(trace, model, agents=4))
    return replay, list(replay.run())


def test_nothing_of_ours_is_in_the_plain_engine(run: Run) -> None:
    ready = run[0].ready
    assert ready is not None
    assert ready[0].ours == ()
    assert "tokendance.engines.vllm.connector" in ready[1].ours
    assert (ready[0].dtype, ready[0].pages) == (ready[1].dtype, ready[1].pages)


def test_both_engines_answer_as_forced(run: Run) -> None:
    replay, reports = run
    assert len(reports) == 2
    for report, prompts in zip(reports, replay.prompts):
        for result in (report.plain, report.ours):
            assert [call.output for call in result.calls] == [p.output for p in prompts]
            assert [call.prompt_tokens for call in result.calls] == [len(p.ids) for p in prompts]
            for call in result.calls:
                assert 0 < call.first_token_s <= result.prefill_wall_s <= result.total_wall_s
                assert call.finish_s <= result.total_wall_s
            assert 0 < result.prefill_cpu_s <= result.total_cpu_s
            assert result.peak_pages >= sum(len(p.ids) // BLOCK for p in prompts) / len(prompts)


def test_plain_vllm_computes_what_an_unlimited_prefix_cache_leaves(run: Run) -> None:
    replay, reports = run
    cache: set[tuple[int, ...]] = set()
    for report, prompts in zip(reports, replay.prompts):
        for call, prompt in zip(report.plain.calls, prompts):
            hit = 0
            while hit + BLOCK < len(prompt.ids) and prompt.ids[: hit + BLOCK] in cache:
                hit += BLOCK
            assert call.cached == hit
            tokens = prompt.ids
            cache.update(tokens[:n] for n in range(BLOCK, len(tokens) + 1, BLOCK))


def test_tokendance_shares_the_round_and_stays_close(run: Run) -> None:
    replay, reports = run
    for report in reports:
        for call in report.ours.calls:
            assert sum(rows_by_source(call).values()) == call.prompt_tokens
    later = reports[1]
    assert len(later.followers) == 3 and len(later.exact) == 1
    assert later.sources["computed"] < later.plain_computed
    assert later.sources["computed"] <= 1.1 * later.bound.region
    assert max(close.mean for close in later.exact) < 1e-3
    assert max(close.mean for close in later.followers) < 0.02

    figures = summarise(replay, reports)
    assert json.loads(json.dumps(figures)) == figures
    assert figures["computed_ratio"] > 1
    assert figures["plain_computed_tokens"] == sum(r.plain_computed for r in reports)
    assert figures["prefill_cpu_ratio_steady"] > 1.3
    assert figures["rounds"] == 2 and figures["agents"] == 4
    assert 0 < figures["kl_mean"] <= figures["kl_max"] < 0.02 and figures["top1"] > 0.9


@pytest.fixture
def engine(model: str) -> Iterator[EngineProcess]:
    with EngineProcess(EngineSettings(model, tokendance=False, kv_cache_gib=1)) as running:
        yield running


def test_failures_are_one_exception_and_leave_no_process(
    engine: EngineProcess, tmp_path: Path
) -> None:
    good = Call("good", tuple(range(100, 140)), (5, 6, 7))
    with pytest.raises(EngineError, match=r"plain vLLM failed during 'round'"):
        engine.round([Call("long", (100,) * 20000, (5,))])

    first = engine.round([good], logits=tmp_path / "first.npy", logit_rows=2)
    again = engine.round([good], logits=tmp_path / "again.npy", logit_rows=2)
    assert first.calls[0].output == again.calls[0].output == (5, 6, 7)
    assert (first.calls[0].cached, again.calls[0].cached) == (0, BLOCK)
    engine.reset()
    assert engine.round([good]).calls[0].cached == 0
    a, b = (np.load(tmp_path / f"{name}.npy") for name in ("first", "again"))
    assert a.shape == b.shape and len(a) == 2
    assert not (a[0] == a[1]).all(), (
        "the logits of two steps are the same, so they are not the model's"
    )

    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"ended during 'round' \(exit status -9\)"):
        engine.round([good])
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (
        EngineProcess(EngineSettings(str(tmp_path), tokendance=False)) as running,
        pytest.raises(EngineError, match="plain vLLM failed during 'start'"),
    ):
        running.ready()


def test_a_missing_model_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--model", str(tmp_path / "none"), "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "make demo" in err and "tokendance model" in err


def test_a_prompt_beyond_the_model_is_said_at_once(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = WORKLOADS / "paper" / "1_meet_and_greet.jsonl"
    assert main(["demo", "--model", model, "--trace", str(trace), "--json"]) == 1
    assert "the model has 8192" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "whole", "steady"),
    [
        ("small/1_meet_and_greet", 2.2, (2.7, 3.4)),
        ("small/3_election_discussions", 2.0, (2.3, 2.9)),
        ("small/5_information_outbreak", 2.7, (3.8, 3.9)),
        ("small/6_pre_landfall_activity", 2.4, (2.9, 3.0)),
        ("small/x1_pairwise_faithful", 1.2, (1.0, 1.8)),
        ("paper/1_meet_and_greet", 5.3, (6.4, 6.9)),
        ("paper/5_information_outbreak", 5.5, (12.0, 13.0)),
    ],
)
def test_row_bounds_of_the_traces(
    model: str, name: str, whole: float, steady: tuple[float, float]
) -> None:
    """Known bounds of the shipped traces, counted with the model's own tokenizer."""
    read = Trace(WORKLOADS / f"{name}.jsonl")
    render, counter = Renderer(HFTokenizer(model), read.header.render), BoundCounter(BLOCK)
    bounds = [counter.add([render(q) for q in round_.requests]) for round_ in read.rounds()]
    total = sum(b.plain for b in bounds) / sum(b.region for b in bounds)
    assert total == pytest.approx(whole, abs=0.06)
    for bound in bounds[1:]:
        assert steady[0] - 0.06 <= bound.ratio <= steady[1] + 0.06
