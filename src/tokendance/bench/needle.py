"""Needles: a random fact hidden in a shared segment, which every agent is asked for at the end.

A needle round is the last round of a trace with one sentence more in one shared text and a question
in place of the task. The answer is forced, so each of its tokens can be compared with what the
model would have said: greedy decoding finds the fact exactly if all of them are the likeliest ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np

from tokendance.bench.engine_process import RoundResult
from tokendance.bench.render import Prompt, Renderer
from tokendance.bench.trace import Part, Request, Segment, TraceError

COLOURS = ("amber", "black", "golden", "green", "orange", "purple", "silver", "white")
THINGS = ("anchor", "bottle", "castle", "dragon", "falcon", "garden", "ladder", "planet", "tiger")
QUESTION = "Question: What is the secret word of the day? Answer with the words alone.\nAnswer:"
LEAD = " The secret word of the day is"


@dataclass(frozen=True, slots=True)
class Needle:
    """A round with a needle. answer: how many tokens at the end of the forced ids are the fact."""

    prompts: tuple[Prompt, ...]
    fact: str
    answer: int


def hide(requests: Sequence[Request], render: Renderer, seed: int) -> Needle:
    """Hide a fact in a shared text that all requests have. Raises TraceError if there is none."""
    random = Random(seed)
    fact = f" {random.choice(COLOURS)} {random.choice(THINGS)}"
    shared = [{p.segment.id for p in r.parts if p.kind == "shared"} for r in requests]
    common = sorted(set.intersection(*shared)) if shared else []
    if not common:
        raise TraceError("a needle needs a shared text that all agents read; take another trace")
    place = random.choice(common)
    lead, answer = render.tokenizer.encode(LEAD), render.tokenizer.encode(fact)
    prompts = tuple(
        replace(render(_asking(request, place, fact)), output=(*lead, *answer))
        for request in requests
    )
    return Needle(prompts, fact.strip(), len(answer))


def _asking(request: Request, place: str, fact: str) -> Request:
    parts = []
    for part in request.parts:
        if part.segment.id == place:
            text = f"{part.segment.text.rstrip()} The secret word of the day is{fact}.\n"
            part = part._replace(segment=replace(part.segment, id=f"{place}?", text=text))
        parts.append(part)
    # Roles stay: what the last message says is replaced, not who says it.
    last = parts[-1]
    question = Segment("question", "framework", "framework", QUESTION)
    kept = parts[:-1] if last.kind == "task" else parts
    role = last.role if last.kind == "task" else None
    return replace(request, parts=(*kept, Part("task", question, role)), output=None)


def recalled(result: RoundResult, answer: int, calls: Sequence[int]) -> int:
    """How many of `calls` (indices) would have given the fact in greedy decoding."""
    if result.logits is None:
        raise ValueError("recall needs the round's logits")
    table = np.load(Path(result.logits), mmap_mode="r")
    found = 0
    for index in calls:
        call = result.calls[index]
        rows = np.asarray(table[call.logits])
        if rows.dtype == np.uint16:  # the bits of bf16
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        said = rows.argmax(-1)[len(call.output) - answer :]
        found += said.tolist() == list(call.output[-answer:])
    return found
