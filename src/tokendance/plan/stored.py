"""What the store holds, as the scheduler side knows it: a hint, never a promise (M18, M26).

The workers own the store and evict by themselves. Whoever plans with a row that is gone loses
nothing: the worker computes it and reports the loss, and the entry is forgotten here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokendance.plan.ticket import StoredRows, common_prefix
from tokendance.types import RequestId

REMEMBERED = 4096
"""Entries that are remembered; the oldest is forgotten first."""


class Owner(NamedTuple):
    """Whose history an entry is."""

    tenant: str
    session: str
    agent: str


@dataclass(frozen=True, slots=True, eq=False)
class StoredEntry:
    """One finished request in the store.

    token_ids: array("q") of its rows, prompt
    and decoded. exact_rows: leading rows that are what the engine alone computes. page_hashes: the
    engine's content hashes of its pages, as many as are known.
    """

    request_id: RequestId
    owner: Owner
    token_ids: Sequence[int]
    exact_rows: int
    page_hashes: tuple[Hashable, ...]


class StoredIndex:
    """Entries by owner and by page hash."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._entries: OrderedDict[RequestId, StoredEntry] = OrderedDict()
        self._by_owner: dict[Owner, RequestId] = {}
        self._by_page: dict[Hashable, RequestId] = {}
        self.version = 0  # changes with every change

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: RequestId) -> StoredEntry | None:
        """What is stored of a finished request."""
        return self._entries.get(request_id)

    def add(self, entry: StoredEntry) -> None:
        """An entry has been stored; it takes the place of its owner's last one."""
        self.version += 1
        self.forget((entry.request_id,))
        if entry.owner in self._by_owner:
            self.forget((self._by_owner[entry.owner],))
        self._entries[entry.request_id] = entry
        self._by_owner[entry.owner] = entry.request_id
        self._by_page.update(dict.fromkeys(entry.page_hashes, entry.request_id))
        if len(self._entries) > REMEMBERED:
            self.forget((next(iter(self._entries)),))

    def of(self, tenant: str, session: str) -> list[RequestId]:
        """The entries of a session."""
        owned = (entry for entry in self._entries.values() if entry.owner[:2] == (tenant, session))
        return [entry.request_id for entry in owned]

    def clear(self) -> None:
        self.forget(list(self._entries))

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Entries that are gone; unknown ones are no error."""
        self.version += 1
        for request_id in request_ids:
            entry = self._entries.pop(request_id, None)
            if entry is None:
                continue
            if self._by_owner.get(entry.owner) == request_id:
                del self._by_owner[entry.owner]
            for page in entry.page_hashes:
                if self._by_page.get(page) == request_id:
                    del self._by_page[page]

    def find(
        self,
        owner: Owner,
        token_ids: Sequence[int],
        page_hashes: Sequence[Hashable],
        cached: int,
    ) -> StoredRows | None:
        """The entry that holds most leading rows of a prompt; None if none holds more than the
        `cached` rows that are there already.

        The owner's own entry may be approximate; any other one serves its exact rows only.
        token_ids: array("q"). page_hashes: the engine's, of the prompt's full pages.
        """
        found = [self._of_owner(owner, token_ids), self._of_pages(token_ids, page_hashes, cached)]
        best = max((f for f in found if f is not None), key=lambda f: f.rows, default=None)
        return best if best is not None and best.rows > cached else None

    def _of_owner(self, owner: Owner, token_ids: Sequence[int]) -> StoredRows | None:
        entry = self._entries.get(self._by_owner.get(owner, RequestId("")))
        if entry is None:
            return None
        rows = common_prefix(token_ids, entry.token_ids)
        return StoredRows(entry.request_id, rows, min(rows, entry.exact_rows))

    def _of_pages(
        self, token_ids: Sequence[int], page_hashes: Sequence[Hashable], cached: int
    ) -> StoredRows | None:
        page, entry = cached // self._page_size, None
        while page < len(page_hashes) and page_hashes[page] in self._by_page:
            entry = self._entries[self._by_page[page_hashes[page]]]
            page += 1
        if entry is None:
            return None
        # Hashes are the engine's word for equal tokens; the store's keys are confirmed on tokens.
        rows = min(common_prefix(token_ids, entry.token_ids), entry.exact_rows)
        return StoredRows(entry.request_id, rows, rows)
