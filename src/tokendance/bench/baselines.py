"""The engines that capacity is measured on, and how each of them is sent a round (M23).

prefix: vLLM's prefix caching. reordered: the same, with what the agents share moved to the front of
every prompt, which is exact and needs no add-on. offload: vLLM with its own KV offloading to host
memory. cacheblend, cacheblend-serial: TokenDance's connector with the CacheBlend backend, for the
round as a whole and for each request in a pass of its own. tokendance: the connector as it comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tokendance.bench.engine_process import Call, EngineSettings
from tokendance.bench.render import Piece, Prompt

Process = Literal["plain", "offload", "connector"]


@dataclass(frozen=True, slots=True)
class Baseline:
    """One engine. Those with the same `process` run, one after the other, in the same process:
    they differ in what they are sent only."""

    name: str
    process: Process
    reordered: bool = False
    backend: str = ""
    one_by_one: bool = False

    def settings(self, base: EngineSettings, offload_gib: float) -> EngineSettings:
        """How its process is started; everything else is the same for all."""
        return replace(
            base,
            tokendance=self.process == "connector",
            offload_gib=offload_gib if self.process == "offload" else None,
        )

    def calls(self, prompts: Sequence[Prompt], name: str, index: int, qps: float) -> list[Call]:
        """A round as this engine is sent it; arrivals are 1/qps apart, 0 is all at once."""
        sent = reorder(prompts) if self.reordered else prompts
        # A round of one waits for nobody, and whoever comes later follows the first.
        size = 1 if self.one_by_one else len({prompt.agent for prompt in sent})
        calls = []
        for number, prompt in enumerate(sent):
            hints: dict[str, Any] | None = None
            if self.process == "connector":
                hints = {
                    "session": name,
                    "round": str(index),
                    "agent": prompt.agent,
                    "size": size,
                    "segments": [n for n in prompt.lengths if n],
                }
                if self.backend:
                    hints["backend"] = self.backend
            arrival = number / qps if qps else 0.0
            id_ = f"{name}.{index}.{number}"
            calls.append(Call(id_, prompt.ids, prompt.output, hints, arrival))
        return calls


BASELINES = (
    Baseline("prefix", "plain"),
    Baseline("reordered", "plain", reordered=True),
    Baseline("offload", "offload"),
    Baseline("cacheblend-serial", "connector", backend="cacheblend", one_by_one=True),
    Baseline("cacheblend", "connector", backend="cacheblend"),
    Baseline("tokendance", "connector"),
)
NAMES = tuple(baseline.name for baseline in BASELINES)


def reorder(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same texts with what is shared in front: first what most agents read, in one order.

    What stands before the first text of a prompt (a tokenizer's opening id) stays there.
    """
    readers = Counter(p for prompt in prompts for p in dict.fromkeys(_shared(prompt)))
    rank = {p: i for i, p in enumerate(sorted(readers, key=lambda p: -readers[p]))}
    result = []
    for prompt in prompts:
        pieces = list(prompt.pieces)
        opening = next((i for i, p in enumerate(pieces) if p.kind != "task"), len(pieces))
        shared = sorted(_shared(prompt), key=lambda piece: rank[piece])
        rest = [piece for piece in pieces[opening:] if piece.kind != "shared"]
        result.append(replace(prompt, pieces=(*pieces[:opening], *shared, *rest)))
    return result


def _shared(prompt: Prompt) -> list[Piece]:
    return [piece for piece in prompt.pieces if piece.kind == "shared"]
