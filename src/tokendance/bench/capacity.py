"""Round latency and memory against the number of agents, in a KV pool of fixed size (M24).

A cell is one session on one engine: closed loop, rounds with a barrier, from an empty cache. The
first round of a session brings the histories into the cache and is not counted, unless it is the
only one. For every number of agents, rate of arrival and repetition all engines run the same
session, and take turns in going first. Figure 10 of the paper is made of the cells, figure 2 of one
round of the prefix engine and as many requests that have nothing to do with each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from tokendance.bench.baselines import Baseline
from tokendance.bench.engine_process import (
    Call,
    EngineError,
    EngineProcess,
    EngineSettings,
    RoundResult,
)
from tokendance.bench.measure import rows_by_source
from tokendance.bench.partial import append_line, read_lines
from tokendance.bench.prefill import Words, spread
from tokendance.bench.render import Prompt
from tokendance.bench.sessions import Session, strangers

Say = Callable[[str], None]
Line = dict[str, Any]

CROWD = "prefix"
"""The engine of figure 2: plain vLLM."""

STRANGERS = "strangers"
"""The cell with independent requests, as if it were an engine."""


class Cell(NamedTuple):
    """A session that all engines run."""

    repetition: int
    agents: int
    qps: float

    @property
    def name(self) -> str:
        return f"{self.repetition}.{self.agents}.{self.qps:g}"


@dataclass(frozen=True, slots=True)
class Study:
    """What is measured. base: settings that all engines have in common."""

    baselines: tuple[Baseline, ...]
    agents: tuple[int, ...]
    qps: tuple[float, ...]
    repeat: int
    base: EngineSettings
    offload_gib: float

    def cells(self) -> Iterator[Cell]:
        for repetition in range(self.repeat):
            for agents in self.agents:
                for qps in self.qps:
                    yield Cell(repetition, agents, qps)

    def turns(self, index: int) -> tuple[Baseline, ...]:
        """The engines in the order of the index-th cell."""
        start = index % len(self.baselines)
        return self.baselines[start:] + self.baselines[:start]


class Fleet(ExitStack):
    """The engine processes, each started when it is first needed.

    skipped: engines whose process does not start, and why.
    """

    def __init__(self, study: Study, warm_up: Session, say: Say) -> None:
        super().__init__()
        self.skipped: dict[str, str] = {}
        self._study = study
        self._warm_up = warm_up
        self._say = say
        self._running: dict[str, EngineProcess] = {}
        self._failed: dict[str, str] = {}
        self._warm: set[str] = set()

    def get(self, baseline: Baseline) -> EngineProcess | None:
        """The engine, empty and warm; None if it is skipped."""
        engine = self._started(baseline)
        if engine is None:
            self.skipped[baseline.name] = self._failed[baseline.process]
            return None
        if baseline.name not in self._warm:
            self._warm.add(baseline.name)
            play(engine, baseline, self._warm_up, f"warm.{baseline.name}", 0)
        engine.reset()
        return engine

    def _started(self, baseline: Baseline) -> EngineProcess | None:
        kind = baseline.process
        if kind not in self._running and kind not in self._failed:
            self._say(f"starting the engine of {baseline.name}")
            settings = baseline.settings(self._study.base, self._study.offload_gib)
            engine = self.enter_context(EngineProcess(settings))
            try:
                engine.ready()
            except EngineError as error:
                engine.close()
                self._failed[kind] = cause(error)
                self._say(f"{baseline.name} does not start: {self._failed[kind]}")
            else:
                self._running[kind] = engine
        return self._running.get(kind)


def cause(error: EngineError) -> str:
    """The first line of what an engine died of."""
    text = str(error).splitlines()[0]
    return text.split(": ", 1)[-1]


def play(
    engine: EngineProcess, baseline: Baseline, session: Session, name: str, qps: float
) -> list[RoundResult]:
    """Run a session round by round."""
    return [
        engine.round(baseline.calls(prompts, name, index, qps), one_by_one=baseline.one_by_one)
        for index, prompts in enumerate(session.rounds)
    ]


class Record:
    """The lines of a study, in order. What the partial file holds is not measured again."""

    def __init__(self, partial: Path, say: Say) -> None:
        self.lines: list[Line] = []
        self._partial = partial
        self._say = say
        self._done = {line["key"]: line for line in read_lines(partial)}

    def once(self, cell: Cell, engine: str, measure: Callable[[], Line | None]) -> Line | None:
        """The line of a cell on an engine, measured if need be; None if it cannot be."""
        key = f"{cell.name}.{engine}"
        if key not in self._done:
            measured = measure()
            if measured is None:
                return None
            self._done[key] = {"key": key, **cell._asdict(), "engine": engine, **measured}
            append_line(self._partial, self._done[key])
            self._say(f"{key}: {measured['rounds'][-1]['round_s']:.1f} s")
        self.lines.append(self._done[key])
        return self._done[key]


def run_study(
    study: Study, session: Callable[[Cell], Session], words: Words, partial: Path, say: Say
) -> tuple[list[Line], dict[str, str]]:
    """Run all cells that `partial` does not hold: all lines of the study, and who is skipped why.

    Raises EngineError if an engine that has started fails.
    """
    record = Record(partial, say)
    with Fleet(study, session(Cell(-1, min(study.agents), 0.0)), say) as fleet:
        for index, cell in enumerate(study.cells()):
            for baseline in study.turns(index):
                measure = functools.partial(_measure, fleet, baseline, cell, session)
                record.once(cell, baseline.name, measure)
        cell = Cell(0, max(study.agents), 0.0)
        crowd = [x for x in record.lines if x["key"] == f"{cell.name}.{CROWD}"]
        if crowd:
            baseline = next(b for b in study.baselines if b.name == CROWD)
            round_s = crowd[0]["rounds"][-1]["round_s"]
            prompts = strangers(session(cell).rounds[-1], words)
            record.once(cell, STRANGERS, lambda: _spread_out(fleet, baseline, prompts, round_s))
        return record.lines, fleet.skipped


def _measure(
    fleet: Fleet, baseline: Baseline, cell: Cell, session: Callable[[Cell], Session]
) -> Line | None:
    engine = fleet.get(baseline)
    if engine is None:
        return None
    results = play(engine, baseline, session(cell), f"{cell.name}.{baseline.name}", cell.qps)
    return _figures(engine, results[1:] or results, cell.qps)


def _spread_out(
    fleet: Fleet, baseline: Baseline, prompts: Sequence[Prompt], seconds: float
) -> Line | None:
    """Independent requests that arrive evenly over some time."""
    engine = fleet.get(baseline)
    if engine is None:
        return None
    rate = len(prompts) / seconds
    calls = [Call(f"{p.agent}", p.ids, p.output, None, i / rate) for i, p in enumerate(prompts)]
    return _figures(engine, [engine.round(calls)], rate)


def _figures(engine: EngineProcess, results: Sequence[RoundResult], qps: float) -> Line:
    return {"dtype": engine.ready().dtype, "rounds": [figures(r, qps) for r in results]}


def figures(result: RoundResult, qps: float) -> dict[str, Any]:
    """One round as plain data; seconds of an agent count from its arrival, in order of arrival."""
    arrivals = [i / qps if qps else 0.0 for i in range(len(result.calls))]
    return {
        "round_s": max(call.finish_s for call in result.calls),
        "wall_s": result.total_wall_s,
        "cpu_s": result.total_cpu_s,
        "ttft_s": [call.first_token_s - at for call, at in zip(result.calls, arrivals)],
        "latency_s": [call.finish_s - at for call, at in zip(result.calls, arrivals)],
        "peak_pages": result.peak_pages,
        "mean_pages": result.mean_pages,
        "preemptions": result.preemptions,
        "computed": sum(rows_by_source(call)["computed"] for call in result.calls),
    }


# -- from cells to the result ---------------------------------------------------------------------


def summarise(
    lines: Sequence[Line], engines: Sequence[str], skipped: Mapping[str, str], target_s: float
) -> dict[str, Any]:
    """Rows, the largest numbers of agents under the target, and figure 2."""
    rows = list(_rows(lines, engines))
    largest = []
    for engine in engines:
        for qps in sorted({row["qps"] for row in rows if row["engine"] == engine}):
            mine = [r for r in rows if (r["engine"], r["qps"]) == (engine, qps)]
            found = under([(r["agents"], r["round_s"]["median"]) for r in mine], target_s)
            largest.append({"engine": engine, "qps": qps, **found._asdict()})
    return {"rows": rows, "largest": largest, **by_index(lines), "skipped": dict(skipped)}


def _rows(lines: Sequence[Line], engines: Sequence[str]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[int, float, int], list[dict[str, Any]]] = {}
    for line in lines:
        if line["engine"] in engines:
            key = (engines.index(line["engine"]), line["qps"], line["agents"])
            groups.setdefault(key, []).extend(line["rounds"])
    for (engine, qps, agents), rounds in sorted(groups.items()):
        pooled = {n: [s for r in rounds for s in r[n]] for n in ("ttft_s", "latency_s")}
        yield {
            "engine": engines[engine],
            "agents": agents,
            "qps": qps,
            "round_s": spread([r["round_s"] for r in rounds]),
            "cpu_s": spread([r["cpu_s"] for r in rounds]),
            **{name: spread(seconds) for name, seconds in pooled.items()},
            "peak_pages": max(r["peak_pages"] for r in rounds),
            "mean_pages": round(fmean(r["mean_pages"] for r in rounds), 1),
            "preemptions": round(fmean(r["preemptions"] for r in rounds), 1),
            "computed": median(r["computed"] for r in rounds),
        }


class Under(NamedTuple):
    """agents: the largest measured number that meets a target, 0 if none does. interpolated: where
    the line through the measured points crosses it; `agents` if no larger number was measured."""

    agents: int
    interpolated: float


def under(points: Sequence[tuple[int, float]], target_s: float) -> Under:
    """How many agents meet the target; points: (agents, seconds), of no agents 0 seconds."""
    measured = sorted([(0, 0.0), *points])
    last = max(i for i, (_, seconds) in enumerate(measured) if seconds <= target_s)
    agents, seconds = measured[last]
    if last + 1 == len(measured):
        return Under(agents, float(agents))
    beyond, their_seconds = measured[last + 1]
    share = (target_s - seconds) / (their_seconds - seconds)
    return Under(agents, round(agents + share * (beyond - agents), 2))


def by_index(lines: Sequence[Line]) -> dict[str, Any]:
    """Figure 2: seconds from arrival to the end, in order of arrival, and pages at the peak."""
    independent = next((line for line in lines if line["engine"] == STRANGERS), None)
    if independent is None:
        return {"latency_by_index": []}
    name = independent["key"].replace(STRANGERS, CROWD)
    crowd = next(line for line in lines if line["key"] == name)
    kinds = {"agents": crowd["rounds"][-1], "independent": independent["rounds"][-1]}
    return {
        "latency_by_index": [
            {"kind": kind, "index": index, "latency_s": round(seconds, 4)}
            for kind, figures in kinds.items()
            for index, seconds in enumerate(figures["latency_s"])
        ],
        "peak_pages_by_kind": {kind: figures["peak_pages"] for kind, figures in kinds.items()},
    }
