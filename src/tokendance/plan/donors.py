"""Finished requests whose K/V serves text that later prompts quote (M4, M5, M26).

An agent's answer is decoded in the agent's own context, and everybody quotes it in the next round,
and in those after that. Recovery backends that repair K/V from other contexts take it from there:

    donor:   prompt | ... copied ... | ... | answer          every row that it has computed itself
    quoting: history | A says: answer | B says: answer | task

Text is found by content: the ids that were decoded are looked for in the new prompt. Where its
tokenizer has split the edges of a quotation in another way, those tokens are not part of the match.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokendance.plan.kept import Held, standing
from tokendance.plan.match import SAMPLE, WINDOW, Tokens, extend
from tokendance.plan.ticket import Quotation, Ticket, common_prefix
from tokendance.types import RequestId, Rows, subtract_rows

Mark = tuple[str, int]
"""A tenant's window, by its hash."""


@dataclass(slots=True)
class _Donor:
    """token_ids: as array("q"), decoded ones too. own: rows that it has computed. prompt: tokens of
    its prompt."""

    ticket: Ticket
    salt: str
    token_ids: Sequence[int]
    tokens: Tokens
    own: tuple[Rows, ...]
    prompt: int
    held: Held
    marks: tuple[Mark, ...] = ()


class Donors:
    """The latest finished requests, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._donors: OrderedDict[RequestId, _Donor] = OrderedDict()
        self._places: dict[Mark, dict[RequestId, int]] = {}  # where a window stands, oldest first

    def __len__(self) -> int:
        return len(self._donors)

    def add(self, salt: str, ticket: Ticket, token_ids: Sequence[int], held: Held) -> None:
        """A request has finished. token_ids: all its tokens, decoded ones too."""
        self._remove(ticket.request_id)
        token_ids = array("q", token_ids)
        kept = standing(ticket, token_ids, held, exact=False)
        if kept is None or not self._limit:
            return
        own = tuple(subtract_rows(Rows(0, len(token_ids)), ticket.copied))
        tokens, prompt = Tokens(token_ids), len(ticket.token_ids)
        donor = _Donor(kept, salt, token_ids, tokens, own, prompt, held)
        self._donors[ticket.request_id] = donor
        self._index(donor)
        if len(self._donors) > self._limit:
            self._remove(next(iter(self._donors)))

    def quoted(self, salt: str, ticket: Ticket) -> tuple[Quotation, ...]:
        """The text of a prompt that donors have computed themselves; of each the oldest, which
        wrote it or read it first. Sorted, disjoint.

        What a donor has before it, token by token from row 0 on, is a history and no quotation.
        """
        tokens = Tokens(ticket.token_ids)
        found: list[Quotation] = []
        row = 0  # all before it is done
        for at, mark in enumerate(tokens.windows.tolist()):
            place = self._oldest((salt, mark)) if at >= row else None
            if place is None:
                continue
            donor, there = place
            match = extend(tokens.ids, donor.tokens.ids, at, there, row)
            own = next(own for own in donor.own if own.start <= there < own.end)
            shift = match.source_start - match.start
            start = max(match.start, own.start - shift)
            end = min(match.start + match.length, own.end - shift, donor.ticket.end - shift)
            end = min(end, ticket.end)
            if end - start < WINDOW:  # hashes may collide
                continue
            row = end
            if shift or common_prefix(ticket.token_ids, donor.token_ids) < end:
                found.append(Quotation(donor.ticket, start + shift, start, end - start))
        return tuple(found)

    def standing(self, quotations: Iterable[Quotation]) -> Iterator[Quotation]:
        """What is still there of what was found."""
        for donor, source_start, start, length in quotations:
            now = self._standing(donor.request_id)
            if now is not None and source_start < now.ticket.end:
                length = min(length, now.ticket.end - source_start)
                yield Quotation(now.ticket, source_start, start, length)

    def _standing(self, request_id: RequestId) -> _Donor | None:
        """A donor, cut to what is left of it; None, and it is forgotten, if that is nothing."""
        donor = self._donors.get(request_id)
        if donor is None or donor.ticket.computed():
            return donor
        kept = standing(donor.ticket, donor.token_ids, donor.held, exact=False)
        if kept is None:
            self._remove(request_id)
            return None
        donor.ticket = kept
        self._forget(donor)
        self._index(donor)
        return donor

    def _oldest(self, mark: Mark) -> tuple[_Donor, int] | None:
        """The first donor that holds a window, and where."""
        while places := self._places.get(mark):
            request_id, place = next(iter(places.items()))
            donor = self._standing(request_id)
            if donor is not None and self._places.get(mark, {}).get(request_id) == place:
                return donor, place
        return None

    def _index(self, donor: _Donor) -> None:
        """Note the windows of the rows that stand; answers are short, so all of theirs, and of the
        prompt a sample."""
        windows = donor.tokens.windows.tolist()
        marks = []
        for own in donor.own:
            for place in range(own.start, min(own.end, donor.ticket.end) - WINDOW + 1):
                decoded = place + WINDOW > donor.prompt
                if decoded or windows[place] % SAMPLE == 0:
                    mark = donor.salt, windows[place]
                    places = self._places.setdefault(mark, {})
                    if donor.ticket.request_id not in places:
                        places[donor.ticket.request_id] = place
                        marks.append(mark)
        donor.marks = tuple(marks)

    def _remove(self, request_id: RequestId) -> None:
        donor = self._donors.pop(request_id, None)
        if donor is not None:
            self._forget(donor)

    def _forget(self, donor: _Donor) -> None:
        for mark in donor.marks:
            places = self._places[mark]
            del places[donor.ticket.request_id]
            if not places:
                del self._places[mark]
        donor.marks = ()
