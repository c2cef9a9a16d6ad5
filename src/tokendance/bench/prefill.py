"""Prefill of one synthetic round, cold and with warm histories, and what the add-on costs idle.

    tokendance bench prefill     N agents, private history + shared blocks: CPU seconds until all
                                 first tokens, plain vLLM over TokenDance
    tokendance bench overhead    requests that share nothing: TokenDance over plain vLLM

Repetitions of both engines are interleaved, each from an empty cache and with texts of its own.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokendance.bench.engine_process import Call, EngineProcess, EngineSettings, RoundResult
from tokendance.bench.measure import compare, is_follower
from tokendance.bench.trace import Trace

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RoundShape:
    """A round: `agents` prompts of about `private` own tokens, `blocks` shared ones, and a task."""

    agents: int = 8
    private: int = 150
    blocks: int = 8
    block: int = 149
    task: int = 12


class Words:
    """Token ids of real text, cut anew for every round."""

    def __init__(self, ids: Sequence[int], seed: int | str) -> None:
        self._ids = ids
        self._random = random.Random(seed)

    def reseeded(self, seed: str) -> Words:
        """The same text, cut in another way."""
        return Words(self._ids, seed)

    def take(self, count: int) -> tuple[int, ...]:
        start = self._random.randrange(len(self._ids) - count)
        return tuple(self._ids[start : start + count])


def words_of(traces: Sequence[Path], encode: Callable[[str], Sequence[int]], seed: int) -> Words:
    """The texts of some traces, as one long sequence of token ids."""
    texts = {
        (trace, part.segment.id): part.segment.text
        for trace in traces
        for round_ in Trace(trace).rounds()
        for request in round_.requests
        for part in request.parts
    }
    return Words([token for text in texts.values() for token in encode(text)], seed)


def round_calls(shape: RoundShape, words: Words, name: str) -> tuple[list[Call], list[Call]]:
    """The calls of one round, and calls that bring just its histories into the prefix cache."""
    shared = [words.take(shape.block) for _ in range(shape.blocks)]
    task = words.take(shape.task)
    calls, warm = [], []
    for agent in range(shape.agents):
        history = words.take(shape.private + agent)
        pieces = (history, *shared, task)
        hints = {
            "session": name,
            "round": "1",
            "agent": f"agent{agent}",
            "size": shape.agents,
            "segments": [len(p) for p in pieces],
        }
        prompt = tuple(t for piece in pieces for t in piece)
        calls.append(Call(f"{name}.{agent}", prompt, (task[0],), hints))
        warm.append(Call(f"{name}.{agent}.warm", history, (task[0],)))
    return calls, warm


def bench_prefill(
    model: str, shape: RoundShape, words: Words, repeat: int, threads: int, say: Say
) -> dict[str, Any]:
    """Medians and spread of the CPU ratio, cold and warm, and the followers' KL."""
    rows: list[dict[str, Any]] = []
    with both(model, threads) as engines, tempfile.TemporaryDirectory() as scratch:
        for turn in range(-1, repeat):
            for warm in (False, True):
                name = f"{'warm' if warm else 'cold'}{turn}"
                calls, histories = round_calls(shape, words, name)
                order = engines if turn % 2 else engines[::-1]
                results: dict[bool, RoundResult] = {}
                for engine in order:
                    engine.reset()
                    if warm:
                        engine.round(histories)
                    ours = engine.settings.tokendance
                    file = Path(scratch) / f"{ours}.npy"
                    results[ours] = engine.round(
                        for_engine(engine, calls), logits=file, logit_rows=1
                    )
                if turn < 0:
                    continue  # first use of kernels and caches
                rows.append({"warm": warm, **_row(results)})
                say(f"{name}: {rows[-1]['cpu_ratio']:.2f}x, KL {rows[-1]['kl_max']:.4f}")
        ready = engines[0].ready()
    return {
        "shape": asdict(shape),
        "dtype": ready.dtype,
        "threads": threads,
        "repetitions": repeat,
        "cold": _summary([r for r in rows if not r["warm"]]),
        "warm": _summary([r for r in rows if r["warm"]]),
        "rows": rows,
    }


def bench_overhead(
    model: str, requests: int, tokens: int, words: Words, repeat: int, threads: int, say: Say
) -> dict[str, Any]:
    """CPU and wall time of requests that share nothing, TokenDance over plain vLLM."""
    rows: list[dict[str, float]] = []
    with both(model, threads) as engines:
        for turn in range(-1, repeat):
            calls = [
                Call(f"{turn}.{i}", words.take(tokens), words.take(8)) for i in range(requests)
            ]
            results = {}
            for engine in engines if turn % 2 else engines[::-1]:
                engine.reset()
                results[engine.settings.tokendance] = engine.round(calls)
            if turn < 0:
                continue
            rows.append(
                {
                    "cpu_ratio": results[True].total_cpu_s / results[False].total_cpu_s,
                    "wall_ratio": results[True].total_wall_s / results[False].total_wall_s,
                }
            )
            say(f"{turn + 1} of {repeat}: CPU {rows[-1]['cpu_ratio']:.3f}x")
    return {
        "requests": requests,
        "tokens": tokens,
        "threads": threads,
        "repetitions": repeat,
        "cpu_ratio": spread([r["cpu_ratio"] for r in rows]),
        "wall_ratio": spread([r["wall_ratio"] for r in rows]),
        "rows": rows,
    }


class both(ExitStack):
    """Plain vLLM and TokenDance, started together."""

    def __init__(self, model: str, threads: int) -> None:
        super().__init__()
        self._settings = [EngineSettings(model, ours, threads=threads) for ours in (False, True)]

    def __enter__(self) -> list[EngineProcess]:  # type: ignore[override]
        return [self.enter_context(EngineProcess(settings)) for settings in self._settings]


def for_engine(engine: EngineProcess, calls: Sequence[Call]) -> list[Call]:
    """The calls as this engine is sent them: plain vLLM takes no hints."""
    return [c if engine.settings.tokendance else c._replace(hints=None) for c in calls]


def _row(results: dict[bool, RoundResult]) -> dict[str, Any]:
    plain, ours = results[False], results[True]
    closeness = [c for c, call in zip(compare(plain, ours), ours.calls) if is_follower(call)]
    return {
        "plain_cpu_s": plain.prefill_cpu_s,
        "cpu_s": ours.prefill_cpu_s,
        "cpu_ratio": plain.prefill_cpu_s / ours.prefill_cpu_s,
        "wall_ratio": plain.prefill_wall_s / ours.prefill_wall_s,
        "plain_computed": sum(c.prompt_tokens - c.cached for c in plain.calls),
        "kl_mean": statistics.fmean(c.end for c in closeness) if closeness else 0.0,
        "kl_max": max((c.end for c in closeness), default=0.0),
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ("cpu_ratio", "wall_ratio", "kl_mean", "kl_max", "plain_cpu_s", "cpu_s")
    return {name: spread([row[name] for row in rows]) for name in names}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }
