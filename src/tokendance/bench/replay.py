"""Replays a trace on plain vLLM and on TokenDance, side by side, and reports round by round.

Both engines get the same token ids, have to give the stored answers, and run under the same
settings. A round runs on one engine and then on the other, and they take turns in going first, so
that whatever else the machine does falls on both.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tokendance.bench.engine_process import (
    Call,
    EngineProcess,
    EngineSettings,
    Ready,
    RoundResult,
)
from tokendance.bench.measure import (
    Bound,
    BoundCounter,
    Closeness,
    compare,
    is_follower,
    rows_by_source,
)
from tokendance.bench.render import HFTokenizer, Prompt, Renderer, Tokenizer
from tokendance.bench.trace import Header, Trace, TraceError

Progress = Callable[[str], None]


class ModelMissing(RuntimeError):
    """The model folder is not there; the text says how to get it."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What to replay.

    rounds, agents: only the first so many; the prompts stay as they are. repeat: repetitions of the
    whole trace, each from an empty cache. logit_rows: tokens per answer that are compared between
    the engines, in the first repetition. connector: options of the TokenDance connector.
    """

    trace: Path
    model: str
    rounds: int | None = None
    agents: int | None = None
    repeat: int = 1
    logit_rows: int = 128
    threads: int = 1
    kv_cache_gib: float = 2
    connector: Mapping[str, Any] = field(default_factory=dict)

    def engine(self, tokendance: bool) -> EngineSettings:
        return EngineSettings(
            model=self.model,
            tokendance=tokendance,
            connector=self.connector,
            threads=self.threads,
            kv_cache_gib=self.kv_cache_gib,
        )


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One round on both engines. closeness: per call, empty after the first repetition."""

    repetition: int
    index: int
    bound: Bound
    plain: RoundResult
    ours: RoundResult
    closeness: tuple[Closeness, ...]

    @property
    def plain_computed(self) -> int:
        return sum(call.prompt_tokens - call.cached for call in self.plain.calls)

    @property
    def sources(self) -> Counter[str]:
        """Prompt tokens of TokenDance's round by source."""
        total: Counter[str] = Counter()
        for call in self.ours.calls:
            total.update(rows_by_source(call))
        return total

    @property
    def followers(self) -> tuple[Closeness, ...]:
        """The calls whose K/V is approximate."""
        return tuple(
            close for call, close in zip(self.ours.calls, self.closeness) if is_follower(call)
        )

    @property
    def exact(self) -> tuple[Closeness, ...]:
        """The calls that took nothing from others."""
        return tuple(
            close for call, close in zip(self.ours.calls, self.closeness) if not is_follower(call)
        )


class Replay:
    """One trace, rendered for one model, ready to run.

    Raises ModelMissing, TraceError; `run` raises EngineError too.
    """

    def __init__(self, settings: ReplaySettings, tokenizer: Tokenizer | None = None) -> None:
        self.settings = settings
        self.header: Header = Trace(settings.trace).header
        limit = _context(settings.model)
        renderer = Renderer(tokenizer or HFTokenizer(settings.model), self.header.render)
        self.prompts = _render(settings, self.header, renderer)
        counter = BoundCounter()
        self.bounds = [counter.add(prompts) for prompts in self.prompts]
        longest = max(len(p.ids) + len(p.output) for round_ in self.prompts for p in round_)
        if limit is not None and longest > limit:
            raise TraceError(
                f"{settings.trace} needs a context of {longest} tokens and the model has {limit}; "
                "take a smaller trace, fewer rounds (--rounds) or another model (--model)"
            )
        self.ready: tuple[Ready, Ready] | None = None

    @property
    def agents(self) -> int:
        return len({p.agent for round_ in self.prompts for p in round_})

    def run(self, progress: Progress = lambda text: None) -> Iterator[RoundReport]:
        """Start both engines, replay, and yield every round when both have finished it."""
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=_fast_folder())))
            progress("starting two engines")
            plain = stack.enter_context(EngineProcess(self.settings.engine(tokendance=False)))
            ours = stack.enter_context(EngineProcess(self.settings.engine(tokendance=True)))
            self.ready = (plain.ready(), ours.ready())
            progress("warming up")
            for engine in (plain, ours):
                engine.round(self._warm_up())
            for repetition in range(self.settings.repeat):
                plain.reset()
                ours.reset()
                for index in range(len(self.prompts)):
                    yield self._round(repetition, index, plain, ours, scratch, progress)

    def _round(
        self,
        repetition: int,
        index: int,
        plain: EngineProcess,
        ours: EngineProcess,
        scratch: Path,
        progress: Progress,
    ) -> RoundReport:
        calls = self._calls(repetition, index)
        order = (plain, ours) if (repetition + index) % 2 == 0 else (ours, plain)
        results: dict[EngineProcess, RoundResult] = {}
        for engine in order:
            progress(f"round {index + 1} of {len(self.prompts)}: {engine.settings.name}")
            hinted = engine is ours
            results[engine] = engine.round(
                [call if hinted else call._replace(hints=None) for call in calls],
                logits=scratch / f"{hinted}.npy" if repetition == 0 else None,
                logit_rows=self.settings.logit_rows,
            )
        closeness: tuple[Closeness, ...] = ()
        if repetition == 0:
            progress(f"round {index + 1} of {len(self.prompts)}: comparing the answers")
            closeness = tuple(compare(results[plain], results[ours]))
        return RoundReport(
            repetition, index, self.bounds[index], results[plain], results[ours], closeness
        )

    def _calls(self, repetition: int, index: int) -> list[Call]:
        prompts = self.prompts[index]
        groups = Counter(self.header.group_of(p.agent) for p in prompts)
        calls, seen = [], Counter[str]()
        for prompt in prompts:
            seen[prompt.agent] += 1
            again = f".{seen[prompt.agent]}" if seen[prompt.agent] > 1 else ""
            agent = prompt.agent + again
            group = self.header.group_of(prompt.agent)
            hints: dict[str, Any] = {
                "session": ".".join(filter(None, (self.header.name, group, str(repetition)))),
                "agent": agent,
                "segments": [n for n in prompt.lengths if n],
            }
            if not self.header.serial:  # conversations that know nothing of each other are no round
                hints |= {"round": str(index), "size": groups[group]}
            forced = prompt.output or prompt.ids[-1:]
            calls.append(Call(f"{repetition}.{index}.{agent}", prompt.ids, forced, hints))
        return calls

    def _warm_up(self) -> list[Call]:
        """A small round of other content, so that nothing is done for the first time later."""
        text = self.prompts[0][0].ids[::-1][:160]
        calls = []
        for agent in range(3):
            private = text[agent : agent + 40]
            hints = {
                "session": "warm-up",
                "round": "0",
                "agent": str(agent),
                "size": 3,
                "segments": [len(private), len(text), 1],
            }
            calls.append(Call(f"warm-up.{agent}", (*private, *text, text[0]), text[:4], hints))
        return calls


def _render(
    settings: ReplaySettings, header: Header, renderer: Renderer
) -> list[tuple[Prompt, ...]]:
    wanted = {agent.id for agent in header.agents[: settings.agents]}
    rendered = []
    for round_ in islice(Trace(settings.trace).rounds(), settings.rounds):
        prompts = tuple(renderer(r) for r in round_.requests if r.agent in wanted)
        if prompts:
            rendered.append(prompts)
    if not rendered:
        raise TraceError(f"nothing to replay in {settings.trace} with these rounds and agents")
    return rendered


def _context(model: str) -> int | None:
    """Positions of the model, if its folder says so."""
    folder = Path(model)
    if not (folder / "config.json").exists():
        if folder.is_absolute() or model.startswith(".") or model.count("/") != 1:
            raise ModelMissing(
                f"there is no model in {model}; run `make demo` or `tokendance model` to make the "
                "small one, or give a folder with --model"
            )
        return None  # a name on the Hugging Face hub; vLLM checks it
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    limit = config.get("max_position_embeddings")
    return int(limit) if limit is not None else None


def _fast_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
