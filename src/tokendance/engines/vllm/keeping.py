"""The scheduler's side of storage: what is worth storing, and what a prompt gets back (M17, M26).

finished, preempted -> SaveQueue -> workers -> confirmed -> StoredIndex -> rows of later prompts
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tokendance.config import Config
from tokendance.plan.match import WINDOW
from tokendance.plan.reuse_plan import Copy, Member, PageTable, ReusePlan
from tokendance.plan.saving import Save, SaveFamily, SaveQueue, SessionOrder
from tokendance.plan.stored import Owner, StoredEntry, StoredIndex
from tokendance.plan.ticket import State, StoredRows, Ticket
from tokendance.types import AgentId, RequestId, RoundId


class _Look(NamedTuple):
    """What a look into the index depended on."""

    cached: int
    tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class _Alone:
    """Rows [cached, rows) of a request on the ordinary path come from the store."""

    stored: StoredRows
    cached: int
    rows: int


class Keeping:
    """One per engine with a store."""

    def __init__(self, config: Config, block_size: int) -> None:
        self.index = StoredIndex(block_size)
        self._block_size = block_size
        self._approximate = config.store_int8
        self._queue = SaveQueue(block_size)
        self._urgent: list[SaveFamily] = []
        self._sent: dict[RequestId, StoredEntry] = {}  # on their way to the workers
        self._looks: dict[RequestId, _Look] = {}
        self._alone: dict[RequestId, _Alone] = {}
        self._starting: list[ReusePlan] = []
        self._prefetches = bool(config.store_folder)
        self._orders: list[SessionOrder] = []
        self._releases: dict[str, SessionOrder] = {}  # by the request after which they happen

    def rows(self, request_id: RequestId, exact: bool) -> int:
        """Leading rows of a finished request that the workers have, or will have before they need
        them: they store what is on its way to them first. exact: only exact ones."""
        entry: Save | StoredEntry | None = self._queue.waiting(request_id)
        entry = entry or self._sent.get(request_id) or self.index.get(request_id)
        return 0 if entry is None else entry.exact_rows if exact else len(entry.token_ids)

    # -- sessions ------------------------------------------------------------------------------

    def arrived(self, request_id: str, session: str, salt: str, retain: str | None) -> None:
        """A request of a named session has come; what it has on disk may be wanted soon."""
        if retain == "pin":
            self._orders.append(SessionOrder("pin", session, salt))
        elif retain == "release":
            self._releases[request_id] = SessionOrder("release", session, salt)
        order = SessionOrder("prefetch", session, salt)
        if self._prefetches and order not in self._orders:
            self._orders.append(order)

    def ended(self, request_id: str) -> bool:
        """A request is over, in whatever way; whether its session is forgotten with it."""
        order = self._releases.pop(request_id, None)
        if order is not None:
            self._orders.append(order)
            self.index.forget(self.index.of(order.salt, order.session))
            self._drop(order.session, order.salt)
        return order is not None

    def _drop(self, session: str, salt: str) -> None:
        """Store nothing of a session that is on its way."""
        for entry in list(self._sent.values()):
            if entry.owner[:2] == (salt, session):
                self._queue.withdraw(entry.request_id)
                del self._sent[entry.request_id]

    def reset(self) -> None:
        """Forget everything: the model has other weights, or the pages have lost their content."""
        self.index.clear()
        self._queue = SaveQueue(self._block_size)
        self._urgent, self._sent = [], {}
        self._orders = [SessionOrder("clear", "", "")]

    def take_orders(self) -> tuple[SessionOrder, ...]:
        orders, self._orders = tuple(self._orders), []
        return orders

    # -- back from the store -------------------------------------------------------------------

    def look(self, request: Any, ticket: Ticket, session: str, cached: int) -> None:
        """Note on the ticket what the store holds of a waiting request; cheap if nothing changed
        since the last look."""
        look = _Look(cached, request.num_tokens, self.index.version)
        if self._looks.get(ticket.request_id) == look:
            return
        self._looks[ticket.request_id] = look
        tokens = ticket.token_ids
        if request.num_tokens > len(tokens):
            tokens = array("q", request.all_token_ids)
        owner = Owner(request.cache_salt or "", session, ticket.agent)
        ticket.stored = self.index.find(owner, tokens, request.block_hashes, cached)

    def rows_alone(self, request: Any, ticket: Ticket, cached: int) -> int:
        """Rows beyond `cached` that a request on the ordinary path gets back, less than a page is
        not worth it. Approximate ones only if they are its own, from before a preemption."""
        self._alone.pop(ticket.request_id, None)
        stored = ticket.stored
        if stored is None:
            return 0
        own = stored.request_id == ticket.request_id
        rows = min(stored.rows if own else stored.exact, int(request.num_tokens) - 1)
        if rows - cached < self._block_size:
            return 0
        self._alone[ticket.request_id] = _Alone(stored, cached, rows)
        return rows - cached

    def start_alone(self, request: Any, blocks: tuple[int, ...]) -> None:
        """Such a request has got its pages."""
        request_id = RequestId(request.request_id)
        alone = self._alone.pop(request_id, None)
        if alone is None:
            return
        exact = max(alone.cached, min(alone.stored.exact, alone.rows))
        runs = ((alone.cached, exact, True), (exact, alone.rows, False))
        copies = tuple(Copy(1, a, a, b - a, sure, True) for a, b, sure in runs if a < b)
        member = Member(
            request_id=request_id,
            agent=AgentId(""),
            table=0,
            token_ids=array("q", request.all_token_ids),
            cached=alone.cached,
            end=alone.rows,
            copies=copies,
        )
        tables = (PageTable(request_id, blocks), PageTable(alone.stored.request_id, (), True))
        self._starting.append(ReusePlan(RoundId(""), (member,), tables))

    def take_alone(self) -> list[ReusePlan]:
        """The plans of those that started in this step."""
        starting, self._starting = self._starting, []
        return starting

    # -- into the store ------------------------------------------------------------------------

    def finished(self, request: Any, ticket: Ticket, session: str, blocks: tuple[int, ...]) -> None:
        """A request is over. blocks: its pages, () if it is not to be stored."""
        self._looks.pop(ticket.request_id, None)
        self._alone.pop(ticket.request_id, None)
        rows = min(request.num_computed_tokens, request.num_tokens - 1)
        # As a history less than a page is not worth it, as the source of a quotation it is.
        least = WINDOW if ticket.takes_donors else self._block_size
        if not blocks or rows < least:
            return self._queue.left(ticket.request_id)
        tokens = array("q", request.all_token_ids[:rows])
        self._queue.add(self._save(request, ticket, session, tokens, blocks))

    def preempted(self, request: Any, ticket: Ticket, session: str) -> None:
        """A request has lost its pages in this step; what the pass filled of them is kept.

        Once: the pages it gets later on are not those of its ticket, and may not be filled yet.
        """
        first = ticket.state is State.COLLECTIVE and request.num_preemptions == 1
        if first and ticket.end >= self._block_size:
            tokens = array("q", ticket.token_ids[: ticket.end])
            save = self._save(request, ticket, session, tokens, ticket.blocks)
            plan = self._queue.plan_of(ticket.request_id)
            self._urgent.append(SaveFamily(plan, (save,)))

    def _save(
        self,
        request: Any,
        ticket: Ticket,
        session: str,
        tokens: array[int],
        blocks: tuple[int, ...],
    ) -> Save:
        rows, salt = len(tokens), request.cache_salt or ""
        exact = rows if ticket.approximate_from is None else min(rows, ticket.approximate_from)
        exact = 0 if self._approximate else exact
        hashes = tuple(request.block_hashes[: exact // self._block_size])
        owner = Owner(salt, session, ticket.agent)
        entry = StoredEntry(ticket.request_id, owner, tokens, exact, hashes)
        self._sent[ticket.request_id] = entry
        pages = blocks[: -(-rows // self._block_size)]
        return Save(ticket.request_id, session, ticket.agent, tokens, pages, exact, salt)

    def due(
        self, plans: Iterable[ReusePlan], given_out: Iterable[int], running: Container[str]
    ) -> tuple[SaveFamily, ...]:
        """What the workers have to store in this step, in which `plans` start."""
        for plan in plans:
            self._queue.planned(plan)
        urgent, self._urgent = self._urgent, []
        families = (*self._queue.due(given_out, running), *urgent)
        for save in (save for family in families for save in family.saves):
            entry = self._sent[save.request_id]  # it may be stored without its last page
            self._sent[save.request_id] = replace(
                entry, token_ids=save.token_ids, exact_rows=save.exact_rows
            )
        return families

    def confirm(self, saved: Mapping[RequestId, bool], gone: Collection[RequestId]) -> None:
        """What the workers have stored, and what they have no longer."""
        if gone:
            self.index.forget(gone)
        for request_id, kept in saved.items():
            entry = self._sent.pop(request_id, None)
            if entry is not None and kept:
                self.index.add(entry)
