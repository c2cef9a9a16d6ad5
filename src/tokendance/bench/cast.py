"""The prompts of a scenario whose answers are made while it is played.

own and shared texts | what was said lately, as token ids | task
                     |  Ada says: ids  Boris says: ids .. | or a question, or a judgement
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tokendance.bench.needle import hide
from tokendance.bench.render import Piece, Prompt, Renderer
from tokendance.bench.trace import Part, Request, Segment, TraceError

Said = Sequence[Sequence[Sequence[int]]]
"""The answers' token ids by round and agent. One may end with a stop token, which nobody quotes."""

SYSTEM = (
    "You live in a small town. Everybody hears what the others say and answers in one or two plain "
    "sentences.\n"
)
JUDGEMENT = "\nWhich of these answers is the best one? Reply with its letter.\nThe best answer is"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Question(NamedTuple):
    """Prompts that ask something, and the ids that matter in the answer to it."""

    prompts: tuple[Prompt, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Cast:
    """The agents of a scenario.

    requests: their first prompts, each with a task at its end. names: how the others call them.
    window: past rounds that a prompt quotes. stop: tokens that end an answer. Raises TraceError.
    """

    requests: tuple[Request, ...]
    names: tuple[str, ...]
    render: Renderer
    window: int
    stop: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 2 <= len(self.requests) <= len(LETTERS):
            raise TraceError(f"this takes 2 to {len(LETTERS)} agents, not {len(self.requests)}")
        if any(request.parts[-1].kind != "task" for request in self.requests):
            raise TraceError("a prompt has to end with a task, before which the answers are quoted")

    def prompts(self, said: Said) -> tuple[Prompt, ...]:
        """The prompts of the round that comes after `said`."""
        quotes = self._quotes(said)
        return tuple(_insert(self.render(request), quotes) for request in self.requests)

    def judgement(self, said: Said) -> Question:
        """Every agent is asked which answer of the last round is the best; ids: of the letters."""
        quotes = self._quotes(said[:-1])
        for letter, ids in zip(LETTERS, said[-1]):
            quotes += [self._text(f"\n{letter})"), self.quoted(ids)]
        ending = self._text(JUDGEMENT)
        asked = [_insert(self.render(request), quotes, ending) for request in self.requests]
        letters = LETTERS[: len(self.requests)]
        ids = tuple(self.render.tokenizer.encode(f" {letter}")[-1] for letter in letters)
        return Question(tuple(asked), ids)

    def needle(self, said: Said, seed: int) -> Question:
        """A fact is hidden in a shared text and asked for. A prompt's output is the answer to be
        forced; its last tokens are `ids`, the fact. Raises TraceError if no text is shared."""
        needle, quotes = hide(self.requests, self.render, seed), self._quotes(said)
        prompts = tuple(
            replace(_insert(prompt, quotes), output=prompt.output) for prompt in needle.prompts
        )
        return Question(prompts, prompts[0].output[-needle.answer :])

    def quoted(self, ids: Sequence[int]) -> Piece:
        """An answer as the others read it."""
        end = len(ids) - 1 if ids and ids[-1] in self.stop else len(ids)
        return Piece("shared", tuple(ids[:end]))

    def limit(self, tokens: int) -> int:
        """Rows that no prompt exceeds, its answer of at most `tokens` tokens included."""
        base = max(len(self.render(request).ids) for request in self.requests)
        heads = max(len(self._text(f"\n{name} says:").ids) for name in (*self.names, "A"))
        return base + (self.window + 1) * len(self.names) * (tokens + heads) + tokens + 128

    def _quotes(self, said: Said) -> list[Piece]:
        pieces: list[Piece] = []
        for answers in said[max(0, len(said) - self.window) :]:
            for name, ids in zip(self.names, answers):
                pieces += [self._text(f"\n{name} says:"), self.quoted(ids)]
        return [*pieces, self._text("\n")] if pieces else []

    def _text(self, text: str) -> Piece:
        return Piece("task", tuple(self.render.tokenizer.encode(text)))


def town_requests(requests: Iterable[Request], texts: int) -> tuple[Request, ...]:
    """The prompts of a town's last round with SYSTEM in front and the first `texts` shared texts
    alone, as the first prompts of a scenario."""
    # Not marked as shared: a needle in the common prefix would be no test of reuse.
    system = Part("task", Segment("system", "framework", "framework", SYSTEM))
    found = []
    for request in requests:
        shared = [part for part in request.parts if part.kind == "shared"][:texts]
        parts = (part for part in request.parts if part.kind != "shared" or part in shared)
        found.append(replace(request, parts=(system, *parts), output=None))
    return tuple(found)


def _insert(prompt: Prompt, pieces: Sequence[Piece], ending: Piece | None = None) -> Prompt:
    """The prompt with pieces before its last run of task pieces, or with another end."""
    end = len(prompt.pieces)
    while end and prompt.pieces[end - 1].kind == "task":
        end -= 1
    last = prompt.pieces[end:] if ending is None else (ending,)
    return Prompt(prompt.agent, (*prompt.pieces[:end], *pieces, *last), ())
