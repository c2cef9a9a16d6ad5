"""What a round does to somebody else's request that is being answered meanwhile.

One unrelated request decodes; when it has its first tokens, a round of agents arrives. Counted are
the gaps between its tokens from then on until the round is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np

from tokendance.bench.engine_process import Call, Clock, EngineProcess, EngineSettings, RoundResult
from tokendance.bench.prefill import RoundShape, Say, Words, for_engine, round_calls

PROMPT_TOKENS = 64
ANSWER_TOKENS = 64
BEFORE = 8
"""Tokens that the bystander has when the round arrives."""

ANSWERS_OF_ROUND = 24
FIGURES = {"p50": 50, "p99": 99, "max": 100}


def bench_bystander(
    model: str,
    shape: RoundShape,
    words: Words,
    repeat: int,
    threads: int,
    step_tokens: int,
    clock: Clock,
    say: Say,
) -> dict[str, Any]:
    """Percentiles of the gaps, on plain vLLM and on TokenDance, in milliseconds.

    step_tokens: max_num_batched_tokens of both engines. clock: of the gaps.
    """
    gaps: dict[str, list[float]] = {"plain": [], "tokendance": []}
    alone: dict[str, list[float]] = {"plain": [], "tokendance": []}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                EngineProcess(
                    EngineSettings(
                        model,
                        tokendance=name == "tokendance",
                        threads=threads,
                        max_num_batched_tokens=step_tokens,
                        clock=clock,
                    )
                )
            )
            for name in gaps
        }
        for engine in engines.values():
            engine.round(for_engine(engine, _calls("warm-up", shape, words)))
        for turn in range(repeat):
            bystander, *members = _calls(str(turn), shape, words)
            for name in sorted(engines, reverse=bool(turn % 2)):
                engine = engines[name]
                engine.reset()
                times = engine.round([bystander]).calls[0].token_s
                alone[name] += np.diff(times).tolist()
                engine.reset()
                calls = [c._replace(arrival_s=times[BEFORE]) for c in for_engine(engine, members)]
                gaps[name] += gaps_within(engine.round([bystander, *calls]), times[BEFORE])
            say(f"bystander {turn + 1} of {repeat}: {_percentiles(gaps, 100)} ms at most")
    return {
        "agents": shape.agents,
        "tokens": len(members[0].prompt),
        "max_num_batched_tokens": step_tokens,
        "clock": clock,
        "repetitions": repeat,
        "alone_p50_ms": _percentiles(alone, 50),
        **{f"decode_{name}_ms": _percentiles(gaps, share) for name, share in FIGURES.items()},
    }


def gaps_within(result: RoundResult, start_s: float) -> list[float]:
    """Seconds between the tokens of the first call, from `start_s` until the others are done.

    A gap counts if any of it lies in that time.
    """
    bystander, *others = result.calls
    end_s = max(call.finish_s for call in others)
    times = bystander.token_s
    return [b - a for a, b in pairwise(times) if b > start_s and a < end_s]


def _calls(name: str, shape: RoundShape, words: Words) -> list[Call]:
    """The bystander, then the members of the round."""
    answer = words.take(ANSWER_TOKENS)
    members, _ = round_calls(shape, words, f"bystander.{name}")
    return [
        Call(f"bystander.{name}", words.take(PROMPT_TOKENS), answer),
        *(call._replace(forced=words.take(ANSWERS_OF_ROUND)) for call in members),
    ]


def _percentiles(gaps: dict[str, list[float]], share: int) -> dict[str, float]:
    return {name: percentile_ms(values, share) for name, values in gaps.items()}


def percentile_ms(seconds: Sequence[float], share: int) -> float:
    """A percentile in milliseconds."""
    return round(float(np.percentile(seconds, share)) * 1000, 1)
