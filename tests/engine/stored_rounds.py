"""Rounds that go on after what was said, for tests of the store."""

from __future__ import annotations

from random import Random
from typing import Any

from small_engine import Engine, Member, tokens, words

OPTIONS = {"store_gib": 0.25, "round_timeout_ms": 200.0}


def send(engine: Engine, members: list[Member], **options: object) -> list[str]:
    return [engine.add(m.prompt, m.hints, **options) for m in members]


def play(engine: Engine, members: list[Member], **options: object) -> list[Any]:
    outputs = engine.answers(send(engine, members, **options))
    engine.steps(2)  # what has finished is stored in the step after
    return outputs


def next_round(members: list[Member], outputs: list[Any], seed: int) -> list[Member]:
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
