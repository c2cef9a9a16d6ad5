"""Rounds under bad conditions: little memory, small steps, aborts, failures, much at once.

Every pass is audited (audit.py). Whatever is not approximate has to be what vLLM says on its own,
nothing may hang, and the pages and the round book have to be empty again in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from audit import Audit, audited  # noqa: E402
from small_engine import (  # noqa: E402
    BLOCK,
    Engine,
    Member,
    make_round,
    outcome,
    tokens,
    words,
)

from tokendance.plan.reuse_plan import PlanError  # noqa: E402

Start = Callable[..., AbstractContextManager[Engine]]

OPTIONS = {"min_shared_tokens": 16, "round_timeout_ms": 200.0, "linger_ms": 20.0}


@contextmanager
def clean(engine: Engine) -> Iterator[Audit]:
    """Audit what runs in the context; nothing is left of it afterwards."""
    engine.forget()
    engine.counters()
    free = engine.free_blocks
    with audited(engine) as audit:
        yield audit
    engine.run()
    assert engine.free_blocks == free
    assert len(engine.book) == 0
    assert not engine.scheduling._outcomes and not engine.scheduling._running
    engine.forget()


def send(engine: Engine, members: list[Member], **options: Any) -> list[str]:
    return [engine.add(*member, **options) for member in members]


def check_exact(engine: Engine, outputs: list[Any]) -> int:
    """Compare all but followers with vLLM's ordinary answer; how many were compared."""
    exact = [o for o in outputs if outcome(o).get("role") != "follower"]
    names = [
        engine.add(list(o.prompt_token_ids), {"mode": "exact"}, max_tokens=len(tokens(o)))
        for o in exact
    ]
    for output, wanted in zip(exact, engine.answers(names)):
        assert tokens(output) == tokens(wanted), outcome(output)
    return len(exact)


def preemptions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with the ids of preempted requests."""
    seen: list[str] = []
    preempt = engine.scheduler._preempt_request

    def note(request: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(request.request_id)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", note)
    return seen


# -- little memory ---------------------------------------------------------------------------------


class TestScarceMemory:
    PAGES = 48

    @pytest.fixture(scope="class")
    def engine(self, start_engine: Start) -> Iterator[Engine]:
        rows = self.PAGES * BLOCK
        with start_engine(
            options=OPTIONS, num_gpu_blocks_override=self.PAGES, max_model_len=rows
        ) as engine:
            yield engine

    def test_preemption_and_resumption(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = preemptions(engine, monkeypatch)
        with clean(engine) as audit:
            outputs = engine.answers(send(engine, make_round(1, 4), max_tokens=180))
            assert audit.members == 4
        assert seen
        assert all(len(tokens(o)) == 180 for o in outputs)
        assert check_exact(engine, outputs) >= 1

    def test_exact_after_a_resumed_follower(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a follower computes again after a preemption is still found by nobody."""
        members = make_round(2, 4)
        before = [tokens(engine.ask_exactly(m.prompt)) for m in members]
        seen = preemptions(engine, monkeypatch)
        engine.forget()
        engine.answers(send(engine, members, max_tokens=180))
        assert seen
        assert [tokens(engine.ask_exactly(m.prompt)) for m in members] == before

    def test_round_larger_than_the_pool(self, engine: Engine) -> None:
        with clean(engine) as audit:
            outputs = engine.answers(send(engine, make_round(3, 12)))
            assert audit.members == 12
            assert len(audit.plans) > 1
        # Whoever starts after the leader has finished needs a new one.
        assert [outcome(o)["role"] for o in outputs].count("follower") >= 8
        assert check_exact(engine, outputs) >= 1

    def test_every_prompt_fills_the_pool(self, engine: Engine) -> None:
        """Only one fits at a time; nobody waits for ever."""
        members = make_round(4, 3, shared=(500, 400), private=500)
        with clean(engine):
            outputs = engine.answers(send(engine, members, max_tokens=40))
        check_exact(engine, outputs)

    def test_a_round_beside_strangers(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = preemptions(engine, monkeypatch)
        with clean(engine):
            strangers = [engine.add(words(Random(i), 150), max_tokens=150) for i in range(4)]
            engine.steps(3)
            rounds = [*send(engine, make_round(5, 4), max_tokens=60)]
            engine.steps(3)
            rounds += send(engine, make_round(6, 4), max_tokens=60)
            outputs = engine.answers([*strangers, *rounds])
        assert seen
        check_exact(engine, outputs)


# -- small steps -----------------------------------------------------------------------------------


@pytest.fixture(scope="class", params=[64, 256])
def small_steps(start_engine: Start, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with start_engine(options=OPTIONS, max_num_batched_tokens=request.param) as engine:
        yield engine


class TestSmallSteps:
    def test_the_leader_goes_in_chunks(self, small_steps: Engine) -> None:
        engine = small_steps
        members = make_round(7, 5, private=100)
        with clean(engine) as audit:
            outputs = engine.answers(send(engine, members))
            rows = [plan.computed_rows for plan in audit.plans]
        assert outcome(outputs[0])["role"] == "ordinary"
        assert outcome(outputs[0])["reason"] == "leads"
        assert [outcome(o)["role"] for o in outputs[1:]] == ["follower"] * 4
        assert max(rows) <= max(self.limit(engine), 125)  # one member always goes
        assert check_exact(engine, outputs) == 1

    def limit(self, engine: Engine) -> int:
        return int(engine.scheduler.scheduler_config.max_num_batched_tokens)

    def test_decodes_go_on(self, small_steps: Engine) -> None:
        """A request that is decoding gets a token in every step, whatever the round does."""
        engine = small_steps
        with clean(engine):
            bystander = engine.add(words(Random(1), 20), max_tokens=300)
            engine.step()
            (request,) = engine.scheduler.running
            names = send(engine, make_round(8, 6, private=100))
            while not set(names) <= set(engine.finished):
                before = request.num_output_tokens
                engine.step()
                assert request.num_output_tokens == before + 1
            assert bystander not in engine.finished
            engine.run()

    def test_a_leader_aborted_between_chunks(self, small_steps: Engine) -> None:
        engine = small_steps
        with clean(engine):
            names = send(engine, make_round(9, 4, private=100))
            engine.steps(2)
            engine.abort(names[0])
            outputs = engine.answers(names[1:])
        check_exact(engine, outputs)

    def test_long_histories_in_the_cache(self, small_steps: Engine) -> None:
        """Warm histories leave few rows, which fit one step again."""
        engine = small_steps
        members = make_round(10, 3, private=390, shared=(30,), tail=3)
        with clean(engine) as audit:
            for member in members:
                engine.ask_exactly(member.prompt[:390], max_tokens=1)
            waiting = send(engine, members[:2])
            engine.step()  # from now on the book knows what these two have in the cache
            outputs = engine.answers([*waiting, *send(engine, members[2:])])
            assert len(audit.plans[0].members) >= 2
        assert [outcome(o)["rows"]["prefix"] for o in outputs] == [384] * 3
        assert check_exact(engine, outputs) == 1


# -- aborts and failures ---------------------------------------------------------------------------


class Broken(RuntimeError):
    pass


class TestFailures:
    @pytest.fixture(scope="class")
    def engine(self, start_engine: Start) -> Iterator[Engine]:
        with start_engine(options=OPTIONS, disable_log_stats=False) as engine:
            yield engine

    def test_abort_while_waiting(self, engine: Engine) -> None:
        members = make_round(11, 4)
        with clean(engine):
            names = send(engine, members[:3])
            engine.steps(2)
            for name in (names[0], names[2]):
                engine.abort(name)
            outputs = engine.answers([names[1], *send(engine, members[3:])])
        assert [outcome(o)["role"] for o in outputs] == ["leader", "follower"]
        check_exact(engine, outputs)

    def test_all_members_aborted(self, engine: Engine) -> None:
        with clean(engine):
            for name in send(engine, make_round(12, 3, size=4)):
                engine.abort(name)
            engine.steps(2)

    @pytest.mark.parametrize("who", [0, 1])
    def test_abort_while_decoding(self, engine: Engine, who: int) -> None:
        """The others have their own pages, and the leader's stand for whoever comes later: it had
        answered already, so all its rows were there."""
        members = make_round(13, 5, size=4)
        with clean(engine) as audit:
            names = send(engine, members[:4], max_tokens=40)
            engine.steps(5)
            engine.abort(names[who])
            names += send(engine, members[4:])
            outputs = engine.answers([n for n in names if n != names[who]])
            assert audit.members == 5
        assert outcome(outputs[-1])["role"] == "follower"
        check_exact(engine, outputs)

    @pytest.mark.parametrize("call", [1, 2])
    def test_copying_fails(
        self, engine: Engine, call: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the first or a later layer; all members are computed instead, and exact."""
        kv = engine.worker.layers.kv
        write, calls = kv.write, count(1)

        def fail(*args: Any) -> None:
            if next(calls) == call:
                raise Broken
            write(*args)

        with unaudited(engine):
            monkeypatch.setattr(kv, "write", fail)
            names = send(engine, make_round(14, 3))
            engine.step()
            monkeypatch.undo()
            outputs = engine.answers(names)
        counted = engine.counters()
        assert counted["tokendance:pass_failures_total/Broken"] == 1
        assert all("Broken" in outcome(o)["reason"] for o in outputs)
        assert all(set(outcome(o)["rows"]) == {"computed"} for o in outputs)
        assert "tokendance:rows_total/sibling" not in counted
        check_all_exact(engine, outputs)

    @pytest.mark.parametrize(("failing", "alone"), [(range(1000), 3), ((0, 1), 1), ((0, 2, 3), 2)])
    def test_computing_alone_fails_too(
        self,
        engine: Engine,
        failing: Collection[int],
        alone: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """For all, for the leader, or for the followers; their pages go back to vLLM.

        vLLM computes them, and with them what stands behind them in other requests.
        """
        layers = engine.worker.layers
        forward, calls = layers.forward, count()

        def fail(*args: Any) -> None:
            if next(calls) in failing:
                raise Broken
            forward(*args)

        with unaudited(engine):
            members = make_round(15, 3, system=2 * BLOCK)
            monkeypatch.setattr(layers, "forward", fail)
            names = send(engine, members)
            engine.step()
            monkeypatch.undo()
            # Somebody new who shares the first pages, which are still empty.
            again = [Member(m.prompt, {**m.hints, "round": "2"}) for m in members]
            with audited(engine):
                outputs = engine.answers([*names, *send(engine, again)])
        counted = engine.counters()
        assert counted["tokendance:pass_failures_total/Broken"] == 1
        assert counted["tokendance:pass_failures_total/alone: Broken"] == alone
        check_all_exact(engine, outputs[:3])
        check_exact(engine, outputs)

    def test_failure_beside_strangers_with_the_same_pages(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A request on the ordinary path has found pages that the pass then fails to fill."""
        layers = engine.worker.layers

        def fail(*args: Any) -> None:
            raise Broken

        with unaudited(engine):
            members = make_round(16, 3, system=2 * BLOCK)
            monkeypatch.setattr(layers, "forward", fail)
            names = [*send(engine, members), engine.add(members[0].prompt)]
            engine.step()
            monkeypatch.undo()
            outputs = engine.answers(names)
        check_all_exact(engine, outputs)

    def test_an_unsound_plan_reuses_nothing(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(plan: Any, page_size: int) -> None:
            raise PlanError("a bug in the planner")

        with unaudited(engine):
            monkeypatch.setattr("tokendance.engines.vllm.scheduler_side.check_plan", refuse)
            outputs = engine.answers(send(engine, make_round(17, 3)))
            monkeypatch.undo()
            counted = engine.counters()
        assert counted["tokendance:pass_failures_total/PlanError"] == 1
        assert all(outcome(output)["reason"] == "a bug in the planner" for output in outputs)
        check_all_exact(engine, outputs)


@contextmanager
def unaudited(engine: Engine) -> Iterator[None]:
    engine.forget()
    engine.counters()
    free = engine.free_blocks
    yield
    assert engine.free_blocks == free
    assert len(engine.book) == 0
    engine.forget()


def check_all_exact(engine: Engine, outputs: list[Any]) -> None:
    """Nobody is approximate."""
    engine.forget()
    for output in outputs:
        wanted = engine.ask_exactly(list(output.prompt_token_ids), max_tokens=len(tokens(output)))
        assert tokens(output) == tokens(wanted), outcome(output)


# -- much at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_mixed_load(start_engine: Start, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 requests of all kinds, arriving, aborted and preempted as they come."""
    random = Random(seed)
    settings = {
        "num_gpu_blocks_override": 80,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 16,
        "max_model_len": 1024,
        "scheduling_policy": "priority",
    }
    with start_engine(options=OPTIONS, **settings) as engine:
        seen = preemptions(engine, monkeypatch)
        load = mixed_load(random, 200)
        names: list[str] = []
        with clean(engine) as audit:
            while load or engine.busy:
                for _ in range(random.choice((0, 0, 1, 3, 8))):
                    if load:
                        prompt, hints, options = load.pop()
                        names.append(engine.add(prompt, hints, **options))
                if names and random.random() < 0.05:
                    name = random.choice(names)
                    if name not in engine.finished:
                        engine.abort(name)
                engine.step()
            outputs = [engine.finished[name] for name in names if name in engine.finished]
            assert audit.members > 10
        assert len(outputs) > 150 and seen
        followers = sum(outcome(o).get("role") == "follower" for o in outputs)
        assert followers > 5
        assert check_exact(engine, outputs) == len(outputs) - followers


Arrival = tuple[Any, dict[str, Any] | None, dict[str, Any]]


def mixed_load(random: Random, number: int) -> list[Arrival]:
    """Rounds, rounds without hints, unrelated and exact requests, some of them shuffled."""
    load: list[Arrival] = []
    while len(load) < number:
        agents = random.randint(1, 7)
        members = make_round(
            random.randrange(6),  # the same round again, too
            agents,
            shared=[random.choice((20, 50, 130)) for _ in range(random.randint(1, 4))],
            private=random.choice((1, 20, 60, 200)),
            system=random.choice((0, 0, 40, 70)),
            tail=random.choice((1, 9)),
            round=str(random.randrange(1000)),
        )
        kind = random.choice(("round", "round", "marked", "exact", "plain", "short"))
        for member in members:
            hints: dict[str, Any] | None = dict(member.hints)
            assert hints is not None
            prompt = member.prompt
            if kind == "round":
                hints["size"] = agents + random.choice((0, 0, 0, 1))
            elif kind == "marked":
                hints = {"segments": hints["segments"]}
            elif kind == "exact":
                hints["mode"] = "exact"
            else:
                hints, prompt = None, prompt if kind == "plain" else prompt[:3]
            options: dict[str, Any] = {"max_tokens": random.choice((1, 5, 30, 120))}
            if random.random() < 0.1:
                options["priority"] = random.randint(-1, 1)
            load.append((prompt, hints, options))
    for _ in range(number // 4):
        a, b = random.randrange(number), random.randrange(number)
        load[a], load[b] = load[b], load[a]
    return load[:number]
