"""`tokendance bench capacity` and its neighbours, without an engine: prompts, figures, resuming."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendance.bench import capacity
from tokendance.bench.baselines import BASELINES, reorder
from tokendance.bench.bystander import gaps_within, percentile_ms
from tokendance.bench.capacity import Cell, Study, figures, run_study, summarise, under
from tokendance.bench.engine_process import (
    Call,
    CallResult,
    EngineError,
    EngineSettings,
    Ready,
    RoundResult,
)
from tokendance.bench.export import export
from tokendance.bench.prefill import Words
from tokendance.bench.render import Piece, Prompt
from tokendance.bench.sessions import Session, Shape, from_trace, strangers, synthetic
from tokendance.bench.trace import Trace, TraceError

WORKLOADS = Path(__file__).parents[2] / "benchmarks/workloads/small"
WORDS = Words(range(10000), 0)
BY_NAME = {baseline.name: baseline for baseline in BASELINES}


class Splitter:
    """A tokenizer of which every word is a token."""

    bos: tuple[int, ...] = (7,)

    def encode(self, text: str) -> list[int]:
        return [sum(map(ord, word)) for word in text.split()]

    def chat(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


# -- sessions -------------------------------------------------------------------------------------


def test_a_synthetic_round_holds_what_all_said_in_the_round_before() -> None:
    shape = Shape(private=50, output=20, task=5)
    session = synthetic("s", shape, 4, 3, WORDS)
    assert [len(prompts) for prompts in session.rounds] == [4, 4, 4]
    for index, prompts in enumerate(session.rounds):
        assert len({prompt.pieces[0] for prompt in prompts}) == 4
        assert len({prompt.pieces[1:] for prompt in prompts}) == 1
        heard = [piece.ids for piece in prompts[0].pieces if piece.kind == "shared"]
        if index > 1:
            assert heard == [prompt.output for prompt in session.rounds[index - 1]]
        assert {len(p.output) for p in prompts} == {20 if index else 1}
    for first, later in zip(session.rounds[0], session.rounds[2]):
        assert first.pieces[0] == later.pieces[0] and first.pieces[-1] == later.pieces[-1]
    assert session.longest == 50 + 3 + 4 * 20 + 5 + 20


def test_one_round_alone_is_answered_in_full() -> None:
    (prompts,) = synthetic("s", Shape(output=20), 2, 1, WORDS).rounds
    assert [len(prompt.output) for prompt in prompts] == [20, 20]


def test_the_same_seed_cuts_the_same_session() -> None:
    first, again, other = (
        synthetic("s", Shape(), 3, 2, WORDS.reseeded(seed)) for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other


def test_a_trace_gives_its_first_agents_and_rounds_with_short_answers() -> None:
    path = WORKLOADS / "3_election_discussions.jsonl"
    session = from_trace(path, Splitter(), 3, 2, 4)
    source = [r for r, _ in zip(Trace(path).rounds(), range(2))]
    assert [len(prompts) for prompts in session.rounds] == [3, 3]
    for prompts, round_ in zip(session.rounds, source):
        for prompt, request in zip(prompts, round_.requests):
            texts = "".join(part.segment.text for part in request.parts)
            assert list(prompt.ids) == [7, *Splitter().encode(texts)]
            known = Splitter().encode(request.output.text) if request.output else prompt.ids
            assert prompt.output == tuple(known[:4])


def test_traces_that_are_no_session_are_refused() -> None:
    with pytest.raises(TraceError, match="not one session"):
        from_trace(WORKLOADS / "x1_pairwise_faithful.jsonl", Splitter(), 2, 2, 4)
    with pytest.raises(TraceError, match="has 3 agents, not 9"):
        from_trace(WORKLOADS / "2_valentines_day_party.jsonl", Splitter(), 9, 2, 4)


def test_strangers_have_the_same_lengths_and_nothing_in_common() -> None:
    prompts = synthetic("s", Shape(), 3, 2, WORDS).rounds[1]
    others = strangers(prompts, WORDS)
    assert [len(p.ids) for p in others] == [len(p.ids) for p in prompts]
    assert [p.output for p in others] == [p.output for p in prompts]
    assert len({p.ids[:32] for p in others}) == 3


# -- baselines ------------------------------------------------------------------------------------

kinds = st.sampled_from(["private", "shared", "task"])
pieces = st.builds(Piece, kinds, st.tuples(st.integers(0, 5), st.integers(0, 2)))
rounds = st.lists(st.lists(pieces, min_size=1, max_size=8), min_size=1, max_size=4)


@given(rounds)
def test_reordering_keeps_every_text_and_the_order_of_what_is_not_shared(
    round_: list[list[Piece]],
) -> None:
    prompts = [Prompt(f"a{i}", tuple(p), (i,)) for i, p in enumerate(round_)]
    for before, after in zip(prompts, reorder(prompts), strict=True):
        assert Counter(after.pieces) == Counter(before.pieces)
        own = [p for p in before.pieces if p.kind != "shared"]
        assert [p for p in after.pieces if p.kind != "shared"] == own
        assert (after.agent, after.output) == (before.agent, before.output)


def test_reordered_prompts_begin_with_all_that_is_shared() -> None:
    a, b, c = (Piece("shared", (i,)) for i in range(3))
    bos, task = Piece("task", (100,)), Piece("task", (200,))
    orders = [(a, b, c), (c, b, a), (b, a)]
    prompts = [
        Prompt(f"a{i}", (bos, Piece("private", (50 + i,)), *shared, task), ())
        for i, shared in enumerate(orders)
    ]
    for i, prompt in enumerate(reorder(prompts)):
        shared = (a, b, c)[: len(orders[i])]  # c has the fewest readers
        assert prompt.pieces == (bos, *shared, Piece("private", (50 + i,)), task)


def test_every_engine_is_sent_the_same_tokens_and_its_own_hints() -> None:
    prompts = synthetic("s", Shape(), 3, 2, WORDS).rounds[1]
    for baseline in BASELINES:
        calls = baseline.calls(prompts, "cell", 1, 2.0)
        assert [call.arrival_s for call in calls] == [0.0, 0.5, 1.0]
        assert [call.forced for call in calls] == [p.output for p in prompts]
        assert [Counter(c.prompt) for c in calls] == [Counter(p.ids) for p in prompts]
        assert (calls[0].prompt != prompts[0].ids) == baseline.reordered
        for call, prompt in zip(calls, prompts):
            if baseline.process != "connector":
                assert call.hints is None
                continue
            assert call.hints is not None
            assert call.hints["segments"] == list(prompt.lengths)
            assert call.hints["size"] == (1 if baseline.one_by_one else 3)
            wanted = None if baseline.name == "tokendance" else "cacheblend"
            assert call.hints.get("backend") == wanted


def test_engines_differ_in_nothing_but_what_they_are() -> None:
    base = EngineSettings("model", tokendance=False, pages=50, threads=3)
    for baseline in BASELINES:
        settings = baseline.settings(base, 4.0)
        assert replace(settings, tokendance=False, offload_gib=None) == base
        arguments = settings.engine_arguments()
        assert arguments["num_gpu_blocks_override"] == 51
        assert ("kv_transfer_config" in arguments) == (baseline.process == "connector")
        assert arguments.get("kv_offloading_size") == (4.0 if baseline.name == "offload" else None)


# -- figures --------------------------------------------------------------------------------------


def test_largest_number_under_the_target() -> None:
    points = [(8, 9.0), (2, 1.0), (4, 3.0)]
    assert under(points, 3.0) == (4, 4.0)
    assert under(points, 6.0) == (4, 6.0)
    assert under(points, 0.5) == (0, 1.0)
    assert under(points, 100.0) == (8, 8.0)
    assert under([(2, 1.0), (4, 3.0), (8, 2.0)], 2.5) == (8, 8.0)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 100)), min_size=1, max_size=6),
    st.floats(0.01, 100),
)
def test_interpolation_lies_between_the_neighbours(
    measured: list[tuple[int, float]], target: float
) -> None:
    points = list(dict(measured).items())
    found = under(points, target)
    assert found.agents == max([n for n, s in points if s <= target], default=0)
    larger = [n for n, _ in points if n > found.agents]
    assert found.agents <= found.interpolated <= min(larger, default=found.agents) + 0.005


def result_of(calls: list[tuple[float, float]], **changes: Any) -> RoundResult:
    results = tuple(
        CallResult(str(i), first, last, (1,), 100, 20, None, slice(0), (first, last))
        for i, (first, last) in enumerate(calls)
    )
    end = max(last for _, last in calls)
    round_ = RoundResult(results, 1.0, 1.0, 2.0, end, 5, None, mean_pages=4.0, preemptions=1)
    return replace(round_, **changes)


def test_an_agents_clock_starts_at_its_arrival() -> None:
    found = figures(result_of([(1.0, 3.0), (2.5, 4.0)]), qps=2.0)
    assert found["ttft_s"] == [1.0, 2.0]
    assert found["latency_s"] == [3.0, 3.5]
    assert (found["round_s"], found["cpu_s"], found["computed"]) == (4.0, 2.0, 160)


def test_gaps_of_the_bystander_count_while_the_round_lasts() -> None:
    result = result_of([(0.0, 0.0), (3.0, 5.0)])
    times = (0.0, 1.0, 2.0, 4.5, 5.5, 6.0)
    bystander = result.calls[0]._replace(token_s=times)
    result = replace(result, calls=(bystander, result.calls[1]))
    assert gaps_within(result, 1.5) == [1.0, 2.5, 1.0]
    assert percentile_ms([0.001, 0.003, 0.002], 50) == 2.0
    assert percentile_ms([0.001, 0.003, 0.002], 100) == 3.0


# -- a whole study on engines that only count -----------------------------------------------------


class CountingEngine:
    """Answers at once; fails when it is told to. A round takes a second for every agent."""

    started: ClassVar[list[EngineSettings]] = []
    played: ClassVar[list[str]] = []
    fail_after: ClassVar[int | None] = None

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.started.append(settings)

    def __enter__(self) -> CountingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass

    def ready(self) -> Ready:
        if self.settings.offload_gib is not None:
            raise EngineError("the engine failed during 'start': Exception: no host memory\n  log")
        return Ready("0", "cpu", "float32", 10, 100, ())

    def reset(self) -> None:
        pass

    def round(self, calls: list[Call], one_by_one: bool = False) -> RoundResult:
        if self.fail_after is not None and len(self.played) >= self.fail_after:
            raise EngineError("killed")
        self.played.append(calls[0].id)
        speed = 1.0 if self.settings.tokendance else 2.0
        return result_of([(0.5, speed * len(calls))] * len(calls))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[CountingEngine]:
    monkeypatch.setattr(capacity, "EngineProcess", CountingEngine)
    monkeypatch.setattr(CountingEngine, "started", [])
    monkeypatch.setattr(CountingEngine, "played", [])
    monkeypatch.setattr(CountingEngine, "fail_after", None)
    return CountingEngine


def session(cell: Cell) -> Session:
    return synthetic(cell.name, Shape(), cell.agents, 2, WORDS.reseeded(cell.name))


def study(*names: str) -> Study:
    base = EngineSettings("model", tokendance=False)
    baselines = tuple(BY_NAME[name] for name in names)
    return Study(baselines, (2, 4), (0.0,), 2, base, 1.0)


def measured(study: Study, partial: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    return run_study(study, session, WORDS, partial, lambda text: None)


def test_a_study_runs_every_cell_once_and_reports_what_does_not_start(
    engine: type[CountingEngine], tmp_path: Path
) -> None:
    names = ("prefix", "reordered", "offload", "cacheblend-serial", "tokendance")
    lines, skipped = measured(study(*names), tmp_path / "x.partial")
    assert len(engine.started) == 3  # one for each kind of process, whoever runs in it
    counted = [id_ for id_ in engine.played if not id_.startswith("warm")]
    cells = [f"{r}.{n}.0.{name}" for r in (0, 1) for n in (2, 4) for name in names]
    cells = [cell for cell in cells if "offload" not in cell]
    wanted = [f"{cell}.{index}.0" for cell in cells for index in (0, 1)]
    assert sorted(counted) == sorted([*wanted, "stranger0"])
    summary = summarise(lines, names, skipped, 7.0)
    assert summary["skipped"] == {"offload": "Exception: no host memory"}
    rows = {(row["engine"], row["agents"]): row for row in summary["rows"]}
    assert set(rows) == {(name, n) for name in names if name != "offload" for n in (2, 4)}
    assert rows["prefix", 4]["round_s"] == {"median": 8.0, "min": 8.0, "max": 8.0}
    assert rows["tokendance", 4]["round_s"]["median"] == 4.0
    assert (rows["prefix", 4]["peak_pages"], rows["prefix", 4]["preemptions"]) == (5, 1.0)
    largest = {row["engine"]: (row["agents"], row["interpolated"]) for row in summary["largest"]}
    assert largest["prefix"] == (2, 3.5)
    assert largest["tokendance"] == (4, 4.0)
    by_index = [(row["kind"], row["latency_s"]) for row in summary["latency_by_index"]]
    assert by_index[:4] == [("agents", 8.0)] * 4
    # The strangers arrive over the 8 s that the agents took, and every one is done after 8 s.
    assert by_index[4:] == [("independent", 8.0 - 2.0 * i) for i in range(4)]


def test_an_interrupted_study_goes_on_where_it_ended(
    engine: type[CountingEngine], tmp_path: Path
) -> None:
    partial = tmp_path / "x.partial"
    engine.fail_after = 9  # in the middle of a session
    with pytest.raises(EngineError):
        measured(study("prefix", "tokendance"), partial)
    before = [id_ for id_ in engine.played if not id_.startswith("warm")]
    kept = [json.loads(line) for line in partial.read_text().splitlines()]
    assert 0 < len(kept) < 8
    engine.fail_after, engine.played = None, []
    lines, _ = measured(study("prefix", "tokendance"), partial)
    after = [id_ for id_ in engine.played if not id_.startswith("warm")]
    again = set(before) & set(after)
    assert len(again) == 1  # the session that was cut off began anew
    assert lines[: len(kept)] == kept
    whole, _ = measured(study("prefix", "tokendance"), tmp_path / "other.partial")
    assert sorted(line["key"] for line in lines) == sorted(line["key"] for line in whole)


def test_a_finished_study_starts_no_engine(engine: type[CountingEngine], tmp_path: Path) -> None:
    first = measured(study("prefix", "tokendance"), tmp_path / "x.partial")
    started = len(engine.started)
    again = measured(study("prefix", "tokendance"), tmp_path / "x.partial")
    assert again == first
    assert len(engine.started) == started


# -- export ---------------------------------------------------------------------------------------


def test_export_writes_prompts_and_lengths_in_order(tmp_path: Path) -> None:
    path = WORKLOADS / "4_winning_the_election.jsonl"
    out = tmp_path / "folder" / "out.jsonl"
    requests = [r for round_ in Trace(path).rounds() for r in round_.requests]
    assert export(path, out, Splitter(), 64) == len(requests)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for line, request in zip(lines, requests, strict=True):
        assert line["prompt"] == "".join(part.segment.text for part in request.parts)
        assert request.output is not None
        assert line["output_tokens"] == len(request.output.text.split())


def test_export_of_a_chat_is_the_rendered_conversation(tmp_path: Path) -> None:
    header = {
        **{"type": "trace", "format": "allgather-trace/1", "name": "n", "scenario": "s"},
        **{"size": "small", "framework": "f", "agents": [{"id": "a", "name": "A"}]},
        **{"rounds": 1, "history_rounds": 1, "render": "chat"},
    }
    part = {"type": "segment", "id": "t", "author": "x", "origin": "memory", "text": "Hello.\n"}
    request = {
        **{"type": "request", "round": 0, "agent": "a", "arrival_ms": 0},
        "segments": [{"kind": "private", "id": "t", "role": "user"}],
    }
    trace = tmp_path / "chat.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in (header, part, request)))
    out = tmp_path / "out.jsonl"
    assert export(trace, out, Splitter(), 9) == 1
    assert json.loads(out.read_text()) == {
        "prompt": "<user>Hello.\n<assistant>",
        "output_tokens": 9,
    }
