"""Finished agents in the store, and what later prompts get back from it, on real vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from audit import Audit, audited
from small_engine import Engine, Member, make_round, outcome, tokens
from stored_rounds import OPTIONS, next_round, play

from tokendance.engines.vllm.archive import _has
from tokendance.plan import reuse_plan
from tokendance.plan.reuse_plan import Copy, PageTable, ReusePlan
from tokendance.types import AgentId, RequestId, RoundId

pytestmark = pytest.mark.engine

Start = Callable[..., AbstractContextManager[Engine]]


@pytest.fixture(scope="module")
def engine(start_engine: Start) -> Iterator[Engine]:
    with start_engine(options=OPTIONS, disable_log_stats=False) as engine:
        yield engine


@pytest.fixture
def audit(engine: Engine) -> Iterator[Audit]:
    engine.forget()
    with audited(engine) as audit:
        yield audit


def test_a_history_that_left_the_prefix_cache_comes_back(engine: Engine, audit: Audit) -> None:
    first = make_round(1, 4, private=150)
    outputs = play(engine, first)
    engine.forget()
    second = next_round(first, outputs, 2)
    answers = play(engine, second)
    rows = [outcome(a)["rows"] for a in answers]
    assert all(r.get("stored", 0) > 300 for r in rows), rows
    assert sum(r.get("computed", 0) for r in rows) < 300
    leader = next(i for i, a in enumerate(answers) if outcome(a)["role"] == "leader")
    engine.forget()
    assert tokens(answers[leader]) == tokens(engine.ask_exactly(second[leader].prompt))


def test_a_single_request_gets_its_prompt_back(engine: Engine, audit: Audit) -> None:
    (member,) = make_round(20, 1, private=200)
    (first,) = play(engine, [member])
    engine.forget()
    (again,) = play(engine, [member])
    assert outcome(again)["role"] == "ordinary"
    assert outcome(again)["rows"]["stored"] > 300
    assert tokens(again) == tokens(first) == tokens(engine.ask_exactly(member.prompt))


def test_another_agent_gets_exact_rows_only(engine: Engine, audit: Audit) -> None:
    """Approximate rows of one agent's history are nothing that another one may find."""
    members = make_round(30, 3, private=100)
    outputs = play(engine, members)
    follower = next(i for i, o in enumerate(outputs) if outcome(o)["role"] == "follower")
    engine.forget()
    stranger = members[follower].hints | {"agent": "new", "round": "x", "size": 1}
    (answer,) = play(engine, [Member(members[follower].prompt, stranger)])
    assert 0 < outcome(answer)["rows"]["stored"] <= 100 + 3 * follower
    assert tokens(answer) == tokens(engine.ask_exactly(members[follower].prompt))


def test_salts_never_meet(engine: Engine, audit: Audit) -> None:
    (member,) = make_round(40, 1, private=200)
    play(engine, [member], salt="a")
    engine.forget()
    (other,) = play(engine, [member], salt="b")
    assert "stored" not in outcome(other).get("rows", {})
    engine.forget()
    (own,) = play(engine, [member], salt="a")
    assert outcome(own)["rows"]["stored"] > 300


def test_exact_requests_take_nothing_from_the_store(engine: Engine, audit: Audit) -> None:
    (member,) = make_round(50, 1, private=200)
    play(engine, [member])
    engine.forget()
    assert audit.members == 0
    assert outcome(engine.ask_exactly(member.prompt)) == {}
    assert audit.members == 0


def test_an_entry_has_to_be_as_exact_as_asked() -> None:
    """Another request with the same tokens, exact to a lesser row, may have taken its place."""
    name = RequestId("old")
    entries: Any = {name: SimpleNamespace(tokens=torch.arange(8), exact_rows=4)}
    tables = (PageTable(RequestId("new"), (0,)), PageTable(name, (), stored=True))
    member = reuse_plan.Member(RequestId("new"), AgentId("a"), 0, range(9), 0, 8)
    plan = ReusePlan(RoundId("r"), (member,), tables)
    assert _has(entries, plan, member, Copy(1, 0, 0, 4, exact=True, stored=True))
    assert _has(entries, plan, member, Copy(1, 0, 0, 8, exact=False, stored=True))
    assert not _has(entries, plan, member, Copy(1, 0, 0, 5, exact=True, stored=True))


def test_prompts_with_embeddings_are_left_alone(engine: Engine) -> None:
    """Wherever an embedding stands, all prompts have the same token id."""
    request = SimpleNamespace(
        request_id="embeddings",
        prompt_token_ids=[0] * 200,
        prompt_embeds=object(),
        sampling_params=object(),
        kv_transfer_params=None,
        cache_salt=None,
    )
    engine.scheduling.add(request)
    assert "embeddings" not in engine.book


def test_a_late_agent_takes_the_region_from_the_store(engine: Engine, audit: Audit) -> None:
    members = make_round(60, 4, size=3)
    play(engine, members[:3])
    engine.forget()
    (late,) = play(engine, members[3:])
    assert outcome(late)["role"] == "follower"
    assert outcome(late)["rows"]["stored"] > 150, outcome(late)
    assert "sibling" not in outcome(late)["rows"]


@pytest.mark.parametrize("backend", ["cacheblend", "legolink"])
def test_other_backends_over_stored_rows(engine: Engine, backend: str) -> None:
    engine.forget()
    members = make_round(70 + len(backend), 4, size=3, backend=backend)
    play(engine, members[:3])
    engine.forget()
    (late,) = play(engine, members[3:])
    rows = outcome(late)["rows"]
    # Of about 210 shared rows most come back, and some are computed again.
    assert 100 < rows["stored"] + rows.get("sibling", 0) < 205, rows
    assert rows["computed"] > 49 + 5


def test_entries_that_are_gone_are_computed(engine: Engine, audit: Audit) -> None:
    first = make_round(80, 3, private=120)
    outputs = play(engine, first)
    engine.forget()
    store = engine.worker.archive._store
    for record in list(store._custody.ledger.by_key.values()):
        store.evict(record.entry.key)
    audit.check = lambda plan: None  # it would look for rows that the plan hoped for
    second = next_round(first, outputs, 81)
    answers = play(engine, second)
    assert all("stored" not in outcome(a)["rows"] for a in answers)
    leader = next(i for i, a in enumerate(answers) if outcome(a)["role"] == "leader")
    engine.forget()
    assert tokens(answers[leader]) == tokens(engine.ask_exactly(second[leader].prompt))
    engine.forget()
    third = play(engine, second)
    assert all(outcome(a)["rows"].get("stored", 0) > 100 for a in third)


def test_a_restore_that_fails_costs_nothing_but_time(
    engine: Engine, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    (member,) = make_round(90, 1, private=200)
    (first,) = play(engine, [member])
    engine.forget()

    def broken(placements: object) -> None:
        raise RuntimeError("a fault in the test")

    monkeypatch.setattr(engine.worker.archive._restorer, "restore", broken)
    engine.counters()
    audit.check = lambda plan: None
    (again,) = play(engine, [member])
    assert "stored" not in outcome(again)["rows"]
    assert tokens(again) == tokens(first)
    assert engine.counters()["tokendance:pass_failures_total/restore: RuntimeError"] == 1


def test_a_save_that_fails_costs_nothing(
    engine: Engine, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("a fault in the test")

    monkeypatch.setattr(engine.worker.archive._store, "put_family", broken)
    monkeypatch.setattr(engine.worker.archive._store, "put", broken)
    members = make_round(100, 3)
    first = play(engine, members)
    engine.forget()
    again = play(engine, members)
    assert [tokens(a) for a in again] == [tokens(b) for b in first]
    assert all("stored" not in outcome(a)["rows"] for a in again)


def test_a_session_is_pinned_and_released(engine: Engine, audit: Audit) -> None:
    members = make_round(105, 3, private=100, retain="pin")
    play(engine, members)
    store = engine.worker.archive._store
    before = store.stats()
    assert any("s105" in session for session in store._custody.ledger.pinned)
    engine.forget()
    last = [Member(m.prompt, m.hints | {"retain": "release"}) for m in members]
    outputs = play(engine, last)
    assert all(outcome(o)["rows"]["stored"] > 100 for o in outputs)
    after = store.stats()
    assert after.entries == before.entries - 3 and after.held < before.held
    assert not any("s105" in session for session in store._custody.ledger.pinned)
    engine.forget()
    again = play(engine, make_round(105, 3, private=100, retain="release"))
    assert all("stored" not in outcome(o)["rows"] for o in again)


def test_a_reset_of_the_cache_forgets_everything(engine: Engine, audit: Audit) -> None:
    """vLLM asks for it when the model gets other weights."""
    members = make_round(106, 3, private=100)
    play(engine, members)
    assert engine.worker.archive._store.stats().entries > 0
    assert engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    again = play(engine, members)
    assert all("stored" not in outcome(o)["rows"] for o in again)
    assert engine.worker.archive._store.stats().entries == 3


def test_an_answer_that_ends_at_a_stop_string_is_kept(engine: Engine, audit: Audit) -> None:
    """vLLM's front end aborts such a request."""
    (member,) = make_round(107, 1, private=200)
    text = engine.ask(member.prompt, {"mode": "exact"}, max_tokens=30).outputs[0].text
    stop = text[len(text) // 3 : len(text) // 3 + 3]
    (output,) = play(engine, [member], max_tokens=30, stop=[stop])
    assert output.outputs[0].finish_reason == "stop"
    engine.forget()
    (again,) = play(engine, [member])
    assert outcome(again)["rows"]["stored"] > 300


def test_a_leader_that_talks_on_is_still_the_master(engine: Engine, audit: Audit) -> None:
    members = make_round(108, 4, shared=(200, 150, 170), private=60)
    store = engine.worker.archive._store
    before = store.stats()
    names = [
        engine.add(m.prompt, m.hints, max_tokens=4 if i else 100) for i, m in enumerate(members)
    ]
    outputs = engine.answers(names)
    engine.steps(2)
    assert outcome(outputs[0])["role"] == "leader"
    assert store.stats().mirrors == before.mirrors + 3


def test_counters_and_gauges(engine: Engine, audit: Audit) -> None:
    from prometheus_client import REGISTRY

    engine.counters()
    members = make_round(110, 4, private=100)
    play(engine, members)
    engine.forget()
    play(engine, members)
    counted = engine.counters()
    assert counted["tokendance:restored_rows_total"] > 800
    assert counted["tokendance:rows_total/stored"] > 800
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("tokendance:store_")
    }
    held = {key[-1]: value for key, value in values.items() if key[0] == "tokendance:store_bytes"}
    stats = engine.worker.archive._store.stats()
    assert held["budget"] == 0.25 * 2**30
    assert held["master"] + held["mirror"] + held["dense"] == stats.held
    assert held["mirror"] > 0
    ratios = {key[-1]: value for key, value in values.items() if key[0].endswith("store_ratio")}
    assert ratios["all"] == pytest.approx(stats.family_ratio) and ratios["all"] > 1
