"""Figures 2 and 10: latency by request, and agents in a pool of fixed size (capacity.json)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import quantiles
from typing import Any

from tokendance.bench.report.model import (
    ENGINES,
    Figure,
    Glance,
    Run,
    Table,
    ends,
    middle,
    ranged,
    several,
)
from tokendance.bench.report.svg import Axis, Bar, Group, Mark, Point, Series, bars, lines

KINDS = {"agents": ("agents of one session", "ours"), "independent": ("independent", "c1")}

Rows = Sequence[Mapping[str, Any]]
Largest = Mapping[tuple[str, float], Mapping[str, Any]]


def latency_by_index(runs: Sequence[Run]) -> Figure:
    """Figure 2."""
    rows: Rows = runs[0]["latency_by_index"]
    series, table, last = [], [], {}
    for kind, (name, colour) in KINDS.items():
        found = sorted((r["index"], r["latency_s"]) for r in rows if r["kind"] == kind)
        if found:
            series.append(Series(name, colour, [Point(*p) for p in found], marks=len(found) < 40))
            times = [latency for _, latency in found]
            last[kind] = quantiles(times, n=100, method="inclusive")[-1] if times[1:] else times[0]
            cells = (f"{min(times):.2f}", f"{last[kind]:.2f}", f"{max(times):.2f}")
            table.append((name, str(len(times)), *cells))
    ratio = last["agents"] / last["independent"]
    return Figure(
        "250 requests on 80 GB: those of ten sessions reach a P99 of 136 s and fill 99.3 % of the "
        "pool (41.5 GiB); as many independent ones rise to 125 s and need 59.2 % (24.8 GiB).",
        f"On plain vLLM the P99 of {table[0][1]} requests of agents is {ratio:.2f} times that of "
        "as many independent ones: that is the pressure that sharing can take away.",
        "This is plain vLLM alone, so there is nothing of ours to win or lose here.",
        [
            lines(
                series,
                Axis("request, in order of arrival"),
                Axis("seconds until its answer is complete"),
            )
        ],
        [Table(("kind", "requests", "fastest s", "P99 s", "slowest s"), table)],
    )


def agents(runs: Sequence[Run]) -> Figure:
    """Figure 10."""
    run = runs[0]
    rows: Rows = run["rows"]
    rates = sorted({row["qps"] for row in rows})
    target, pool = run["target_s"], run["pool_pages"]
    largest = {(x["engine"], x.get("qps", rates[0])): x for x in run["largest"]}
    plots = [_latency(rows, rate, target) for rate in rates]
    plots += [_largest(largest, rates, target), _pages(rows, rates[0], pool)]
    return Figure(
        "Rounds within 1.5 s: up to 2.7 times the agents of vLLM with prefix caching, and up to "
        "2.3 times lower round latency (A100, Qwen2.5-7B and 14B, 1 to 10 agents, QPS 1 to 16).",
        _read(rows, largest, rates[0], run),
        several(_losses(rows), "At no measured point was another engine's round faster."),
        plots,
        [_table(rows), *_skipped(run)],
        list(_glance(rows, largest, rates[0], target)),
    )


def _name(engine: str) -> str:
    return ENGINES.get(engine, (engine, ""))[0]


def _when(rate: float) -> str:
    return "all at once" if not rate else f"{rate:g} a second"


def _engines(rows: Rows) -> list[str]:
    present = {row["engine"] for row in rows}
    return [engine for engine in ENGINES if engine in present]


def _series(rows: Rows, rate: float, field: str) -> list[Series]:
    found = []
    for engine in _engines(rows):
        own = sorted(
            (r for r in rows if r["engine"] == engine and r["qps"] == rate),
            key=lambda r: r["agents"],
        )
        if own:
            points = [Point(r["agents"], middle(r[field]), *ends(r[field])) for r in own]
            found.append(Series(*ENGINES[engine], points))
    return found


def _latency(rows: Rows, rate: float, target: float) -> str:
    return lines(
        _series(rows, rate, "round_s"),
        Axis(f"agents ({_when(rate)})"),
        Axis("seconds a round"),
        [Mark(f"target, {target:g} s", "bound", target)],
    )


def _pages(rows: Rows, rate: float, pool: int) -> str:
    return lines(
        _series(rows, rate, "peak_pages"),
        Axis(f"agents ({_when(rate)})"),
        Axis("KV pages at the peak"),
        [Mark(f"pool, {pool} pages", "bound", pool)],
    )


def _largest(largest: Largest, rates: Sequence[float], target: float) -> str:
    groups = []
    for rate in rates:
        found = [(e, largest[e, rate]["interpolated"]) for e in ENGINES if (e, rate) in largest]
        own = [Bar(*ENGINES[engine], value, text=f"{value:.1f}") for engine, value in found]
        groups.append(Group(_when(rate), own))
    return bars(groups, Axis(f"agents within {target:g} s (interpolated)"))


def _cell(rows: Rows, engine: str, agents: int, rate: float) -> Mapping[str, Any] | None:
    return next(
        (r for r in rows if (r["engine"], r["agents"], r["qps"]) == (engine, agents, rate)), None
    )


def _most_common(rows: Rows, rate: float) -> tuple[int, float, float] | None:
    """(agents, seconds of plain vLLM, our seconds) for the largest round that both ran."""
    sizes = sorted({r["agents"] for r in rows if r["qps"] == rate}, reverse=True)
    for size in sizes:
        plain, ours = (_cell(rows, e, size, rate) for e in ("prefix", "tokendance"))
        if plain and ours:
            return size, middle(plain["round_s"]), middle(ours["round_s"])
    return None


def _read(rows: Rows, largest: Largest, rate: float, run: Run) -> str:
    ours = largest["tokendance", rate]["interpolated"]
    others = ", ".join(
        f"{_name(e)} {x['interpolated']:.1f}"
        for (e, r), x in largest.items()
        if r == rate and e != "tokendance"
    )
    return (
        f"With {run['pool_pages']} pages of {run['page_size']} tokens, TokenDance keeps "
        f"{ours:.1f} agents within {run['target_s']:g} s a round; {others}."
    )


def _losses(rows: Rows) -> list[str]:
    found = []
    for row in rows:
        ours = _cell(rows, "tokendance", row["agents"], row["qps"])
        if ours is not None and middle(row["round_s"]) < middle(ours["round_s"]):
            found.append(
                f"{_name(row['engine'])} is faster with {row['agents']} agents, "
                f"{_when(row['qps'])}: {middle(row['round_s']):.2f} s against "
                f"{middle(ours['round_s']):.2f} s"
            )
    return found


def _table(rows: Rows) -> Table:
    cells = [
        (
            _name(r["engine"]),
            str(r["agents"]),
            _when(r["qps"]),
            ranged(r["round_s"]),
            ranged(r["cpu_s"]),
            ranged(r["ttft_s"]),
            f"{r['peak_pages']} / {r['mean_pages']:.0f}",
            str(r["preemptions"]),
        )
        for r in sorted(rows, key=lambda r: (r["qps"], r["agents"]))
    ]
    header = ("engine", "agents", "arrival", "round s", "CPU s", "first token s")
    return Table((*header, "pages, peak / mean", "preemptions"), cells)


def _skipped(run: Run) -> list[Table]:
    skipped = [(_name(engine), why) for engine, why in run.get("skipped", {}).items()]
    return [Table(("left out", "why"), skipped)] if skipped else []


def _glance(rows: Rows, largest: Largest, rate: float, target: float) -> Iterator[Glance]:
    plain, ours = (largest.get((e, rate)) for e in ("prefix", "tokendance"))
    if plain and ours and plain["interpolated"]:
        ratio = ours["interpolated"] / plain["interpolated"]
        what = f"agents within the target ({target:g} s), over vLLM with prefix caching"
        yield Glance(what, "up to 2.7x", f"{ratio:.2f}x", holds=ratio >= 2.7)
    common = _most_common(rows, rate)
    if common:
        size, plain_s, our_s = common
        ratio = plain_s / our_s
        what = f"round latency of {size} agents, vLLM over TokenDance"
        yield Glance(what, "up to 2.3x", f"{ratio:.2f}x", holds=ratio >= 2.3)
