"""A round book in front of an engine that computes every request in one step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random

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
        self._next = 0

    def send(
        self,
        name: str,
        tokens: list[int],
        salt: str = "",
        round_id: str = "",
        *,
        donors: bool = False,
        cached: int = 0,
    ) -> Ticket:
        done: list[int] = []
        ticket = Ticket(
            RequestId(name),
            AgentId(name),
            tokens,
            KEYS.spans(tokens, [len(tokens)]),
            0.0,
            lambda: sum(done),
            takes_donors=donors,
        )
        if donors:
            self.book.attribute(ticket, salt=salt, key=KEYS.key)
        self.book.discover(ticket, salt=salt, key=KEYS.key)
        if round_id:
            self.book.join_announced(
                ticket, session="s", round_id=round_id, size=1, salt=salt, now=0.0
            )
        else:
            self.book.join_by_content(ticket, salt=salt, marked=False, now=0.0)
        verdict = self.book.verdict(ticket.request_id, cached, BUDGET, 0.0)
        assert verdict is not Verdict.WAIT
        count = -(-len(tokens) // PAGE)
        self.pages[name] = tuple(range(self._next, self._next + count))
        self._next += count
        self.book.admitted(ticket.request_id, self.pages[name], verdict is Verdict.COLLECTIVE)
        self.plans = self.book.end_step(lambda request_id: self.pages[request_id])
        done.append(len(tokens))
        return ticket

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
