"""The round book against a scheduler that does everything schedulers do, in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plan_engine import Engine, Request, text
from plan_world import Part

from tokendance.config import Config

SHARED = [text(n, 30 + i) for i, n in enumerate((9, 17, 1, 12, 5))]


class Rounds(RuleBasedStateMachine):
    """Arrivals, steps, time, aborts, preemptions, stalls and lack of pages in any order."""

    @initialize(
        quorum=st.sampled_from((1.0, 0.7, 0.4)),
        distance=st.sampled_from((1.0, 1.0, 0.3)),
        minimum=st.sampled_from((0, 1, 8)),
        rows=st.sampled_from((12, 60, 200)),
        tokens=st.sampled_from((7, 64, 500)),
        chunk=st.sampled_from((5, 30, 500)),
        max_requests=st.sampled_from((2, 6, 16)),
        pool=st.sampled_from((40, 90, 400)),
    )
    def start(self, quorum, distance, minimum, rows, tokens, chunk, max_requests, pool) -> None:
        config = Config(
            quorum=quorum,
            max_order_distance=distance,
            min_shared_tokens=minimum,
            round_timeout_ms=500,
            linger_ms=50,
        )
        self.engine = Engine(config, pool, tokens, chunk, rows, max_requests)

    @property
    def alive(self) -> list[Request]:
        return self.engine.waiting + self.engine.running

    def parts(self, data: st.DataObject, who: int) -> list[Part]:
        order = data.draw(st.permutations(SHARED) | st.lists(st.sampled_from(SHARED), max_size=6))
        return [text(data.draw(st.integers(0, 6)), 10 + who % 3), *order, text(2, 50 + who)]

    @rule(
        data=st.data(),
        session=st.sampled_from("st"),
        name=st.sampled_from("12"),
        agents=st.lists(st.integers(0, 5), min_size=1, max_size=6),
        lie=st.sampled_from((0, 0, 0, -1, 1, 5)),
        outputs=st.integers(1, 6),
    )
    def a_round(self, data, session, name, agents, lie, outputs) -> None:
        """Agents may come twice, be missing, come to a round that runs, or repeat an old one."""
        size = data.draw(st.just(0) | st.just(max(0, len(set(agents)) + lie)))
        for agent in agents:
            self.engine.add(
                self.parts(data, agent),
                round_=(session, name, f"a{agent}", size),
                outputs=outputs,
                pages=data.draw(st.sampled_from((0, 0, 1, 3, 99))),
            )

    @rule(
        data=st.data(),
        marked=st.sampled_from((True, False, None)),
        salt=st.sampled_from(("", "other")),
        number=st.integers(1, 3),
    )
    def without_hints(self, data, marked, salt, number) -> None:
        for who in range(number):
            self.engine.add(self.parts(data, who), marked=marked, salt=salt, outputs=2)

    @rule(number=st.integers(1, 6))
    def steps(self, number) -> None:
        for _ in range(number):
            self.engine.step()
            self.engine.now += 0.02

    @rule(seconds=st.sampled_from((0.01, 0.3, 20.0, 90.0)))
    def time_passes(self, seconds) -> None:
        self.engine.now += seconds

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.engine.finish(data.draw(st.sampled_from(self.alive)))

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def preempt(self, data) -> None:
        self.engine.preempt(data.draw(st.sampled_from(self.engine.running)))

    @precondition(lambda self: self.engine.waiting)
    @rule(data=st.data(), blocked=st.booleans(), retries=st.integers(0, 2))
    def stall(self, data, blocked, retries) -> None:
        request = data.draw(st.sampled_from(self.engine.waiting))
        request.blocked, request.retries = blocked, retries

    @rule(share=st.sampled_from((0.0, 0.5, 0.95)))
    def others_take_pages(self, share) -> None:
        room = self.engine.free + self.engine.reserved
        self.engine.reserved = int(room * share)

    @invariant()
    def book_holds_exactly_the_live_members(self) -> None:
        if hasattr(self, "engine"):
            book = self.engine.book
            tickets = {t for r in book._rounds.values() for t in r.tickets}
            assert tickets == set(book._of) <= {r.id for r in self.alive}
            assert all(r.tickets for r in book._rounds.values())

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


Rounds.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestRounds = Rounds.TestCase
