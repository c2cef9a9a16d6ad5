"""Finished agents in the store, and what later prompts get back from it, on real vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from random import Random

import pytest
from audit import Audit, audited
from small_engine import Engine, Member, distance, make_round, outcome, tokens, words

pytestmark = pytest.mark.engine

Start = Callable[..., AbstractContextManager[Engine]]

OPTIONS = {"store_gib": 0.25, "round_timeout_ms": 200.0}


@pytest.fixture(scope="module")
def engine(start_engine: Start) -> Iterator[Engine]:
    with start_engine(options=OPTIONS, disable_log_stats=False) as engine:
        yield engine


@pytest.fixture
def audit(engine: Engine) -> Iterator[Audit]:
    engine.forget()
    with audited(engine) as audit:
        yield audit


def send(engine: Engine, members: list[Member], **options: object) -> list[str]:
    return [engine.add(m.prompt, m.hints, **options) for m in members]


def play(engine: Engine, members: list[Member], **options: object) -> list:
    outputs = engine.answers(send(engine, members, **options))
    engine.steps(2)  # what has finished is stored in the step after
    return outputs


def next_round(members: list[Member], outputs: list, seed: int) -> list[Member]:
    """Everybody's prompt goes on with its own answer and what all say next."""
    random = Random(seed)
    shared = [words(random, n) for n in (60, 45)]
    following = []
    for member, output in zip(members, outputs):
        history = [*member.prompt, *tokens(output)]
        pieces = [history, *shared, words(random, 5)]
        hints = {**member.hints, "round": str(seed), "segments": [len(p) for p in pieces]}
        following.append(Member([t for piece in pieces for t in piece], hints))
    return following


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
