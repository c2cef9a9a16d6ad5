"""A round book in front of an engine that computes every request in one step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

from tokendance.config import Config
from tokendance.plan.kept import Held
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
        self.stored_rows: dict[str, int] = {}
        self._done: dict[str, list[int]] = {}
        self._next = 0

    def send(
        self, name: str, tokens: list[int], salt: str = "", round_id: str = "", **options: Any
    ):
        """A request that may start at once, and its plan."""
        ticket = self.arrive(name, tokens, salt, round_id, **options)
        assert self.step(ticket)[0] is not Verdict.WAIT
        return ticket

    def arrive(
        self,
        name: str,
        tokens: list[int],
        salt: str = "",
        round_id: str = "",
        *,
        size: int = 1,
        donors: bool = False,
        segments: Sequence[int] = (),
    ) -> Ticket:
        """segments: lengths, of a marked prompt."""
        done: list[int] = []
        ticket = Ticket(
            RequestId(name),
            AgentId(name),
            tokens,
            KEYS.spans(tokens, segments or [len(tokens)]),
            0.0,
            lambda: sum(done),
            takes_donors=donors,
        )
        self._done[name] = done
        if not segments:
            self.book.discover(ticket, salt=salt, key=KEYS.key)
        self.book.attribute(ticket, salt=salt)
        if round_id:
            self.book.join_announced(
                ticket, session="s", round_id=round_id, size=size, salt=salt, now=0.0
            )
        else:
            self.book.join_by_content(ticket, salt=salt, marked=False, now=0.0)
        return ticket

    def step(self, *tickets: Ticket, budget: Budget = BUDGET) -> list[Verdict]:
        """The engine asks for these, in this order, and starts those that may."""
        verdicts = [self.book.verdict(t.request_id, 0, budget, 0.0) for t in tickets]
        started = [t for t, v in zip(tickets, verdicts) if v is not Verdict.WAIT]
        for ticket in started:
            count = -(-len(ticket.token_ids) // PAGE)
            self.pages[ticket.request_id] = tuple(range(self._next, self._next + count))
            self._next += count
            collective = verdicts[tickets.index(ticket)] is Verdict.COLLECTIVE
            self.book.admitted(ticket.request_id, self.pages[ticket.request_id], collective)
        self.plans = self.book.end_step(lambda request_id: self.pages[request_id])
        for ticket in started:
            self._done[ticket.request_id].append(len(ticket.token_ids))
        return verdicts

    def finish(self, name: str, said: Sequence[int] = (), stored: int = 0) -> None:
        """stored: rows that the store has of it, as long as `stored_rows` says so."""
        pages = self.pages.pop(name)
        self.standing[name] = True
        tokens = array("q", (*self.book.ticket(RequestId(name)).token_ids, *said))
        pages = (*pages, *range(self._next, self._next + len(said) // PAGE + 1))
        self._next += len(said) // PAGE + 1
        full = (len(tokens) - 1) // PAGE
        self.stored_rows[name] = stored
        self.book.retire(
            RequestId(name),
            Held(
                full * PAGE,
                pages[:full],
                lambda: self.standing[name],
                lambda exact: self.stored_rows[name],
            ),
            tokens,
        )

    @property
    def plan(self) -> ReusePlan | None:
        return self.plans[0] if self.plans else None


def shared_rows(plan: ReusePlan | None) -> int:
    return sum(c.length for m in plan.members for c in m.copies) if plan else 0
