"""`tokendance bench collective` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch

from tokendance.bench import collective
from tokendance.bench.collective import Shape, make_round, measure
from tokendance.bench.prefill import Words
from tokendance.bench.roundbench import LOCK_STEP, PLAIN, REGION, SERIAL, RoundBench
from tokendance.bench.rounds import PAGE
from tokendance.cli import main
from tokendance.engines.reference.model import Model

SHAPE = Shape(history=37, blocks=3, block=20, task=5)


def words() -> Words:
    return Words([i * i % tiny.VOCAB for i in range(500)], seed=1)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_hf(tiny.hf_model())


def test_a_round_shares_its_texts_and_nothing_else() -> None:
    round_ = make_round(SHAPE, 4, words())
    assert len(round_.prompts) == 4 and len(round_.donors) == SHAPE.blocks
    assert {p.pieces[1:-1] for p in round_.prompts} == {round_.prompts[0].pieces[1:-1]}
    assert [len(p.pieces[0].ids) for p in round_.prompts] == [37, 38, 39, 40]
    assert len({p.pieces[0].ids for p in (*round_.prompts, *round_.donors)}) == 7
    assert set(round_.cached) == {PAGE}  # whole pages of the histories
    for donor, text in zip(round_.donors, round_.prompts[0].pieces[1:-1]):
        assert donor.pieces[1].ids == text.ids


@torch.inference_mode()
def test_the_methods_do_what_they_are_compared_for(model: Model) -> None:
    round_ = make_round(SHAPE, 4, words())
    with RoundBench(round_, model) as bench:
        found = {m: bench.fill(m) for m in (PLAIN, REGION, SERIAL, LOCK_STEP)}
        again = bench.fill(PLAIN)
    plain = found[PLAIN].ends
    for prompt, end in zip(round_.prompts, plain):
        assert torch.allclose(end, tiny.oracle(list(prompt.ids))[-1], atol=1e-4)
    assert torch.equal(plain, again.ends)  # a fill leaves nothing behind
    region = found[REGION].ends
    assert torch.allclose(region[0], plain[0], atol=1e-4)  # the leader is exact
    assert (region[1:] - plain[1:]).abs().amax(1).min() > 1e-3  # the followers are not
    # Serial and lock step recompute the same rows, so they are two ways to the same answer.
    serial, lock_step = found[SERIAL], found[LOCK_STEP]
    assert torch.allclose(serial.ends, lock_step.ends, atol=1e-4)
    assert serial.outcome and lock_step.outcome and found[REGION].outcome
    assert serial.outcome.computed_rows == lock_step.outcome.computed_rows
    assert (serial.outcome.forwards, lock_step.outcome.forwards) == (4, 1)
    own = sum(len(p.ids) - PAGE - SHAPE.shared - 1 for p in round_.prompts)
    assert found[REGION].outcome.computed_rows == own + SHAPE.shared


def test_measure_divides_seconds_of_the_same_repetition(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {PLAIN: 8.0, SERIAL: 4.0, LOCK_STEP: 2.0, REGION: 1.0}
    order = []

    def fill(self, method, original=RoundBench.fill):  # type: ignore[no-untyped-def]
        order.append(method)
        slow = 1 + (len(order) - 2) // 4  # the machine gets slower from repetition to repetition
        return original(self, method)._replace(cpu_s=seconds[method] * slow, wall_s=0.5 * slow)

    monkeypatch.setattr(RoundBench, "fill", fill)
    rows = measure(SHAPE, 3, words(), model, 3, lambda text: None)
    assert [order[i] for i in (1, 5, 9)] == list(collective.METHODS[:3])
    by_name = {row["backend"]: row for row in rows}
    assert by_name["region"]["cpu_s"] == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert by_name["region"]["seconds"] == {"median": 1.0, "min": 0.5, "max": 1.5}
    flat = [dict.fromkeys(("median", "min", "max"), x) for x in (4.0, 8.0, 2.0, 4.0)]
    names = [(b, n) for b in ("region", "cacheblend") for n in ("over_serial", "over_plain")]
    assert [by_name[b][n] for b, n in names] == flat


def test_the_command_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("tokendance.bench.render.HFTokenizer", FakeTokenizer)
    monkeypatch.setattr(Model, "load", lambda folder: Model.from_hf(tiny.hf_model()))
    out = tmp_path / "results/collective.json"
    command = ["bench", "collective", "--model", str(tmp_path), "--out", str(out), "--repeat", "1"]
    command += ["--history", "33", "--blocks", "2", "--block", "9"]
    assert main([*command, "--agents", "1"]) == 1
    assert "two agents at least" in capsys.readouterr().err
    real, calls = collective.measure, []

    def failing(shape, agents, *rest):  # type: ignore[no-untyped-def]
        calls.append(agents)
        if agents == 3 and calls.count(3) == 1:
            raise KeyboardInterrupt
        return real(shape, agents, *rest)

    monkeypatch.setattr(collective, "measure", failing)
    with pytest.raises(KeyboardInterrupt):
        main([*command, "--agents", "2", "3"])
    assert main([*command, "--agents", "2", "3", "--resume"]) == 0
    assert calls == [2, 3, 3]
    result = json.loads(out.read_text())
    assert {"machine", "versions", "command", "model", "repetitions", "rows"} <= result.keys()
    assert [(row["agents"], row["backend"]) for row in result["rows"]] == [
        (n, backend) for n in (2, 3) for backend in ("region", "cacheblend")
    ]
    for row in result["rows"]:
        assert (row["history"], row["shared"]) == (33, 18)
        assert row["over_serial"]["median"] > 0 and row["seconds"]["median"] > 0
    assert [path.name for path in out.parent.iterdir()] == [out.name]


class FakeTokenizer:
    bos: tuple[int, ...] = ()

    def __init__(self, folder: Path) -> None: ...

    def encode(self, text: str) -> list[int]:
        return [len(word) * 7 % tiny.VOCAB for word in text.split()]
