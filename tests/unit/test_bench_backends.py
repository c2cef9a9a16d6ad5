"""`tokendance bench backends` on a tiny model: towns, donors, cells, resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
import tiny
import torch

from tokendance.bench import backends
from tokendance.bench.backends import Case, Method, changed_blocks, closeness
from tokendance.bench.roundbench import first_tokens
from tokendance.bench.rounds import PAGE, LastRound, donor_plan, last_round, leader_plan
from tokendance.bench.town import HISTORY_TOKENS, SEGMENT_TOKENS, SEGMENTS, sentences, write_town
from tokendance.bench.trace import Trace, TraceError
from tokendance.cli import main
from tokendance.engines.reference.model import Model
from tokendance.plan.reuse_plan import Copy
from tokendance.reuse.collective import MemberOutcome, PassOutcome
from tokendance.types import Rows

WORKLOADS = Path(__file__).parents[2] / "benchmarks/workloads/small"


class Words:
    """A tokenizer of which every word is one token of the tiny model."""

    bos: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [crc32(word.encode()) % tiny.VOCAB for word in text.split()]

    def chat(self, messages: list[dict[str, str]]) -> str:
        raise AssertionError("a town has no chat")


def count(text: str) -> int:
    return len(text.split())


POOL = [f"Sentence {a} {b} has {'very ' * (b % 7)}few words." for a in range(60) for b in range(60)]


@pytest.fixture
def town(tmp_path: Path) -> Path:
    return write_town(tmp_path / "town.jsonl", POOL, 3, count, SEGMENTS)


def tiny_round(town: Path, agents: int = 3) -> LastRound:
    """Short enough for the tiny model's 256 positions: the first four shared texts, cut."""
    round_ = last_round(town, Words(), agents)

    def cut(prompt):  # type: ignore[no-untyped-def]
        pieces = [p._replace(ids=p.ids[:21]) for p in prompt.pieces]
        shared = [p for p in pieces if p.kind == "shared"][:5]
        return replace(prompt, pieces=(pieces[0], *shared, pieces[-1]), output=prompt.output[:9])

    kept = tuple(map(cut, round_.prompts))
    return LastRound(round_.name, kept, (0,) * agents, tuple(map(cut, round_.donors)))


def test_a_town_is_deterministic_and_has_the_promised_shape(town: Path, tmp_path: Path) -> None:
    again = write_town(tmp_path / "again.jsonl", POOL, 3, count, SEGMENTS)
    other = write_town(tmp_path / "other.jsonl", POOL, 4, count, SEGMENTS)
    assert again.read_bytes() == town.read_bytes() != other.read_bytes()
    first, second = Trace(town).rounds()
    said = [request.output for request in first.requests]
    for request in second.requests:
        history, *shared, _scene, _task = [part.segment for part in request.parts]
        assert HISTORY_TOKENS[0] <= count(history.text) <= HISTORY_TOKENS[1]
        assert shared == said
        assert all(SEGMENT_TOKENS[0] <= count(s.text) <= SEGMENT_TOKENS[1] for s in shared)
    texts = "".join(s.text for s in [*said, *(r.parts[0].segment for r in first.requests)] if s)
    used = [sentence for sentence in POOL if sentence in texts]
    assert all(texts.count(sentence) == 1 for sentence in used) and len(used) > 100


def test_a_town_says_when_it_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="too few sentences"):
        write_town(tmp_path / "t", POOL[:20], 0, count)
    with pytest.raises(TraceError, match="2 to 20 agents"):
        write_town(tmp_path / "t", POOL, 0, count, 21)


def test_sentences_are_plain_text_of_the_traces() -> None:
    pool = sentences([WORKLOADS / "5_information_outbreak.jsonl"])
    assert len(pool) == len(set(pool)) > 50
    assert not any(set(s) & set('{}":[]\n') for s in pool)


def test_donors_are_the_contexts_in_which_the_shared_texts_were_written(town: Path) -> None:
    round_ = last_round(town, Words(), 4)
    assert [p.agent for p in round_.prompts] == [p.agent for p in round_.donors[:4]]
    assert len(round_.donors) == SEGMENTS
    for donor, piece in zip(round_.donors, round_.prompts[0].pieces[1:]):
        assert donor.pieces[-2].ids == piece.ids  # the answer, behind the author's own prompt
    for prompt, cached in zip(round_.prompts, round_.cached):
        assert cached == len(prompt.pieces[0].ids) // PAGE * PAGE


def test_plans_take_rows_from_the_leader_or_from_the_authors(town: Path) -> None:
    round_ = last_round(town, Words(), 3)
    pages = [tuple(range(100 * i, 100 * i + 60)) for i in range(3 + SEGMENTS)]
    by_leader = leader_plan(round_, pages[:3])
    assert by_leader.leader == 0 and not by_leader.members[0].copies
    by_author = donor_plan(round_, pages[:3], pages[3:])
    for plan, members in ((by_leader, by_leader.members[1:]), (by_author, by_author.members)):
        for member in members:
            shared = [p for p in round_.prompts[0].pieces if p.kind == "shared"][:SEGMENTS]
            assert sum(c.length for c in member.copies) >= sum(len(p.ids) for p in shared)
            assert {plan.tables[c.source].request_id[0] for c in member.copies} <= {"r", "d"}
    owners = {by_author.tables[c.source].request_id for c in by_author.members[0].copies}
    assert owners == {f"donor{i}" for i in range(SEGMENTS)}


def test_cells_measure_what_their_methods_do(town: Path, tmp_path: Path) -> None:
    model = Model.from_hf(tiny.hf_model())
    case = Case("town.3", 3, lambda: tiny_round(town), backends.METHODS)
    lines = backends.run_cases([case], model, tmp_path / "p", lambda text: None)
    by_key = {(x["backend"], x["source"], x["ratio"]): x for x in lines}
    assert len(by_key) == len(backends.METHODS) + 1
    full = by_key["full", "leader", 1.0]
    assert full["kl_end"] < 1e-6 and full["kl_cont"] < 1e-6 and full["top1"] == 1.0
    assert full["changed_blocks"] == 1.0
    naive, zero = by_key["naive", "donors", 0.0], by_key["cacheblend", "donors", 0.0]
    region = by_key["region", "leader", 0.0]
    assert naive["changed_blocks"] == zero["changed_blocks"] == region["changed_blocks"] == 0.0
    assert naive["kl_end"] == pytest.approx(zero["kl_end"], abs=1e-5) and naive["kl_end"] > 1e-4
    rows = [by_key["cacheblend", "donors", r]["rows"] for r in backends.RATIOS]
    assert rows == sorted(set(rows)) and zero["checked_rows"] > 0
    serial, lock_step = by_key["cacheblend-serial", "donors", 0.15], backends.LOCK_STEP
    same = by_key[lock_step.backend, lock_step.source, lock_step.ratio]
    for name in ("kl_end", "kl_cont", "top1", "rows", "changed_blocks"):
        assert serial[name] == pytest.approx(same[name], abs=1e-5)
    totals = backends.summary(lines)
    assert {t["over"] for t in totals} == {"towns"} and len(totals) == len(lines)


def test_an_interrupted_run_goes_on_where_it_ended(town: Path, tmp_path: Path) -> None:
    model, partial = Model.from_hf(tiny.hf_model()), tmp_path / "p"
    methods = (backends.REGION, Method("naive", "donors", 0.0))
    loads: list[int] = []

    def load() -> LastRound:
        loads.append(1)
        return tiny_round(town, 2)

    case = Case("town.3", 2, load, methods)
    lines = backends.run_cases([case], model, partial, lambda text: None)
    kept = partial.read_text().splitlines(keepends=True)
    partial.write_text("".join(kept[:1]) + kept[1][:30])  # cut off within a line
    said: list[str] = []
    again = backends.run_cases([case], model, partial, said.append)
    assert said[0] == "3 cells, 1 of them done before"
    assert [x["key"] for x in again] == [x["key"] for x in lines]
    assert again[0] == lines[0] and again[1]["kl_end"] == pytest.approx(lines[1]["kl_end"])
    assert all(json.loads(line) for line in partial.read_text().splitlines())
    backends.run_cases([case], model, partial, said.append)
    assert len(loads) == 2


def test_first_tokens_stay_within_the_ratio(town: Path) -> None:
    round_ = last_round(town, Words(), 2)
    pages = [tuple(range(100 * i, 100 * i + 60)) for i in range(2 + SEGMENTS)]
    plan = donor_plan(round_, pages[:2], pages[2:])
    lengths = [c.length for m in plan.members for c in m.copies if not c.exact]
    for ratio in (0.0, 0.05, 0.15, 0.3, 1.0):
        tokens = first_tokens(plan, ratio)
        taken = [sum(min(n, t) for n in lengths) for t in (tokens, tokens + 1)]
        assert taken[0] <= ratio * sum(lengths)
        assert taken[1] > ratio * sum(lengths) or ratio == 1.0


def test_changed_blocks_counts_blocks_from_the_start_of_each_piece(town: Path) -> None:
    round_ = last_round(town, Words(), 2)
    plan = leader_plan(round_, [tuple(range(60)), tuple(range(60, 120))])
    follower = replace(
        plan.members[1], copies=(Copy(0, 7, 10, 70), Copy(0, 100, 90, 32))
    )  # blocks [10, 42), [42, 74), [74, 80) and [90, 122)
    plan = replace(plan, members=(plan.members[0], follower))
    done = [
        MemberOutcome(plan.members[0].request_id, 0.0, ()),
        MemberOutcome(follower.request_id, 0.0, (Rows(41, 43), Rows(121, 122))),
    ]
    assert changed_blocks(plan, PassOutcome(1, 0, 0, members=tuple(done))) == 3 / 4


def test_closeness_of_followers() -> None:
    logits = [torch.randn(4, 9).numpy(), torch.randn(3, 9).numpy()]
    assert closeness(logits, logits) == {"kl_end": 0.0, "kl_cont": 0.0, "top1": 1.0}
    moved = [logits[0].copy(), logits[1]]
    moved[0][0] = -moved[0][0]
    found = closeness(logits, moved)
    p, q = (torch.from_numpy(x[0][0]).log_softmax(-1) for x in (logits, moved))
    assert found["kl_end"] == pytest.approx(float((p.exp() * (p - q)).sum()) / 2, abs=1e-5)
    assert found["kl_cont"] == 0.0 and found["top1"] == round(6 / 7, 4)


def test_the_command_writes_what_a_table_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("tokendance.bench.render.HFTokenizer", lambda folder: Words())
    monkeypatch.setattr(Model, "load", lambda folder: Model.from_hf(tiny.hf_model()))
    out = tmp_path / "results/backends.json"
    command = ["bench", "backends", "--model", str(tmp_path), "--quick", "--out", str(out)]
    assert main([*command, "--trace", str(tmp_path / "none.jsonl")]) == 1
    assert "cannot open the trace" in capsys.readouterr().err
    out.with_suffix(".partial").write_text("")
    assert main([*command, "--resume"]) == 1  # begun with that trace
    assert "with other settings" in capsys.readouterr().err
    assert main(command) == 0
    assert "KL end" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert {"machine", "versions", "command", "settings", "summary", "rows"} <= result.keys()
    assert str(tmp_path) not in out.read_text()
    assert [row["backend"] for row in result["rows"]] == [
        *("region", "cacheblend", "legolink", "cacheblend-serial")
    ]
    for row in result["rows"]:
        assert row.keys() >= {
            *("backend", "ratio", "trace", "agents", "kl_end", "kl_cont", "top1", "rows"),
            *("changed_blocks", "cpu_ratio_plain", "cpu_ratio_serial_cacheblend"),
        }
    assert result["rows"][-1]["cpu_ratio_serial_cacheblend"] == 1.0
    assert [path.name for path in out.parent.iterdir()] == [out.name]
