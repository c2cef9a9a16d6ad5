"""Kept leaders and unmarked prompts, in the round book alone."""

from __future__ import annotations

from random import Random

from tokendance.config import Config
from tokendance.plan.discover import Discovery, cut
from tokendance.plan.kept import Held
from tokendance.plan.match import Tokens
from tokendance.plan.reuse_plan import ReusePlan
from tokendance.plan.roundbook import RoundBook, Verdict
from tokendance.plan.rounds import Budget
from tokendance.plan.ticket import Ticket
from tokendance.prompt.segments import SegmentKeys
from tokendance.types import AgentId, RequestId

KEYS = SegmentKeys("model")
BUDGET = Budget(rows=10_000, pages=1_000, page_size=16, requests=100)
PAGE = 16


def text(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(50_000) for _ in range(length)]


class World:
    """A book and an engine that admits whatever may start and computes it in one step."""

    def __init__(self, **options: object) -> None:
        self.book = RoundBook(Config(min_shared_tokens=32, **options))  # type: ignore[arg-type]
        self.pages: dict[str, tuple[int, ...]] = {}
        self.standing: dict[str, bool] = {}
        self._next = 0

    def send(self, name: str, tokens: list[int], salt: str = "", round_id: str = "") -> Ticket:
        done: list[int] = []
        ticket = Ticket(
            RequestId(name),
            AgentId(name),
            tokens,
            KEYS.spans(tokens, [len(tokens)]),
            0.0,
            lambda: sum(done),
        )
        self.book.discover(ticket, salt=salt, key=KEYS.key)
        if round_id:
            self.book.join_announced(
                ticket, session="s", round_id=round_id, size=1, salt=salt, now=0.0
            )
        else:
            self.book.join_by_content(ticket, salt=salt, marked=False, now=0.0)
        verdict = self.book.verdict(ticket.request_id, 0, BUDGET, 0.0)
        assert verdict is not Verdict.WAIT
        count = -(-len(tokens) // PAGE)
        self.pages[name] = tuple(range(self._next, self._next + count))
        self._next += count
        self.book.admitted(ticket.request_id, self.pages[name], verdict is Verdict.COLLECTIVE)
        self.plans = self.book.end_step(lambda request_id: self.pages[request_id])
        done.append(len(tokens))
        return ticket

    def finish(self, name: str) -> None:
        pages = self.pages.pop(name)
        self.standing[name] = True
        held = Held((len(pages) - 1) * PAGE, pages[:-1], lambda: self.standing[name])
        self.book.retire(RequestId(name), held)

    @property
    def plan(self) -> ReusePlan | None:
        return self.plans[0] if self.plans else None


def shared_rows(plan: ReusePlan | None) -> int:
    return sum(c.length for m in plan.members for c in m.copies) if plan else 0


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
