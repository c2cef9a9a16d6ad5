"""One round on the reference engine, filled by one recovery method after the other (M9).

The histories and the contexts from which CacheBlend takes K/V are computed once, when the bench is
opened; `fill` is what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from tokendance.bench.rounds import PAGE, LastRound, donor_plan, leader_plan
from tokendance.engines.reference.engine import ReferenceEngine, Stream
from tokendance.engines.reference.model import Model
from tokendance.plan.reuse_plan import ReusePlan
from tokendance.reuse.base import LayerEngine
from tokendance.reuse.collective import PassOutcome, run_pass, run_serial
from tokendance.reuse.recovery import Recovery, create
from tokendance.types import Rows

MAX_ROWS = 16384
"""Rows of one forward pass."""


class Method(NamedTuple):
    """How a round is filled. source: whose K/V is taken, "leader" or "donors"."""

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


class Filled(NamedTuple):
    """What filling a round took. ends: float32 [agents, vocab], logits of the last prompt tokens.
    outcome: None where no plan was run."""

    cpu_s: float
    wall_s: float
    ends: torch.Tensor
    outcome: PassOutcome | None


class RoundBench:
    """A round on an engine with just the pages it needs. Use as a context manager.

    room: tokens that may be appended to each prompt. streams: one per prompt, leader first.
    """

    def __init__(self, round_: LastRound, model: Model, room: int = 0) -> None:
        self.round, self._room = round_, room
        rows = [len(p.ids) + room for p in (*round_.prompts, *round_.donors)]
        pages = sum(-(-count // PAGE) for count in rows)
        self.engine = ReferenceEngine(model, num_pages=pages, page_size=PAGE)

    def __enter__(self) -> RoundBench:
        prompts = [p.ids for p in (*self.round.prompts, *self.round.donors)]
        self._open = self.engine.streams(prompts, room=self._room)
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

    def fill(self, method: Method) -> Filled:
        """Fill the rows of every agent by one method, from the histories on."""
        for stream, prompt, cached in zip(self.streams, self.round.prompts, self.round.cached):
            stream.token_ids[:] = prompt.ids
            stream.filled = cached
        reuse = None
        if method is not PLAIN:
            reuse = Reuse(self.plans[method.source], self.backend(method), method.serial)
        cpu, wall = time.process_time(), time.perf_counter()
        ends, outcome = prefill(self.engine, self.streams, reuse)
        return Filled(time.process_time() - cpu, time.perf_counter() - wall, ends, outcome)

    def backend(self, method: Method) -> Recovery:
        if method.backend == "cacheblend":
            return create("cacheblend", {"ratio": method.ratio})
        if method.backend == "legolink":
            tokens = first_tokens(self.plans[method.source], method.ratio)
            return create("legolink", {"tokens": tokens})
        return create(method.backend)


class Reuse(NamedTuple):
    """A plan and how to carry it out. serial: request by request, what run_pass is compared
    with."""

    plan: ReusePlan
    backend: Recovery
    serial: bool = False


def prefill(
    engine: ReferenceEngine, streams: Sequence[Stream], reuse: Reuse | None
) -> tuple[torch.Tensor, PassOutcome | None]:
    """Fill prompts as a plan says, or compute them; logits float32 [streams, vocab] of the ends."""
    if reuse is None:
        return engine.prefill(streams), None
    runner = run_serial if reuse.serial else run_pass
    backends = [reuse.backend] * len(reuse.plan.members)
    outcome = runner(cast(LayerEngine, engine), reuse.plan, MAX_ROWS, backends)
    for stream, member in zip(streams, reuse.plan.members):
        stream.filled = member.end
    groups = [[stream] for stream in streams] if reuse.serial else [streams]
    return torch.cat([engine.prefill(group) for group in groups]), outcome


def first_tokens(plan: ReusePlan, ratio: float) -> int:
    """The most first tokens of each inexact copied piece that stay within `ratio` of their rows."""
    lengths: Sequence[int] = [c.length for m in plan.members for c in m.copies if not c.exact]
    tokens = 0
    while sum(min(n, tokens + 1) for n in lengths) <= ratio * sum(lengths) and tokens < max(
        lengths
    ):
        tokens += 1
    return tokens
