"""A small world for store and restore tests: paged K/V with known content, and rounds over it.

The oracle is `World.planes`: what lies in the pages of each request is what must come back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from tokendance.plan.reuse_plan import Copy, Member, PageTable, ReusePlan
from tokendance.restore import PagedPlanes, Placement, Restorer
from tokendance.reuse.rotary import Rotary
from tokendance.store import Cache, Entry, Identity, Owner
from tokendance.types import AgentId, RequestId, RoundId, SessionId

LAYERS, HEADS, DIM, PAGE = 3, 2, 16, 4
IDENTITY = Identity("tiny", dtype="bfloat16")
ROTARY = Rotary(1.0 / 10000 ** (torch.arange(0, DIM, 2).double() / DIM))


@dataclass
class World:
    """Pages that requests are written to; page numbers are never used twice."""

    rng: np.random.Generator
    dtype: torch.dtype = torch.bfloat16
    pages: int = 4096
    kv: PagedPlanes = field(init=False)
    next_page: int = 0

    def __post_init__(self) -> None:
        self.kv = PagedPlanes.empty(LAYERS, self.pages, PAGE, HEADS, DIM, self.dtype)

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, 50_000, count).tolist()

    def table(self, rows: int) -> tuple[int, ...]:
        count = -(-rows // PAGE)
        if self.next_page + count > self.pages:
            self.next_page = 0
        first, self.next_page = self.next_page, self.next_page + count
        return tuple(self.rng.permutation(np.arange(first, first + count)).tolist())

    def random(self, rows: int) -> torch.Tensor:
        seed = int(self.rng.integers(1 << 31))
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, HEADS, DIM, generator=generator).to(self.dtype)

    def fill(self, slots: torch.Tensor) -> None:
        """New K/V at the slots, as if computed."""
        for layer in range(LAYERS):
            self.kv.write(layer, slots, self.random(len(slots)), self.random(len(slots)))

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """[layers, 2, rows, heads, dim], a copy."""
        return torch.stack([torch.stack(self.kv.read(i, slots)) for i in range(LAYERS)])


def slots_of(blocks: tuple[int, ...], rows: int) -> torch.Tensor:
    row = torch.arange(rows)
    return torch.tensor(blocks)[row // PAGE] * PAGE + row % PAGE


def cache(
    world: World,
    name: str,
    token_ids: list[int],
    blocks: tuple[int, ...] | None = None,
    session: str = "s",
    **kwargs: object,
) -> Cache:
    """A live cache; without blocks its rows are computed now."""
    slots = slots_of(blocks or world.table(len(token_ids)), len(token_ids))
    if blocks is None:
        world.fill(slots)
    owner = Owner(SessionId(session), AgentId(name))
    return Cache(RequestId(name), owner, token_ids, world.kv, slots, **kwargs)  # type: ignore[arg-type]


@dataclass
class Round:
    plan: ReusePlan
    caches: dict[RequestId, Cache]


def make_round(
    world: World,
    private: list[int],
    shared: list[list[int]],
    *,
    decoded: int = 3,
    recompute: tuple[tuple[int, int], ...] = (),
    session: str = "s",
    tag: str = "",
    orders: list[list[int]] | None = None,
    salt: bytes = b"",
) -> Round:
    """A round as the region pass makes it: agent 0 leads and computes everything, each other agent
    has `private[i]` rows of its own, then the shared segments, then a task and decoded tokens.

    recompute: rows relative to the region's start that followers computed again.
    """
    members, tables, caches = [], [], {}
    region = [token for segment in shared for token in segment]
    lead: Member | None = None
    for agent, count in enumerate(private):
        order = orders[agent] if orders else list(range(len(shared)))
        tokens = world.tokens(count) + [t for i in order for t in shared[i]] + world.tokens(5)
        end = len(tokens) - 1
        blocks = world.table(len(tokens) + decoded)
        name = RequestId(f"{tag}a{agent}")
        tables.append(PageTable(name, blocks))
        copies: tuple[Copy, ...] = ()
        if lead is not None:
            copies = tuple(_copies(shared, order, private[0], count, recompute))
        member = Member(name, AgentId(f"a{agent}"), agent, tuple(tokens), 0, end, copies)
        lead = lead or member
        members.append(member)
        slots = slots_of(blocks, len(tokens) + decoded)
        world.fill(slots)
        for copy in copies:
            move(world, copy, tables[0].blocks, blocks)
        owner = Owner(SessionId(session), AgentId(f"a{agent}"))
        ids = tokens + world.tokens(decoded)
        caches[name] = Cache(name, owner, ids, world.kv, slots, salt=salt)
    assert len(region) == sum(map(len, shared))
    return Round(ReusePlan(RoundId(tag), tuple(members), tuple(tables), 0), caches)


def _copies(
    shared: list[list[int]],
    order: list[int],
    lead_private: int,
    private: int,
    recompute: tuple[tuple[int, int], ...],
) -> list[Copy]:
    starts = np.cumsum([0, *map(len, shared)]).tolist()
    result, start = [], private
    for index in order:
        source = lead_private + starts[index]
        length = len(shared[index])
        if result and result[-1].delta == start - source and result[-1].end == start:
            last = result.pop()
            result.append(last._replace(length=last.length + length))
        else:
            result.append(Copy(0, source, start, length))
        start += length
    for a, b in recompute:
        result = [part for c in result for part in _without(c, private + a, private + b)]
    return result


def _without(copy: Copy, a: int, b: int) -> list[Copy]:
    a, b = max(a, copy.start), min(b, copy.end)
    if a >= b:
        return [copy]
    parts = [(copy.start, a), (b, copy.end)]
    return [Copy(0, s - copy.delta, s, e - s) for s, e in parts if e > s]


def move(world: World, copy: Copy, source: tuple[int, ...], target: tuple[int, ...]) -> None:
    """What the collective pass does with a copy."""
    from_slots = slots_of(source, copy.source_start + copy.length)[copy.source_start :]
    to_slots = slots_of(target, copy.end)[copy.start :]
    for layer in range(LAYERS):
        k, v = world.kv.read(layer, from_slots)
        world.kv.write(layer, to_slots, ROTARY.rotate(k, copy.delta), v)


def restored(entry: Entry, dtype: torch.dtype = torch.bfloat16, **kwargs: object) -> torch.Tensor:
    """[layers, 2, rows, heads, dim] of an entry, through a fused restore into fresh pages."""
    placement = Placement(entry, torch.arange(0), **kwargs)  # type: ignore[arg-type]
    count = len(placement.span)
    pages = -(-count // PAGE) + 1
    target = PagedPlanes.empty(LAYERS, pages, PAGE, HEADS, DIM, dtype)
    order = np.random.default_rng(count).permutation(pages).tolist()
    slots = slots_of(tuple(order), count)
    Restorer(target, ROTARY).restore([Placement(entry, slots, **kwargs)])  # type: ignore[arg-type]
    return torch.stack([torch.stack(target.read(i, slots)) for i in range(LAYERS)])
