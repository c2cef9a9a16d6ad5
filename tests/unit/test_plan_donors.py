"""What was said comes from the context in which it was said, in the round book alone (M5)."""

from __future__ import annotations

from book_world import PAGE, World, shared_rows, text
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokendance.plan.reuse_plan import Copy, check_plan
from tokendance.types import RequestId

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
    assert world.plan is not None and world.plan.leader is None


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


def test_a_history_that_goes_on_is_exact() -> None:
    """An agent's own context is a donor of the beginning of its next prompt."""
    world = World()
    said(world, "a", history(1), [*ANSWER, *text(9, PAGE)])
    following = [*history(1), *ANSWER, *text(9, PAGE), *text(4, 40)]
    world.send("a2", following, donors=True)
    assert world.plan is not None
    (copy,) = world.plan.members[0].copies
    rows = (len(history(1)) + len(ANSWER) + PAGE - 1) // PAGE * PAGE
    assert copy[1:5] == Copy(0, 0, 0, rows, exact=True)[1:5]


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
