"""How small families get, on the layouts of real traces.

Every round of a trace is planned by the planner and stored; bytes follow from the layout and the
model's shape alone, so the K/V is blank and no model runs. Both ratios are given, always with N: of
a whole family, which can never exceed N / (1 + (N - 1) * private share), and of one mirror.

Methods: `region` is the product's default. `tokens` recomputes a random 15 % of the shared tokens
one by
one: the worst case of the paper's selection, whose choices cluster somewhat. `blocks` recomputes
the same share as whole blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tokendance.bench.render import Prompt, Renderer, Tokenizer
from tokendance.bench.trace import Header, Trace
from tokendance.plan.planner import plan_round
from tokendance.plan.reuse_plan import Copy, ReusePlan
from tokendance.plan.ticket import Ticket, common_prefix
from tokendance.store import Cache, Identity, Owner, Store
from tokendance.store.blocks import BLOCK
from tokendance.store.family import family_bound
from tokendance.types import AgentId, RequestId, RoundId, Rows, SegmentKey, SessionId, Span

PAGE = 16
RECOMPUTED = 0.15
METHODS = ("region", "tokens", "blocks")


class Shape(NamedTuple):
    """Layers, K/V heads and head size; few layers give the same ratios as many."""

    layers: int
    heads: int
    dim: int


class Blank:
    """A KVAccess whose rows are zeros."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.num_layers = shape.layers
        self.page_size = PAGE

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.zeros(len(slots), self.shape.heads, self.shape.dim, dtype=torch.bfloat16)
        return rows, rows

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        raise NotImplementedError("nothing is restored here")


class Group(NamedTuple):
    """What one family of one round came to."""

    agents: int
    private_share: float
    held: int
    dense: int
    mirror_held: int
    mirror_dense: int


class Agents:
    """Requests of one session from round to round, with the engine's prefix cache as it would be:
    every agent finds the whole pages of its own last prompt."""

    def __init__(self, shape: Shape, method: str, session: str) -> None:
        self._kv = Blank(shape)
        self._method = method
        self._session = SessionId(session)
        self._last: dict[str, tuple[int, ...]] = {}
        self._store = Store(Identity("blank"), budget=1 << 40)
        self._rng = np.random.default_rng(0)

    def round(self, number: int, prompts: Sequence[Prompt]) -> Group:
        tickets = [self._ticket(number, prompt) for prompt in prompts]
        plan = plan_round(RoundId(str(number)), tickets, ())
        plan = replace(plan, members=tuple(_selected(plan, self._method, self._rng)))
        caches = {t.request_id: self._cache(t, p) for t, p in zip(tickets, prompts)}
        self._store.put_family(plan, caches)
        stats = self._store.stats()
        return Group(
            len(prompts),
            _private_share(prompts),
            stats.held,
            stats.dense_equivalent,
            stats.mirror_bytes,
            stats.mirror_equivalent,
        )

    def _ticket(self, number: int, prompt: Prompt) -> Ticket:
        ids = prompt.ids
        cached = common_prefix(ids[:-1], self._last.get(prompt.agent, ()))
        self._last[prompt.agent] = (*ids, *prompt.output)
        return Ticket(
            request_id=RequestId(f"{number}.{prompt.agent}"),
            agent=AgentId(prompt.agent),
            token_ids=ids,
            spans=tuple(_spans(prompt)),
            arrived=0.0,
            computed=lambda: 0,
            cached=cached // PAGE * PAGE,
            approximate_from=0,
        )

    def _cache(self, ticket: Ticket, prompt: Prompt) -> Cache:
        ids = (*prompt.ids, *prompt.output)
        owner = Owner(self._session, ticket.agent)
        return Cache(ticket.request_id, owner, ids, self._kv, torch.arange(len(ids)))


def _spans(prompt: Prompt) -> Iterator[Span]:
    start = 0
    for piece in prompt.pieces:
        if piece.ids:
            key = SegmentKey(np.array(piece.ids, dtype=np.int32).tobytes())
            yield Span(start, start + len(piece.ids), key)
            start += len(piece.ids)


def _private_share(prompts: Sequence[Prompt]) -> float:
    """Rows of an agent (prompt and answer) in segments that no other prompt of the round holds:
    mean over all but the first agent. What the plan makes of the round plays no part in it."""
    readers = Counter(ids for prompt in prompts for ids in {piece.ids for piece in prompt.pieces})
    shares = []
    for prompt in prompts[1:]:
        shared = sum(len(piece.ids) for piece in prompt.pieces if readers[piece.ids] > 1)
        shares.append(1 - shared / (len(prompt.ids) + len(prompt.output)))
    return float(np.mean(shares)) if shares else 1.0


def _selected(plan: ReusePlan, method: str, rng: np.random.Generator) -> Iterator[Any]:
    """The members, with the method's share of every copied run computed instead."""
    size = BLOCK if method == "blocks" else 1
    for member in plan.members:
        if method == "region":
            yield member
            continue
        copies = [part for copy in member.copies for part in _holes(copy, size, rng)]
        yield replace(member, copies=tuple(copies))


def _holes(copy: Copy, size: int, rng: np.random.Generator) -> Iterator[Copy]:
    units = -(-copy.length // size)
    keep = rng.random(units) >= RECOMPUTED
    rows = np.repeat(keep, size)[: copy.length]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], rows.astype(np.int8), [0]))))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist()):
        run = Rows(copy.start + start, copy.start + end)
        yield copy._replace(source_start=run.start - copy.delta, start=run.start, length=len(run))


def measure(trace: Trace, renderer: Renderer, shape: Shape, method: str) -> list[dict[str, Any]]:
    """One row per round that has a family."""
    sessions: dict[str, Agents] = {}
    rows = []
    for round_ in trace.rounds():
        groups: dict[str, list[Prompt]] = defaultdict(list)
        for request in round_.requests:
            groups[trace.header.group_of(request.agent) or "all"].append(renderer(request))
        found = []
        for name, prompts in groups.items():
            agents = sessions.setdefault(name, Agents(shape, method, name))
            found.append(agents.round(round_.index, prompts))
        if max(group.agents for group in found) > 1:
            rows.append(_row(trace.header, method, round_.index, found))
    return rows


def _row(header: Header, method: str, number: int, groups: Sequence[Group]) -> dict[str, Any]:
    agents = float(np.mean([g.agents for g in groups]))
    private = float(np.mean([g.private_share for g in groups]))
    ratio = sum(g.dense for g in groups) / sum(g.held for g in groups)
    mirrors = sum(g.mirror_held for g in groups)
    bound = family_bound(round(agents), private)
    return {
        "trace": f"{header.size}/{header.name}",
        "order": header.order,
        "self_mode": header.self_mode,
        "round": number,
        "method": method,
        "agents": round(agents),
        "private_share": round(private, 4),
        "family_ratio": round(ratio, 3),
        "bound": round(bound, 3),
        "of_bound": round(ratio / bound, 3),
        "mirror_ratio": round(sum(g.mirror_dense for g in groups) / mirrors, 3) if mirrors else 1.0,
    }


def bench_storage(
    paths: Sequence[Path], tokenizer: Tokenizer, shape: Shape, say: Callable[[str], None]
) -> dict[str, Any]:
    """Every method on every trace. Bytes are counted, not timed, so one repetition is exact; the
    last round of a trace has the full history."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        trace = Trace(path)
        renderer = Renderer(tokenizer, trace.header.render)
        for method in METHODS:
            found = measure(trace, renderer, shape, method)
            rows += found
            if found:
                say(_line(found[-1]))
    return {"shape": shape._asdict(), "block": BLOCK, "repetitions": 1, "rows": rows}


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['trace']:36} {row['method']:7} N={row['agents']:<3} "
        f"family {row['family_ratio']:6.2f} (bound {row['bound']:6.2f}) "
        f"mirror {row['mirror_ratio']:6.2f}"
    )
