"""A synthetic town: deterministic traces of one shape, for measurements over many seeds.

Real sentences are taken from other traces and dealt out anew, so that every text is plain English
and no sentence stands twice in a town. Two rounds: in the first every agent speaks from its own
history; in the second, the one to measure, all read what the first ten have said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tokendance.bench.trace import FORMAT, Trace, TraceError

HISTORY_TOKENS = (150, 215)
SEGMENT_TOKENS = (54, 126)
SEGMENTS = 10

_NAMES = (
    *("Ada", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas"),
    *("Karin", "Liam", "Mona", "Nils", "Olga", "Pavel", "Rosa", "Stefan", "Tilda", "Yusuf"),
)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"']?\s+|\n")
_SENTENCE = re.compile(r"[A-Z][A-Za-z0-9 ,.';!?()-]{30,240}[.!?]")

Count = Callable[[str], int]
"""Tokens of a text."""


def sentences(traces: Iterable[Path]) -> list[str]:
    """The plain sentences in the texts of some traces, each once, in order."""
    found: dict[str, None] = {}
    for path in traces:
        for round_ in Trace(path).rounds():
            for request in round_.requests:
                texts = [p.segment.text for p in request.parts if p.kind != "task"]
                for text in (*texts, request.output.text if request.output else ""):
                    for piece in _SENTENCE_END.split(text):
                        piece = piece.strip(" \"'{},-")
                        if _SENTENCE.fullmatch(piece):
                            found.setdefault(piece)
    return list(found)


def write_town(
    path: Path, pool: Iterable[str], seed: int, count: Count, agents: int = SEGMENTS
) -> Path:
    """Write one town as a trace file; the same arguments give the same bytes.

    Histories have HISTORY_TOKENS tokens, everything that is said SEGMENT_TOKENS, both uniform.
    Raises TraceError if the pool has too few sentences for so many agents.
    """
    if not 2 <= agents <= len(_NAMES):
        raise TraceError(f"a town has 2 to {len(_NAMES)} agents, not {agents}")
    lines = _Town(pool, seed, count, agents).lines()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


class _Town:
    def __init__(self, pool: Iterable[str], seed: int, count: Count, agents: int) -> None:
        self.random = Random(seed)
        self.pool = list(pool)
        self.random.shuffle(self.pool)
        self.count = count
        self.seed = seed
        self.names = _NAMES[:agents]

    def lines(self) -> Iterator[dict[str, Any]]:
        yield self.header()
        for name in self.names:
            text = f"Name: {name}\nThis is what {name} remembers:\n"
            yield _segment(f"history.{name}", name, self.text(HISTORY_TOKENS, text))
            task = f"---\nWhat does {name} say to the others next? Answer as {name} would speak.\n"
            yield _segment(f"task.{name}", "framework", task)
        scenes = "It is Monday morning in the town.\n", "It is Monday noon in the town.\n"
        for index, scene in enumerate(scenes):
            yield _segment(f"scene.{index}", "environment", scene, index)
            said = [f"out.{name}.0" for name in self.names[:SEGMENTS]] if index else []
            yield from (self.request(index, name, said) for name in self.names)
            for name in self.names:
                text = self.text(SEGMENT_TOKENS, f"{name} says: ")
                yield _segment(f"out.{name}.{index}", name, text, index)

    def header(self) -> dict[str, Any]:
        return {
            "type": "trace",
            "format": FORMAT,
            "name": f"town.{self.seed}",
            "scenario": "town",
            "size": "small",
            "framework": "synthetic",
            "provenance": "synthesised from real sentences",
            "agents": [{"id": name, "name": name} for name in self.names],
            "rounds": 2,
            "history_rounds": 1,
            "render": "concat",
        }

    def request(self, index: int, name: str, said: list[str]) -> dict[str, Any]:
        shared = [{"kind": "shared", "id": id_} for id_ in (*said, f"scene.{index}")]
        own = {"kind": "private", "id": f"history.{name}"}
        task = {"kind": "task", "id": f"task.{name}"}
        return {
            "type": "request",
            "round": index,
            "agent": name,
            "arrival_ms": 0,
            "segments": [own, *shared, task],
            "output": f"out.{name}.{index}",
        }

    def text(self, bounds: tuple[int, int], opening: str) -> str:
        """New sentences after an opening, between `bounds` tokens in all."""
        target = self.random.randint(*bounds)
        text, skipped = opening, []
        while self.count(text) < max(bounds[0], target - 10):
            if not self.pool:
                raise TraceError("too few sentences for a town of this size; give more traces")
            sentence = self.pool.pop()
            longer = f"{text.rstrip(' ')}{'' if text.endswith(chr(10)) else ' '}{sentence}"
            if self.count(longer + "\n") > bounds[1]:
                skipped.append(sentence)
            else:
                text = longer
        self.pool.extend(reversed(skipped))
        return text + "\n"


def _segment(id_: str, author: str, text: str, round_: int | None = None) -> dict[str, Any]:
    line: dict[str, Any] = {"type": "segment", "id": id_, "author": author, "origin": "memory"}
    if round_ is not None:
        line["round"] = round_
    return {**line, "text": text}
