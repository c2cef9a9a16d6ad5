"""Random rounds for tests of the collective pass: who holds which rows, built without a planner.

A prompt is a list of parts; a part that several prompts hold is shared. Every shared part that an
earlier member computes, or that a donor holds, is copied; everything else is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

import tiny
import torch
from hypothesis import strategies as st

from tokendance.engines.reference.engine import ReferenceEngine, Stream
from tokendance.plan.reuse_plan import Copy, Member, ReusePlan, check_plan
from tokendance.types import AgentId, RequestId, RoundId, Rows

Part = tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """prompts: parts of each agent, its last token in the last part. cached: rows held already.

    authors: with donors, the private history in front of each shared part when it was written.
    """

    prompts: tuple[tuple[Part, ...], ...]
    shared: tuple[Part, ...]
    cached: tuple[int, ...]
    authors: tuple[Part, ...]

    def ids(self, agent: int) -> list[int]:
        return [token for part in self.prompts[agent] for token in part]


def part(length: int, seed: int) -> Part:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(tiny.VOCAB, (length,), generator=generator).tolist())


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    """Orders, subsets, repeats, empty and one-token segments, equal segments, any prefix hit."""
    lengths = draw(st.lists(st.sampled_from((0, 1, 2, 5, 9, 13)), min_size=1, max_size=4))
    shared = [part(n, 100 + i) for i, n in enumerate(lengths)]
    if draw(st.booleans()):
        shared.append(shared[0])  # two agents with identical outputs
    prompts, cached = [], []
    for agent in range(draw(st.integers(1, 4))):
        history = part(draw(st.integers(0, 14)), 200 + agent * draw(st.booleans()))
        order = draw(st.lists(st.sampled_from(range(len(shared))), max_size=5))
        parts = [history]
        for index in order:
            parts.append(shared[index])
            if draw(st.integers(0, 3)) == 0:
                parts.append(part(draw(st.integers(1, 4)), 300 + agent))
        parts.append(part(draw(st.integers(1, 4)), 400 + agent))
        prompts.append(tuple(parts))
        length = sum(map(len, parts))
        cached.append(draw(st.just(0) | st.integers(0, length - 1)))
    authors = tuple(part(draw(st.integers(0, 9)), 500 + i) for i in range(len(shared)))
    return Round(tuple(prompts), tuple(shared), tuple(cached), authors)


STANDARD = Round(
    prompts=tuple(
        (part(history, 10 + i), part(20, 1), part(17, 2), part(26, 3), part(5, 20 + i))
        for i, history in enumerate((12, 7, 0, 19))
    ),
    shared=(part(20, 1), part(17, 2), part(26, 3)),
    cached=(0, 4, 0, 19),
    authors=(part(9, 31), part(3, 32), part(14, 33)),
)


@contextmanager
def on_engine(
    engine: ReferenceEngine, spec: Round, *, donors: bool = False
) -> Iterator[tuple[ReusePlan, list[Stream]]]:
    """The round's plan and its members' streams; prefix rows and donors are in the cache."""
    prompts = [spec.ids(i) for i in range(len(spec.prompts))]
    books = [[*a, *s] for a, s in zip(spec.authors, spec.shared)] if donors else []
    with engine.streams([*prompts, *books]) as streams:
        members, kept = streams[: len(prompts)], streams[len(prompts) :]
        for stream, cached in zip(members, spec.cached):
            if cached:
                engine.hidden(engine.batch([(stream, [Rows(0, cached)])]))
        if any(books):
            engine.prefill([stream for stream, book in zip(kept, books) if book])
        plan = plan_of(spec, streams, donors)
        check_plan(plan, engine.kv.page_size)
        yield plan, members


def plan_of(spec: Round, streams: Sequence[Stream], donors: bool) -> ReusePlan:
    agents = range(len(spec.prompts))
    where: dict[Part, tuple[int, int]] = {}
    if donors:
        for i, (author, text) in enumerate(zip(spec.authors, spec.shared)):
            where.setdefault(text, (len(agents) + i, len(author)))
    members: list[Member] = []
    for agent in agents:
        ids, start = spec.ids(agent), 0
        copies: list[Copy] = []
        offered = dict(where)
        for text in spec.prompts[agent]:
            rows = Rows(max(start, spec.cached[agent]), min(start + len(text), len(ids) - 1))
            if text in spec.shared and rows.end > rows.start and text in where:
                table, origin = where[text]
                source = origin + rows.start - start
                exact = source == rows.start and _same_prefix(spec, agent, table, rows.end)
                exact = exact and all(c.exact for c in members[table].copies if c.start < rows.end)
                copies.append(Copy(table, source, rows.start, len(rows), exact))
            if text in spec.shared and text not in where and start + len(text) < len(ids):
                offered.setdefault(text, (agent, start))
            start += len(text)
        where = offered
        members.append(
            Member(
                RequestId(f"r{agent}"),
                AgentId(f"a{agent}"),
                agent,
                tuple(ids),
                spec.cached[agent],
                len(ids) - 1,
                tuple(copies),
            )
        )
    tables = tuple(s.table(RequestId(f"r{i}")) for i, s in enumerate(streams))
    return ReusePlan(RoundId("round"), tuple(members), tables, None if donors else 0)


def _same_prefix(spec: Round, agent: int, table: int, end: int) -> bool:
    """Whether the source is a member that sees the same tokens up to `end`."""
    if table >= len(spec.prompts):
        return False
    pairs = zip(spec.ids(agent), spec.ids(table))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) >= end


def finish(engine: ReferenceEngine, plan: ReusePlan, streams: Sequence[Stream]) -> torch.Tensor:
    """Logits [members, vocab] of the last rows, which the engine computes itself."""
    for stream, member in zip(streams, plan.members):
        stream.filled = member.end
    return engine.prefill(streams)


def kv_of(engine: ReferenceEngine, stream: Stream, rows: Rows) -> torch.Tensor:
    """K and V of some rows in all layers, [layers, 2, rows, kv_heads, head_dim]."""
    slots = engine.batch([(stream, [rows])]).slots
    layers = range(engine.kv.num_layers)
    return torch.stack([torch.stack(engine.kv.read(layer, slots)) for layer in layers])
