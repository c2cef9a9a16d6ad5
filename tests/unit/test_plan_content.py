"""Requests without hints, and pages that are filled in the step in which others find them."""

from __future__ import annotations

from plan_engine import CONFIG, A, B, C, engine_of, enter, members, private, prompt, text
from plan_world import PAGE

from tokendance.plan.roundbook import RoundBook


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
