"""Finished requests whose K/V serves text that later prompts quote (M4, M5, M26).

An agent's answer is decoded in the agent's own context, and everybody quotes it in the next round,
and in those after that. Recovery backends that repair K/V from other contexts take it from there:

    donor:   prompt | ... copied ... | ... | answer          every row that it has computed itself
    quoting: history | A says: answer | B says: answer | task

Text is found by content: the ids that were decoded are looked for in the new prompt. Where its
tokenizer has split the edges of a quotation in another way, those tokens are not part of the match.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokendance.plan.discover import Key, cut
from tokendance.plan.kept import Held, standing
from tokendance.plan.match import WINDOW, Holders, Tokens, common_runs
from tokendance.plan.ticket import Ticket
from tokendance.types import RequestId, Rows, Span, merge_rows, subtract_rows

MAX_LOOKS = 64
"""Donors that one prompt is compared with."""


class Quotation(NamedTuple):
    """Rows [start, start + length) of a prompt are rows [source_start, ...) of a donor."""

    donor: Ticket
    source_start: int
    start: int
    length: int


@dataclass(slots=True)
class _Donor:
    turn: int
    salt: str
    ticket: Ticket
    tokens: Tokens
    marks: frozenset[int]
    copied: tuple[Rows, ...]
    renew: Callable[[], Ticket | None]


class Donors:
    """The latest finished requests, at most `limit`, per tenant."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turn = 0
        self._donors: OrderedDict[RequestId, _Donor] = OrderedDict()
        self._holders = Holders()

    def __len__(self) -> int:
        return len(self._donors)

    def add(self, salt: str, ticket: Ticket, token_ids: Sequence[int], held: Held) -> None:
        """A request has finished. token_ids: array("q") of all its tokens, decoded ones too."""

        def renew() -> Ticket | None:
            return standing(ticket, token_ids, held, exact=False)

        kept = renew()
        if kept is None or not self._limit:
            return
        tokens = Tokens(token_ids)
        # Answers are short, so all their windows count; of the prompt a sample does.
        answer = tokens.windows[max(0, len(ticket.token_ids) - WINDOW + 1) :]
        marks = tokens.fingerprints.union(answer.tolist())
        self._turn += 1
        self._donors[ticket.request_id] = _Donor(
            self._turn, salt, kept, tokens, marks, ticket.copied, renew
        )
        self._holders.add(salt, marks, ticket.request_id)
        if len(self._donors) > self._limit:
            self._remove(next(iter(self._donors)))

    def quoted(self, salt: str, ticket: Ticket, tokens: Tokens) -> list[Quotation]:
        """The text of a prompt that donors have computed themselves; of each the oldest, which
        wrote it or read it first. Sorted, disjoint."""
        found: list[Quotation] = []
        taken: list[Rows] = []
        votes = self._holders.votes(salt, set(tokens.windows.tolist()))
        oldest = sorted((self._donors[r] for r in votes), key=lambda donor: donor.turn)
        for donor in oldest[:MAX_LOOKS]:
            if self.standing(donor.ticket) is None:
                continue
            for run in common_runs(tokens, donor.tokens, WINDOW):
                shift = run.source_start - run.start
                end = min(run.start + run.length, donor.ticket.end - shift, ticket.end)
                copied = (Rows(c.start - shift, c.end - shift) for c in donor.copied)
                for own in subtract_rows(Rows(run.start, end), copied):
                    for free in subtract_rows(own, taken):
                        if len(free) >= WINDOW:
                            start = free.start + shift
                            found.append(Quotation(donor.ticket, start, free.start, len(free)))
            rows = (Rows(q.start, q.start + q.length) for q in found)
            taken = list(merge_rows(sorted(rows)))
        return sorted(found, key=lambda quotation: quotation.start)

    def standing(self, ticket: Ticket) -> Ticket | None:
        """What is left of a donor, with all that has been found in it; None, and it is forgotten,
        if that is nothing."""
        donor = self._donors.get(ticket.request_id)
        if donor is None:
            return None
        if not donor.ticket.computed():
            renewed = donor.renew()
            if renewed is None:
                self._remove(ticket.request_id)
                return None
            renewed.offer(donor.ticket.offered())
            donor.ticket = renewed
        return donor.ticket

    def _remove(self, request_id: RequestId) -> None:
        donor = self._donors.pop(request_id)
        self._holders.remove(donor.salt, donor.marks, request_id)


def attribute(ticket: Ticket, found: Sequence[Quotation], key: Key) -> None:
    """Cut a prompt at its quotations, and name the donors that hold them."""
    ticket.recut(cut(ticket, [(q.start, q.length) for q in found], key))
    for quotation in found:
        first, shift = quotation.start, quotation.source_start - quotation.start
        inside = (s for s in ticket.spans if first <= s.start and s.end <= first + quotation.length)
        quotation.donor.offer(Span(s.start + shift, s.end + shift, s.key) for s in inside)
    ticket.donors = tuple(dict.fromkeys(quotation.donor for quotation in found))
