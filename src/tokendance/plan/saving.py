"""Which finished requests are stored when: a family at a time, or at once if pages are taken.

An engine leaves the content of freed pages alone until it gives them out again. So a request that
has finished waits for the others of its plan, whose master or mirror it is to be, unless one of its
pages was just given out: the workers store before they write, so it is still in time (M12).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tokendance.plan.reuse_plan import ReusePlan
from tokendance.types import RequestId


@dataclass(frozen=True, slots=True)
class Save:
    """Rows [0, len(token_ids)) of a request, in `blocks`, go into the store.

    exact_rows: leading rows that are what the engine alone computes. salt: tenant.
    """

    request_id: RequestId
    session: str
    agent: str
    token_ids: Sequence[int]
    blocks: tuple[int, ...]
    exact_rows: int
    salt: str = ""


class SessionOrder(NamedTuple):
    """What becomes of the stored entries of a session: "pin", "release", or "prefetch" from the
    tier below memory; "clear" forgets those of all sessions."""

    order: str
    session: str
    salt: str


@dataclass(frozen=True, slots=True)
class SaveFamily:
    """Requests to be stored together, as their plan relates them; None if there is none."""

    plan: ReusePlan | None
    saves: tuple[Save, ...]


class SaveQueue:
    """Finished requests that are not stored yet."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._plans: dict[RequestId, ReusePlan] = {}  # of requests under way and of waiting ones
        self._waiting: dict[RequestId, Save] = {}
        self._on_page: dict[int, set[RequestId]] = {}
        self._asked: set[RequestId] = set()  # waiting ones that a plan of this step takes from
        self._changed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def planned(self, plan: ReusePlan) -> None:
        """A plan is about to be executed."""
        self._plans.update((member.request_id, plan) for member in plan.members)
        self._asked.update(table.request_id for table in plan.tables if table.stored)

    def plan_of(self, request_id: RequestId) -> ReusePlan | None:
        return self._plans.get(request_id)

    def waiting(self, request_id: RequestId) -> Save | None:
        return self._waiting.get(request_id)

    def add(self, save: Save) -> None:
        """A request has finished."""
        self._changed = True
        self._waiting[save.request_id] = save
        for block in save.blocks:
            self._on_page.setdefault(block, set()).add(save.request_id)

    def withdraw(self, request_id: RequestId) -> None:
        """A finished request is not to be stored after all."""
        if request_id in self._waiting:
            self._take([request_id])

    def left(self, request_id: RequestId) -> None:
        """A request has ended and is not to be stored."""
        self._changed = True
        self._plans.pop(request_id, None)

    def due(self, given_out: Iterable[int], running: Container[str]) -> tuple[SaveFamily, ...]:
        """What has to be stored in this step. given_out: pages that the engine gave to a request in
        it. running: the requests that hold pages."""
        names = {
            name
            for block in given_out
            for name in list(self._on_page.get(block, ()))
            if name in self._asked or not self._trimmed(name, block, running)
        }
        names |= self._asked & self._waiting.keys()
        self._asked.clear()
        if self._changed:
            self._changed = False
            names |= {name for name in self._waiting if not self._awaited(name, running)}
        for name in list(names):  # a mirror needs its master first
            plan = self._plans.get(name)
            names |= {t.request_id for t in plan.tables} & self._waiting.keys() if plan else set()
        return self._take([name for name in self._waiting if name in names])

    def _trimmed(self, name: RequestId, block: int, running: Container[str]) -> bool:
        """Give up the last page of a mirror whose master is still running, if it is not full.

        Engines hand out such a page first, often to that very master. Without it the mirror can go
        on waiting; stored now, it would have to be dense.
        """
        save, plan = self._waiting[name], self._plans.get(name)
        full = len(save.token_ids) // self._page_size * self._page_size
        if plan is None or block != save.blocks[-1] or not 0 < full < len(save.token_ids):
            return False
        member = next(m for m in plan.members if m.request_id == name)
        if not any(plan.tables[copy.source].request_id in running for copy in member.copies):
            return False
        self._waiting[name] = replace(
            save,
            token_ids=save.token_ids[:full],
            blocks=save.blocks[:-1],
            exact_rows=min(save.exact_rows, full),
        )
        self._forget_page(block, name)
        return True

    def _forget_page(self, block: int, name: RequestId) -> None:
        self._on_page[block].discard(name)
        if not self._on_page[block]:
            del self._on_page[block]

    def _awaited(self, name: RequestId, running: Container[str]) -> bool:
        """Whether somebody that is related to a finished request is still under way."""
        plan = self._plans.get(name)
        return plan is not None and any(table.request_id in running for table in plan.tables)

    def _take(self, names: Iterable[RequestId]) -> tuple[SaveFamily, ...]:
        families: dict[int, tuple[ReusePlan | None, list[Save]]] = {}
        for name in names:
            save, plan = self._waiting.pop(name), self._plans.pop(name, None)
            families.setdefault(id(plan), (plan, []))[1].append(save)
            for block in save.blocks:
                self._forget_page(block, name)
        # Sources finish before or with those that take from them, or stand in an earlier plan.
        order = sorted(families.values(), key=lambda family: _depth(family[0], families))
        return tuple(SaveFamily(plan, tuple(saves)) for plan, saves in order)


def _depth(plan: ReusePlan | None, families: dict[int, tuple[ReusePlan | None, list[Save]]]) -> int:
    """How many of the other families hold a source of this one."""
    if plan is None:
        return 0
    sources = {table.request_id for table in plan.tables}
    own = {member.request_id for member in plan.members}
    return sum(
        any(save.request_id in sources - own for save in saves) for _, saves in families.values()
    )
