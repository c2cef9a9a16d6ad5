"""What was said comes from the context in which it was said, in the round book alone (M5)."""

from __future__ import annotations

from array import array
from time import process_time

import pytest
from book_world import PAGE, World, shared_rows, text
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokendance.plan.donors import Donors
from tokendance.plan.kept import Held
from tokendance.plan.reuse_plan import check_plan
from tokendance.plan.roundbook import Verdict
from tokendance.plan.rounds import Budget
from tokendance.plan.ticket import StoredRows, Ticket
from tokendance.types import AgentId, RequestId

ANSWER, OTHER = text(1, 40), text(2, 50)


def history(seed: int) -> list[int]:
    return text(100 + seed, 60 + seed)


def said(world: World, name: str, prompt: list[int], answer: list[int], **options: object) -> None:
    world.send(name, prompt, donors=True)
    world.finish(name, answer, **options)  # type: ignore[arg-type]


def copies(world: World, member: int = 0) -> list[tuple[str, int, int, int]]:
    """Source, its first row, first row, rows."""
    assert world.plan is not None
    made = world.plan.members[member].copies
    assert not any(copy.exact for copy in made)
    return [(world.plan.tables[c.source].request_id, *c[1:4]) for c in made]


def test_an_answer_comes_from_its_author() -> None:
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    said(world, "b", history(2), [*OTHER, *text(8, PAGE)])
    mine = history(3)
    world.send("c", [*mine, 7, *OTHER, 8, *ANSWER, *text(4, 9)], donors=True)
    start = len(mine) + 1
    assert copies(world) == [
        ("b", len(history(2)), start, len(OTHER)),
        ("a", len(history(1)), start + len(OTHER) + 1, len(ANSWER)),
    ]


def test_the_leader_and_its_followers_take_from_the_author() -> None:
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    rest = text(5, 40)
    for name, seed in (("c", 3), ("d", 4)):
        world.send(name, [*history(seed), *ANSWER, *rest, 1], donors=True, round_id="2")
    # What nobody has said before comes from the leader, which has computed it itself.
    assert [c[0] for c in copies(world)] == ["a", "c"]
    assert shared_rows(world.plan) == len(ANSWER) + len(rest)


def test_backends_without_donors_take_nothing_from_authors() -> None:
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    world.send("c", [*history(3), *ANSWER, *text(4, 9)])
    assert shared_rows(world.plan) == 0


def test_other_tokens_at_the_edges_are_computed() -> None:
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    quoted = [5, *ANSWER[1:-2], 6, 7]
    world.send("c", [*history(3), *quoted, *text(4, 9)], donors=True)
    start = len(history(3)) + 1
    assert copies(world) == [("a", len(history(1)) + 1, start, len(ANSWER) - 3)]


def test_a_later_round_still_takes_it_from_the_author() -> None:
    """Those who have quoted it since hold copies, which are no source."""
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    said(world, "b", [*history(2), *ANSWER, *text(3, 20)], OTHER)
    world.send("c", [*history(3), *OTHER[:30], *ANSWER, *text(4, 9)], donors=True)
    assert [c[0] for c in copies(world)] == ["b", "a"]
    world.standing["a"] = False
    world.finish("c")
    world.send("d", [*history(4), *ANSWER, *text(4, 9)], donors=True)
    assert shared_rows(world.plan) == 0


def test_what_was_read_in_an_earlier_round_is_a_source_too() -> None:
    world = World()
    said(world, "a", [*history(1), *ANSWER, *text(5, 30)], text(6, 2 * PAGE))
    world.send("b", [*history(2), *ANSWER, *text(4, 9)], donors=True)
    assert copies(world) == [("a", len(history(1)), len(history(2)), len(ANSWER))]


def test_rows_behind_the_last_full_page_come_from_the_store() -> None:
    prompt = history(1)
    for stored in (0, len(prompt) + len(ANSWER)):
        world = World()
        said(world, "a", prompt, [*ANSWER, 3], stored=stored)
        world.send("c", [*history(3), *ANSWER, *text(4, 9)], donors=True)
        full = (len(prompt) + len(ANSWER)) // PAGE * PAGE
        assert shared_rows(world.plan) == (len(ANSWER) if stored else full - len(prompt))
        assert world.plan is not None and world.plan.members[0].copies[0].stored == bool(stored)


def test_pages_serve_when_the_store_has_forgotten() -> None:
    world, prompt = World(), history(1)
    said(world, "a", prompt, [*ANSWER, 3], stored=len(prompt) + len(ANSWER))
    world.stored_rows["a"] = 0
    world.send("c", [*history(3), *ANSWER, *text(4, 9)], donors=True)
    full = (len(prompt) + len(ANSWER)) // PAGE * PAGE
    assert shared_rows(world.plan) == full - len(prompt)


def test_only_the_part_that_is_lost_is_quoted() -> None:
    world, prompt, tail = World(), history(1), text(4, 15)
    said(world, "a", prompt, [*ANSWER, *tail, 3], stored=len(prompt) + len(ANSWER) + len(tail))
    world.stored_rows["a"] = 0
    assert world.arrive("c", [*history(3), *ANSWER[-4:], *tail, 3, 1], donors=True).quotations == ()


def test_a_donor_that_is_lost_before_the_plan_is_computed() -> None:
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])

    class Lost(dict):
        def __getitem__(self, name: str) -> bool:
            return next(answers)

    answers = iter([True, *[False] * 9])  # on arrival, and later
    world.standing = Lost()
    world.send("c", [*history(3), *ANSWER, *text(4, 9)], donors=True)
    assert shared_rows(world.plan) == 0


def test_other_tenants_and_limits() -> None:
    world = World(keep_donors=2)
    for index in range(4):
        said(world, f"a{index}", history(10 + index), [*text(50 + index, 40), *text(9, PAGE)])
    assert len(world.book._donors) == 2
    quoted = [token for index in range(4) for token in text(50 + index, 40)]
    world.send("x", [*history(3), *quoted, 1], salt="other", donors=True)
    assert shared_rows(world.plan) == 0
    world.book.leave(RequestId("x"))
    world.send("c", [*history(4), *quoted, 1], donors=True)
    assert [c[0] for c in copies(world)] == ["a2", "a3"]
    none = World(keep_donors=0)
    said(none, "a", history(1), [*ANSWER, *text(9, PAGE)])
    assert len(none.book._donors) == 0


def test_the_same_answer_twice_in_a_prompt_and_from_two_authors() -> None:
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    said(world, "b", history(2), [*ANSWER, *text(8, PAGE)])
    world.send("c", [*history(3), *ANSWER, 5, *ANSWER, 6], donors=True)
    assert [c[0] for c in copies(world)] == ["a", "a"]
    assert {c[1] for c in copies(world)} == {len(history(1))}


def test_a_history_that_goes_on_is_no_quotation() -> None:
    """What an agent's own context holds from row 0 on comes back exactly, in other ways."""
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    following = [*history(1), *ANSWER, *text(9, PAGE), *text(4, 40)]
    ticket = world.arrive("a2", following, donors=True)
    assert ticket.quotations == ()
    assert world.step(ticket) == [Verdict.ORDINARY] and ticket.approximate_from is None


def test_a_store_that_forgets_after_the_arrival_leaves_the_pages() -> None:
    world, prompt = World(), history(1)
    said(world, "a", prompt, [*ANSWER, 3], stored=len(prompt) + len(ANSWER))
    verdict = world.book.verdict

    def forget_first(*args: object) -> object:
        world.stored_rows["a"] = 0
        return verdict(*args)  # type: ignore[arg-type]

    world.book.verdict = forget_first  # type: ignore[assignment, method-assign]
    world.send("c", [*history(3), *ANSWER, *text(4, 9)], donors=True)
    full = (len(prompt) + len(ANSWER)) // PAGE * PAGE
    assert shared_rows(world.plan) == full - len(prompt)


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=2, max_size=6),
    st.dictionaries(st.integers(0, 5), st.integers(0, 5)),
)
@settings(max_examples=150, deadline=None)
@example([[4], [4, 5], [4, 5]], {0: 2})
def test_whatever_is_quoted_has_one_source_that_computed_it(
    prompts: list[list[int]], lost: dict[int, int]
) -> None:
    """Prompts and answers are made of six texts; contexts are as the plans have made them.

    lost: whose pages are given away before which prompt.
    """
    texts = [text(1000 + i, n) for i, n in enumerate((3, 15, 16, 17, 40, 75))]
    world = World()
    computed: dict[str, list[bool]] = {}
    for index, parts in enumerate(prompts):
        name = f"r{index}"
        world.standing.update({f"r{i}": False for i, when in lost.items() if when == index})
        tokens = [*history(index), *(token for part in parts for token in texts[part]), index]
        world.send(name, tokens, donors=True)
        own = [True] * len(tokens)
        if world.plan is not None:
            check_plan(world.plan, PAGE)
            (member,) = world.plan.members
            rows = world.book.ticket(RequestId(name)).token_ids
            for copy in member.copies:
                source = world.plan.tables[copy.source].request_id
                theirs = world.book._donors._donors[source].ticket
                there = slice(copy.source_start, copy.source_start + copy.length)
                assert theirs.token_ids[there] == rows[copy.start : copy.end]
                assert copy.exact or all(computed[source][there])
                own[copy.start : copy.end] = [False] * copy.length
        answer = texts[parts[0]] + text(2000 + index, PAGE)
        world.finish(name, answer)
        computed[name] = own + [True] * len(answer)


def test_pages_may_end_before_the_text_that_is_quoted() -> None:
    """Pages of 64 rows: the donor's own text stands behind the last full one, a copy after it."""
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    own = text(5, 17)
    ticket = world.send("b", [*text(3, 66), *own, *ANSWER[:35], 1], donors=True)
    tokens = array("q", (*ticket.token_ids, 5))
    world.book.retire(ticket.request_id, Held(64, world.pages["b"][:4], lambda: True), tokens)
    world.send("c", [*text(4, 33), *own, *ANSWER[:35], 2], donors=True)
    assert shared_rows(world.plan) == 35


def test_new_answers_are_found_among_many_donors_that_begin_alike() -> None:
    world, system = World(), text(77, 40)
    for i in range(100):
        said(world, f"a{i}", [*system, *text(200 + i, 30)], [*text(400 + i, 40), *text(9, PAGE)])
    world.send("c", [*system, *text(999, 10), *text(499, 40), 1], donors=True)
    assert copies(world) == [("a99", 70, 50, 40)]


def test_many_donors_cost_little_time() -> None:
    """A prompt of 8,000 tokens that 64 finished requests share: not a search in each of them."""
    shared, times = text(5, 8000), []
    for count in (1, 64):
        donors = Donors(100)
        for i in range(count):
            tokens = [*history(i), *shared]
            ticket = Ticket(RequestId(f"x{i}"), AgentId("x"), tokens, (), 0.0, lambda: 0)
            held = Held(8000, (), lambda: True)
            donors.add("", ticket, array("q", (*ticket.token_ids, *text(i, 20))), held)
        new = Ticket(RequestId("y"), AgentId("y"), [*history(99), *shared], (), 0.0, lambda: 0)
        began = process_time()
        assert len(donors.quoted("", new)) == 1
        times.append(process_time() - began)
    assert times[1] < 5 * times[0] + 0.05


@pytest.mark.parametrize("donors", [False, True])
def test_what_all_begin_with_is_computed_exactly_once(donors: bool) -> None:
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    head, region = [*text(7, 50), *ANSWER, *text(8, 100)], text(13, 60)
    cut = [len(head), 20, 60, 1]
    tickets = [
        world.arrive(
            name,
            [*head, *text(seed, 20), *region, 1],
            "",
            "r",
            donors=donors,
            size=2,
            segments=cut,
        )
        for name, seed in (("c", 11), ("d", 12))
    ]
    assert world.step(*tickets) == [Verdict.COLLECTIVE] * 2
    assert world.plan is not None
    leader, follower = world.plan.members
    assert leader.copies == () and follower.copies[0].exact
    assert shared_rows(world.plan) == len(head) + len(region)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_donors_that_come_or_go_between_two_members(lost: bool, marked: bool) -> None:
    """The region is computed once all the same."""
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    region = [*text(50, 100), *ANSWER, *text(51, 100)]

    def arrive(name: str, seed: int) -> Ticket:
        tokens = [*history(seed), *region, 1]
        cut = [len(history(seed)), len(region), 1] if marked else ()
        return world.arrive(name, tokens, "", "r", donors=True, size=2, segments=cut)

    first = arrive("c", 3)
    if lost:
        world.standing["a"] = False
    else:
        said(world, "b", history(2), [*region[:60], *text(9, PAGE)])
    assert world.step(first, arrive("d", 4)) == [Verdict.COLLECTIVE] * 2
    assert world.plan is not None
    assert sum(c.length for c in world.plan.members[1].copies) >= len(region) - 40


def test_a_quotation_within_a_quotation() -> None:
    """A prompt that quotes less of an answer does not take it from one that quotes all."""
    world = World()
    said(world, "a", history(1), [*text(1, 100), *text(9, PAGE)])
    first = world.arrive("c", [*history(3), *text(1, 100), 2], "", "r", donors=True, size=2)
    other = world.arrive("d", [*history(4), *text(1, 100)[:50], 3], "", "r", donors=True, size=2)
    world.step(first, other)
    assert [sum(c[3] for c in copies(world, i)) for i in (0, 1)] == [100, 50]


def test_without_its_donor_a_request_is_ordinary() -> None:
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    ticket = world.arrive("c", [*history(3), *ANSWER, 1], donors=True)
    world.standing["a"] = False
    assert world.step(ticket) == [Verdict.ORDINARY] and ticket.approximate_from is None


def test_an_exactly_stored_history_stays_exact() -> None:
    world, prompt = World(), history(1)
    following = [*prompt, *ANSWER, *text(9, PAGE), *text(4, 40)]
    said(world, "a", prompt, [*ANSWER, *text(9, PAGE)], stored=len(prompt) + 55)
    world.standing["a"] = False
    ticket = world.arrive("a2", following, donors=True)
    ticket.stored = StoredRows(RequestId("a"), len(prompt) + 55, len(prompt) + 55)
    world.step(ticket)
    assert ticket.approximate_from is None


def test_whoever_needs_nothing_of_the_leader_does_not_wait_for_it() -> None:
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    big, small = text(70, 3000), Budget(rows=1000, pages=1000, page_size=16, requests=100)
    tickets = [
        world.arrive("big", big, "", "r", size=3, segments=[3000]),
        world.arrive("c", [*history(3), *ANSWER, 1], "", "r", size=3, donors=True, segments=[104]),
        world.arrive("d", [*text(5, 9), *big], "", "r", size=3, segments=[9, 3000]),
    ]
    verdicts = world.step(*tickets, budget=small)
    assert verdicts.count(Verdict.WAIT) == 2
    leader = next(t for t, v in zip(tickets, verdicts) if v is not Verdict.WAIT)
    world._done[leader.request_id][:] = [1000]  # it is on its way
    waiting = [ticket for ticket in tickets if ticket is not leader]
    verdicts = world.step(*waiting, budget=small)
    assert waiting[0].request_id == "c" and verdicts == [Verdict.COLLECTIVE, Verdict.WAIT]


def test_a_request_id_that_is_used_again() -> None:
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    said(world, "a", history(2), [*OTHER, *text(9, PAGE)])
    assert world.arrive("c", [*history(3), *ANSWER, 1], donors=True).quotations == ()
    world.standing["a"] = False
    assert world.arrive("d", [*history(3), *OTHER, 1], donors=True).quotations == ()
    assert not world.book._donors._donors and not world.book._donors._places
