"""The gate: identity of a model, verdicts that are kept, needles, and what is judged."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tokendance import gate
from tokendance.bench.engine_process import CallResult, RoundResult
from tokendance.bench.measure import Bound, compare
from tokendance.bench.needle import LEAD, QUESTION, hide, recalled
from tokendance.bench.render import Renderer
from tokendance.bench.replay import RoundReport
from tokendance.bench.trace import Trace, TraceError
from tokendance.cli import gate as command
from tokendance.cli import main

WORKLOADS = Path(__file__).parents[2] / "benchmarks/workloads/small"
VOCAB = 256


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 1000000}')
    (folder / "model.safetensors").write_bytes(bytes(1 << 20))
    return folder


def verdict(**figures: float) -> gate.Verdict:
    found = {"kl": 0.01, "top1": 0.98, "recall_exact": 1.0, "recall_reuse": 1.0, **figures}
    return gate.Verdict("m", "region", problems=gate.judge(gate.Limits(), **found), **found)


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({}, ""),
        ({"kl": 0.05, "top1": 0.9, "recall_exact": 0.6, "recall_reuse": 0.5}, ""),
        ({"kl": 0.051}, "KL 0.0510 is above 0.05"),
        ({"top1": 0.89}, "top-1 agreement 0.890 is below 0.9"),
        ({"recall_reuse": 0.5}, "needle recall falls from 1.00 to 0.50"),
        ({"recall_exact": 0.0, "recall_reuse": 0.0}, ""),
        ({"kl": float("nan")}, "KL nan is above"),
    ],
)
def test_limits(figures: dict[str, float], says: str) -> None:
    found = verdict(**figures)
    assert found.passed == (not says)
    assert says in "; ".join(found.problems)


def test_only_the_verdict_on_this_model_backend_and_version_counts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def objection(folder: Path = model, backend: str = "region", **options: Any) -> str:
        return gate.objection(str(folder), None, backend, options)

    assert "run `tokendance gate`" in objection()
    gate.store(verdict(), str(model), None, {})
    assert objection() == ""
    assert objection(backend="cacheblend") and objection(ratio=0.3)
    moved = tmp_path / "moved"
    shutil.copytree(model, moved)
    assert objection(moved) == ""
    (moved / "config.json").write_text('{"max_position_embeddings": 1}')
    assert objection(moved)
    gate.store(verdict(kl=1.0), str(model), None, {})
    assert objection() == "the model did not pass the gate: KL 1.0000 is above 0.05"
    gate.store(verdict(), str(model), None, {})
    monkeypatch.setattr(gate, "__version__", "99.0")
    assert "TokenDance 99.0" in objection()


@pytest.mark.parametrize("byte", [0, (1 << 20) // 2, (1 << 20) - 1])
def test_other_weights_of_the_same_size_are_another_model(model: Path, byte: int) -> None:
    before = gate.model_key(str(model))
    weights = bytearray((model / "model.safetensors").read_bytes())
    # A training step changes nearly all weights; here a quarter around one place.
    for i in range(max(0, byte - (1 << 18)), min(len(weights), byte + (1 << 18))):
        weights[i] = 1
    (model / "model.safetensors").write_bytes(weights)
    assert gate.model_key(str(model)) != before


def test_names_without_a_snapshot_and_broken_verdicts(model: Path) -> None:
    assert gate.model_key("nobody/nothing-here", "abc") == "nobody/nothing-here@abc"
    assert gate.model_key("nobody/nothing-here") == "nobody/nothing-here@main"
    path = gate.store(verdict(), str(model), None, {})
    for text in ("{", "[]", "{}", '{"passed": 1, "problems": []}'):
        path.write_text(text)
        assert gate.objection(str(model), None, "region", {})


class Letters:
    """Every character is a token."""

    bos: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [min(ord(c), VOCAB - 1) for c in text]

    def chat(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[answer]"


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def test_a_needle_is_hidden_once_in_a_text_that_all_read() -> None:
    trace = Trace(WORKLOADS / "1_meet_and_greet.jsonl")
    *_, last = trace.rounds()
    facts, places = set(), set()
    for seed in range(12):
        needle = hide(last.requests, Renderer(Letters(), trace.header.render), seed)
        facts.add(needle.fact)
        for prompt in needle.prompts:
            text = text_of(prompt.ids)
            assert text.count(f"The secret word of the day is {needle.fact}.") == 1
            assert text.endswith(QUESTION)
            assert text_of(prompt.output) == f"{LEAD} {needle.fact}"
            assert text_of(prompt.output[-needle.answer :]) == f" {needle.fact}"
            (holder,) = [p for p in prompt.pieces if needle.fact in text_of(p.ids)]
            assert holder.kind == "shared"
            places.add(holder.ids[:30])
    assert len(facts) > 6 and len(places) > 3
    first, *_ = trace.rounds()
    private = [r for r in first.requests if r.agent == first.requests[0].agent]
    parts = tuple(p for p in private[0].parts if p.kind != "shared")
    with pytest.raises(TraceError, match="a needle needs a shared text"):
        hide([private[0].__class__(0, "a", 0.0, parts)], Renderer(Letters()), 0)


def result(folder: Path, name: str, calls: Sequence[Any], says: Callable[[Any, int], int]) -> Any:
    """What an engine would answer: per call and step, the token that `says` gives is likeliest."""
    rows, results = [], []
    for call in calls:
        start = len(rows)
        for step in range(len(call.forced)):
            logits = np.zeros(VOCAB, np.float32)
            logits[says(call, step)] = 9.0
            rows.append(logits)
        outcome = {"tokendance": {"rows": {"sibling": 0 if call.id.endswith(".0") else 90}}}
        results.append(
            CallResult(
                call.id,
                0.1,
                0.2,
                call.forced,
                len(call.prompt),
                0,
                outcome,
                slice(start, len(rows)),
            )
        )
    path = folder / f"{name}.npy"
    np.save(path, np.stack(rows))
    return RoundResult(tuple(results), 1.0, 1.0, 1.0, 1.0, 1, str(path))


def stub_replay(folder: Path, wrong: Callable[[bool, int], bool]) -> type:
    """A Replay whose engines say the forced tokens, except where `wrong(needle, agent)`."""

    class Stub:
        def __init__(self, settings: Any, tokenizer: Any) -> None:
            self.header = Trace(settings.trace).header
            self.agents = settings.agents
            render, wanted = Renderer(tokenizer), {a.id for a in self.header.agents[: self.agents]}
            rounds = list(Trace(settings.trace).rounds())[: settings.rounds]
            self.prompts = [
                tuple(render(r) for r in round_.requests if r.agent in wanted) for round_ in rounds
            ]
            self.bounds = [Bound(2, 1)] * len(self.prompts)
            self.ready = (None, SimpleNamespace(vllm="0", dtype="float32", device="cpu"))
            self.traced = len(self.prompts)

        def run(self, progress: Any) -> Iterator[RoundReport]:
            for index, prompts in enumerate(self.prompts):
                calls = [
                    SimpleNamespace(id=f"{index}.{i}", prompt=p.ids, forced=p.output)
                    for i, p in enumerate(prompts)
                ]

                def ours(call: Any, step: int, needle: bool = index >= self.traced) -> int:
                    agent, token = int(call.id.split(".")[1]), int(call.forced[step])
                    return token ^ 1 if wrong(needle, agent) else token

                exact = result(folder, "exact", calls, lambda call, step: call.forced[step])
                other = result(folder, "other", calls, ours)
                yield RoundReport(
                    0, index, self.bounds[index], exact, other, tuple(compare(exact, other))
                )

    return Stub


@pytest.mark.parametrize(
    ("wrong", "status", "problems"),
    [
        (lambda needle, agent: False, 0, 0),
        (lambda needle, agent: agent == 0, 0, 0),  # the leader is exact and not judged
        (lambda needle, agent: needle and agent == 1, 1, 1),
        (lambda needle, agent: not needle and agent == 1, 1, 2),
    ],
)
def test_the_command_judges_the_followers(
    wrong: Callable[[bool, int], bool],
    status: int,
    problems: int,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "Replay", stub_replay(tmp_path, wrong))
    monkeypatch.setattr(command, "HFTokenizer", lambda model: Letters())
    options = ["--tokendance", '{"backend": "legolink", "require_gate": true}']
    assert main(["gate", str(model), "--rounds", "2", "--needles", "2", *options]) == status
    path = Path(capsys.readouterr().out.split("kept in ")[1].strip())
    kept = json.loads(path.read_text())
    assert len(kept["problems"]) == problems and kept["passed"] == (status == 0)
    assert kept["recall_exact"] == 1.0 and kept["details"]["needles"] == 6
    assert (gate.objection(str(model), None, "legolink", {}) == "") == (status == 0)
    assert gate.objection(str(model), None, "region", {})


def test_recall_needs_all_tokens_of_the_fact(tmp_path: Path) -> None:
    calls = [SimpleNamespace(id="0.1", prompt=(1,), forced=(10, 11, 12, 13))]
    for miss, found in ((None, 1), (0, 1), (1, 1), (2, 0), (3, 0)):
        said = result(
            tmp_path, "x", calls, lambda call, step, miss=miss: call.forced[step] ^ (step == miss)
        )
        assert recalled(said, 2, [0]) == found


def test_nothing_to_judge_is_no_verdict(
    model: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    assert main(["gate", str(model), "--tokendance", '{"mood": 1}']) == 2
    assert main(["gate", "./no/such/folder"]) == 2
    assert "tokendance gate:" in capsys.readouterr().err
    assert not list(cache.rglob("*.json"))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert parser.parse_args(["m"]).max_kl == gate.Limits().max_kl
