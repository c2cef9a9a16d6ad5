"""The round book against an engine that does everything engines do."""

from __future__ import annotations

import random
import time
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plan_engine import Engine, Request
from plan_world import PAGE, Part, ticket_of

from tokendance.config import Config
from tokendance.plan import roundbook
from tokendance.plan.roundbook import LEADER_PATIENCE_S, Budget, RoundBook, Verdict
from tokendance.plan.ticket import Ticket
from tokendance.types import AgentId, RequestId, SegmentKey, Span


def text(length: int, seed: int) -> Part:
    return tuple(100 * seed + i for i in range(length))


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


Rounds.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRounds = Rounds.TestCase


# -- one situation each --------------------------------------------------------------------------

A, B, C = (text(20, 40 + i) for i in range(3))
CONFIG = Config(min_shared_tokens=8, round_timeout_ms=500, linger_ms=50)


def private(who: int, length: int = 6) -> Part:
    return text(length, 10 + who)


def prompt(who: int, *shared: Part) -> list[Part]:
    return [private(who), *(shared or (A, B, C)), text(2, 60 + who)]


def engine_of(config: Config = CONFIG, **options: int) -> Engine:
    return Engine(config, **{"pool": 10_000, "tokens": 1000, "rows": 1000, **options})


def enter(engine: Engine, who: int, size: int = 0, **options) -> Request:
    name = options.pop("name", "1")
    parts = options.pop("parts", None) or prompt(who)
    return engine.add(parts, round_=("s", name, f"a{who}", size), **{"outputs": 5, **options})


def members(plans) -> list[list[str]]:
    return [[m.request_id for m in plan.members] for plan in plans]


def roles(engine: Engine) -> dict[str, str]:
    return {r.id: r.ticket.state.value for r in engine.running}


def test_a_complete_round_starts_in_one_step_leader_first() -> None:
    engine = engine_of()
    requests = [enter(engine, who, 3) for who in range(2)]
    assert engine.step() == () and not engine.running
    requests.append(enter(engine, 2, 3))
    (plan,) = engine.step()
    assert {m.request_id for m in plan.members} == {r.id for r in requests}
    assert [bool(m.copies) for m in plan.members] == [False, True, True]
    engine.drain()


@pytest.mark.parametrize("size", [0, 3, 50])
def test_missing_members_hold_a_round_until_its_deadline(size: int) -> None:
    engine = engine_of()
    for who in range(2):
        enter(engine, who, size)
    engine.now = 0.499
    assert engine.step() == ()
    engine.now = 0.5
    (plan,) = engine.step()
    assert len(plan.members) == 2


def test_a_round_of_one_is_an_ordinary_request() -> None:
    engine = engine_of()
    alone = enter(engine, 0, 1)
    assert engine.step() == ()
    assert roles(engine) == {alone.id: "ordinary"}
    assert alone.ticket.reason == "leads"


@pytest.mark.parametrize(
    ("quorum", "size", "needed"), [(0.5, 5, 3), (0.55, 20, 11), (1.0, 4, 4), (0.1, 3, 1)]
)
def test_quorum(quorum: float, size: int, needed: int) -> None:
    """0.55 * 20 is 11.000000000000002 in floating point; eleven members are enough."""
    engine = engine_of(Config(quorum=quorum, min_shared_tokens=8), max_requests=64)
    for who in range(needed):
        engine.step()
        assert not engine.running
        enter(engine, who, size)
    engine.step()
    assert len(engine.running) == needed


def test_samples_of_one_agent_count_once() -> None:
    """n = 2: both come with the same agent, and the round is not complete with them."""
    engine = engine_of()
    enter(engine, 0, 2), enter(engine, 0, 2)
    assert engine.step() == () and not engine.running
    enter(engine, 1, 2)
    engine.step()
    assert len(engine.running) == 3


def test_a_late_member_takes_from_the_leader_that_runs() -> None:
    engine = engine_of()
    enter(engine, 0, 2), enter(engine, 1, 2)
    engine.step()
    late = enter(engine, 2, 2)
    (plan,) = engine.step()
    assert members([plan]) == [[late.id]] and plan.leader is None
    assert plan.members[0].rows_by_source()["sibling"] == 60


def test_a_late_member_of_a_round_that_is_over_does_not_wait() -> None:
    engine = engine_of()
    enter(engine, 0, 2), enter(engine, 1, 2)
    engine.drain()
    late = enter(engine, 2, 3)
    engine.step()
    assert roles(engine) == {late.id: "ordinary"}


def test_a_repeated_round_gathers_again() -> None:
    engine = engine_of()
    for _ in range(2):
        enter(engine, 0, 2)
        assert engine.step() == () and not engine.running
        enter(engine, 1, 2)
        (plan,) = engine.step()
        assert len(plan.members) == 2
        engine.drain()


def test_an_aborted_member_counts_as_come() -> None:
    engine = engine_of()
    aborted = enter(engine, 0, 3)
    enter(engine, 1, 3)
    engine.finish(aborted)
    enter(engine, 2, 3)
    (plan,) = engine.step()
    assert len(plan.members) == 2


def test_a_round_that_never_ran_is_not_over() -> None:
    """Its only member was aborted; those who come now are not late, they gather."""
    engine = engine_of()
    engine.finish(enter(engine, 0, 3))
    enter(engine, 1, 2)
    assert engine.step() == () and not engine.running
    enter(engine, 2, 2)
    (plan,) = engine.step()
    assert len(plan.members) == 2


def test_who_shares_nothing_is_not_held_up_by_a_leader_on_its_way() -> None:
    engine = engine_of(rows=30)
    enter(engine, 0, 3), enter(engine, 1, 3)
    stranger = enter(engine, 2, 3, parts=[text(30, 90), text(3, 91)])
    engine.chunk = 40  # the leader takes more than one step
    engine.step()
    assert len(engine.running) == 2 and roles(engine)[stranger.id] == "ordinary"


def test_followers_of_a_leader_in_chunks_wait_for_it_and_then_take_its_rows() -> None:
    engine = engine_of(rows=50, tokens=20)
    requests = [enter(engine, who, 3) for who in range(3)]
    held = 0
    while not (plans := engine.step()):
        held += 1
    assert held == 4  # 68 rows, 20 a step
    (plan,) = plans
    assert {m.request_id for m in plan.members} == {r.id for r in requests[1:]}
    assert all(m.rows_by_source()["sibling"] == 60 for m in plan.members)


def test_patience_with_a_leader_ends() -> None:
    engine = engine_of(rows=50, chunk=1)
    leader, follower = enter(engine, 0, 2), enter(engine, 1, 2)
    engine.step()
    engine.now = 1.0
    engine.step()
    assert engine.running == [leader]
    engine.now = 1.0 + LEADER_PATIENCE_S - 0.1
    engine.step()
    assert engine.running == [leader]
    engine.now = 1.0 + LEADER_PATIENCE_S
    engine.step()
    assert engine.running == [leader, follower]
    assert follower.ticket.reason == "leader not ready in time"


def test_a_leader_preempted_while_followers_wait_is_replaced() -> None:
    engine = engine_of(rows=50, tokens=20)
    leader, *others = (enter(engine, who, 3) for who in range(3))
    engine.step(), engine.step()
    engine.preempt(leader)
    leader.blocked = True
    engine.step()
    assert roles(engine) == {others[0].id: "ordinary"}
    engine.drain()


def test_a_leader_aborted_between_its_release_and_its_admission_is_replaced() -> None:
    engine = engine_of(rows=1000)
    leader, *others = (enter(engine, who, 3) for who in range(3))
    engine.reserved = engine.pool - 1  # released, but there are no pages
    engine.step()
    assert not engine.running
    engine.finish(leader)
    engine.reserved = 0
    (plan,) = engine.step()
    assert {m.request_id for m in plan.members} == {r.id for r in others}
    engine.drain()


def test_followers_whose_leader_finished_find_another() -> None:
    engine = engine_of(rows=50)
    leader, *others = (enter(engine, who, 3) for who in range(3))
    leader.outputs = 1
    engine.step()
    assert leader in engine.done
    engine.step()
    assert roles(engine) == {others[0].id: "ordinary"}
    (plan,) = engine.step()
    assert members([plan]) == [[others[1].id]]


def test_who_shares_little_does_not_become_leader_by_being_there() -> None:
    """The pages of a stranger serve nobody; the waiting members have one of them compute."""
    engine = engine_of(rows=50)
    leader, *others = (enter(engine, who, 4) for who in range(3))
    leader.outputs = 1
    stranger = enter(engine, 3, 4, parts=[text(30, 90), text(3, 91)])
    engine.step()
    assert leader in engine.done and stranger in engine.running
    engine.step()
    (plan,) = engine.step()
    assert members([plan]) == [[others[1].id]] and plan.members[0].copies


def test_a_leader_the_engine_does_not_ask_for_is_passed_over() -> None:
    engine = engine_of(rows=50)  # so the leader would go first, alone
    leader, *others = (enter(engine, who, 3) for who in range(3))
    leader.blocked = True
    for _ in range(3):
        assert not engine.running
        engine.step()
    assert roles(engine) == {others[0].id: "ordinary"}
    (plan,) = engine.step()
    assert members([plan]) == [[others[1].id]]


def test_the_region_is_computed_once_if_followers_are_admitted_before_the_leader() -> None:
    engine = engine_of()
    requests = [enter(engine, who, 3) for who in range(3)]
    requests[0].blocked = True
    (plan,) = engine.step()
    assert members([plan]) == [[r.id for r in requests[1:]]]
    assert [bool(m.copies) for m in plan.members] == [False, True]
    requests[0].blocked = False
    (plan,) = engine.step()
    assert members([plan]) == [[requests[0].id]]
    assert plan.members[0].rows_by_source()["sibling"] == 60


def test_a_whole_prompt_in_the_cache_is_ordinary_and_can_lead() -> None:
    engine = engine_of()
    first = enter(engine, 0, 2, pages=99, parts=[private(0), A, B, C, text(3, 60)])
    assert first.hit == first.ticket.end
    second = enter(engine, 1, 2)
    assert engine.step() == ()
    assert roles(engine) == {first.id: "ordinary"}
    (plan,) = engine.step()
    assert members([plan]) == [[second.id]]
    assert plan.members[0].rows_by_source()["sibling"] == 60


def test_a_round_larger_than_the_pool_goes_in_waves() -> None:
    engine = engine_of(pool=60, max_requests=64)  # 17 pages each
    requests = [enter(engine, who, 6, outputs=2) for who in range(6)]
    plans = [p for _ in range(8) for p in engine.step()]
    assert sorted(m.request_id for p in plans for m in p.members) <= sorted(r.id for r in requests)
    assert max(len(p.members) for p in plans) == 3
    engine.drain()


def test_the_leader_stays_from_round_to_round() -> None:
    engine = engine_of()
    led = []
    for number in range(4):
        for who in range(number, number + 4):
            enter(engine, who % 4, 4, name=str(number))
        (plan,) = engine.step()
        led.append(plan.members[0].agent)
        engine.drain()
        if number == 1:
            enter(engine, 9, 4, name=str(number))  # late and alone: it leads nobody
            engine.drain()
    assert len(set(led)) == 1


def test_a_former_leader_that_serves_few_does_not_lead() -> None:
    engine = engine_of()
    for who in range(4):
        enter(engine, who, 4)
    (plan,) = engine.step()
    former = int(plan.members[0].agent[1:])
    engine.drain()
    for who in range(4):
        shared = (A,) if who == former else (A, B, C)
        enter(engine, who, 4, name="2", parts=prompt(who, *shared))
    (plan,) = engine.step()
    assert plan.members[0].agent != f"a{former}"


def test_groups_by_order_share_and_keep_their_leaders() -> None:
    engine = engine_of(Config(min_shared_tokens=8, max_order_distance=0.4))
    orders = [(A, B, C), (C, B, A), (A, C, B), (C, A, B), (B, A, C), (C, B, A)]
    leaders = []
    for number in range(2):
        for who, order in enumerate(orders):
            enter(engine, who, 6, name=str(number), parts=prompt(who, *order))
        plans = [*engine.step(), *engine.step()]
        assert sorted(len(p.members) for p in plans) == [3, 3]
        assert all(m.copies for p in plans for m in p.members[1:])
        leaders.append({p.members[0].agent for p in plans})
        late = enter(engine, 7, 6, name=str(number), parts=prompt(7, C, B, A))
        plans = [*engine.step(), *engine.step()]
        assert members(plans) == [[late.id]] and plans[0].members[0].copies
        engine.drain()
    assert leaders[0] == leaders[1]


# -- without hints -------------------------------------------------------------------------------


def test_chats_that_only_begin_alike_are_no_round_and_never_wait() -> None:
    engine = engine_of()
    system = text(40, 70)
    chats = [engine.add([system, private(who, 30)], marked=False) for who in range(6)]
    assert len(engine.book._rounds) == 6
    assert engine.step() == ()
    assert {r.id for r in engine.done} == {r.id for r in chats}


def test_the_same_prompt_twice_is_left_to_the_prefix_cache() -> None:
    engine = engine_of()
    for _ in range(2):
        engine.add(prompt(0), marked=False)
    assert len(engine.book._rounds) == 2


def test_chats_that_share_text_behind_different_beginnings_form_a_round_at_once() -> None:
    engine = engine_of()
    chats = [engine.add(prompt(who), marked=False, outputs=3) for who in range(3)]
    other = engine.add(prompt(3), marked=False, salt="another tenant", outputs=3)
    (plan,) = engine.step()
    assert members([plan]) == [[r.id for r in chats]]
    assert other in engine.running


def test_marked_requests_wait_a_moment_for_one_another() -> None:
    engine = engine_of()
    first = engine.add(prompt(0), marked=True, outputs=3)
    engine.step()
    assert engine.waiting == [first]
    second = engine.add(prompt(1), marked=True, outputs=3)
    engine.now = 0.049
    assert engine.step() == ()
    engine.now = 0.05
    (plan,) = engine.step()
    assert members([plan]) == [[first.id, second.id]]


def test_an_unmarked_request_does_not_wait_for_marked_ones() -> None:
    engine = engine_of()
    engine.add(prompt(0), marked=True, outputs=3)
    engine.add(prompt(1), marked=False, outputs=3)
    (plan,) = engine.step()
    assert len(plan.members) == 2


def test_requests_without_hints_stay_out_of_announced_rounds() -> None:
    """They would neither be members that count nor wait for its members."""
    engine = engine_of()
    enter(engine, 0, 2)
    outsider = engine.add(prompt(5), marked=False, outputs=3)
    engine.step()
    assert engine.running == [outsider]


# -- pages of the step ---------------------------------------------------------------------------


def test_a_leader_computes_prefix_pages_that_a_follower_behind_it_would_fill() -> None:
    """The follower was admitted first, so the engine gave the leader a hit on its empty pages."""
    book = RoundBook(CONFIG)
    system = text(8, 80)
    engine = engine_of()
    engine.book = book
    parts = [[system, *prompt(who)] for who in range(2)]
    for name in ("1", "2"):  # agent 0 leads; in the second round the engine asks it last
        order = (0, 1) if name == "1" else (1, 0)
        requests = [enter(engine, who, 2, name=name, parts=parts[who]) for who in order]
        if name == "1":
            engine.step()
            engine.drain()
    follower, leader = requests
    leader.hit = 2 * PAGE
    leader.pages = follower.pages[:2] + leader.pages[2:]
    (plan,) = engine.step()
    assert members([plan]) == [[leader.id, follower.id]]
    assert plan.members[0].cached == 0
    assert plan.members[1].copies[0].exact


def test_pages_filled_by_a_round_that_runs_later_are_not_read_by_an_earlier_one() -> None:
    engine = engine_of()
    system = text(8, 80)
    one = [enter(engine, w, 2, name="1", parts=[system, *prompt(w)]) for w in range(2)]
    two = [enter(engine, w, 2, name="2", parts=[system, *prompt(w + 2)]) for w in range(2)]
    engine.waiting[:] = [one[0], two[0], two[1], one[1]]
    one[1].hit, one[1].pages = 2 * PAGE, two[0].pages[:2] + one[1].pages[2:]
    plans = engine.step()
    assert members(plans) == [[r.id for r in one], [r.id for r in two]]
    assert plans[0].members[1].cached == 0


def test_an_ordinary_request_of_this_step_is_no_source_yet() -> None:
    """Its prefix pages may be computed by the forward that comes after the pass."""
    engine = engine_of()
    cached = enter(engine, 0, 3, pages=99, parts=[private(0), A, B, C, text(3, 60)])
    others = [enter(engine, who, 3) for who in (1, 2)]
    engine.waiting.reverse()
    engine.book._leaders.put(("", "s"), cached.ticket.agent)
    (plan,) = engine.step()
    assert {m.request_id for m in plan.members} == {r.id for r in others}
    assert len(plan.tables) == 2


# -- cost ----------------------------------------------------------------------------------------


def test_work_per_request_and_step_is_constant(monkeypatch) -> None:
    """One wave per round and step, and two requests are compared once."""
    waves, looks = [], []
    wave, look = RoundBook._next_wave, roundbook.Round.share.__globals__["shared_with"]
    monkeypatch.setattr(RoundBook, "_next_wave", lambda *a: waves.append(1) or wave(*a))
    monkeypatch.setitem(
        roundbook.Round.share.__globals__, "shared_with", lambda *a: looks.append(1) or look(*a)
    )
    engine = engine_of(rows=50, chunk=1)
    for who in range(10):
        enter(engine, who, 11)
    for _ in range(20):
        engine.step()
    assert not waves and not looks  # still gathering
    enter(engine, 10, 11)
    for _ in range(20):
        engine.step()
    assert len(waves) == 20 and len(looks) == 10


def test_memories_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(roundbook, "REMEMBERED", 5)
    engine = engine_of()
    for number in range(20):
        for who in range(2):
            engine.add(prompt(who), round_=(f"s{number}", "1", f"a{who}", 2))
        engine.step()
    engine.drain()
    assert len(engine.book._leaders._items) == len(engine.book._ended._items) == 5


SECONDS = 0.5
"""Generous: a server core takes 0.05 to 0.1 s for the joins, one wave and the plan of all."""


class Large:
    """200 requests of 20,000 tokens in 60 segments each, 16 rows a page."""

    agents, segments, rows, page = 200, 60, 20_000, 16

    def __init__(self, *, shuffled: bool, prefix: int = 0) -> None:
        rng = random.Random(1)
        length = (self.rows - 400) // self.segments
        shared = [
            array("q", (rng.randrange(100_000) for _ in range(length)))
            for _ in range(self.segments)
        ]
        keys = [SegmentKey(bytes([255, i])) for i in range(self.segments)]
        self.tickets = []
        for agent in range(self.agents):
            order = list(range(self.segments))
            if shuffled:
                rng.shuffle(order)
            own = array("q", (1_000_000 + agent * 1000 + i for i in range(200 + agent)))
            pieces = [(SegmentKey(b"own" + bytes([agent])), own)]
            pieces += [(keys[i], shared[i]) for i in order]
            pieces.append((SegmentKey(b"end"), array("q", (7,) * 20)))
            if prefix:
                pieces = [*pieces[1 : 1 + prefix], pieces[0], *pieces[1 + prefix :]]
            tokens, spans = array("q"), []
            for key, piece in pieces:
                spans.append(Span(len(tokens), len(tokens) + len(piece), key))
                tokens.extend(piece)
            name = f"r{agent}"
            self.tickets.append((name, tokens, tuple(spans)))

    def seconds(self, join) -> tuple[float, list]:
        """CPU time of the book's thread from the first ticket to the plans of all."""
        book, held, plans = RoundBook(Config()), {}, []
        pages = tuple(range(2000))
        begin = time.thread_time()
        for name, tokens, spans in self.tickets:
            ticket = Ticket(
                RequestId(name), AgentId(name), tokens, spans, 0.0, lambda n=name: held.get(n, 0)
            )
            join(book, ticket)
        waiting = [name for name, _, _ in self.tickets]
        for _ in range(4):
            for name in waiting:
                budget = Budget(10**7, 10**6, self.page, 256 - len(held))
                verdict = book.verdict(RequestId(name), 0, budget, 1.0)
                if verdict is not Verdict.WAIT:
                    held[name] = self.rows
                    book.admitted(RequestId(name), pages, verdict is Verdict.COLLECTIVE)
            plans += book.end_step(lambda _: pages)
            waiting = [name for name in waiting if name not in held]
        seconds = time.thread_time() - begin
        assert not waiting
        return seconds, plans


@pytest.mark.parametrize("prefix", [0, 40])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("hinted", [True, False])
def test_200_large_requests_cost_little(hinted: bool, shuffled: bool, prefix: int) -> None:
    large = Large(shuffled=shuffled, prefix=prefix)

    def join(book: RoundBook, ticket: Ticket) -> None:
        if hinted:
            book.join_announced(ticket, session="s", round_id="1", size=200, salt="", now=0.0)
        else:
            book.join_by_content(ticket, salt="", marked=True, now=0.0)

    seconds, plans = large.seconds(join)
    print(f"hinted={hinted} shuffled={shuffled} prefix={prefix}: {seconds * 1000:.0f} ms")
    assert sum(len(p.members) for p in plans) >= 199
    assert seconds < SECONDS


def test_many_open_rounds_do_not_slow_an_arrival_down() -> None:
    book = RoundBook(CONFIG)
    system = text(400, 80)

    def chat(name: str, *parts: Part) -> float:
        ticket = ticket_of(name, [system, *parts, text(2, 60)])
        begin = time.thread_time()
        book.join_by_content(ticket, salt="", marked=False, now=0.0)
        return time.thread_time() - begin

    few = sorted(chat(f"few{i}", text(30, 1000 + i)) for i in range(50))
    for i in range(2000):
        chat(f"many{i}", text(30, 2000 + i))
    many = sorted(chat(f"late{i}", text(30, 9000 + i)) for i in range(50))
    assert len(book._rounds) == 2100
    assert many[25] < 5 * few[25] + 0.0005
