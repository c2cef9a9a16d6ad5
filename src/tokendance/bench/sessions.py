"""Closed-loop sessions: rounds with a barrier, whose prompts hold what was said one round before.

A session is synthetic, of real text cut anew, or a trace. Answers are given, so that every engine
works on the same token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from tokendance.bench.prefill import Words
from tokendance.bench.render import Piece, Prompt, Renderer, Tokenizer
from tokendance.bench.trace import Trace, TraceError

STAGGER = 7
"""Histories differ in length by less than this, so that shared text starts at other offsets."""


@dataclass(frozen=True, slots=True)
class Session:
    """Rounds of prompts; `chat` if a chat template ties the parts of a prompt to their places."""

    name: str
    rounds: tuple[tuple[Prompt, ...], ...]
    chat: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(p.ids) + len(p.output) for prompts in self.rounds for p in prompts)


@dataclass(frozen=True, slots=True)
class Shape:
    """A synthetic all-gather session.

    Every agent has about `private` tokens of its own, hears `output` tokens of every agent, itself
    included, from the round before (in the first round a scene of as many), ends on a task of
    `task` tokens and answers with `output` tokens.
    """

    private: int = 96
    output: int = 32
    task: int = 12


def synthetic(name: str, shape: Shape, agents: int, rounds: int, words: Words) -> Session:
    """A session of `agents` agents over `rounds` rounds.

    The first of several rounds is there to bring the histories into the cache; its answers are not
    generated beyond their first token.
    """
    histories = [words.take(shape.private + agent % STAGGER) for agent in range(agents)]
    task = Piece("task", words.take(shape.task))
    said = [words.take(shape.output)]
    made = []
    for index in range(rounds):
        answers = [words.take(shape.output) for _ in range(agents)]
        shared = [Piece("shared", text) for text in said]
        generated = 1 if index == 0 and rounds > 1 else shape.output
        made.append(
            tuple(
                Prompt(f"agent{i}", (Piece("private", history), *shared, task), answer[:generated])
                for i, (history, answer) in enumerate(zip(histories, answers))
            )
        )
        said = answers
    return Session(name, tuple(made))


def from_trace(
    path: Path, tokenizer: Tokenizer, agents: int, rounds: int, output_tokens: int
) -> Session:
    """The first rounds of a trace for its first agents; answers are cut to `output_tokens`.

    A request without a stored answer is made to repeat the beginning of its prompt. The prompts
    stay as they are: they hold what all agents have said. Raises TraceError.
    """
    trace = Trace(path)
    header = trace.header
    if agents > len(header.agents):
        raise TraceError(f"{path} has {len(header.agents)} agents, not {agents}; see --agents")
    if header.serial or len({agent.group for agent in header.agents}) > 1:
        raise TraceError(f"{path} is not one session with rounds; take another trace")
    render = Renderer(tokenizer, header.render)
    wanted = {agent.id for agent in header.agents[:agents]}
    made = []
    for round_ in islice(trace.rounds(), rounds):
        prompts = [render(r) for r in round_.requests if r.agent in wanted]
        answered = [replace(p, output=(p.output or p.ids)[:output_tokens]) for p in prompts]
        if answered:
            made.append(tuple(answered))
    return Session(header.name, tuple(made), chat=header.render == "chat")


def strangers(prompts: Sequence[Prompt], words: Words) -> tuple[Prompt, ...]:
    """As many prompts of the same lengths that have nothing in common."""
    return tuple(
        Prompt(f"stranger{i}", (Piece("private", words.take(len(p.ids))),), p.output)
        for i, p in enumerate(prompts)
    )
