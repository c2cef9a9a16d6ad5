"""Traces of multi-agent applications (M22): a streaming reader of the format `allgather-trace/1`.

A trace is JSON Lines: one header, then texts and requests in the order in which they come to exist.
A round is a barrier, so the reader hands out one complete round at a time and never needs the
whole file. Every line is checked; what is wrong with a file is said with its line number and with
what to do about it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

FORMAT = "allgather-trace/1"
KINDS = ("private", "shared", "task")
RENDERS = ("concat", "chat")

Kind = Literal["private", "shared", "task"]


class TraceError(ValueError):
    """A trace that cannot be replayed; the text names file, line, fault and remedy."""


class Agent(NamedTuple):
    """One agent. Agents of different groups are independent sessions."""

    id: str
    name: str
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """What the first line says about the whole trace.

    rounds: number of rounds. history_rounds: how many past rounds a prompt shows. render: how texts
    become a prompt. serial: separate conversations, in which one request follows the other.
    """

    name: str
    scenario: str
    size: str
    framework: str
    agents: tuple[Agent, ...]
    rounds: int
    history_rounds: int
    render: Literal["concat", "chat"]
    provenance: str = ""
    note: str = ""
    self_mode: str = ""
    order: str = ""
    serial: bool = False
    source: Mapping[str, Any] = field(default_factory=dict)

    def group_of(self, agent: str) -> str | None:
        """The session group of an agent."""
        return next(a.group for a in self.agents if a.id == agent)


@dataclass(frozen=True, slots=True)
class Segment:
    """One text, stored once; it begins with a non-blank character and ends with one newline."""

    id: str
    author: str
    origin: str
    text: str
    round: int | None = None
    real: bool | None = None


class Part(NamedTuple):
    """One text inside a prompt; a role opens a new chat message."""

    kind: Kind
    segment: Segment
    role: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the model. `output` is what the model of the source answered, if it is known."""

    round: int
    agent: str
    arrival_ms: float
    parts: tuple[Part, ...]
    output: Segment | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """All requests between two barriers."""

    index: int
    requests: tuple[Request, ...]


class Trace:
    """One trace file. `header` is read at once, `rounds()` reads the file as it goes.

    Raises TraceError if the file is missing or breaks the format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with _Lines(self.path) as lines:
            self.header = _header(lines)

    def rounds(self) -> Iterator[Round]:
        """Every round in order, each as soon as all its texts are known."""
        with _Lines(self.path) as lines:
            yield from _Reader(_header(lines)).read(lines)


class _Lines:
    """The lines of a file as checked JSON objects, with the number of the current one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0

    def __enter__(self) -> _Lines:
        try:
            self._file = self.path.open(encoding="utf-8")
        except OSError as error:
            reason = error.strerror or str(error)
            raise TraceError(f"cannot open the trace {self.path}: {reason}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fail(self, fault: str) -> NoReturn:
        raise TraceError(f"{self.path}, line {self.number}: {fault}")

    def __iter__(self) -> Iterator[Record]:
        while True:
            try:
                text = self._file.readline()
            except UnicodeDecodeError:
                self.number += 1
                self.fail("the text is not UTF-8; save the file as UTF-8")
            if not text:
                return
            self.number += 1
            if text.strip():
                yield Record(self, self._parse(text))

    def _parse(self, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            self.fail(f"not JSON ({error.msg}, column {error.colno}); put one object on each line")
        if not isinstance(value, dict):
            self.fail(f"a {type(value).__name__}; every line has to be a JSON object")
        return value


_FIELDS: dict[str, tuple[str, ...]] = {
    "trace": (
        *("type", "format", "name", "scenario", "size", "framework", "provenance", "source"),
        *("agents", "rounds", "history_rounds", "render", "self_mode", "order", "arrival"),
        *("serial", "gen_tokens", "note"),
    ),
    "segment": ("type", "id", "author", "origin", "round", "real", "text"),
    "request": ("type", "round", "agent", "arrival_ms", "segments", "output"),
    "agents": ("id", "name", "group"),
    "segments": ("kind", "id", "role"),
}


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object and where it stands; reads fields by name and type."""

    lines: _Lines
    values: Mapping[str, Any]

    def fail(self, fault: str) -> NoReturn:
        self.lines.fail(fault)

    def check_fields(self, what: str) -> None:
        known = _FIELDS[what]
        for name in self.values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                self.fail(f"unknown field {name!r} in {what!r}; {hint}")

    def get(self, name: str, *kinds: type) -> Any:
        """A field that has to be there."""
        if name not in self.values:
            self.fail(f"the field {name!r} is missing; add it")
        return self.optional(name, *kinds)

    def optional(self, name: str, *kinds: type) -> Any:
        """A field that may be left out (None then)."""
        value = self.values.get(name)
        wrong_bool = isinstance(value, bool) and bool not in kinds
        if value is not None and (not isinstance(value, kinds) or wrong_bool):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            self.fail(f"{name!r} has to be {wanted}, it is {value!r}")
        if value is None and name in self.values:
            self.fail(f"{name!r} is null; leave it out or give it a value")
        return value

    def index(self, name: str) -> int:
        value = self.get(name, int)
        if value < 0:
            self.fail(f"{name!r} must not be negative, it is {value}")
        return int(value)

    def choice(self, name: str, allowed: tuple[str, ...]) -> Any:
        value = self.get(name, str)
        if value not in allowed:
            self.fail(f"{name!r} has to be one of {', '.join(allowed)}, it is {value!r}")
        return value

    def items(self, name: str) -> list[Record]:
        """A list of objects that must not be empty."""
        value = self.get(name, list)
        if not value:
            self.fail(f"{name!r} is empty; it needs at least one entry")
        for item in value:
            if not isinstance(item, dict):
                self.fail(f"{name!r} has to hold objects, it holds {item!r}")
        records = [Record(self.lines, item) for item in value]
        for record in records:
            record.check_fields(name)
        return records


def _header(lines: _Lines) -> Header:
    record = next(iter(lines), None)
    if record is None:
        raise TraceError(f"{lines.path}: the file is empty; its first line has to be the header")
    if record.values.get("type") != "trace" or record.values.get("format") != FORMAT:
        record.fail(f'not a trace: the first line needs "type": "trace" and "format": "{FORMAT}"')
    record.check_fields("trace")
    agents = tuple(
        Agent(a.get("id", str), a.get("name", str), a.optional("group", str))
        for a in record.items("agents")
    )
    if len({a.id for a in agents}) != len(agents):
        record.fail("two agents have the same id; give every agent its own")
    if record.index("rounds") == 0:
        record.fail("'rounds' is 0; a trace needs at least one round")
    return Header(
        **{k: record.get(k, str) for k in ("name", "scenario", "size", "framework")},
        agents=agents,
        rounds=record.index("rounds"),
        history_rounds=record.index("history_rounds"),
        render=record.choice("render", RENDERS),
        serial=bool(record.optional("serial", bool)),
        source=record.optional("source", dict) or {},
        **{k: record.optional(k, str) or "" for k in ("provenance", "note", "self_mode", "order")},
    )


class _Pending(NamedTuple):
    """A request whose output text has not come yet."""

    request: Request
    output: str | None
    line: int


class _Reader:
    """Turns checked lines into rounds."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.agents = {agent.id for agent in header.agents}
        self.texts: dict[str, Segment] = {}
        self.private: dict[str, str] = {}  # segment -> its only reader
        self.current = 0
        self.pending: list[_Pending] = []

    def read(self, lines: _Lines) -> Iterator[Round]:
        for record in lines:
            kind = record.choice("type", ("segment", "request"))
            record.check_fields(kind)
            if kind == "segment":
                self._segment(record)
                continue
            index = record.index("round")
            if index != self.current:
                self._check_next(record, index)
                yield self._finish(lines)
                self.current = index
            self.pending.append(self._request(record))
        if not self.pending or self.current != self.header.rounds - 1:
            lines.fail(
                f"the file ends in round {self.current}, the header promises "
                f"{self.header.rounds} rounds; complete the file or correct 'rounds'"
            )
        yield self._finish(lines)

    def _check_next(self, record: Record, index: int) -> None:
        if index != self.current + 1 or not self.pending:
            record.fail(
                f"a request of round {index} follows round {self.current}; "
                "sort the requests by round, starting at 0 and leaving none out"
            )
        if index >= self.header.rounds:
            record.fail(
                f"round {index}, but the header promises {self.header.rounds} rounds; "
                "correct 'rounds'"
            )

    def _segment(self, record: Record) -> None:
        segment = Segment(
            **{k: record.get(k, str) for k in ("id", "author", "origin", "text")},
            round=record.index("round") if "round" in record.values else None,
            real=record.optional("real", bool),
        )
        if segment.id in self.texts:
            record.fail(f"a second segment with the id {segment.id!r}; ids have to be unique")
        text = segment.text
        if not text[:1].strip() or not text.endswith("\n") or text.endswith("\n\n"):
            record.fail(
                f"the text of {segment.id!r} has to begin with a non-blank character and end "
                "with exactly one newline, so that segments tokenise independently"
            )
        self.texts[segment.id] = segment

    def _request(self, record: Record) -> _Pending:
        agent = record.get("agent", str)
        if agent not in self.agents:
            record.fail(f"unknown agent {agent!r}; add it to 'agents' of the header")
        parts = tuple(self._part(item, agent) for item in record.items("segments"))
        if self.header.render == "chat" and parts[0].role is None:
            record.fail("a chat prompt has to begin with a role; give its first segment one")
        arrival = float(record.get("arrival_ms", int, float))
        request = Request(self.current, agent, arrival, parts)
        return _Pending(request, record.optional("output", str), record.lines.number)

    def _part(self, item: Record, agent: str) -> Part:
        name = item.get("id", str)
        if name not in self.texts:
            item.fail(f"unknown segment {name!r}; define it on an earlier line")
        kind = item.choice("kind", KINDS)
        if kind == "private" and self.private.setdefault(name, agent) != agent:
            item.fail(
                f"{name!r} is private for {self.private[name]!r} and for {agent!r}; "
                "a text that two agents read is 'shared'"
            )
        return Part(kind, self.texts[name], item.optional("role", str))

    def _finish(self, lines: _Lines) -> Round:
        requests = []
        for request, output, line in self.pending:
            if output is not None and output not in self.texts:
                raise TraceError(
                    f"{lines.path}, line {line}: the output {output!r} of {request.agent!r} is "
                    "not defined before the next round; add its segment after the request"
                )
            answer = self.texts[output] if output is not None else None
            requests.append(
                Request(request.round, request.agent, request.arrival_ms, request.parts, answer)
            )
        self.pending = []
        return Round(self.current, tuple(requests))
