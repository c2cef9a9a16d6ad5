"""Reuse of a whole round at once against request by request, on the reference engine (figure 11).

Every agent's history is in the KV cache already; what is timed is the rest of the round: texts that
all agents read, and a task of their own. In lock step the region is computed once and CacheBlend
goes through its check layer for all agents together; serial CacheBlend takes one request after the
other, from the same K/V, with the same rows recomputed. Plain prefill computes every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokendance.bench.prefill import Words, spread
from tokendance.bench.render import Piece, Prompt
from tokendance.bench.roundbench import (
    LOCK_STEP,
    PLAIN,
    REGION,
    SERIAL,
    Filled,
    Method,
    RoundBench,
)
from tokendance.bench.rounds import PAGE, LastRound
from tokendance.engines.reference.model import Model

METHODS = (PLAIN, SERIAL, LOCK_STEP, REGION)
MEASURED = {"region": REGION, "cacheblend": LOCK_STEP}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of a prompt: a history (up to a page longer, another length per agent), `blocks`
    shared texts of `block` tokens, and the task."""

    history: int = 128
    blocks: int = 8
    block: int = 48
    task: int = 12

    @property
    def shared(self) -> int:
        return self.blocks * self.block


def make_round(shape: Shape, agents: int, words: Words) -> LastRound:
    """A round of real text. Each shared text was written by somebody with another history."""
    texts = [Piece("shared", words.take(shape.block)) for _ in range(shape.blocks)]

    def prompt(agent: int) -> Prompt:
        history = Piece("private", words.take(shape.history + agent % PAGE))
        task = Piece("task", words.take(shape.task))
        return Prompt(f"agent{agent}", (history, *texts, task), ())

    def donor(index: int) -> Prompt:
        history = Piece("private", words.take(shape.history + index % PAGE))
        end = Piece("task", words.take(1))  # the planner leaves the last row of a context alone
        return Prompt(f"author{index}", (history, texts[index], end), ())

    return LastRound(
        f"{agents} agents",
        tuple(map(prompt, range(agents))),
        (shape.history // PAGE * PAGE,) * agents,
        tuple(map(donor, range(shape.blocks))),
    )


def measure(
    shape: Shape, agents: int, words: Words, model: Model, repetitions: int, say: Say
) -> list[dict[str, Any]]:
    """One row per lock-step method. Every repetition runs all methods, in another order each."""
    found: dict[Method, list[Filled]] = {method: [] for method in METHODS}
    round_ = make_round(shape, agents, words)
    with torch.inference_mode(), RoundBench(round_, model) as bench:
        bench.fill(REGION)  # first use of kernels and memory
        for turn in range(repetitions):
            for method in _turned(METHODS, turn):
                found[method].append(bench.fill(method))
            times = ", ".join(f"{m.name} {found[m][-1].cpu_s:.2f} s" for m in METHODS)
            say(f"{agents} agents, {turn + 1} of {repetitions}: {times}")
    return [
        {
            "agents": agents,
            "history": shape.history,
            "shared": shape.shared,
            "backend": backend,
            **_figures(found, method),
        }
        for backend, method in MEASURED.items()
    ]


def _figures(found: dict[Method, list[Filled]], method: Method) -> dict[str, Any]:
    """What the schema names, and the computed rows: in all layers, and below the check layer."""
    own, serial, plain = found[method], found[SERIAL], found[PLAIN]
    outcome = own[0].outcome
    assert outcome is not None
    return {
        "rows": outcome.computed_rows,
        "checked_rows": outcome.checked_rows,
        "seconds": spread([x.wall_s for x in own]),
        "cpu_s": spread([x.cpu_s for x in own]),
        "serial_cpu_s": spread([x.cpu_s for x in serial]),
        "plain_cpu_s": spread([x.cpu_s for x in plain]),
        "over_serial": spread([s.cpu_s / x.cpu_s for x, s in zip(own, serial)]),
        "over_plain": spread([p.cpu_s / x.cpu_s for x, p in zip(own, plain)]),
    }


def _turned(methods: Sequence[Method], turn: int) -> Sequence[Method]:
    start = turn % len(methods)
    return (*methods[start:], *methods[:start])
