"""Every recovery backend on the same rounds: closeness, rows, changed blocks and CPU seconds (M9).

Runs on the reference engine in fp32. A *cell* is one method on one round; its result is a line of a
`.partial` file, so that an interrupted run goes on where it ended. Baselines (every row computed in
one batch, and CacheBlend request by request) are measured again every few cells, so that a cell is
compared with what the machine did a moment ago.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from tokendance.bench.measure import kl_divergence
from tokendance.bench.partial import append_line, read_lines
from tokendance.bench.roundbench import LOCK_STEP, PLAIN, REGION, SERIAL, Method, RoundBench
from tokendance.bench.rounds import LastRound
from tokendance.engines.reference.model import Model
from tokendance.plan.reuse_plan import ReusePlan
from tokendance.reuse.collective import PassOutcome
from tokendance.types import RequestId, Rows

RATIOS = (0.0, 0.05, 0.15, 0.30)
CONTINUATION = 30
BLOCK = 32
BASELINE_EVERY = 8

Say = Callable[[str], None]


# Region and naive compute nothing again, so they have no ratio; LegoLink at 0 % is naive.
METHODS = (
    REGION,
    Method("naive", "donors", 0.0),
    Method("full", "leader", 1.0),
    *(Method("legolink", "donors", ratio) for ratio in RATIOS if ratio),
    *(Method("cacheblend", source, r) for source in ("donors", "leader") for r in RATIOS),
)
SPEED_METHODS = (REGION, LOCK_STEP)
QUICK_METHODS = (REGION, LOCK_STEP, Method("legolink", "donors", 0.15))


@dataclass(frozen=True, slots=True)
class Case:
    """A round, how to load it when its turn comes, and what to run on it."""

    trace: str
    agents: int
    load: Callable[[], LastRound] = field(repr=False)
    methods: tuple[Method, ...] = METHODS

    def key(self, method: Method) -> str:
        return f"{self.trace}/{self.agents}/{method.name}"


class Measured(NamedTuple):
    """One run. logits: float32 [followers, 1 + CONTINUATION (or fewer), vocab], as a list."""

    cpu_s: float
    logits: list[np.ndarray]
    outcome: PassOutcome | None


def run_cases(
    cases: Sequence[Case],
    model: Model,
    partial: Path,
    say: Say,
) -> list[dict[str, Any]]:
    """Run every cell that `partial` does not hold yet; the lines of all cells, in order."""
    done = {line["key"]: line for line in read_lines(partial)}
    keys = [case.key(method) for case in cases for method in (*case.methods, SERIAL)]
    left = [key for key in keys if key not in done]
    say(f"{len(keys)} cells, {len(keys) - len(left)} of them done before")
    started, finished = time.monotonic(), 0
    for case in cases:
        methods = [m for m in (*case.methods, SERIAL) if case.key(m) not in done]
        if not methods:
            continue
        say(f"{case.trace}, {case.agents} agents: computing histories and donors")
        with torch.inference_mode():
            for line in _run_case(case, methods, model):
                append_line(partial, line)
                done[line["key"]] = line
                finished += 1
                minutes = (time.monotonic() - started) / finished * (len(left) - finished) / 60
                say(f"[{finished}/{len(left)}] {_words(line)}; about {minutes:.0f} min left")
    return [done[key] for key in keys]


def _run_case(case: Case, methods: Sequence[Method], model: Model) -> Iterator[dict[str, Any]]:
    round_ = case.load()
    with RoundBench(round_, model, CONTINUATION) as bench:
        exact = _run(bench, PLAIN)
        plain_s = exact.cpu_s
        for count, method in enumerate(methods):
            if count % BASELINE_EVERY == 0:
                if count:
                    plain_s = _run(bench, PLAIN).cpu_s
                serial = _run(bench, SERIAL)
            measured = serial if method is SERIAL else _run(bench, method)
            yield {
                "key": case.key(method),
                "backend": method.backend + ("-serial" if method.serial else ""),
                "source": method.source,
                "ratio": method.ratio,
                "trace": case.trace,
                "agents": len(round_.prompts),
                **closeness(exact.logits, measured.logits),
                **_counts(bench, method, measured.outcome),
                "cpu_s": round(measured.cpu_s, 3),
                "plain_cpu_s": round(plain_s, 3),
                "serial_cpu_s": round(serial.cpu_s, 3),
                "cpu_ratio_plain": round(plain_s / measured.cpu_s, 3),
                "cpu_ratio_serial_cacheblend": round(serial.cpu_s / measured.cpu_s, 3),
            }


def _run(bench: RoundBench, method: Method) -> Measured:
    """Fill the round by a method, timed; then score the followers' stored answers."""
    filled = bench.fill(method)
    logits = []
    for stream, end, prompt in list(zip(bench.streams, filled.ends, bench.round.prompts))[1:]:
        forced = bench.engine.score(stream, prompt.output[:CONTINUATION])
        logits.append(torch.cat((end[None], forced)).numpy())
    return Measured(filled.cpu_s, logits, filled.outcome)


def _counts(bench: RoundBench, method: Method, outcome: PassOutcome | None) -> dict[str, float]:
    """rows: computed in all layers, per agent; checked_rows: below the check layer only."""
    assert outcome is not None
    agents = len(bench.streams)
    return {
        "rows": round(outcome.computed_rows / agents, 1),
        "checked_rows": round(outcome.checked_rows / agents, 1),
        "changed_blocks": round(changed_blocks(bench.plans[method.source], outcome), 4),
    }


def changed_blocks(plan: ReusePlan, outcome: PassOutcome) -> float:
    """Share of the blocks of copied pieces, from each piece's start on, with a recomputed row."""
    recomputed: dict[RequestId, tuple[Rows, ...]] = {
        m.request_id: m.recomputed for m in outcome.members
    }
    blocks = changed = 0
    for member in plan.members:
        rows = recomputed[member.request_id]
        for copy in member.copies:
            for start in range(copy.start, copy.end, BLOCK):
                end = min(start + BLOCK, copy.end)
                blocks += 1
                changed += any(run.start < end and start < run.end for run in rows)
    return changed / blocks if blocks else 0.0


def closeness(exact: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> dict[str, float]:
    """KL(exact || other) at the last prompt token and after it, and equal likeliest tokens."""
    divergence = [kl_divergence(p, q) for p, q in zip(exact, other)]
    same = np.concatenate([p.argmax(-1) == q.argmax(-1) for p, q in zip(exact, other)])
    return {
        "kl_end": round(fmean(float(kl[0]) for kl in divergence), 6),
        "kl_cont": round(float(np.concatenate([kl[1:] for kl in divergence]).mean()), 6),
        "top1": round(float(same.mean()), 4),
    }


def summary(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the traces and over the towns of every method, for the same number of agents."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        kind = "towns" if line["trace"].startswith("town.") else "traces"
        key = (kind, line["agents"], line["backend"], line["source"], line["ratio"])
        groups.setdefault(key, []).append(line)
    names = ("kl_end", "kl_cont", "top1", "rows", "changed_blocks")
    ratios = ("cpu_ratio_plain", "cpu_ratio_serial_cacheblend")
    return [
        dict(zip(("over", "agents", "backend", "source", "ratio"), key))
        | {"rounds": len(group)}
        | {name: round(fmean(line[name] for line in group), 5) for name in (*names, *ratios)}
        for key, group in groups.items()
    ]


def _words(line: dict[str, Any]) -> str:
    return (
        f"{line['trace']}, {line['agents']} agents, {line['backend']} {line['ratio']:.0%} "
        f"({line['source']}): KL {line['kl_end']:.4f} / {line['kl_cont']:.4f}, "
        f"top-1 {line['top1']:.3f}, {line['rows']:.0f} rows, {line['cpu_s']:.1f} s, "
        f"{line['cpu_ratio_plain']:.2f}x plain, "
        f"{line['cpu_ratio_serial_cacheblend']:.2f}x serial CacheBlend"
    )
