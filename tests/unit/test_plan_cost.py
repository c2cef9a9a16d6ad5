"""What the round book costs the scheduler's thread, and what it keeps."""

from __future__ import annotations

import random
import time
from array import array

import pytest
from plan_engine import CONFIG, engine_of, enter, prompt, text
from plan_world import Part, ticket_of

from tokendance.config import Config
from tokendance.plan import rounds
from tokendance.plan.roundbook import Budget, RoundBook, Verdict
from tokendance.plan.ticket import Ticket
from tokendance.types import AgentId, RequestId, SegmentKey, Span


def test_work_per_request_and_step_is_constant(monkeypatch) -> None:
    """One wave per round and step, and two requests are compared once."""
    waves, looks = [], []
    wave, look = RoundBook._next_wave, rounds.shared_with
    monkeypatch.setattr(RoundBook, "_next_wave", lambda *a: waves.append(1) or wave(*a))
    monkeypatch.setattr(rounds, "shared_with", lambda *a: looks.append(1) or look(*a))
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
    monkeypatch.setattr(rounds, "REMEMBERED", 5)
    engine = engine_of()
    for number in range(20):
        for who in range(2):
            engine.add(prompt(who), round_=(f"s{number}", "1", f"a{who}", 2))
        engine.step()
    engine.drain()
    assert len(engine.book._leaders._items) == len(engine.book._ended._items) == 5


SECONDS = 2.0
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
