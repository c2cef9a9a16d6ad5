"""The store when memory is scarce: pages, its own budget, and the tier below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random

import pytest
from audit import Audit, audited, audited_saves
from small_engine import Engine, make_round, outcome, tokens, words
from stored_rounds import OPTIONS, next_round, play, send

pytestmark = pytest.mark.engine

Start = Callable[..., AbstractContextManager[Engine]]


class TestScarcePages:
    """A pool that holds a fraction of what is asked for."""

    @pytest.fixture(scope="class")
    def engine(self, start_engine: Start) -> Iterator[Engine]:
        with start_engine(
            options=OPTIONS, num_gpu_blocks_override=40, disable_log_stats=False
        ) as engine:
            yield engine

    @pytest.fixture
    def audit(self, engine: Engine) -> Iterator[Audit]:
        engine.forget()
        with audited(engine) as audit:
            yield audit

    def test_preempted_requests_come_back_from_the_store(
        self, engine: Engine, audit: Audit
    ) -> None:
        members = make_round(200, 4, private=60)
        engine.counters()
        outputs = engine.answers(send(engine, members, max_tokens=120))
        counted = engine.counters()
        assert counted.get("tokendance:restored_rows_total", 0) > 100, counted
        leader = next(o for o in outputs if outcome(o)["role"] == "leader")
        assert len(tokens(leader)) == 120
        prompt = members[outputs.index(leader)].prompt
        engine.forget()
        assert tokens(leader) == tokens(engine.ask_exactly(prompt, max_tokens=120))

    def test_agents_take_turns_in_a_pool_that_holds_a_third_of_them(
        self, engine: Engine, audit: Audit
    ) -> None:
        """Every round, every agent's history has left the pool, and all of it comes back."""
        members = make_round(210, 6, private=150)
        outputs = play(engine, members)
        for number in (211, 212):
            members = next_round(members, outputs, number)
            outputs = play(engine, members)
            rows = [outcome(o)["rows"] for o in outputs]
            assert all(r.get("stored", 0) + r.get("prefix", 0) > 300 for r in rows), rows
        for member, output in zip(members, outputs):
            if outcome(output)["role"] == "leader":
                assert tokens(output) == tokens(engine.ask_exactly(member.prompt))

    def test_pages_that_are_given_out_are_stored_in_time(
        self, engine: Engine, audit: Audit
    ) -> None:
        """A follower ends long before its leader, and a stranger takes its pages."""
        members = make_round(220, 2, private=100)
        slow, quick = (
            engine.add(m.prompt, m.hints, max_tokens=n) for m, n in zip(members, (200, 2))
        )
        engine.run([quick])
        stranger = words(Random(5), 700)
        assert len(tokens(engine.ask(stranger, {"mode": "exact"}))) == 4
        engine.run([slow])
        engine.steps(2)
        engine.forget()
        again = play(engine, members)
        assert all(outcome(a)["rows"].get("stored", 0) > 200 for a in again), again

    def test_saves_come_before_the_forward_that_takes_their_pages(self, engine: Engine) -> None:
        """Also in a step that loads nothing, in which vLLM would rather begin with its forward."""
        engine.forget()
        with audited_saves(engine) as saves:
            (member,) = make_round(230, 1, private=150)
            engine.answers(send(engine, [member]))
            assert not saves
            engine.ask(words(Random(6), 1200), {"mode": "exact"})  # all pages, in the next step
            assert len(saves) == 1

    def test_a_request_that_is_preempted_again_and_again_is_stored_once(
        self, engine: Engine
    ) -> None:
        """Its second pages are not those of its plan."""
        engine.forget()
        with audited_saves(engine) as saves:
            names = send(engine, make_round(240, 2, private=60), max_tokens=60)
            engine.steps(4)
            for seed in range(3):
                engine.add(words(Random(seed), 200), {"mode": "exact"})
                assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
                engine.steps(3)
                assert len(engine.scheduling._running) == len(engine.scheduler.running)
            assert len(saves) == len(names)
            engine.run()


def test_a_budget_that_holds_nothing(start_engine: Start) -> None:
    """The store refuses, and everything is served as without one."""
    options = OPTIONS | {"store_gib": 1e-6}
    with start_engine(options=options, disable_log_stats=False) as engine:
        members = make_round(300, 3)
        first = play(engine, members)
        engine.forget()
        again = play(engine, members)
        assert [tokens(a) for a in again] == [tokens(b) for b in first]
        assert all("stored" not in outcome(a)["rows"] for a in again)
        assert engine.worker.archive._store.stats().held == 0


def test_what_memory_does_not_hold_comes_back_from_disk(
    start_engine: Start, tmp_path: Path
) -> None:
    options = OPTIONS | {"store_gib": 2.5e-3, "store_folder": str(tmp_path)}
    with start_engine(options=options, disable_log_stats=False) as engine, audited(engine):
        sessions = [make_round(400 + i, 3, private=150) for i in range(4)]
        for members in sessions:
            play(engine, members)
            engine.worker.archive._store.flush()
        assert engine.worker.archive._store.stats().held <= 2.5e-3 * 2**30
        engine.forget()
        again = play(engine, sessions[0])
        assert all(outcome(a)["rows"].get("stored", 0) > 100 for a in again), again


def test_int8_serves_followers_only(start_engine: Start) -> None:
    options = OPTIONS | {"store_int8": True}
    with start_engine(options=options, disable_log_stats=False) as engine:
        members = make_round(500, 3, private=120)
        first = play(engine, members)
        engine.forget()
        again = play(engine, next_round(members, first, 501), logprobs=5)
        by_role = {outcome(a)["role"]: outcome(a)["rows"] for a in again}
        assert "stored" not in by_role["leader"]
        assert by_role["follower"]["stored"] > 200
