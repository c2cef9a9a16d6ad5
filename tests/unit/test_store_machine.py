"""The store against a dictionary: any sequence of calls keeps its promises."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_world import IDENTITY, Round, World, cache, make_round, restored

from tokendance.store import Dense, EntryKey, Kept, Mirror, Store
from tokendance.store.records import Record
from tokendance.store.tiers.base import TierQueue
from tokendance.store.tiers.disk import DiskTier
from tokendance.types import SessionId

SESSIONS = ["x", "y"]
BUDGET = 90_000


def tensors_of(record: Record) -> list[torch.Tensor]:
    entry = record.entry
    layers = (*entry.k.layers, *entry.v.layers)
    return [entry.tokens, *(t for layer in layers for t in layer if t is not None)]


class StoreMachine(RuleBasedStateMachine):
    """`model` maps every key ever kept to the K/V that was in the pages then."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp()
        self.world = World(np.random.default_rng(1), pages=1024)
        self.model: dict[EntryKey, torch.Tensor] = {}
        self.exact: dict[EntryKey, int] = {}
        self.must: dict[str, set[EntryKey]] = {}  # session -> keys that a pin protects
        self.leases: list[tuple[EntryKey, ExitStack]] = []
        self.history: list[Round] = []
        self.count = 0
        self.start()

    def start(self) -> None:
        self.queue = TierQueue(DiskTier(self.root))
        self.store = Store(IDENTITY, budget=BUDGET, block=8, lower=self.queue, spill_at=0.5)

    def teardown(self) -> None:
        for _, stack in self.leases:
            stack.close()
        self.queue.close()
        shutil.rmtree(self.root)

    def keys(self) -> list[EntryKey]:
        return list(self.store._custody.ledger.by_key)

    def learn(self, kept: list[Kept], round_: Round, session: str) -> None:
        for item in kept:
            if item.key is not None:
                live = round_.caches[item.request_id]
                self.model[item.key] = self.world.rows(live.slots)
        if session in self.must:
            owned = set(self.store._custody.ledger.of_session(SessionId(session)))
            self.must[session] = owned

    @rule(
        private=st.lists(st.integers(1, 24), min_size=2, max_size=3),
        shared=st.lists(st.integers(8, 30), min_size=1, max_size=2),
        recompute=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=2),
        session=st.sampled_from(SESSIONS),
    )
    def put_family(
        self,
        private: list[int],
        shared: list[int],
        recompute: list[tuple[int, int]],
        session: str,
    ) -> None:
        self.count += 1
        round_ = make_round(
            self.world,
            private,
            [self.world.tokens(n) for n in shared],
            recompute=tuple((a, a + n) for a, n in recompute),
            session=session,
            tag=f"{self.count}.",
        )
        self.history = [*self.history[-3:], round_]
        self.learn(self.store.put_family(round_.plan, round_.caches), round_, session)

    @precondition(lambda self: self.history)
    @rule(which=st.integers(0, 3))
    def put_again(self, which: int) -> None:
        round_ = self.history[which % len(self.history)]
        session = next(iter(round_.caches.values())).owner.session
        known = {r: self.world.rows(c.slots) for r, c in round_.caches.items()}
        kept = self.store.put_family(round_.plan, round_.caches)
        for item in kept:
            if item.key in self.model:  # else there was no room for it the first time
                assert torch.equal(self.model[item.key], known[item.request_id])
        self.learn(kept, round_, session)

    @precondition(lambda self: self.history)
    @rule(rows=st.integers(1, 60), reuse=st.booleans(), session=st.sampled_from(SESSIONS))
    def put_alone(self, rows: int, reuse: bool, session: str) -> None:
        """Without a plan; with `reuse` it begins with rows of a live cache, in the same pages."""
        self.count += 1
        name = f"{self.count}.alone"
        tokens = self.world.tokens(rows)
        live = cache(self.world, name, tokens, session=session)
        if reuse:
            donor = next(iter(self.history[-1].caches.values()))
            tokens = [*donor.token_ids[:24], *tokens]
            live = cache(self.world, name, tokens, session=session)
            same = min(24, donor.rows)
            for layer in range(3):
                k, v = self.world.kv.read(layer, donor.slots[:same])
                self.world.kv.write(layer, live.slots[:same], k, v)
        round_ = Round(self.history[-1].plan, {live.request_id: live})
        self.learn([self.store.put(live)], round_, session)

    @precondition(lambda self: self.keys())
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.keys()))
        with self.store.lease(key) as entry:
            assert entry is not None and entry is self.store.get(key)
            assert torch.equal(restored(entry), self.model[key])

    @precondition(lambda self: self.keys())
    @rule(data=st.data())
    def open_lease(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.keys()))
        stack = ExitStack()
        assert stack.enter_context(self.store.lease(key)) is not None
        self.leases.append((key, stack))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9))
    def close_lease(self, which: int) -> None:
        _, stack = self.leases.pop(which % len(self.leases))
        stack.close()

    @precondition(lambda self: self.keys())
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.keys()))
        if self.store.promote(key):
            assert isinstance(self.store.get(key), Dense)

    @precondition(lambda self: self.keys())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.keys()))
        gone = self.store.evict(key)
        assert gone == (self.store.get(key) is None)
        if gone:
            self.must = {session: keys - {key} for session, keys in self.must.items()}

    @rule(session=st.sampled_from(SESSIONS))
    def pin(self, session: str) -> None:
        owned = set(self.store._custody.ledger.of_session(SessionId(session)))
        assert self.store.pin(SessionId(session)) == bool(owned)
        if owned:
            self.must[session] = owned

    @rule(session=st.sampled_from(SESSIONS))
    def unpin(self, session: str) -> None:
        self.store.unpin(SessionId(session))
        self.must.pop(session, None)

    @rule(session=st.sampled_from(SESSIONS))
    def release(self, session: str) -> None:
        before = self.store.memory.held
        receipt = self.store.release(SessionId(session))
        self.must.pop(session, None)
        assert receipt.nbytes == before - self.store.memory.held
        assert receipt.deferred <= 2 * len(self.leases)  # a mirror's lease holds its master too
        assert not self.store._custody.ledger.of_session(SessionId(session))
        assert self.store.prefetch(SessionId(session)) == {}

    @rule(session=st.sampled_from(SESSIONS))
    def prefetch(self, session: str) -> None:
        self.store.prefetch(SessionId(session))
        self.store.flush()

    @precondition(lambda self: not self.leases)
    @rule()
    def crash(self) -> None:
        """Memory is gone; what was on disk is found again, and nothing else."""
        self.queue.close()
        self.must = {}
        self.start()
        assert not self.keys()

    @invariant()
    def bytes_are_what_is_held(self) -> None:
        self.store.flush()
        records = list(self.store._custody.ledger.records())
        held = sum(t.untyped_storage().nbytes() for r in records for t in tensors_of(r))
        assert held == self.store.memory.held == self.store.stats().held
        assert held <= BUDGET
        assert self.queue.inflight == 0

    @invariant()
    def leases_are_counted(self) -> None:
        ledger = self.store._custody.ledger
        expected: dict[int, int] = {}
        for key, _ in self.leases:
            record = ledger.by_key[key]  # a leased entry never leaves
            expected[id(record)] = expected.get(id(record), 0) + 1
            if isinstance(record.entry, Mirror):
                master = ledger.master_of(record.entry)
                expected[id(master)] = expected.get(id(master), 0) + 1
        for record in ledger.records():
            assert record.leases == expected.get(id(record), 0)

    @invariant()
    def mirrors_have_masters(self) -> None:
        ledger = self.store._custody.ledger
        mirrors = [r for r in ledger.by_key.values() if isinstance(r.entry, Mirror)]
        for record in mirrors:
            assert isinstance(record.entry, Mirror)
            master = ledger.master_of(record.entry)
            assert record in master.mirrors
            held = {r for p in master.entry.pieces for r in range(p.start, p.end)}
            assert all(set(range(*run)) <= held for run in record.entry.needs())
        assert sum(len(r.mirrors) for r in ledger.records()) == len(mirrors)
        assert all(r.mirrors for r in ledger.trunks)

    @invariant()
    def pins_hold(self) -> None:
        for keys in self.must.values():
            assert keys <= set(self.keys())

    @invariant()
    def index_knows_what_is_there(self) -> None:
        assert sum(map(len, self.store._custody.indexes.values())) == len(self.keys())


StoreMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestStore = StoreMachine.TestCase
