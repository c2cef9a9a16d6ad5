"""Many rounds through a store that is far too small.

Sessions come, play some rounds with agents that join and leave, and go; most are forgotten without
a word, as clients are. Entries are evicted to disk, brought back, pinned, leased and restored all
the time. What must stay flat: the bytes held, the resident memory, and the sizes of every table.
Every restored entry is checked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tokendance.plan.reuse_plan import Copy, Member, PageTable, ReusePlan
from tokendance.restore import PagedPlanes, Placement, Restorer
from tokendance.reuse.rotary import Rotary
from tokendance.store import Cache, EntryKey, Identity, Owner, Store
from tokendance.store.tiers.base import TierQueue
from tokendance.store.tiers.disk import DiskTier
from tokendance.types import AgentId, RequestId, RoundId, SessionId

PAGE, LAYERS, HEADS, DIM, BLOCK = 4, 2, 2, 16, 8
MOST_ROWS = 120


class Sample(NamedTuple):
    """Sizes at one moment. tables: entries in all tables of the store together."""

    round: int
    held: int
    rss: int
    disk: int
    tables: int


class Tally(NamedTuple):
    """What a churn came to. checked: entries that were restored and compared."""

    samples: list[Sample]
    checked: int
    wrong: int
    counters: dict[str, int]


@dataclass(slots=True)
class Session:
    """One application: its agents and how often it has played."""

    name: SessionId
    agents: int
    rounds: int = 0


class Churn:
    """The store under test and the sessions that use it."""

    def __init__(self, root: Path, budget: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.queue = TierQueue(DiskTier(root, capacity=3 * budget))
        self.store = Store(
            Identity("churn"), budget=budget, block=BLOCK, lower=self.queue, spill_at=0.5
        )
        pages = 6 * -(-MOST_ROWS // PAGE)
        self.kv = PagedPlanes.empty(LAYERS, pages, PAGE, HEADS, DIM, torch.bfloat16)
        self.target = PagedPlanes.empty(LAYERS, pages, PAGE, HEADS, DIM, torch.bfloat16)
        self.rotary = Rotary(1.0 / 1e4 ** (torch.arange(0, DIM, 2).double() / DIM))
        self.restorer = Restorer(self.target, self.rotary)
        self.sessions = [self._session() for _ in range(6)]
        self.checked = self.wrong = 0

    def step(self, number: int) -> None:
        """One round of one session, and something that happens to another one."""
        session = self.sessions[int(self.rng.integers(len(self.sessions)))]
        self._play(number, session)
        other = self.sessions[int(self.rng.integers(len(self.sessions)))]
        event = self.rng.random()
        if event < 0.15:
            self.store.prefetch(other.name)
        elif event < 0.25:
            self.store.pin(other.name)
        elif event < 0.4:
            self.store.unpin(other.name)
        elif event < 0.45:
            self.store.release(other.name)
        if session.rounds > 12:
            self.store.unpin(session.name)
            self.sessions[self.sessions.index(session)] = self._session()
        session.agents = max(2, min(6, session.agents + int(self.rng.integers(-1, 2))))

    def sample(self, number: int) -> Sample:
        self.store.flush()
        custody = self.store._custody
        indexes = custody.indexes.values()
        tables = (
            len(custody.ledger.by_key)
            + len(custody.ledger.trunks)
            + len(custody.ledger.masters)
            + len(custody.ledger._history)
            + len(custody._requests)
            + sum(len(index) + len(index._places) for index in indexes)
        )
        disk = self.queue.tier.held if isinstance(self.queue.tier, DiskTier) else 0
        return Sample(number, self.store.memory.held, resident(), disk, tables)

    def _session(self) -> Session:
        name = SessionId(f"session-{int(self.rng.integers(1 << 60)):x}")
        return Session(name, int(self.rng.integers(2, 6)))

    def _play(self, number: int, session: Session) -> None:
        session.rounds += 1
        plan, caches = self._round(number, session)
        kept = self.store.put_family(plan, caches)
        for item in kept:
            if item.key is not None:
                self._check(item.key, caches[item.request_id])

    def _check(self, key: EntryKey, cache: Cache) -> None:
        with self.store.lease(key) as entry:
            if entry is None:
                return
            slots = torch.arange(entry.rows)
            self.restorer.restore([Placement(entry, slots)])
            same = all(
                torch.equal(a, b)
                for layer in range(LAYERS)
                for a, b in zip(self.target.read(layer, slots), self.kv.read(layer, cache.slots))
            )
        self.checked += 1
        self.wrong += not same

    def _round(self, number: int, session: Session) -> tuple[ReusePlan, dict[RequestId, Cache]]:
        shared = self.rng.integers(0, 50_000, int(self.rng.integers(16, 60))).tolist()
        members, tables, caches = [], [], {}
        page = -(-MOST_ROWS // PAGE)
        lead = 0
        for index in range(session.agents):
            before = int(self.rng.integers(2, 40))
            tokens = [*self._tokens(before), *shared, *self._tokens(6)]
            name = RequestId(f"{session.name}.{number}.{index}")
            blocks = tuple(range(index * page, (index + 1) * page))
            slots = torch.arange(len(tokens)) + index * page * PAGE
            copies = (Copy(0, lead, before, len(shared)),) if index else ()
            lead = before if index == 0 else lead
            self._fill(slots, copies)
            tables.append(PageTable(name, blocks))
            agent = AgentId(f"agent-{index}")
            end = len(tokens) - 1
            members.append(Member(name, agent, index, tuple(tokens), 0, end, copies))
            caches[name] = Cache(name, Owner(session.name, agent), tokens, self.kv, slots)
        return ReusePlan(RoundId(str(number)), tuple(members), tuple(tables), 0), caches

    def _tokens(self, count: int) -> list[int]:
        return list(map(int, self.rng.integers(0, 50_000, count)))

    def _fill(self, slots: torch.Tensor, copies: Sequence[Copy]) -> None:
        for layer in range(LAYERS):
            k, v = torch.randn(2, len(slots), HEADS, DIM).to(torch.bfloat16)
            for copy in copies:
                rows = slice(copy.start, copy.end)
                source = torch.arange(copy.length) + copy.source_start
                lead_k, lead_v = self.kv.read(layer, source)
                k[rows], v[rows] = self.rotary.rotate(lead_k, copy.delta), lead_v
            self.kv.write(layer, slots, k, v)


def resident() -> int:
    """Bytes of this process in memory (0 where the system does not say)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def churn(
    rounds: int, root: Path, *, budget: int = 400_000, samples: int = 20, seed: int = 0
) -> Tally:
    """Play `rounds` rounds and look at the sizes `samples` times."""
    world = Churn(root, budget, seed)
    every = max(1, rounds // samples)
    taken = []
    for number in range(rounds):
        world.step(number)
        if (number + 1) % every == 0:
            taken.append(world.sample(number + 1))
    counters = world.store.stats().counters
    world.queue.close()
    return Tally(taken, world.checked, world.wrong, counters)


def growth(values: Sequence[int]) -> float:
    """Largest value of the second half over that of the first: near 1 is flat. Single values say
    little, since what is held varies with the sessions of the moment."""
    half = len(values) // 2
    return max(values[half:]) / max(1, *values[:half])


def bench_churn(rounds: int, budget: int) -> dict[str, Any]:
    """A churn with its disk tier in a temporary folder, and how much each size grew."""
    with tempfile.TemporaryDirectory() as folder:
        tally = churn(rounds, Path(folder), budget=budget)
    grown = {
        name: round(growth([getattr(s, name) for s in tally.samples]), 3)
        for name in ("held", "rss", "disk", "tables")
    }
    return {
        "rounds": rounds,
        "budget": budget,
        "repetitions": 1,
        "growth": grown,
        "checked": tally.checked,
        "wrong": tally.wrong,
        "counters": tally.counters,
        "samples": [sample._asdict() for sample in tally.samples],
    }
