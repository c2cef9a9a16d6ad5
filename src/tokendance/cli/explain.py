"""Say for every segment of a round's prompts where its K/V would come from, or why not.

Give a trace and a round of it, or the prompts themselves as text files, with the separator between
their segments or without any; shared text is then found by content. The plan is made by the
server's own planner; no model runs, only its tokenizer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tokendance.bench.trace import Trace, TraceError
from tokendance.cli.model import DEFAULT_FOLDER
from tokendance.config import Config, ConfigError
from tokendance.plan.planner import MIN_COPY_ROWS
from tokendance.plan.reuse_plan import Member, ReusePlan
from tokendance.plan.roundbook import Budget, RoundBook, Verdict
from tokendance.plan.ticket import Ticket, common_prefix, order_distance, shared_with
from tokendance.prompt.segments import SegmentKeys
from tokendance.types import AgentId, RequestId, Rows, Source, Span

PAGE = 32
NEAR = 8
"""Equal tokens at the beginning from which two segments are taken for versions of one."""

PLENTY = 1 << 40


class Asked(NamedTuple):
    """A prompt: its segments as (label, ids), and the rows that a prefix cache holds.

    read: set for a prompt that nobody has cut into segments; turns ids into text.
    """

    name: str
    segments: tuple[tuple[str, tuple[int, ...]], ...]
    cached: int = 0
    read: Callable[[Sequence[int]], str] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for _, ids in self.segments for token in ids)


@dataclass(frozen=True, slots=True)
class Planned:
    """What the round book made of the prompts. ordinary: why a request takes no part, by index."""

    tickets: tuple[Ticket, ...]
    plans: tuple[ReusePlan, ...]
    ordinary: dict[int, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompts", nargs="*", type=Path, help="text files, one prompt each")
    add("--trace", type=Path, help="a trace instead of prompts")
    add("--round", type=int, help="round of the trace, from 0; default: the last")
    add("--model", default=str(DEFAULT_FOLDER), help="whose tokenizer; default: %(default)s")
    add("--tokendance", metavar="JSON", default="{}", help="options of the server")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    try:
        config = Config.from_mapping(json.loads(args.tokendance))
        if (args.trace is None) == (not args.prompts):
            raise TraceError("give either --trace or files with prompts")
        asked = _from_trace(args) if args.trace else _from_files(args, config.separator)
        told = explain(asked, config)
    except (TraceError, ConfigError, OSError, ValueError) as error:
        print(f"tokendance explain: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"requests": told}))
    else:
        _print(told)
    return 0


def explain(asked: Sequence[Asked], config: Config) -> list[dict[str, Any]]:
    """The requests in order, each with its role, its rows by source and its segments."""
    planned = plan_requests(asked, config)
    members = {m.request_id: (m, plan) for plan in planned.plans for m in plan.members}
    told = []
    for index, (one, ticket) in enumerate(zip(asked, planned.tickets)):
        member, plan = members.get(ticket.request_id, (None, None))
        source = _leader(planned, index, plan)
        view = _View(asked, planned, config, index, member, plan)
        rows = {Source.PREFIX: one.cached, Source.SIBLING: 0, Source.COMPUTED: 0}
        if member is not None:
            rows = member.rows_by_source()
            del rows[Source.STORED]  # prompts on a desk have no store behind them
        rows[Source.COMPUTED] = len(one.ids) - rows[Source.PREFIX] - rows[Source.SIBLING]
        told.append(
            {
                "request": one.name,
                "role": view.role,
                "reason": planned.ordinary.get(index, ""),
                "rows": {str(name): count for name, count in rows.items()},
                "order_distance": None
                if source is None
                else round(order_distance(ticket, planned.tickets[source]), 3),
                "segments": list(view.segments()),
            }
        )
    return told


def plan_requests(asked: Sequence[Asked], config: Config) -> Planned:
    """Send the prompts through a round book as one announced round with no limits."""
    keys, book, started = SegmentKeys("explain"), RoundBook(config), set[str]()
    tickets = []
    for index, one in enumerate(asked):
        name = RequestId(f"r{index}")
        if not one.ids:
            raise TraceError(f"the prompt {one.name} is empty")
        spans = keys.spans(one.ids, [len(ids) for _, ids in one.segments])
        end = len(one.ids) - 1
        ticket = Ticket(
            *(name, AgentId(one.name), one.ids, spans, 0.0),
            lambda name=name, end=end: end if name in started else 0,  # type: ignore[misc]
        )
        if config.discover and one.read is not None:
            book.discover(ticket, salt="", key=keys.key)
        book.join_announced(
            ticket, session="explain", round_id="1", size=len(asked), salt="", now=0.0
        )
        tickets.append(ticket)
    plans, ordinary = _start(book, asked, tickets, started)
    return Planned(tuple(tickets), plans, ordinary)


def _start(
    book: RoundBook, asked: Sequence[Asked], tickets: Sequence[Ticket], started: set[str]
) -> tuple[tuple[ReusePlan, ...], dict[int, str]]:
    """Engine steps until every request has started."""
    pages: dict[str, tuple[int, ...]] = {}
    plans: list[ReusePlan] = []
    ordinary: dict[int, str] = {}
    budget = Budget(rows=PLENTY, pages=PLENTY, page_size=PAGE, requests=PLENTY)
    for step in range(2 * len(asked) + 2):
        now = 1000.0 * step  # longer than anybody waits
        starting = []
        for index, ticket in enumerate(tickets):
            name = ticket.request_id
            if name in pages:
                continue
            verdict = book.verdict(name, asked[index].cached, budget, now)
            if verdict is Verdict.WAIT:
                continue
            first = sum(map(len, pages.values()))
            pages[name] = tuple(range(first, first + len(ticket.token_ids) // PAGE + 1))
            if verdict is Verdict.ORDINARY:
                ordinary[index] = {
                    "": "all of its rows are in the prefix cache",
                    "leads": "nobody takes rows from it",
                }.get(ticket.reason, ticket.reason)
            book.admitted(name, pages[name], verdict is Verdict.COLLECTIVE)
            starting.append(name)
        plans.extend(book.end_step(lambda name: pages[name]))
        started.update(starting)
    return tuple(plans), ordinary


def _leader(planned: Planned, index: int, plan: ReusePlan | None) -> int | None:
    """The request that `index` takes rows from, or would be compared with; None for itself."""
    if plan is None:
        leads = [p.tables[0].request_id for p in planned.plans[:1]]
    else:
        leads = [plan.tables[0 if plan.leader is not None else -1].request_id]
    found = [i for i, t in enumerate(planned.tickets) if t.request_id in leads]
    return found[0] if found and found[0] != index else None


@dataclass(frozen=True, slots=True)
class _View:
    """One request and everything that can explain it."""

    asked: Sequence[Asked]
    planned: Planned
    config: Config
    index: int
    member: Member | None
    plan: ReusePlan | None

    @property
    def ticket(self) -> Ticket:
        return self.planned.tickets[self.index]

    @property
    def role(self) -> str:
        if self.member is None:
            return "alone"
        if self.member.copies:
            return "follower"
        return "leader" if self._gives() else "alone"

    def _gives(self) -> bool:
        me = self.ticket.request_id
        return any(
            plan.tables[copy.source].request_id == me
            for plan in self.planned.plans
            for member in plan.members
            for copy in member.copies
        )

    def segments(self) -> Iterator[dict[str, Any]]:
        labels, start = {}, 0
        for label, ids in self.asked[self.index].segments:
            labels[start] = label
            start += len(ids)
        read = self.asked[self.index].read
        for span in self.ticket.spans:
            label = labels.get(span.start, "")
            if read is not None:
                label = _label(read(self.ticket.token_ids[span.start : span.end]))
            pieces = list(self._pieces(span))
            computed = [p for p in pieces if p["source"] == Source.COMPUTED]
            yield {
                "label": label,
                "start": span.start,
                "end": span.end,
                "pieces": pieces,
                "reason": self._reason(span, computed[0]) if computed else "",
            }

    def _pieces(self, span: Span) -> Iterator[dict[str, Any]]:
        """The rows of a segment, cut where their source changes."""
        cached = self.asked[self.index].cached if self.member is None else self.member.cached
        position = span.start
        if position < cached:
            yield _piece(Rows(position, min(cached, span.end)), Source.PREFIX)
            position = min(cached, span.end)
        for copy in self.member.copies if self.member else ():
            start, end = max(copy.start, position), min(copy.end, span.end)
            if start >= end:
                continue
            if position < start:
                yield _piece(Rows(position, start), Source.COMPUTED)
            assert self.plan is not None
            owner = self.plan.tables[copy.source].request_id
            yield _piece(Rows(start, end), Source.SIBLING) | {
                "from": self._name(owner),
                "moved": copy.delta,
                "exact": copy.exact,
            }
            position = end
        if position < span.end:
            yield _piece(Rows(position, span.end), Source.COMPUTED)

    def _name(self, request_id: RequestId) -> str:
        return next(
            a.name for a, t in zip(self.asked, self.planned.tickets) if t.request_id == request_id
        )

    def _reason(self, span: Span, computed: dict[str, Any]) -> str:
        """The first reason why rows of a segment are computed."""
        if computed["start"] >= self.ticket.end:
            return "the engine computes the last prompt row itself"
        holders = [
            i
            for i, t in enumerate(self.planned.tickets)
            if i != self.index and t.where(span.key) is not None
        ]
        if not holders:
            return self._nearest(span)
        names = ", ".join(self.asked[i].name for i in holders[:3]) + ("…" if holders[3:] else "")
        if all(self._apart(i) for i in holders):
            return f"in another group than {names}: orders differ more than max_order_distance"
        if self.index in self.planned.ordinary:
            return f"{self._ordinary()} (also in {names})"
        if len(span) < MIN_COPY_ROWS:
            return f"has {len(span)} rows; less than {MIN_COPY_ROWS} are computed"
        if self._gives():
            return f"computed here, once, for {names}"
        return f"the first to compute it (also in {names})"

    def _ordinary(self) -> str:
        reason = self.planned.ordinary[self.index]
        leader = _leader(self.planned, self.index, None)
        if "shares too little" not in reason or leader is None:
            return reason
        rows = shared_with(self.ticket, self.planned.tickets[leader]).rows
        limit = self.config.min_shared_tokens
        return f"shares {rows} rows with {self.asked[leader].name}, min_shared_tokens is {limit}"

    def _apart(self, index: int) -> bool:
        other = self.planned.tickets[index]
        return order_distance(self.ticket, other) > self.config.max_order_distance

    def _nearest(self, span: Span) -> str:
        mine = self.ticket.token_ids[span.start : span.end]
        best, name = 0, ""
        for index, other in enumerate(self.planned.tickets):
            if index == self.index:
                continue
            for theirs in other.spans:
                equal = common_prefix(mine, other.token_ids[theirs.start : theirs.end])
                if equal > best:
                    best, name = equal, self.asked[index].name
        if best >= min(NEAR, len(span)):
            return f"differs from a segment of {name} at its token {best}"
        return "no other request holds this text"


def _piece(rows: Rows, source: Source) -> dict[str, Any]:
    return {"start": rows.start, "end": rows.end, "source": str(source)}


def _from_trace(args: argparse.Namespace) -> list[Asked]:
    from tokendance.bench.render import HFTokenizer, Renderer
    from tokendance.bench.rounds import whole_pages

    trace = Trace(args.trace)
    tokenizer = HFTokenizer(args.model)
    render = Renderer(tokenizer, trace.header.render)
    wanted = trace.header.rounds - 1 if args.round is None else args.round
    if not 0 <= wanted < trace.header.rounds:
        raise TraceError(f"{args.trace} has rounds 0 to {trace.header.rounds - 1}, not {wanted}")
    *_, round_ = islice(trace.rounds(), wanted + 1)
    known: dict[str, tuple[int, ...]] = {}
    for earlier in islice(trace.rounds(), wanted):
        known |= {request.agent: render(request).ids for request in earlier.requests}
    asked = []
    for request in round_.requests:
        prompt = render(request)
        texts = ((part.segment.id, part.segment.text) for part in request.parts)
        labels = {tuple(tokenizer.encode(text)): id_ for id_, text in texts}
        segments = tuple((labels.get(p.ids, p.kind), p.ids) for p in prompt.pieces)
        asked.append(
            Asked(prompt.agent, segments, whole_pages(prompt.ids, known.get(prompt.agent, ())))
        )
    return asked


def _from_files(args: argparse.Namespace, separator: str) -> list[Asked]:
    from transformers import AutoTokenizer

    from tokendance.engines.vllm.tokenizer import piece_tokenizer
    from tokendance.prompt.separator import split_text

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    pieces = piece_tokenizer(tokenizer)
    if pieces.problem:
        raise TraceError(f"the tokenizer of {args.model} cannot be used: {pieces.problem}")
    asked = []
    for path in args.prompts:
        texts = [text for text in split_text(path.read_text(encoding="utf-8"), separator) if text]
        ids, lengths = pieces.prompt(texts, special=True)
        segments, start = [], 0
        for text, length in zip(texts, lengths):
            segments.append((_label(text), tuple(ids[start : start + length])))
            start += length
        unmarked = tokenizer.decode if len(segments) == 1 else None
        asked.append(Asked(path.name, tuple(segments), read=unmarked))
    return asked


def _label(text: str) -> str:
    return " ".join(text.split())[:40]


def _print(told: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for request in told:
        rows = ", ".join(f"{count} {name}" for name, count in request["rows"].items() if count)
        order = request["order_distance"]
        far = f"; order distance {order}" if order else ""
        title = f"{request['request']}: {request['role']}, {rows}{far}"
        table = Table("rows", "segment", "source", "why not", title=title, title_justify="left")
        for segment in request["segments"]:
            where = "\n".join(map(_words, segment["pieces"]))
            span = f"{segment['start']}-{segment['end']}"
            table.add_row(span, segment["label"], where, segment["reason"])
        console.print(table)


def _words(piece: dict[str, Any]) -> str:
    text = f"{piece['end'] - piece['start']} {piece['source']}"
    if "from" in piece:
        moved = f", moved by {piece['moved']}" if piece["moved"] else ""
        text += f" from {piece['from']}{moved}{', exact' if piece['exact'] else ''}"
    return text
