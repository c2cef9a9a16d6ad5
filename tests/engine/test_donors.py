"""What an agent has said comes from its own decode when others quote it, on real vLLM (M5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from audit import Audit, audited  # noqa: E402
from small_engine import (  # noqa: E402
    BLOCK,
    Engine,
    Member,
    distance,
    make_round,
    outcome,
    tokens,
    words,
)

Start = Callable[..., AbstractContextManager[Engine]]

SAID = 70
"""Tokens of an answer; at least one full page of them, and some behind the last full page."""


@pytest.fixture(scope="module", params=[0.0, 0.25], ids=["pages", "store"])
def engine(request: pytest.FixtureRequest, start_engine: Start) -> Iterator[Engine]:
    options = {
        "store_gib": request.param,
        "round_timeout_ms": 200.0,
        "min_shared_tokens": 16,
        "backend_options": {"ratio": 1.0},
        "backend": "cacheblend",
    }
    with start_engine(options=options) as engine:
        yield engine


@pytest.fixture
def audit(engine: Engine) -> Iterator[Audit]:
    with audited(engine) as audit:
        yield audit


def stored(engine: Engine) -> bool:
    return engine.scheduling._keeping is not None


def speak(engine: Engine, seed: int, agents: int, backend: str) -> tuple[list[Member], list[Any]]:
    """Everybody says something about a text of its own."""
    random = Random(seed)
    members = []
    for agent in range(agents):
        prompt = words(random, 90 + 7 * agent)
        hints = {"session": f"s{seed}", "agent": f"a{agent}", "round": f"{agent}", "size": 1}
        members.append(Member(prompt, hints | {"segments": [len(prompt)], "backend": backend}))
    outputs = [engine.ask(m.prompt, m.hints, max_tokens=SAID) for m in members]
    return members, outputs


def quote(members: list[Member], outputs: list[Any], seed: int) -> list[Member]:
    """Everybody reads what all have said, in a framework's own words around it."""
    random, following = Random(seed), []
    header, task = words(random, 5), words(random, 11)
    for member in members:
        pieces = [words(random, 50), *([*header, *tokens(o)] for o in outputs), task]
        hints = {**member.hints, "round": f"q{seed}", "size": len(members)}
        hints["segments"] = [len(piece) for piece in pieces]
        following.append(Member([t for piece in pieces for t in piece], hints))
    return following


def ask(engine: Engine, members: list[Member], **options: Any) -> list[Any]:
    return engine.answers([engine.add(*member, **options) for member in members])


def from_donors(audit: Audit, said: list[Any]) -> int:
    """Rows that the plans take from those who spoke."""
    names = {output.request_id.split("-")[0] for output in said}
    return sum(
        copy.length
        for plan in audit.plans
        for member in plan.members
        for copy in member.copies
        if plan.tables[copy.source].request_id.split("-")[0] in names and not copy.exact
    )


def held(engine: Engine, prompt: list[int]) -> int:
    """Rows of an answer that are there: all that were decoded, or those in full pages."""
    rows = SAID - 1
    return rows if stored(engine) else (len(prompt) + rows) // BLOCK * BLOCK - len(prompt)


@pytest.mark.parametrize("agents", [1, 3])
def test_quotations_take_what_their_authors_decoded(
    engine: Engine, audit: Audit, agents: int
) -> None:
    """The audit compares every row with its source, and every source with computing it."""
    members, outputs = speak(engine, 10 + agents, agents, "naive")
    assert sum(len(m.copies) for plan in audit.plans for m in plan.members) == 0
    answers = ask(engine, quote(members, outputs, 20 + agents))
    assert from_donors(audit, outputs) == agents * sum(held(engine, m.prompt) for m in members)
    assert {outcome(a)["role"] for a in answers} == {"follower"}
    if stored(engine):
        assert sum(outcome(a)["rows"].get("stored", 0) for a in answers) > 0


def test_everything_computed_again_is_exact(engine: Engine) -> None:
    """The server's CacheBlend with a ratio of 1: donors or not, the answer is vLLM's own."""
    members, outputs = speak(engine, 30, 3, "cacheblend")
    members = [
        m._replace(hints={k: v for k, v in m.hints.items() if k != "backend"}) for m in members
    ]
    outputs = [engine.ask(m.prompt, m.hints, max_tokens=SAID) for m in members]
    following = quote(members, outputs, 31)
    answers = ask(engine, following, logprobs=5)
    for answer, member in zip(answers, following):
        assert outcome(answer)["deviation"] > 0  # the rows were there, and were looked at
        exact = engine.ask_exactly(member.prompt, logprobs=5)
        assert distance(answer, exact) < 1e-3


def test_no_hints_no_marks_and_other_tokens_at_the_edges(engine: Engine, audit: Audit) -> None:
    members, outputs = speak(engine, 40, 2, "naive")
    random = Random(41)
    quoted = [*words(random, 1), *tokens(outputs[0])[1:40], *words(random, 1)]
    prompt = [*words(random, 70), *quoted, *words(random, 9)]
    ask(engine, [Member(prompt, {"backend": "naive"})])
    assert from_donors(audit, outputs) == min(39, held(engine, members[0].prompt) - 1)


def test_the_round_after_next_still_quotes_the_author(engine: Engine, audit: Audit) -> None:
    members, outputs = speak(engine, 50, 2, "naive")
    ask(engine, quote(members, outputs, 51))
    first = from_donors(audit, outputs)
    audit.plans.clear()
    ask(engine, quote(members, outputs, 52))
    assert from_donors(audit, outputs) == first > 0
    audit.plans.clear()
    engine.steps(2)  # now their later answers have taken their place in the store
    ask(engine, quote(members, outputs, 53))
    assert 2 * (SAID - BLOCK) < from_donors(audit, outputs) <= first


def test_pages_that_were_given_away(engine: Engine, audit: Audit) -> None:
    """Without a store what stood in them is computed; with one it comes back."""
    members, outputs = speak(engine, 60, 2, "naive")
    random = Random(61)
    for _ in range(9):  # 9 x 60 pages through a pool of 512
        engine.ask(words(random, 1900), {"mode": "exact"}, max_tokens=1)
    ask(engine, quote(members, outputs, 62))
    whole = len(members) * sum(held(engine, m.prompt) for m in members)
    assert from_donors(audit, outputs) == (whole if stored(engine) else 0)


def test_region_is_not_disturbed(engine: Engine, audit: Audit) -> None:
    """A backend that wants one context for all takes nothing from authors."""
    members, outputs = speak(engine, 70, 3, "region")
    answers = ask(engine, quote(members, outputs, 71))
    assert from_donors(audit, outputs) == 0
    assert sorted(outcome(a)["role"] for a in answers) == ["follower", "follower", "leader"]


def test_salts_keep_donors_apart(engine: Engine, audit: Audit) -> None:
    members, outputs = speak(engine, 80, 2, "naive")
    following = quote(members, outputs, 81)
    engine.answers([engine.add(*member, salt="other") for member in following])
    assert from_donors(audit, outputs) == 0


def test_an_ordinary_round_of_a_donor_backend(engine: Engine, audit: Audit) -> None:
    """Text that nobody has said or read before comes from the leader, as ever."""
    answers = ask(engine, make_round(90, 4, backend="naive"))
    assert sorted(outcome(a)["role"] for a in answers) == [*["follower"] * 3, "leader"]


def test_short_answers_without_hints(engine: Engine) -> None:
    """Less than a page, from a client that says nothing; a reader may name the server's backend."""
    random = Random(100)
    said = engine.ask(words(random, 6), max_tokens=24)
    for hints in (None, {"backend": "cacheblend"}):
        quoted = tokens(said)[:23]
        reader = engine.ask([*words(random, 60), *quoted, *words(random, 5)], hints)
        assert bool(outcome(reader).get("deviation")) is stored(engine)


@pytest.mark.parametrize("engine", [0.25], ids=["store"], indirect=True)
def test_sources_that_are_gone_are_no_reuse(engine: Engine) -> None:
    members, outputs = speak(engine, 110, 2, "naive")
    engine.steps(2)
    engine.worker.archive._store.clear()
    answers = ask(engine, quote(members, outputs, 111)[:1])
    assert outcome(answers[0])["role"] == "ordinary"
    assert outcome(answers[0])["reason"] == "what it was to take is gone"
