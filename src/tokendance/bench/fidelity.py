"""How long agents whose answers are fed back stay together with exact computation (figure 14).

Greedy decoding on the reference engine. Every system plays a scenario twice: live, quoting its own
answers, which shows when it leaves the exact run; and along the exact run, on the same prompts and
with its answers forced, which shows how far apart the distributions are. Along the exact run the
agents also look for needles and judge each other's answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from tokendance.bench.cast import Cast, Question
from tokendance.bench.measure import kl_divergence
from tokendance.bench.render import Piece, Prompt
from tokendance.bench.roundbench import Reuse, prefill
from tokendance.bench.rounds import PAGE, LastRound, donor_plan, leader_plan, whole_pages
from tokendance.engines.reference.engine import ReferenceEngine, Stream
from tokendance.engines.reference.model import Model
from tokendance.reuse.recovery import create
from tokendance.reuse.rows import slots_of
from tokendance.types import RequestId, Rows

OURS = ("tokendance", "tokendance-15")
ENGINES = ("exact", *OURS, "cacheblend-serial")
"""tokendance-15 takes the leader's rows and computes 15 % of them again, in lock step."""

Say = Callable[[str], None]
Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one scenario: rounds, tokens of an answer, and needles hidden in the end."""

    rounds: int = 4
    tokens: int = 32
    needles: int = 2


class Answers(NamedTuple):
    """What the agents of a round said. logits: float32 [tokens, vocab] per agent, from which each
    token of a forced answer would have been taken; of a free answer only the first."""

    outputs: list[list[int]]
    logits: list[np.ndarray]


class Context(NamedTuple):
    """A prompt with its answer, as it stands in the KV cache."""

    prompt: Prompt
    answer: tuple[int, ...]
    stream: Stream


class Session:
    """One system's agents from round to round. An agent's prefix cache holds its last prompt."""

    def __init__(self, engine: str, cast: Cast, model: Model, tokens: int) -> None:
        self.name, self.cast, self._tokens = engine, cast, tokens
        rounds = cast.window + 2  # those that are quoted, the one that is played, a question
        pages = -(-cast.limit(tokens) // PAGE) * len(cast.requests) * rounds
        self.engine = ReferenceEngine(model, num_pages=pages, page_size=PAGE)
        self._rounds: deque[list[Context]] = deque()

    def play(self, prompts: Sequence[Prompt], forced: Sequence[Ids] | None = None) -> Answers:
        """A round; its answers can be quoted from now on."""
        streams = self._open(prompts)
        answers = self._answer(prompts, streams, forced)
        self._rounds.append(
            [Context(p, tuple(a), s) for p, a, s in zip(prompts, answers.outputs, streams)]
        )
        if len(self._rounds) > self.cast.window:
            for context in self._rounds.popleft():
                self.engine.kv.release(context.stream.blocks)
        return answers

    def ask(self, question: Question) -> Answers:
        """A question with its forced answers, if it has any; leaves no trace."""
        streams = self._open(question.prompts)
        answers = self._answer(question.prompts, streams, [p.output for p in question.prompts])
        for stream in streams:
            self.engine.kv.release(stream.blocks)
        return answers

    def _open(self, prompts: Sequence[Prompt]) -> list[Stream]:
        """Streams in which the rows that a prefix cache would serve are filled."""
        streams = []
        for index, prompt in enumerate(prompts):
            ids, room = prompt.ids, max(self._tokens, len(prompt.output)) + 1
            stream = Stream(list(ids), self.engine.kv.allocate(len(ids) + room))
            if self._rounds:
                before = self._rounds[-1][index]
                stream.filled = whole_pages(ids, (*before.prompt.ids, *before.answer))
                self._copy(before.stream, stream, stream.filled)
            streams.append(stream)
        return streams

    def _copy(self, source: Stream, target: Stream, rows: int) -> None:
        kv, name = self.engine.kv, RequestId("")
        there, here = (
            torch.from_numpy(slots_of(s.table(name), Rows(0, rows), PAGE)).to(self.engine.device)
            for s in (source, target)
        )
        for layer in range(kv.num_layers):
            kv.write(layer, here, *kv.read(layer, there))

    def _answer(
        self, prompts: Sequence[Prompt], streams: list[Stream], forced: Sequence[Ids] | None
    ) -> Answers:
        ends, _ = prefill(self.engine, streams, self._reuse(prompts, streams))
        if forced is None:
            return self._decode(streams, ends)
        logits = [ends[index : index + 1] for index in range(len(streams))]
        for index, answer in enumerate(forced):
            if answer:
                rest = self.engine.score(streams[index], answer)[:-1]
                logits[index] = torch.cat((logits[index], rest))
        return Answers([list(answer) for answer in forced], [x.numpy() for x in logits])

    def _decode(self, streams: list[Stream], ends: torch.Tensor) -> Answers:
        outputs = self.engine.decode(streams, self._tokens, self.cast.stop)
        self.engine.prefill(streams)  # the last token too, as others will quote it
        return Answers(outputs, [end[None].numpy() for end in ends])

    def _reuse(self, prompts: Sequence[Prompt], streams: Sequence[Stream]) -> Reuse | None:
        pages = [stream.blocks for stream in streams]
        cached = tuple(stream.filled for stream in streams)
        if self.name == "exact":
            return None
        if self.name in OURS:
            plan = leader_plan(LastRound("round", tuple(prompts), cached, ()), pages)
            return Reuse(plan, create("region" if self.name == "tokendance" else "cacheblend"))
        contexts = [context for round_ in self._rounds for context in round_]
        donors = tuple(self._donor(context) for context in contexts)
        round_ = LastRound("round", tuple(prompts), cached, donors)
        plan = donor_plan(round_, pages, [context.stream.blocks for context in contexts])
        return Reuse(plan, create("cacheblend"), serial=True)

    def _donor(self, context: Context) -> Prompt:
        """The context as a donor of its answer alone."""
        own = [Piece("private", piece.ids) for piece in context.prompt.pieces]
        quoted = self.cast.quoted(context.answer)
        # The planner leaves the last row of a context alone, hence one more.
        end = Piece("task", (*context.answer[len(quoted.ids) :], context.answer[-1]))
        return Prompt(context.prompt.agent, (*own, quoted, end), ())


class Run(NamedTuple):
    """What one system did along a run: prompts and answers of its rounds, judgements, needles."""

    rounds: list[tuple[tuple[Prompt, ...], Answers]]
    judgements: list[tuple[Question, Answers]]
    needles: list[tuple[Question, Answers]]

    @property
    def said(self) -> list[list[list[int]]]:
        return [answers.outputs for _, answers in self.rounds]


def measure(
    trace: str, seed: int, cast: Cast, model: Model, settings: Settings, say: Say
) -> list[dict[str, Any]]:
    """One row per engine. Raises TraceError if the scenario has no text for a needle."""
    rows = []
    with torch.inference_mode():
        exact = play_exact(cast, model, settings)
        say(f"{trace}: exact run of {settings.rounds} rounds")
        for engine in ENGINES:
            live, along = exact, exact
            if engine != "exact":
                live = play_live(engine, cast, model, settings)
                along = play_along(engine, cast, model, settings, exact)
            figures = divergence(exact, live) | closeness(exact, along)
            rows.append({"engine": engine, "trace": trace, "seed": seed, **figures})
            say(f"{trace}, {engine}: {_words(rows[-1])}")
    return rows


def play_exact(cast: Cast, model: Model, settings: Settings) -> Run:
    """The run that all systems are measured against, with its judgements and needles."""
    session, run = Session("exact", cast, model, settings.tokens), Run([], [], [])
    for _ in range(settings.rounds):
        prompts = cast.prompts(run.said)
        run.rounds.append((prompts, session.play(prompts)))
        judgement = cast.judgement(run.said)
        run.judgements.append((judgement, session.ask(judgement)))
    for index in range(settings.needles):
        needle = cast.needle(run.said, index)
        run.needles.append((needle, session.ask(needle)))
    return run


def play_live(engine: str, cast: Cast, model: Model, settings: Settings) -> Run:
    """A system quotes its own answers."""
    session, run = Session(engine, cast, model, settings.tokens), Run([], [], [])
    for _ in range(settings.rounds):
        prompts = cast.prompts(run.said)
        run.rounds.append((prompts, session.play(prompts)))
    return run


def play_along(engine: str, cast: Cast, model: Model, settings: Settings, exact: Run) -> Run:
    """A system gets the prompts of the exact run and has to give its answers."""
    session, run = Session(engine, cast, model, settings.tokens), Run([], [], [])
    for (prompts, answers), (judgement, _) in zip(exact.rounds, exact.judgements):
        run.rounds.append((prompts, session.play(prompts, answers.outputs)))
        run.judgements.append((judgement, session.ask(judgement)))
    run.needles.extend((needle, session.ask(needle)) for needle, _ in exact.needles)
    return run


def divergence(exact: Run, live: Run) -> dict[str, Any]:
    """Of all agents. diverged_round counts from 0."""
    same = [fmean(a == b for a, b in zip(p, q)) for p, q in zip(exact.said, live.said)]
    return {
        "rounds": len(same),
        "agents": len(live.said[0]),
        "diverged_round": next((i for i, share in enumerate(same) if share < 1), None),
        "share_same_outputs": round(fmean(same), 4),
        "same_by_round": [round(share, 4) for share in same],
    }


def closeness(exact: Run, along: Run) -> dict[str, float]:
    """Of all agents but the first, which leads where there is a leader."""
    kl: list[float] = []
    top1: list[bool] = []
    for (_, answers), (_, other) in zip(exact.rounds, along.rounds):
        for p, q, ids in list(zip(answers.logits, other.logits, answers.outputs))[1:]:
            kl.append(float(kl_divergence(p[:1], q[:1])[0]))
            top1 += (q.argmax(-1) == np.array(ids[: len(q)])).tolist()
    verdicts, others = _verdicts(exact), _verdicts(along)
    # A small model has a favourite letter; what the texts add to that is its judgement.
    usual = verdicts.mean(0)
    picked = (verdicts - usual).argmax(1)
    found = [x for asked in along.needles for x in _found(*asked)]
    return {
        "kl_end": round(fmean(kl), 6),
        "kl_end_max": round(max(kl), 6),
        "top1": round(fmean(top1), 4),
        "needle_recall": round(fmean(found), 4) if found else 0.0,
        "needles_asked": len(found),
        "judge_agreement": round(float((picked == (others - usual).argmax(1)).mean()), 4),
        "judgements": len(picked),
        "exact_picks": len(set(picked.tolist())),
    }


def _verdicts(run: Run) -> np.ndarray:
    """float32 [judgements, letters]: logits of the letters, of every judge but the first agent."""
    return np.stack(
        [x[0][list(asked.ids)] for asked, answers in run.judgements for x in answers.logits[1:]]
    )


def _found(needle: Question, answers: Answers) -> list[bool]:
    """Whether each agent but the first would have said the fact in greedy decoding."""
    fact = list(needle.ids)
    return [x.argmax(-1)[-len(fact) :].tolist() == fact for x in answers.logits[1:]]


HIGHER, LOWER = 1, -1
FIGURES = {
    "diverged_round": HIGHER,
    "share_same_outputs": HIGHER,
    "kl_end": LOWER,
    "top1": HIGHER,
    "needle_recall": HIGHER,
    "judge_agreement": HIGHER,
}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the scenarios of every engine (a run that never diverged counts with all its
    rounds), and figures in which each of ours is worse than serial CacheBlend."""
    means: dict[str, dict[str, float]] = {}
    for engine in ENGINES:
        own = [row for row in rows if row["engine"] == engine]
        means[engine] = {n: round(fmean(_number(r, n) for r in own), 5) for n in FIGURES}
    theirs = means["cacheblend-serial"]
    worse = {
        ours: [n for n, sign in FIGURES.items() if sign * (means[ours][n] - theirs[n]) < 0]
        for ours in OURS
    }
    return {"means": means, "worse_than_serial_cacheblend": worse}


def _number(row: Mapping[str, Any], name: str) -> float:
    return float(row["rounds"] if row[name] is None else row[name])


def _words(row: Mapping[str, Any]) -> str:
    left = row["diverged_round"]
    return (
        f"{'never apart' if left is None else f'apart in round {left}'}, "
        f"{row['share_same_outputs']:.0%} the same, KL {row['kl_end']:.4f}, "
        f"top-1 {row['top1']:.3f}, needles {row['needle_recall']:.2f}, "
        f"judges agree {row['judge_agreement']:.2f}"
    )
