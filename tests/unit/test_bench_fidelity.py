"""`tokendance bench fidelity` on a tiny model: prompts, sessions, and what they are compared by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from test_bench_backends import POOL, Words, count

from tokendance.bench import fidelity
from tokendance.bench.cast import LETTERS, Cast, Question, town_requests
from tokendance.bench.fidelity import (
    Answers,
    Run,
    Session,
    Settings,
    closeness,
    divergence,
    measure,
    play_along,
    play_exact,
    play_live,
    summary,
)
from tokendance.bench.render import Renderer
from tokendance.bench.town import write_town
from tokendance.bench.trace import Trace, TraceError
from tokendance.cli import main
from tokendance.engines.reference.model import Model
from tokendance.reuse.mover import Mover

SETTINGS = Settings(rounds=3, tokens=6, needles=1)


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_town(tmp_path_factory.mktemp("town") / "town.jsonl", POOL, 3, count)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_hf(tiny.hf_model())


@pytest.fixture(scope="module")
def cast(town: Path) -> Cast:
    *_, last = Trace(town).rounds()
    requests = town_requests(last.requests[:3], texts=2)
    return Cast(requests, ("Ada", "Boris", "Clara"), Renderer(Words()), window=2)


@pytest.fixture(scope="module")
def exact(cast: Cast, model: Model) -> Run:
    with torch.inference_mode():
        return play_exact(cast, model, SETTINGS)


def said(rounds: int) -> list[list[list[int]]]:
    return [[[10 * r + a, 5, 6] for a in range(3)] for r in range(rounds)]


def test_prompts_quote_the_last_rounds_before_the_task(cast: Cast) -> None:
    first, later = cast.prompts([]), cast.prompts(said(3))
    for a, b in zip(first, later):
        assert b.pieces[-1] == a.pieces[-1] and b.pieces[: len(a.pieces) - 1] == a.pieces[:-1]
        quotes = [p.ids for p in b.pieces[len(a.pieces) - 1 :] if p.kind == "shared"]
        assert quotes == [tuple(ids) for answers in said(3)[1:] for ids in answers]
    assert first[0].pieces[0] == first[1].pieces[0]  # the system prompt
    assert first[0].pieces[1] != first[1].pieces[1]  # the histories
    assert cast.limit(6) >= max(len(p.ids) for p in later) + 6


def test_stop_tokens_are_not_quoted(cast: Cast) -> None:
    stopped = replace(cast, stop=frozenset([6]))
    assert stopped.quoted([4, 5, 6]).ids == (4, 5)
    assert stopped.quoted([6, 5]).ids == (6, 5)


def test_a_judgement_offers_the_answers_of_the_last_round(cast: Cast) -> None:
    question = cast.judgement(said(2))
    assert len(question.ids) == 3
    assert question.ids == tuple(Words().encode(letter)[0] for letter in LETTERS[:3])
    for prompt, before in zip(question.prompts, cast.prompts(said(1))):
        assert prompt.ids[: len(before.ids) - 20] == before.ids[: len(before.ids) - 20]
        assert [p.ids for p in prompt.pieces if p.kind == "shared"][-3:] == [
            tuple(ids) for ids in said(2)[-1]
        ]


def test_a_needle_stands_in_a_text_that_all_read(cast: Cast) -> None:
    needle = cast.needle(said(1), 0)
    for prompt, plain in zip(needle.prompts, cast.prompts(said(1))):
        changed = [p.ids for p in prompt.pieces if p not in plain.pieces and p.kind == "shared"]
        assert len(changed) == 1 and changed[0][-2] == needle.ids[0]
        assert prompt.output[-len(needle.ids) :] == needle.ids
        assert prompt.pieces[0] == plain.pieces[0]


def test_scenarios_that_cannot_be_played(cast: Cast) -> None:
    with pytest.raises(TraceError, match="2 to 26 agents"):
        replace(cast, requests=cast.requests[:1])
    endless = replace(cast.requests[0], parts=cast.requests[0].parts[:-1])
    with pytest.raises(TraceError, match="end with a task"):
        replace(cast, requests=(endless, cast.requests[1]))


def test_an_exact_run_is_what_the_model_says_to_its_own_answers(cast: Cast, exact: Run) -> None:
    history: list[list[list[int]]] = []
    for prompts, answers in exact.rounds:
        assert prompts == cast.prompts(history)
        for prompt, output, logits in zip(prompts, answers.outputs, answers.logits):
            truth = tiny.oracle([*prompt.ids, *output[:-1]])
            assert truth[len(prompt.ids) - 1 :].argmax(-1).tolist() == output
            assert np.allclose(logits[0], truth[len(prompt.ids) - 1], atol=1e-3)
        history.append(answers.outputs)
    for question, answers in exact.judgements + exact.needles:
        for prompt, logits in zip(question.prompts, answers.logits):
            truth = tiny.oracle([*prompt.ids, *prompt.output[:-1]])[len(prompt.ids) - 1 :]
            assert np.allclose(logits, truth, atol=1e-3)


@torch.inference_mode()
def test_exact_against_itself_never_diverges(cast: Cast, model: Model, exact: Run) -> None:
    again = play_live("exact", cast, model, SETTINGS)
    assert divergence(exact, again)["diverged_round"] is None
    figures = closeness(exact, play_along("exact", cast, model, SETTINGS, exact))
    assert figures["kl_end_max"] < 1e-6 and figures["top1"] == figures["judge_agreement"] == 1.0


@torch.inference_mode()
def test_reuse_is_close_and_a_broken_copy_is_not(
    cast: Cast, model: Model, exact: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for engine in fidelity.ENGINES[1:]:
        along = play_along(engine, cast, model, SETTINGS, exact)
        found[engine] = closeness(exact, along)["kl_end"]
        assert found[engine] > 1e-6
        for (_, ours), (_, truth) in zip(along.rounds, exact.rounds):
            assert ours.outputs == truth.outputs  # forced
        if engine in fidelity.OURS:  # the leader is exact
            assert np.allclose(
                along.rounds[-1][1].logits[0][0], exact.rounds[-1][1].logits[0], atol=1e-3
            )
    monkeypatch.setattr(Mover, "__call__", lambda self, layer: None)  # nothing is copied
    broken = play_live("tokendance", cast, model, SETTINGS)
    figures = divergence(exact, broken)
    assert figures["diverged_round"] == 0 and figures["share_same_outputs"] < 1
    assert figures["same_by_round"][0] >= 0.33  # the leader copies nothing
    worse = closeness(exact, play_along("tokendance", cast, model, SETTINGS, exact))
    assert worse["kl_end"] > 2 * found["tokendance"] and worse["top1"] < 1


@torch.inference_mode()
def test_a_session_gives_its_pages_back(cast: Cast, model: Model) -> None:
    session, history = Session("cacheblend-serial", cast, model, 4), []
    free = []
    for _ in range(5):
        history.append(session.play(cast.prompts(history)).outputs)
        session.ask(cast.judgement(history))
        free.append(session.engine.kv.free_pages)
    assert abs(free[-1] - free[-2]) <= 3  # a window of two rounds is held


def run_of(outputs: list[list[list[int]]], logits: np.ndarray) -> Run:
    answers = [Answers(round_, [logits] * len(round_)) for round_ in outputs]
    return Run([((), a) for a in answers], [], [])


def test_divergence_is_the_first_round_in_which_anybody_differs() -> None:
    logits = np.zeros((1, 3), dtype=np.float32)
    outputs = [[[1], [2]], [[1], [2]], [[1], [2]], [[1], [2]]]
    other = [[[1], [2]], [[1], [0]], [[1], [2]], [[0], [0]]]
    figures = divergence(run_of(outputs, logits), run_of(other, logits))
    assert figures["diverged_round"] == 1 and figures["rounds"] == 4
    assert figures["same_by_round"] == [1, 0.5, 1, 0]
    assert figures["share_same_outputs"] == 0.625


def test_judges_agree_on_what_the_texts_add_to_a_favourite_letter() -> None:
    def judged(*verdicts: tuple[float, float]) -> Run:
        run = run_of([[[1], [2]]], np.eye(1, 3, 1, dtype=np.float32))
        for verdict in verdicts:
            logits = np.array([[0.0, *verdict]], dtype=np.float32)
            answers = Answers([[], []], [logits, logits])
            run.judgements.append((Question((), (1, 2)), answers))
        return run

    exact = judged((5, 1), (5, 2), (5, 3))  # usually 5 and 2
    assert closeness(exact, exact)["exact_picks"] == 2
    assert closeness(exact, judged((5, 1), (5, 2), (4, 3)))["judge_agreement"] == 1.0
    assert closeness(exact, judged((5, 1), (5, 2), (5, 1.5)))["judge_agreement"] == round(2 / 3, 4)


def test_summary_says_in_what_tokendance_is_worse() -> None:
    good = {"rounds": 4, "diverged_round": None, "share_same_outputs": 1.0, "kl_end": 0.0}
    good |= {"top1": 1.0, "needle_recall": 0.5, "judge_agreement": 1.0}
    bad = {**good, "diverged_round": 3, "kl_end": 0.1, "top1": 0.9}

    def rows(ours: dict, theirs: dict) -> list[dict]:  # type: ignore[type-arg]
        pairs = zip(fidelity.ENGINES, (good, ours, good, theirs))
        return [{"engine": engine, **figures} for engine, figures in pairs]

    for theirs in (good, bad):
        found = summary(rows(good, theirs))["worse_than_serial_cacheblend"]
        assert found == {"tokendance": [], "tokendance-15": []}
    worse = summary(rows(bad, good))
    named = {"tokendance": ["diverged_round", "kl_end", "top1"], "tokendance-15": []}
    assert worse["worse_than_serial_cacheblend"] == named
    assert worse["means"]["tokendance"]["diverged_round"] == 3.0
    assert worse["means"]["exact"]["diverged_round"] == 4.0


def test_measure_has_a_row_per_engine(cast: Cast, model: Model) -> None:
    rows = measure("town", 3, cast, model, Settings(1, 4, 1), lambda text: None)
    assert [row["engine"] for row in rows] == list(fidelity.ENGINES)
    assert rows[0]["kl_end"] == 0.0 and rows[0]["diverged_round"] is None
    for row in rows:
        assert row["needles_asked"] == row["judgements"] == 2 and row["seed"] == 3


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    monkeypatch.setattr("tokendance.bench.render.HFTokenizer", lambda folder: Words())
    monkeypatch.setattr(Model, "load", lambda folder: Model.from_hf(tiny.hf_model()))
    out = tmp_path / "results/fidelity.json"
    command = ["bench", "fidelity", "--model", str(tmp_path), "--out", str(out)]
    assert main([*command, "--seeds", "0"]) == 1
    assert "nothing to play" in capsys.readouterr().err
    assert main([*command, "--quick"]) == 0
    assert "worse than serial CacheBlend in" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert {"machine", "versions", "command", "model", "repetitions"} <= result.keys()
    assert [row["trace"] for row in result["rows"]] == ["town.0"] * 4
    schema = {"engine", "trace", "seed", "rounds", "diverged_round", "share_same_outputs"}
    schema |= {"kl_end", "top1", "needle_recall", "judge_agreement"}
    assert all(schema <= row.keys() for row in result["rows"])
    assert str(tmp_path) not in out.read_text()
    assert [path.name for path in out.parent.iterdir()] == [out.name]
