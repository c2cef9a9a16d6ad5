"""Every recovery backend on the same rounds: closeness, rows, changed blocks and CPU seconds (M9).

Runs on the reference engine in fp32. A *cell* is one method on one round; its result is a line of a
`.partial` file, so that an interrupted run goes on where it ended. Baselines (every row computed in
one batch, and CacheBlend request by request) are measured again every few cells, so that a cell is
compared with what the machine did a moment ago.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from tokendance.bench.measure import kl_divergence
from tokendance.bench.rounds import PAGE, LastRound, donor_plan, leader_plan
from tokendance.engines.reference.engine import ReferenceEngine, Stream
from tokendance.engines.reference.model import Model
from tokendance.plan.reuse_plan import ReusePlan
from tokendance.reuse.base import LayerEngine
from tokendance.reuse.collective import PassOutcome, run_pass, run_serial
from tokendance.reuse.recovery import Recovery, create
from tokendance.types import RequestId, Rows

RATIOS = (0.0, 0.05, 0.15, 0.30)
CONTINUATION = 30
BLOCK = 32
BASELINE_EVERY = 8
MAX_ROWS = 16384

Say = Callable[[str], None]


class Method(NamedTuple):
    """What a cell runs. source: whose K/V is taken, "leader" or "donors"."""

    backend: str
    source: str
    ratio: float
    serial: bool = False

    @property
    def name(self) -> str:
        serial = "serial " if self.serial else ""
        return f"{serial}{self.backend} {self.ratio:.0%} ({self.source})"


PLAIN = Method("plain", "none", 1.0)
SERIAL = Method("cacheblend", "donors", 0.15, serial=True)
REGION = Method("region", "leader", 0.0)
LOCK_STEP = Method("cacheblend", "donors", 0.15)

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


def read_lines(partial: Path) -> list[dict[str, Any]]:
    """The complete lines of a partial file; one that was cut off is left out."""
    if not partial.exists():
        return []
    text = partial.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def append_line(partial: Path, line: dict[str, Any]) -> None:
    lines = [*read_lines(partial), line]
    scratch = partial.with_name(partial.name + ".new")
    scratch.write_text("".join(json.dumps(item) + "\n" for item in lines), encoding="utf-8")
    os.replace(scratch, partial)


def _run_case(case: Case, methods: Sequence[Method], model: Model) -> Iterator[dict[str, Any]]:
    round_ = case.load()
    with _Bench(round_, model) as bench:
        exact = bench.run(PLAIN)
        plain_s = exact.cpu_s
        for count, method in enumerate(methods):
            if count % BASELINE_EVERY == 0:
                if count:
                    plain_s = bench.run(PLAIN).cpu_s
                serial = bench.run(SERIAL)
            measured = serial if method is SERIAL else bench.run(method)
            yield {
                "key": case.key(method),
                "backend": method.backend + ("-serial" if method.serial else ""),
                "source": method.source,
                "ratio": method.ratio,
                "trace": case.trace,
                "agents": len(round_.prompts),
                **closeness(exact.logits, measured.logits),
                **bench.counts(method, measured.outcome),
                "cpu_s": round(measured.cpu_s, 3),
                "plain_cpu_s": round(plain_s, 3),
                "serial_cpu_s": round(serial.cpu_s, 3),
                "cpu_ratio_plain": round(plain_s / measured.cpu_s, 3),
                "cpu_ratio_serial_cacheblend": round(serial.cpu_s / measured.cpu_s, 3),
            }


class _Bench:
    """One round on an engine with just the pages it needs; histories and donors are computed."""

    def __init__(self, round_: LastRound, model: Model) -> None:
        self.round = round_
        rows = [len(p.ids) + CONTINUATION for p in (*round_.prompts, *round_.donors)]
        pages = sum(-(-count // PAGE) for count in rows)
        self.engine = ReferenceEngine(model, num_pages=pages, page_size=PAGE)

    def __enter__(self) -> _Bench:
        prompts = [p.ids for p in (*self.round.prompts, *self.round.donors)]
        self._open = self.engine.streams(prompts, room=CONTINUATION)
        streams = self._open.__enter__()
        self.streams = streams[: len(self.round.prompts)]
        donors = streams[len(self.round.prompts) :]
        for stream, cached in zip(self.streams, self.round.cached):
            if cached:
                self.engine.hidden(self.engine.batch([(stream, [Rows(0, cached)])]))
        for stream in donors:
            self.engine.prefill([stream])
        pages = [stream.blocks for stream in self.streams]
        self.plans = {
            "leader": leader_plan(self.round, pages),
            "donors": donor_plan(self.round, pages, [stream.blocks for stream in donors]),
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._open.__exit__(None, None, None)

    def run(self, method: Method) -> Measured:
        """Fill the rows of every agent by one method, timed; then score the stored answers."""
        for stream, prompt, cached in zip(self.streams, self.round.prompts, self.round.cached):
            stream.token_ids[:] = prompt.ids
            stream.filled = cached
        outcome = None
        started = time.process_time()
        if method is not PLAIN:
            plan = self.plans[method.source]
            runner = run_serial if method.serial else run_pass
            backends = [self.backend(method)] * len(plan.members)
            outcome = runner(cast(LayerEngine, self.engine), plan, MAX_ROWS, backends)
            for stream, member in zip(self.streams, plan.members):
                stream.filled = member.end
        groups = [[s] for s in self.streams] if method.serial else [self.streams]
        ends = torch.cat([self.engine.prefill(group) for group in groups])
        cpu_s = time.process_time() - started
        followers = zip(self.streams[1:], ends[1:], self.round.prompts[1:])
        return Measured(cpu_s, [self._score(s, e, p.output) for s, e, p in followers], outcome)

    def _score(self, stream: Stream, end: torch.Tensor, answer: tuple[int, ...]) -> np.ndarray:
        forced = answer[:CONTINUATION]
        logits: np.ndarray = torch.cat((end[None], self.engine.score(stream, forced))).numpy()
        return logits

    def backend(self, method: Method) -> Recovery:
        if method.backend == "cacheblend":
            return create("cacheblend", {"ratio": method.ratio})
        if method.backend == "legolink":
            plan = self.plans[method.source]
            return create("legolink", {"tokens": first_tokens(plan, method.ratio)})
        return create(method.backend)

    def counts(self, method: Method, outcome: PassOutcome | None) -> dict[str, float]:
        """rows: computed in all layers, per agent; checked_rows: below the check layer only."""
        assert outcome is not None
        agents = len(self.streams)
        return {
            "rows": round(outcome.computed_rows / agents, 1),
            "checked_rows": round(outcome.checked_rows / agents, 1),
            "changed_blocks": round(changed_blocks(self.plans[method.source], outcome), 4),
        }


def first_tokens(plan: ReusePlan, ratio: float) -> int:
    """The most first tokens of each inexact copied piece that stay within `ratio` of their rows."""
    lengths = [c.length for m in plan.members for c in m.copies if not c.exact]
    tokens = 0
    while sum(min(n, tokens + 1) for n in lengths) <= ratio * sum(lengths) and tokens < max(
        lengths
    ):
        tokens += 1
    return tokens


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
