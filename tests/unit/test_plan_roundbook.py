"""Announced rounds, one situation each."""

from __future__ import annotations

import pytest
from plan_engine import A, B, C, engine_of, enter, members, private, prompt, roles, text

from tokendance.config import Config
from tokendance.plan.roundbook import LEADER_PATIENCE_S, Budget, Verdict
from tokendance.types import RequestId


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


def test_a_deadline_that_passes_within_a_step_parts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    for who in range(3):
        enter(engine, who, 50)
    verdict = engine.book.verdict

    def slowly(request: RequestId, cached: int, budget: Budget, now: float) -> Verdict:
        engine.now += 0.2
        return verdict(request, cached, budget, engine.now)

    monkeypatch.setattr(engine.book, "verdict", slowly)
    assert engine.step() == ()
    (plan,) = engine.step()
    assert len(plan.members) == 3


def test_a_round_of_one_is_an_ordinary_request() -> None:
    engine = engine_of()
    alone = enter(engine, 0, 1)
    assert engine.step() == ()
    assert roles(engine) == {alone.id: "ordinary"}
    assert alone.ticket.reason == "no other member to share with"


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


def test_a_follower_whose_rows_come_into_the_prefix_cache_waits_no_longer() -> None:
    engine = engine_of(rows=50, chunk=20)
    leader, follower = enter(engine, 0, 2), enter(engine, 1, 2)
    engine.step()
    assert engine.running == [leader]
    follower.hit = 64  # of 68 rows; what is left is less than is worth sharing
    engine.step()
    assert engine.running == [leader, follower]
    assert follower.ticket.reason == "shares too little with the leader"


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
