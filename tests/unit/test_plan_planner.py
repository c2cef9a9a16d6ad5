"""Plans for random rounds, checked row by row."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_world import PAGE, Part, check_round, key_of, settle, state_of, ticket_of

from tokendance.plan.planner import MIN_COPY_ROWS, plan_round
from tokendance.plan.reuse_plan import Copy, PageTable
from tokendance.plan.ticket import Ticket, own_spans
from tokendance.types import RoundId, SegmentKey

ROUND = RoundId("round")


def text(length: int, seed: int) -> Part:
    """Texts of one seed begin alike, as texts with the same header do."""
    return tuple(100 * seed + i for i in range(length))


@dataclass(frozen=True)
class Prompt:
    """parts of the prompt, pages in the prefix cache, and from which row on it may approximate."""

    parts: tuple[Part, ...]
    pages: int = 0
    approximate: int | None = 0


@st.composite
def prompts(draw: st.DrawFn, most: int = 5) -> list[Prompt]:
    """Any order, own block left out or last, repeats, empty and one-token segments."""
    lengths = draw(st.lists(st.sampled_from((0, 1, 2, 3, 4, 5, 9, 17)), min_size=1, max_size=5))
    shared = [text(n, draw(st.sampled_from((1, 2, 30 + i)))) for i, n in enumerate(lengths)]
    made = []
    for agent in range(draw(st.integers(1, most))):
        history = text(draw(st.integers(0, 9)), 10 + draw(st.sampled_from((0, 0, agent))))
        order = draw(st.permutations(shared) | st.lists(st.sampled_from(shared), max_size=7))
        if draw(st.booleans()):
            own = shared[agent % len(shared)]
            order = [p for p in order if p != own] + [own] * draw(st.integers(0, 1))
        parts = [history]
        for part in order:
            parts += [part, text(draw(st.integers(0, 3)), 50 + agent)]
        if draw(st.booleans()) or not any(parts):
            parts.append(text(draw(st.integers(1, 3)), 60 + draw(st.sampled_from((0, agent)))))
        rows = sum(map(len, parts)) - 1
        made.append(
            Prompt(
                tuple(parts),
                draw(st.just(0) | st.integers(0, rows // PAGE)),
                draw(st.none() | st.just(0) | st.integers(0, rows)),
            )
        )
    return made


def tickets_of(made: list[Prompt], tag: str, key=key_of) -> list[Ticket]:
    tickets = []
    for i, prompt in enumerate(made):
        ticket = ticket_of(f"{tag}{i}", prompt.parts, key=key)
        ticket.cached = prompt.pages * PAGE
        if prompt.approximate is not None:
            ticket.approximate_from = max(prompt.approximate, ticket.cached)
        tickets.append(ticket)
    return tickets


H, A, B, C, END = text(7, 10), text(9, 30), text(9, 31), text(9, 32), text(2, 60)
END_2 = text(2, 61)


@given(prompts(), prompts(3))
@example([Prompt((H, A, B, C, END))], [Prompt((A, H, C, B, END))])
@example([Prompt((A, B, END)), Prompt((A, B, END), approximate=None)], [Prompt((B, END))])
# The common prefix ends inside the follower's first shared segment.
@example([Prompt((text(5, 1), text(9, 1), END)), Prompt((text(9, 1), text(5, 1), END), 0, 5)], [])
# The end of a segment is taken from one request, its beginning, exactly, from the next.
@example(
    [Prompt((text(9, 1),), approximate=None), Prompt((text(4, 2), text(9, 1)), approximate=None)],
    [
        Prompt((text(1, 3),), approximate=None),
        Prompt((text(9, 1),), approximate=None),
        Prompt((text(4, 2), text(9, 1)), approximate=8),
    ],
)
@settings(max_examples=120)
def test_every_row_has_one_valid_source(first: list[Prompt], second: list[Prompt]) -> None:
    resident, admitted = tickets_of(first, "r"), tickets_of(second, "a")
    before = state_of(resident)
    plan = plan_round(ROUND, resident, ())
    assert state_of(resident) == before
    assert plan == plan_round(ROUND, resident, ())
    check_round(plan, resident, ())
    _takes_what_is_there(plan, resident, [])
    settle(plan, resident)
    before = state_of([*resident, *admitted])
    later = plan_round(ROUND, admitted, resident)
    assert state_of([*resident, *admitted]) == before
    check_round(later, admitted, resident)
    _takes_what_is_there(later, admitted, resident)


def _takes_what_is_there(plan, admitted: list[Ticket], resident: list[Ticket]) -> None:
    """A segment that an earlier request computes is taken where it may be approximate."""
    held = {key for t in resident for key in _whole(t, t.own)}
    for ticket, member in zip(admitted, plan.members):
        copied = {row for c in member.copies for row in range(*c.rows)}
        for span in ticket.spans:
            start, end = max(span.start, ticket.cached), min(span.end, ticket.end)
            allowed = ticket.approximate_from is not None and start >= ticket.approximate_from
            if allowed and span.key in held and end - start >= MIN_COPY_ROWS:
                assert copied.issuperset(range(start, end))
        own = own_spans(ticket, (c.rows for c in member.copies))
        held |= _whole(ticket, own)


def _whole(ticket: Ticket, own) -> set:
    return {k for k, (s, parts) in own.items() if parts == (s[:2],) and s.end <= ticket.end}


@given(prompts(), st.sampled_from((1, 2, 3)))
def test_equal_keys_are_not_trusted(made: list[Prompt], keys: int) -> None:
    tickets = tickets_of(made, "t", lambda part: SegmentKey(bytes([sum(part) % keys])))
    check_round(plan_round(ROUND, tickets, ()), tickets, ())


def plan_of(*made: Prompt):
    tickets = tickets_of(list(made), "t")
    plan = plan_round(ROUND, tickets, ())
    check_round(plan, tickets, ())
    return plan


def test_same_order_is_one_copy() -> None:
    plan = plan_of(Prompt((H, A, B, C, END)), Prompt((text(3, 70), A, B, C, END_2)))
    assert plan.leader == 0 and plan.members[0].reason == "leader"
    assert plan.members[1].copies == (Copy(0, 7, 3, 27),)
    assert plan.computed_rows == 7 + 27 + 1 + 3 + 1


def test_own_note_splits_the_region_and_order_is_free() -> None:
    note = text(2, 71)
    plan = plan_of(Prompt((H, A, B, C, END)), Prompt((text(3, 70), C, A, note, B, END)))
    copies = (Copy(0, 25, 3, 9), Copy(0, 7, 12, 9), Copy(0, 16, 23, 9))
    assert plan.members[1].copies == copies


def test_neighbours_of_different_sources_stay_apart() -> None:
    plan = plan_of(Prompt((H, A, END)), Prompt((text(4, 70), B, END)), Prompt((A, B, END)))
    assert plan.members[2].copies == (Copy(0, 7, 0, 9), Copy(1, 4, 9, 9))


def test_an_equal_prompt_is_an_exact_copy() -> None:
    plan = plan_of(Prompt((H, A, END)), Prompt((H, A, END), approximate=None))
    assert plan.members[1].copies == (Copy(0, 0, 0, 17, True),)


def test_an_approximate_source_is_exact_up_to_its_first_inexact_copy() -> None:
    follower = Prompt((text(6, 70), A, B, END))
    plan = plan_of(Prompt((H, A, END)), follower, Prompt(follower.parts, approximate=None))
    assert plan.members[2].copies == (Copy(1, 0, 0, 6, True),)


def test_a_segment_that_begins_inside_the_common_prefix_is_taken_from_its_end_on() -> None:
    """The leader begins with a text that the follower's first shared segment begins with, too."""
    short, long = text(5, 1), text(9, 1)
    plan = plan_of(Prompt((short, long, END)), Prompt((long, short, END), approximate=5))
    assert plan.members[1].copies == (Copy(0, 10, 5, 4), Copy(0, 0, 9, 5))


def test_short_pieces_are_computed() -> None:
    short = text(MIN_COPY_ROWS - 1, 40)
    plan = plan_of(Prompt((H, short, END)), Prompt((A, short, END_2)))
    assert plan.members[1].copies == () and plan.members[1].reason == "nothing shared"


def test_the_last_prompt_row_is_never_taken_or_given() -> None:
    copies = (Copy(0, 7, 9, 8),)
    assert plan_of(Prompt((H, A)), Prompt((B, A, END))).members[1].copies == copies
    assert plan_of(Prompt((H, A, END)), Prompt((B, A))).members[1].copies == copies


def test_a_whole_segment_is_preferred_to_one_without_its_last_row() -> None:
    made = Prompt((A,), 0, None), Prompt((A, text(1, 51)), 0, None), Prompt((H, A, END))
    assert plan_of(*made).members[2].copies == (Copy(1, 0, 7, 9),)


def test_pages_are_asked_of_sources_only() -> None:
    resident = tickets_of([Prompt((H, A, END)), Prompt((text(6, 70), A, B, END))], "r")
    settle(plan_round(ROUND, resident, ()), resident)
    asked = []

    def pages(ticket: Ticket) -> PageTable:
        asked.append(ticket.request_id)
        return PageTable(ticket.request_id, ticket.blocks)

    admitted = tickets_of([Prompt((C, A, END_2))], "a")
    plan = plan_round(ROUND, admitted, resident, pages=pages)
    assert asked == ["r0"] and plan.leader is None
    assert plan.members[0].copies == (Copy(1, 7, 9, 9),)
    assert plan.tables[1].blocks == resident[0].blocks


def test_the_last_rows_stay_fresh_unless_they_are_exact() -> None:
    lead, same, other = tickets_of(
        [Prompt((H, A, END)), Prompt((H, A, END)), Prompt((B, A, END))], "t"
    )
    for ticket in (same, other):
        ticket.approximate_from = 0
    plan = plan_round(ROUND, [lead, same, other], (), fresh_tail=5)
    assert plan.members[1].copies[-1].end == same.end and plan.members[1].copies[-1].exact
    assert plan.members[2].copies[-1].end == other.end - 5
