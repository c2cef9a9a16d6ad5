"""What the scheduler side knows of the store, when it stores, and plans that take rows from it."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_world import PAGE, ticket_of

from tokendance.plan.planner import plan_round
from tokendance.plan.reuse_plan import Copy, Member, PageTable, PlanError, ReusePlan, check_plan
from tokendance.plan.saving import Save, SaveQueue
from tokendance.plan.stored import Owner, StoredEntry, StoredIndex
from tokendance.plan.ticket import StoredRows
from tokendance.types import AgentId, RequestId, RoundId, Source

ROUND = RoundId("round")


def by(agent: str) -> Owner:
    return Owner("", "s", agent)


def entry(name: str, agent: str, tokens: range, exact: int) -> StoredEntry:
    pages = tuple(("page", tuple(tokens[: i + PAGE])) for i in range(0, exact - PAGE + 1, PAGE))
    return StoredEntry(RequestId(name), by(agent), array("q", tokens), exact, pages)


def hashes(tokens: array[int]) -> list[object]:
    return [("page", tuple(tokens[: i + PAGE])) for i in range(0, len(tokens) - PAGE + 1, PAGE)]


class TestIndex:
    def test_the_owner_gets_its_approximate_rows_others_do_not(self) -> None:
        index = StoredIndex(PAGE)
        index.add(entry("r", "a", range(100, 120), exact=9))
        prompt = array("q", [*range(100, 118), 1, 2, 3])
        own = index.find(by("a"), prompt, hashes(prompt), 0)
        assert own == StoredRows(RequestId("r"), 18, 9)
        assert index.find(by("b"), prompt, hashes(prompt), 0) == StoredRows(RequestId("r"), 9, 9)

    def test_nothing_beyond_what_is_cached_already(self) -> None:
        index = StoredIndex(PAGE)
        index.add(entry("r", "a", range(100, 120), exact=20))
        prompt = array("q", range(100, 112))
        assert index.find(by("a"), prompt, hashes(prompt), 12) is None
        assert index.find(by("b"), prompt, hashes(prompt), 8) == StoredRows(RequestId("r"), 12, 12)

    def test_a_new_entry_takes_the_place_of_the_owners_last(self) -> None:
        index = StoredIndex(PAGE)
        index.add(entry("r1", "a", range(100, 120), exact=20))
        index.add(entry("r2", "a", range(200, 220), exact=20))
        old = array("q", range(100, 120))
        assert index.find(by("a"), old, hashes(old), 0) is None and len(index) == 1

    def test_entries_of_a_session(self) -> None:
        index = StoredIndex(PAGE)
        index.add(entry("r1", "a", range(100, 120), exact=20))
        index.add(entry("r2", "b", range(200, 220), exact=20))
        assert index.of("", "s") == ["r1", "r2"]
        assert index.of("", "t") == index.of("other", "s") == []

    def test_two_entries_with_the_same_pages(self) -> None:
        """Forgetting one of them loses no page that the other one has brought since."""
        index = StoredIndex(PAGE)
        index.add(entry("r1", "a", range(100, 120), exact=20))
        index.add(entry("r2", "b", range(100, 120), exact=20))
        index.forget([RequestId("r1")])
        prompt = array("q", range(100, 120))
        found = index.find(by("c"), prompt, hashes(prompt), 0)
        assert found is not None and found.request_id == "r2"
        index.forget([RequestId("r2"), RequestId("unknown")])
        assert index.find(by("c"), prompt, hashes(prompt), 0) is None

    def test_equal_hashes_of_other_tokens_give_nothing(self) -> None:
        index = StoredIndex(PAGE)
        index.add(entry("r", "a", range(100, 120), exact=20))
        prompt = array("q", range(300, 320))
        assert index.find(by("b"), prompt, hashes(array("q", range(100, 120))), 0) is None


def save(name: str, *blocks: int) -> Save:
    return Save(RequestId(name), "s", name, array("q", [1] * 8), blocks, 8)


def plan_of(members: list[str], sources: list[str]) -> ReusePlan:
    tables = tuple(PageTable(RequestId(n), ()) for n in (*members, *sources))
    made = (
        Member(RequestId(n), AgentId(n), i, array("q", [1]), 0, 0) for i, n in enumerate(members)
    )
    return ReusePlan(ROUND, tuple(made), tables)


def names(families: object) -> list[list[str]]:
    return [[s.request_id for s in family.saves] for family in families]  # type: ignore[attr-defined]


class TestQueue:
    def test_a_family_waits_for_its_last_member(self) -> None:
        queue, plan = SaveQueue(PAGE), plan_of(["a", "b"], [])
        queue.planned(plan)
        queue.add(save("a", 1, 2))
        assert queue.due([], {"b"}) == ()
        queue.add(save("b", 3))
        (family,) = queue.due([], ())
        assert family.plan is plan and names([family]) == [["a", "b"]]
        assert queue.due([], ()) == () and not len(queue)

    def test_it_does_not_wait_for_one_that_left(self) -> None:
        queue = SaveQueue(PAGE)
        queue.planned(plan_of(["a", "b"], []))
        queue.add(save("a", 1))
        queue.left(RequestId("b"))
        assert names(queue.due([], ())) == [["a"]]

    def test_pages_that_are_given_out_do_not_wait_and_take_their_master_along(self) -> None:
        queue = SaveQueue(PAGE)
        queue.planned(plan_of(["lead", "x"], []))
        queue.planned(plan_of(["a", "b"], ["lead"]))
        queue.add(save("lead", 1))
        queue.add(save("a", 2))
        assert queue.due([9], {"x", "b"}) == ()
        assert names(queue.due([2], {"x", "b"})) == [["lead"], ["a"]]

    def test_a_mirror_gives_up_its_last_page_and_waits_for_its_master(self) -> None:
        queue = SaveQueue(PAGE)
        plan = plan_of(["lead", "a"], [])
        copy = Copy(0, 0, 0, 1)
        queue.planned(
            replace(plan, members=(plan.members[0], replace(plan.members[1], copies=(copy,))))
        )
        queue.add(replace(save("a", 1, 2, 3), token_ids=array("q", range(10)), exact_rows=9))
        assert queue.due([3], {"lead"}) == ()
        assert queue.due([3], {"lead"}) == ()  # it is not its page any more
        queue.add(save("lead", 4, 5))
        (family,) = queue.due([], ())
        mirror = family.saves[0]
        assert (list(mirror.token_ids), mirror.blocks, mirror.exact_rows) == (
            [*range(8)],
            (1, 2),
            8,
        )

    def test_one_that_is_withdrawn_is_not_stored(self) -> None:
        queue = SaveQueue(PAGE)
        queue.planned(plan_of(["a", "b"], []))
        queue.add(save("a", 1))
        queue.withdraw(RequestId("a"))
        queue.withdraw(RequestId("unknown"))
        queue.add(save("b", 2))
        assert names(queue.due([1], ())) == [["b"]]

    def test_a_page_shared_by_two_that_finished(self) -> None:
        queue = SaveQueue(PAGE)
        queue.planned(plan_of(["a", "b", "c"], []))
        queue.add(save("a", 1, 2))
        queue.add(save("b", 1, 3))
        assert names(queue.due([1], {"c"})) == [["a", "b"]]

    def test_one_that_a_plan_takes_from_is_stored_before_the_plan_runs(self) -> None:
        queue = SaveQueue(PAGE)
        queue.planned(plan_of(["lead", "x"], []))
        queue.add(save("lead", 1))
        assert queue.due([], {"x"}) == ()
        late = plan_of(["late"], [])
        queue.planned(
            ReusePlan(
                ROUND, late.members, (*late.tables, PageTable(RequestId("lead"), (), stored=True))
            )
        )
        assert names(queue.due([], {"x", "late"})) == [["lead"]]

    @pytest.mark.parametrize("asked", [False, True])
    def test_a_last_page_is_given_up_unless_a_plan_takes_from_it(self, asked: bool) -> None:
        queue, tokens = SaveQueue(4), array("q", range(10))
        member = Member(RequestId("f"), AgentId("f"), 0, tokens, 0, 9, (Copy(1, 0, 2, 5),))
        tables = (PageTable(RequestId("f"), (1, 2, 3)), PageTable(RequestId("lead"), (7, 8)))
        queue.planned(ReusePlan(ROUND, (member,), tables))
        queue.add(Save(RequestId("f"), "s", "f", tokens, (1, 2, 3), 2))
        if asked:
            quoting = plan_of(["q"], [])
            source = PageTable(RequestId("f"), (), stored=True)
            queue.planned(replace(quoting, tables=(*quoting.tables, source)))
        saved = [s for family in queue.due([3], {"lead", "q"}) for s in family.saves]
        waiting = queue.waiting(RequestId("f"))
        if asked:
            assert [len(s.token_ids) for s in saved] == [10] and waiting is None
        else:
            assert saved == [] and waiting is not None and len(waiting.token_ids) == 8

    @given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5)), max_size=12))
    def test_everything_is_stored_once_whatever_happens(
        self, events: list[tuple[str, int]]
    ) -> None:
        queue = SaveQueue(PAGE)
        queue.planned(plan_of(["a", "b", "c"], []))
        queue.planned(plan_of(["d", "e", "f"], ["a"]))
        running, finished, stored = set("abcdef"), [], []
        for name, block in events:
            if name in running:
                running.discard(name)
                finished.append(name)
                queue.add(save(name, block))
            stored += [n for family in names(queue.due([block], running)) for n in family]
        for name in sorted(running):
            queue.left(RequestId(name))
        stored += [n for family in names(queue.due([], ())) for n in family]
        assert sorted(stored) == sorted(finished)


class TestPlans:
    HISTORY, SHARED, END = tuple(range(20)), tuple(range(50, 70)), (1, 2)

    def test_a_leader_takes_exact_rows_and_serves_them(self) -> None:
        lead = ticket_of("lead", (self.HISTORY, self.SHARED, self.END))
        lead.stored = StoredRows(RequestId("old"), 30, 30)
        follower = ticket_of("f", ((7, 8, 9), self.SHARED, self.END))
        follower.approximate_from = 3
        plan = plan_round(ROUND, [lead, follower], ())
        check_plan(plan, PAGE)
        assert plan.members[0].copies == (Copy(2, 0, 0, 30, True, True),)
        assert plan.tables[2] == PageTable(RequestId("old"), (), True)
        assert plan.members[1].copies == (Copy(0, 20, 3, 21),)
        assert plan.members[0].rows_by_source()[Source.STORED] == 30
        assert plan.members[0].rows_by_source(lost=30)[Source.COMPUTED] == 41

    def test_a_follower_takes_its_approximate_history(self) -> None:
        lead = ticket_of("lead", ((5, 6), self.SHARED, self.END))
        follower = ticket_of("f", (self.HISTORY, self.SHARED, self.END))
        follower.cached, follower.stored = 4, StoredRows(RequestId("old"), 18, 8)
        follower.approximate_from = 8
        plan = plan_round(ROUND, [lead, follower], ())
        check_plan(plan, PAGE)
        assert plan.members[1].copies[:2] == (
            Copy(2, 4, 4, 4, True, True),
            Copy(2, 8, 8, 10, False, True),
        )
        assert plan.members[1].copies[-1][:4] == (0, 2, 20, 21)

    def test_approximate_rows_are_no_source_for_a_third(self) -> None:
        lead = ticket_of("lead", ((5, 6), self.END))
        second = ticket_of("s", (self.HISTORY, self.SHARED, self.END))
        second.stored, second.approximate_from = StoredRows(RequestId("old"), 40, 10), 10
        third = ticket_of("t", ((3,), self.SHARED, self.END))
        third.approximate_from = 1
        plan = plan_round(ROUND, [lead, second, third], ())
        check_plan(plan, PAGE)
        assert plan.members[2].copies == ()

    def test_a_copy_has_to_say_where_its_source_stands(self) -> None:
        member = Member(RequestId("m"), AgentId("m"), 0, array("q", range(9)), 0, 8)
        tables = (PageTable(RequestId("m"), (1, 2, 3)), PageTable(RequestId("old"), (), True))
        wrong = ReusePlan(
            ROUND,
            (
                Member(
                    member.request_id, member.agent, 0, member.token_ids, 0, 8, (Copy(1, 0, 0, 8),)
                ),
            ),
            tables,
        )
        with pytest.raises(PlanError, match="disagree"):
            check_plan(wrong, PAGE)
