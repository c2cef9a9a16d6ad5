"""Kept leaders and unmarked prompts, in the round book alone."""

from __future__ import annotations

from book_world import KEYS, World, shared_rows, text

from tokendance.plan.discover import Discovery, cut
from tokendance.plan.match import Tokens
from tokendance.plan.ticket import Ticket
from tokendance.types import AgentId, RequestId

SHARED = text(1, 100)


def prompt(seed: int, shared: list[int] = SHARED) -> list[int]:
    return [*text(seed, 40 + seed), *shared, *text(seed + 1000, 33)]


def test_a_later_prompt_takes_the_shared_text_of_a_finished_one() -> None:
    world = World()
    world.send("a", prompt(2))
    world.finish("a")
    world.send("b", prompt(3))
    assert shared_rows(world.plan) == 100
    assert world.plan is not None
    (copy,) = world.plan.members[0].copies
    assert (copy.source_start, copy.start) == (42, 43)
    assert world.plan.tables[copy.source].blocks == tuple(range(10))


def test_pages_that_do_not_stand_are_no_source() -> None:
    world = World()
    world.send("a", prompt(2))
    world.finish("a")
    world.standing["a"] = False
    world.send("b", prompt(3))
    assert shared_rows(world.plan) == 0


def test_rows_behind_the_held_pages_are_no_source() -> None:
    world = World()
    tokens = [*text(2, 40), *SHARED]  # 140 rows, of which 128 are held
    world.send("a", tokens)
    world.finish("a")
    world.send("b", prompt(3))
    assert shared_rows(world.plan) == 128 - 40


def test_one_text_quoted_in_two_ways_is_still_found_in_the_first_prompt() -> None:
    """Finer cuts for one agent do not hide the coarser ones of another."""
    world = World()
    blocks = [text(50 + i, 60) for i in range(3)]
    world.send("a", [*text(2, 40), *blocks[0], *blocks[1], *blocks[2], *text(9, 20)])
    world.send("b", [*text(3, 45), *blocks[0], *blocks[1], *blocks[2], *text(8, 20)])
    assert shared_rows(world.plan) == 180
    world.send("c", [*text(4, 50), *blocks[0], *text(5, 7), *blocks[2], *text(7, 20)])
    assert shared_rows(world.plan) == 120
    world.send("d", [*text(6, 55), *blocks[0], *blocks[1], *blocks[2], *text(11, 20)])
    assert shared_rows(world.plan) == 180


def test_limits_and_forgetting() -> None:
    world = World(keep_leaders=2)
    for index in range(5):
        name = f"r{index}"
        world.send(name, prompt(index * 10 + 2, text(500 + index, 100)))
        world.finish(name)
    assert world.book.kept == 2 and len(world.book) == 0
    for name in world.standing:
        world.standing[name] = False
    world.send("last", prompt(3, text(900, 100)))
    world.finish("last")
    assert world.book.kept == 1
    world.standing["last"] = False
    world.send("other", text(77, 50))
    world.book.leave(RequestId("other"))
    assert len(world.book._discovery) == world.book.kept == 1


def test_nothing_is_kept_when_told_so() -> None:
    world = World(keep_leaders=0)
    world.send("a", prompt(2))
    world.finish("a")
    assert world.book.kept == 0 and not world.book._rounds and not len(world.book._discovery)


def test_another_tenant_finds_nothing() -> None:
    world = World()
    world.send("a", prompt(2), salt="x")
    world.finish("a")
    world.send("b", prompt(3), salt="y")
    assert shared_rows(world.plan) == 0


def test_a_late_member_of_an_announced_round() -> None:
    world = World()
    world.send("a", prompt(2), round_id="1")
    world.finish("a")
    world.send("b", prompt(3), round_id="1")
    assert shared_rows(world.plan) == 100


def test_the_same_name_for_another_round_forgets_the_old_leader() -> None:
    world = World()
    world.send("a", prompt(2), round_id="1")
    world.finish("a")
    world.send("a", prompt(3), round_id="1")
    assert shared_rows(world.plan) == 0
    assert world.book.kept == 0 and len(world.book) == 1


def test_cuts_keep_what_was_cut_before() -> None:
    tokens = text(1, 90)
    ticket = Ticket(
        RequestId("a"), AgentId("a"), tokens, KEYS.spans(tokens, [30, 60]), 0.0, lambda: 0
    )
    spans = cut(ticket, [(40, 20)], KEYS.key)
    assert [(s.start, s.end) for s in spans] == [(0, 30), (30, 40), (40, 60), (60, 90)]
    assert spans[0] is ticket.spans[0]
    assert spans[2].key == KEYS.key(tokens[40:60])


def test_strangers_are_not_discovered() -> None:
    discovery = Discovery()
    one, two = prompt(2, text(3, 100)), prompt(4, text(5, 100))
    tickets = [
        Ticket(RequestId(n), AgentId(n), t, KEYS.spans(t, [len(t)]), 0.0, lambda: 0)
        for n, t in (("a", one), ("b", two))
    ]
    discovery.add("", tickets[0], Tokens(one))
    assert discovery.find("", tickets[1], Tokens(two), 32) is None
    discovery.remove(RequestId("a"))
    discovery.remove(RequestId("a"))
    assert len(discovery) == 0 and not discovery._holders
