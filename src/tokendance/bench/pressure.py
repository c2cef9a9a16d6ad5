"""A pool of pages that holds a third of the agents: what comes back against what is computed (M17).

Every agent has a long private history that grows by what everybody said. When its turn comes again,
the others have taken its pages. `recompute` is TokenDance without a store, `restore` with one, and
`plain` is vLLM with its prefix cache; all three get the same tokens and pages, round by round.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokendance.bench.engine_process import Call, Clock, EngineProcess, EngineSettings, RoundResult
from tokendance.bench.measure import compare, rows_by_source
from tokendance.bench.prefill import Words, for_engine, spread

Say = Callable[[str], None]

MODES = ("plain", "recompute", "restore")


@dataclass(frozen=True, slots=True)
class PressureShape:
    """agents with `private` own tokens each; a round adds everybody's answer of `answer` tokens and
    a task. rounds: counted ones, after a first one that starts from nothing."""

    agents: int = 6
    private: int = 800
    answer: int = 16
    task: int = 10
    rounds: int = 3

    @property
    def most_rows(self) -> int:
        """Rows of the longest prompt, answer included."""
        grown = (self.rounds + 1) * (self.agents * self.answer + self.task + self.answer)
        return self.private + self.agents + grown


class Session:
    """The prompts of one session, round by round; answers are given, so all engines agree."""

    def __init__(self, shape: PressureShape, words: Words, name: str) -> None:
        self._shape, self._words, self._name = shape, words, name
        self._round = 0
        self._histories = [[words.take(shape.private + i)] for i in range(shape.agents)]
        self._said = [words.take(shape.answer) for _ in range(shape.agents)]

    def round(self) -> list[Call]:
        """The calls of the next round."""
        shape, heard = self._shape, self._said
        task = self._words.take(shape.task)
        self._said = [self._words.take(shape.answer) for _ in range(shape.agents)]
        calls = []
        for agent, (history, answer) in enumerate(zip(self._histories, self._said)):
            history += [*heard, task]
            hints = {
                "session": self._name,
                "round": str(self._round),
                "agent": f"agent{agent}",
                "size": shape.agents,
                "segments": [len(piece) for piece in history],
            }
            prompt = tuple(token for piece in history for token in piece)
            calls.append(Call(f"{self._name}.{self._round}.{agent}", prompt, answer, hints))
            # The last answer token has no K/V when a request ends; it is computed with the rest.
            history.append(answer)
        self._round += 1
        return calls


def bench_pressure(
    model: str,
    shape: PressureShape,
    words: Words,
    threads: int,
    clock: Clock,
    store_gib: float,
    say: Say,
    page_size: int = 32,
) -> dict[str, Any]:
    """Round times of the three engines, and their ratios over the counted rounds."""
    longest = -(-shape.most_rows // page_size)
    pages = -(-shape.agents // 3) * longest
    options: dict[str, dict[str, Any]] = {"recompute": {}, "restore": {"store_gib": store_gib}}
    with ExitStack() as stack:
        engines = {
            mode: stack.enter_context(
                EngineProcess(
                    EngineSettings(
                        model,
                        mode in options,
                        options.get(mode, {}),
                        max_model_len=longest * page_size,
                        pages=pages,
                        block_size=page_size,
                        threads=threads,
                        clock=clock,
                    )
                )
            )
            for mode in MODES
        }
        rows = _play(engines, Session(shape, words, "pressure"), shape, say)
        dtype = engines["plain"].ready().dtype
    return {
        "shape": asdict(shape),
        "agents": shape.agents,
        "pool_pages": pages,
        "page_size": page_size,
        "dtype": dtype,
        "threads": threads,
        "clock": clock,
        "repetitions": shape.rounds,
        "round_ratio": spread(_ratios(rows, "recompute", "round_s")),
        "cpu_ratio": spread(_ratios(rows, "recompute", "cpu_s")),
        "plain_round_ratio": spread(_ratios(rows, "plain", "round_s")),
        "plain_cpu_ratio": spread(_ratios(rows, "plain", "cpu_s")),
        "kl_mean": {m: spread(_counted(rows, m, "kl_mean")) for m in ("recompute", "restore")},
        "rows": rows,
    }


def _play(
    engines: dict[str, EngineProcess], session: Session, shape: PressureShape, say: Say
) -> list[dict[str, Any]]:
    rows = []
    for number in range(shape.rounds + 1):
        calls = session.round()
        modes = MODES if number % 2 else MODES[::-1]
        with tempfile.TemporaryDirectory() as scratch:
            results = {
                mode: engines[mode].round(
                    for_engine(engines[mode], calls),
                    logits=Path(scratch) / f"{mode}.npy",
                    logit_rows=1,
                )
                for mode in modes
            }
            for mode in MODES:
                rows.append(_row(mode, number, results[mode], results["plain"]))
                say(
                    "round {round}, {mode}: {round_s} s, CPU {cpu_s} s, {rows_computed} rows "
                    "computed, {rows_stored} from the store, KL {kl_mean}".format(**rows[-1])
                )
    return rows


def _row(mode: str, number: int, result: RoundResult, plain: RoundResult) -> dict[str, Any]:
    """kl_mean, kl_max: of the first answer token's distribution against plain vLLM's."""
    divergence = [closeness.end for closeness in compare(plain, result)]
    sources = [rows_by_source(call) for call in result.calls]
    last = max(call.finish_s for call in result.calls)
    return {
        "mode": mode,
        "round": number,
        "round_s": round(last, 3),
        "cpu_s": round(result.total_cpu_s, 3),
        "wall_s": round(result.total_wall_s, 3),
        "rows_computed": sum(source.get("computed", 0) for source in sources),
        "rows_stored": sum(source.get("stored", 0) for source in sources),
        "rows_sibling": sum(source.get("sibling", 0) for source in sources),
        "rows_prefix": sum(source.get("prefix", 0) for source in sources),
        "peak_pages": result.peak_pages,
        "preemptions": result.preemptions,
        "kl_mean": round(statistics.fmean(divergence), 6),
        "kl_max": round(max(divergence), 6),
    }


def _counted(rows: Sequence[dict[str, Any]], mode: str, figure: str) -> list[float]:
    return [row[figure] for row in rows if row["mode"] == mode and row["round"]]


def _ratios(rows: Sequence[dict[str, Any]], mode: str, figure: str) -> list[float]:
    """`mode` over `restore`, round by round, without the first one, in which nothing is stored."""
    by_round: dict[int, dict[str, float]] = {}
    for row in rows:
        by_round.setdefault(row["round"], {})[row["mode"]] = row[figure]
    return [modes[mode] / modes["restore"] for number, modes in by_round.items() if number]
