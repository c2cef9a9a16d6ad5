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
    """Figure 2. Raises ValueError if the run had no independent requests."""
    run = runs[0]
    rows: Rows = run["latency_by_index"]
    times = {kind: [r["latency_s"] for r in rows if r["kind"] == kind] for kind in KINDS}
    if not all(times.values()):
        raise ValueError("it has no latencies by request")
    late = {kind: quantiles(t, n=100, method="inclusive")[-1] for kind, t in times.items()}
    series = [
        Series(*KINDS[kind], [Point(*pair) for pair in enumerate(t)], marks=len(t) < 40)
        for kind, t in times.items()
    ]
    cells = [
        (KINDS[kind][0], str(len(t)), f"{min(t):.2f}", f"{late[kind]:.2f}", f"{max(t):.2f}")
        for kind, t in times.items()
    ]
    y = Axis(f"{_seconds(run)} until its answer is complete")
    ratio = late["agents"] / late["independent"]
    return Figure(
        "250 requests on 80 GB: those of ten sessions reach a P99 of 136 s and fill 99.3 % of the "
        "pool (41.5 GiB); as many independent ones rise to 125 s and need 59.2 % (24.8 GiB).",
        f"On plain vLLM the P99 of {cells[0][1]} requests of agents is {ratio:.2f} times that of "
        "as many independent ones"
        + (": a pressure that sharing can take away." if ratio > 1 else "; agents wait no longer."),
        "This is plain vLLM alone, so there is nothing of ours to win or lose here.",
        [lines(series, Axis("request, in order of arrival"), y), *_pages_by_kind(run)],
        [Table(("kind", "requests", "fastest", "P99", "slowest"), cells)],
    )


def _pages_by_kind(run: Run) -> Iterator[str]:
    pages = run.get("peak_pages_by_kind")
    if pages:
        own = [Bar(*KINDS[kind], count) for kind, count in pages.items()]
        pool = Mark(f"pool, {run['pool_pages']} pages", "bound", run["pool_pages"])
        yield bars([Group("", own)], Axis("KV pages at the peak"), [pool])


def agents(runs: Sequence[Run]) -> Figure:
    """Figure 10."""
    run = runs[0]
    rows: Rows = run["rows"]
    rates = sorted({row["qps"] for row in rows})
    largest = {(x["engine"], x.get("qps", rates[0])): x for x in run["largest"]}
    plots = [_latency(run, rate) for rate in rates]
    plots += [_largest(run, largest, rates), _pages(rows, rates[0], run["pool_pages"])]
    return Figure(
        "Rounds within 1.5 s: up to 2.7 times the agents of vLLM with prefix caching, and up to "
        "2.3 times lower round latency (A100, Qwen2.5-7B and 14B, 1 to 10 agents, QPS 1 to 16).",
        _read(run, largest, rates[0]),
        several(
            _losses(rows), "At no measured point was another engine's round faster or smaller."
        ),
        plots,
        [_table(rows), *_skipped(run)],
        list(_glance(run, largest, rates[0])),
    )


def _seconds(run: Run) -> str:
    """On the machine these were measured on, seconds may be the engine's processor time."""
    return "processor seconds" if run.get("clock") == "cpu" else "seconds"


def _within(run: Run) -> str:
    return f"{run['target_s']:g} {_seconds(run)}"


def up_to(run: Run, found: Mapping[str, Any]) -> str:
    """Agents under the target; nothing larger was measured where the largest number meets it."""
    most = max(row["agents"] for row in run["rows"] if row["engine"] == found["engine"])
    if found["agents"] == most:
        return f"{most} or more"
    return f"{found['interpolated']:.1f}"


def _name(engine: str) -> str:
    return ENGINES.get(engine, (engine, ""))[0]


def when(rate: float) -> str:
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


def _latency(run: Run, rate: float) -> str:
    return lines(
        _series(run["rows"], rate, "round_s"),
        Axis(f"agents ({when(rate)})"),
        Axis(f"{_seconds(run)} a round"),
        [Mark(f"target, {_within(run)}", "bound", run["target_s"])],
    )


def _pages(rows: Rows, rate: float, pool: int) -> str:
    return lines(
        _series(rows, rate, "peak_pages"),
        Axis(f"agents ({when(rate)})"),
        Axis("KV pages at the peak"),
        [Mark(f"pool, {pool} pages", "bound", pool)],
    )


def _largest(run: Run, largest: Largest, rates: Sequence[float]) -> str:
    groups = []
    for rate in rates:
        found = [(e, largest[e, rate]) for e in ENGINES if (e, rate) in largest]
        own = [Bar(*ENGINES[e], x["interpolated"], text=up_to(run, x)) for e, x in found]
        groups.append(Group(when(rate), own))
    return bars(groups, Axis(f"agents within {_within(run)} (interpolated)"))


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


def _read(run: Run, largest: Largest, rate: float) -> str:
    found = [(e, largest[e, rate]) for e in ENGINES if (e, rate) in largest]
    texts = ", ".join(f"{_name(engine)} {up_to(run, x)}" for engine, x in found)
    return (
        f"Agents whose rounds stay within {_within(run)}, in {run['pool_pages']} pages of "
        f"{run['page_size']} tokens: {texts}."
    )


def _losses(rows: Rows) -> list[str]:
    found = []
    for row in rows:
        ours = _cell(rows, "tokendance", row["agents"], row["qps"])
        if ours is None:
            continue
        theirs, mine = (f"{middle(r['round_s']):.2f}" for r in (row, ours))
        if float(theirs) < float(mine):
            found.append(
                f"{_name(row['engine'])} is faster with {row['agents']} agents, "
                f"{when(row['qps'])}: {theirs} s against {mine} s"
            )
    size = max(row["agents"] for row in rows)
    ours = next((r for r in rows if (r["engine"], r["agents"]) == ("tokendance", size)), None)
    return found + [
        f"{_name(r['engine'])} needs {r['peak_pages']} pages with {size} agents, we "
        f"{ours['peak_pages']}"
        for r in rows
        if ours and (r["agents"], r["qps"]) == (size, ours["qps"])
        if r["peak_pages"] < ours["peak_pages"]
    ]


def _table(rows: Rows) -> Table:
    cells = [
        (
            _name(r["engine"]),
            str(r["agents"]),
            when(r["qps"]),
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


def _glance(run: Run, largest: Largest, rate: float) -> Iterator[Glance]:
    plain, ours = (largest.get((e, rate)) for e in ("prefix", "tokendance"))
    if plain and ours and plain["interpolated"]:
        ratio = ours["interpolated"] / plain["interpolated"]
        least = ">= " if up_to(run, ours).endswith("more") else ""
        what = f"agents within {_within(run)}, over vLLM with prefix caching"
        yield Glance(what, "up to 2.7x", f"{least}{ratio:.2f}x", holds=ratio >= 2.7)
    common = _most_common(run["rows"], rate)
    if common:
        size, plain_s, our_s = common
        ratio = plain_s / our_s
        what = f"round latency of {size} agents, vLLM over TokenDance"
        yield Glance(what, "up to 2.3x", f"{ratio:.2f}x", holds=ratio >= 2.3)
