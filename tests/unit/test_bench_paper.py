"""`tokendance bench prefill --paper`: rounds, bounds, calls and ratios; the engines are fakes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from test_bench_backends import POOL, Words, count

from tokendance.bench import paper
from tokendance.bench.engine_process import Call, CallResult, EngineSettings, Ready, RoundResult
from tokendance.bench.paper import Case, ModelShape, bench_paper, load, make_model, paper_calls
from tokendance.bench.town import write_town
from tokendance.bench.trace import TraceError
from tokendance.cli import main
from tokendance.cli.model import DEFAULT_FOLDER


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_town(tmp_path_factory.mktemp("town") / "town.jsonl", POOL, 3, count)


@dataclass
class Fake:
    """An engine that takes a CPU second for 100 rows; TokenDance finds half of them elsewhere."""

    settings: EngineSettings
    log: list[Any]

    def reset(self) -> None:
        self.log.append((self.settings.tokendance, "reset"))

    def ready(self) -> Ready:
        return Ready("0", "cpu", "float32", 1, 1, ())

    def round(self, calls: list[Call]) -> RoundResult:
        ours = self.settings.tokendance
        assert ours or all(call.hints is None for call in calls)
        self.log.append((ours, [call.id for call in calls]))
        rows = sum(len(call.prompt) for call in calls) / (200 if ours else 100)
        answers = tuple(
            CallResult(c.id, 0, 0, (), len(c.prompt), 32, None, slice(0)) for c in calls
        )
        return RoundResult(answers, rows, 2 * rows, rows, rows, 0, None)


class Fakes:
    log: list[Any] = []  # noqa: RUF012, one for all

    def __init__(self, model: str, threads: int) -> None:
        Fakes.log = []
        self.engines = [
            Fake(EngineSettings(model, ours, threads=threads), Fakes.log) for ours in (False, True)
        ]

    def __enter__(self) -> list[Fake]:
        return self.engines

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...


def test_a_round_has_the_rows_of_the_one_before_in_the_cache(town: Path) -> None:
    round_ = load(Case(town), Words())  # type: ignore[arg-type]
    assert (round_.index, len(round_.prompts)) == (1, 10)
    assert load(Case(town, last=True), Words()) == round_  # type: ignore[arg-type]
    for prompt, history in zip(round_.prompts, round_.histories):
        own = len(prompt.pieces[0].ids)
        assert history == prompt.ids[: own - own % 32]
    plain = sum(len(p.ids) - len(h) for p, h in zip(round_.prompts, round_.histories))
    shared = sum(len(p.ids) for p in round_.prompts[0].pieces if p.kind == "shared")
    assert round_.bound == (plain, plain - 9 * shared)


def test_one_round_alone_has_nothing_before_it(town: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in town.read_text().splitlines()]
    first = [x for x in lines if x["type"] != "request" or x["round"] == 0]
    first[0]["rounds"] = 1
    short = tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps(line) + "\n" for line in first))
    with pytest.raises(TraceError, match="one round alone"):
        load(Case(short), Words())  # type: ignore[arg-type]


def test_calls_announce_the_round_and_histories_do_not(town: Path) -> None:
    round_ = load(Case(town), Words())  # type: ignore[arg-type]
    calls, histories = paper_calls(round_, "0")
    assert len(calls) == len(histories) == 10
    for call, history, prompt in zip(calls, histories, round_.prompts):
        assert call.prompt == prompt.ids and history.prompt == prompt.ids[: len(history.prompt)]
        assert call.hints and sum(call.hints["segments"]) == len(prompt.ids)
        assert history.hints == {"mode": "exact"} and len(call.forced) == 1
    other, _ = paper_calls(round_, "1")
    assert other[0].hints and calls[0].hints
    assert other[0].hints["session"] != calls[0].hints["session"]
    without = replace(round_, histories=((), *round_.histories[1:]))
    assert len(paper_calls(without, "0")[1]) == 9


def test_ratios_are_of_the_same_turn_and_both_start_from_histories(
    town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "both", Fakes)
    round_ = load(Case(town), Words())  # type: ignore[arg-type]
    found = bench_paper(Path("model"), [round_], 2, 1, lambda text: None)
    (row,) = found["paper"]
    assert row["cpu_ratio"] == row["wall_ratio"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert row["cpu_s"]["median"] == round(row["prompt_tokens"] / 200, 4)
    assert row["row_bound"] == round(round_.bound.ratio, 2) and row["agents"] == 10
    assert row["computed"] == row["plain_computed"] == row["prompt_tokens"] - 320
    turns = Fakes.log[2:]  # after the warm-up
    assert [side for side, _ in turns[::3]] == [True, False, False, True]
    for at in range(0, len(turns), 3):
        reset, histories, calls = (what for _, what in turns[at : at + 3])
        assert reset == "reset" and histories == [f"{name}.history" for name in calls]


def test_each_part_of_the_result_keeps_the_other(
    town: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("tokendance.bench.render.HFTokenizer", lambda folder: Words())
    monkeypatch.setattr("tokendance.bench.commands.prefill.workloads", lambda size="small": town)
    monkeypatch.setattr(paper, "load", lambda case, tokenizer: load(Case(town), tokenizer))
    monkeypatch.setattr(paper, "make_model", lambda folder, tokenizer, shape: folder)
    monkeypatch.setattr(paper, "both", Fakes)
    out = tmp_path / "prefill.json"
    command = ["bench", "prefill", "--model", str(tmp_path), "--out", str(out)]
    out.write_text("not JSON")
    assert main([*command, "--paper"]) == 1
    assert "is no result" in capsys.readouterr().err
    before = {"command": "an earlier one", "machine": "another", "cold": {"cpu_ratio": 1}}
    out.write_text(json.dumps(before))
    assert main([*command, "--paper", "--quick"]) == 0
    result = json.loads(out.read_text())
    assert {name: result[name] for name in before} == before
    assert len(result["paper"]) == 1 and result["paper_model"]["hidden_size"] == 1024
    monkeypatch.setattr("tokendance.bench.prefill.bench_prefill", lambda *_: {"cold": 2})
    monkeypatch.setattr("tokendance.bench.prefill.words_of", lambda *_: None)
    assert main(command) == 0
    again = json.loads(out.read_text())
    assert again["cold"] == 2 and again["command"] != before["command"]
    assert {k: v for k, v in again.items() if k.startswith("paper")} == {
        k: v for k, v in result.items() if k.startswith("paper")
    }


@pytest.mark.skipif(not DEFAULT_FOLDER.exists(), reason="needs the small model's tokenizer")
def test_the_random_model_loads_and_is_as_large_as_it_says(tmp_path: Path) -> None:
    from tokendance.engines.reference.model import Model

    shape = ModelShape(64, 96, 2, 2, 1, 32, 4096)
    model = Model.load(make_model(tmp_path / "model", DEFAULT_FOLDER, shape))
    assert (len(model.layers), model.heads, model.kv_heads, model.head_dim) == (2, 2, 1, 32)
    assert model.layers[0].gate_up.weight.shape == (192, 64)
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["max_position_embeddings"] == 4096
