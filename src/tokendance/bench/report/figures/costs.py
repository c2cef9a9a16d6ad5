"""Memory pressure, prefill and requests that share nothing (pressure, prefill, overhead)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokendance.bench.report.model import Figure, Glance, Run, Table, ends, middle, ranged, several
from tokendance.bench.report.svg import Axis, Bar, Group, Mark, Point, Series, bars, lines

MODES = {
    "plain": ("plain vLLM", "c2"),
    "recompute": ("TokenDance, recomputed", "c1"),
    "restore": ("TokenDance, from the store", "ours"),
}
COMPUTED = ("rows_computed", "rows computed")
STATES = {"cold": "nothing cached", "warm": "histories cached"}
DELAYS = {
    "decode_p50_ms": "median",
    "decode_p99_ms": "99th percentile",
    "decode_max_ms": "longest",
}


def pressure(runs: Sequence[Run]) -> Figure:
    """What a store below the pool saves when the pool is too small."""
    run = runs[0]
    rows = sorted(run["rows"], key=lambda r: r["round"])
    wall, cpu, plain = run["round_ratio"], run["cpu_ratio"], run.get("plain_round_ratio")
    against = f"; plain vLLM takes {ranged(plain)} times as long" if plain else ""
    slower = [
        f"{what} of {than} is {middle(ratio):.2f} times ours"
        for what, than, ratio in (
            ("a round", "TokenDance without a store", wall),
            ("the processor time", "TokenDance without a store", cpu),
            ("a round", "plain vLLM", plain),
        )
        if ratio and middle(ratio) < 1
    ]
    return Figure(
        "Not measured apart; the paper's gain in agents contains it.",
        f"With {run['agents']} agents in {run['pool_pages']} pages, recomputing takes "
        f"{ranged(wall)} times as long as restoring, and {ranged(cpu)} times the processor "
        f"time{against}.",
        several(slower, "Restoring is never slower than recomputing here, in the median."),
        [_by_round(rows, "cpu_s", "CPU seconds a round"), _by_round(rows, *COMPUTED)],
        [_pressure_table(rows)],
        [
            Glance(f"a round under pressure, {name} over restore", "not stated", f"{value}x")
            for name, value in (
                ("recompute", ranged(wall)),
                *([("plain vLLM", ranged(plain))] if plain else []),
            )
        ],
    )


def _by_round(rows: Sequence[Run], field: str, label: str) -> str:
    series = [
        Series(*look, [Point(r["round"], middle(r[field])) for r in rows if r["mode"] == mode])
        for mode, look in MODES.items()
        if any(r["mode"] == mode for r in rows)
    ]
    return lines(series, Axis("round"), Axis(label))


def _pressure_table(rows: Sequence[Run]) -> Table:
    cells = [
        (
            MODES[r["mode"]][0],
            str(r["round"]),
            ranged(r["round_s"]),
            ranged(r["cpu_s"]),
            f"{middle(r['rows_computed']):.0f}",
            f"{middle(r['rows_stored']):.0f}",
        )
        for r in rows
    ]
    return Table(("", "round", "round s", "CPU s", "rows computed", "rows stored"), cells)


def prefill(runs: Sequence[Run]) -> Figure:
    """One synthetic round, and rounds of the paper's size; a file may hold either or both."""
    run = runs[0]
    large = run.get("paper", [])
    below = [
        f"{r['trace']} reaches {middle(r['cpu_ratio']):.2f}x, its shared rows allow "
        f"{r['row_bound']:.2f}x"
        for r in large
        if middle(r["cpu_ratio"]) < r["row_bound"]
    ]
    plots = [_states(run)] if "shape" in run else []
    tables = [_state_table(run)] if "shape" in run else []
    if large:
        plots.append(_large(large))
        tables.append(_large_table(large))
    return Figure(
        "Prefill is up to 1.9 times as fast as CacheBlend request by request.",
        " ".join(_prefill_words(run, large)),
        several(below, "Nothing in time; what is lost is exactness (the KL in the table)."),
        plots,
        tables,
        list(_prefill_glance(run, large)),
    )


def _prefill_words(run: Run, large: Sequence[Run]) -> Iterator[str]:
    if "shape" in run:
        shape = run["shape"]
        yield (
            f"The prefill of {shape['agents']} agents with {shape['blocks']} x {shape['block']} "
            f"shared and {shape['private']} own tokens takes "
            f"1/{middle(run['warm']['cpu_ratio']):.1f} of the processor time of vLLM with prefix "
            "caching once the histories are cached."
        )
    if large:
        low, high = (f(middle(r["cpu_ratio"]) for r in large) for f in (min, max))
        yield f"Rounds of the paper's size: {low:.2f} to {high:.2f} times as fast."


def _prefill_glance(run: Run, large: Sequence[Run]) -> Iterator[Glance]:
    paper = "1.9x (over CacheBlend)"
    for key, name in STATES.items() if "shape" in run else ():
        what = f"prefill of a round of {run['shape']['agents']} over plain vLLM, {name}"
        yield Glance(what, paper, ranged(run[key]["cpu_ratio"]) + "x")
    for r in large:
        what = f"prefill of {r['agents']} agents over plain vLLM, {r['trace']}"
        yield Glance(what, paper, ranged(r["cpu_ratio"]) + "x", f"{r['row_bound']:.2f}x by rows")


def _state_table(run: Run) -> Table:
    cells = [
        (n, ranged(run[k]["cpu_ratio"]), ranged(run[k]["wall_ratio"]), ranged(run[k]["kl_mean"], 4))
        for k, n in STATES.items()
    ]
    return Table(("", "CPU", "wall", "followers' KL"), cells)


def _large_table(rows: Sequence[Run]) -> Table:
    cells = [
        (r["trace"], str(r["agents"]), f"{r['row_bound']:.2f}", ranged(r["cpu_ratio"]))
        for r in rows
    ]
    return Table(("trace", "N", "bound, by shared rows", "CPU, over plain"), cells)


def _states(run: Run) -> str:
    groups = [
        Group(
            name,
            [
                _ratio_bar("CPU", "ours", run[key]["cpu_ratio"]),
                _ratio_bar("wall", "c1", run[key]["wall_ratio"]),
            ],
        )
        for key, name in STATES.items()
    ]
    paper = Mark("paper, 1.9x over CacheBlend", "paper", 1.9)
    return bars(groups, Axis("times, plain vLLM over TokenDance"), [paper])


def _ratio_bar(name: str, colour: str, ratio: Run) -> Bar:
    low, high = ends(ratio)
    return Bar(name, colour, middle(ratio), low, high, f"{middle(ratio):.2f}x")


def _large(rows: Sequence[Run]) -> str:
    groups = [
        Group(
            f"{r['trace']} (N = {r['agents']})",
            [
                _ratio_bar("CPU, measured", "ours", r["cpu_ratio"]),
                Bar(
                    "bound, by shared rows", "bound", r["row_bound"], text=f"{r['row_bound']:.2f}x"
                ),
            ],
        )
        for r in rows
    ]
    return bars(groups, Axis("times, plain vLLM over TokenDance"))


def overhead(runs: Sequence[Run]) -> Figure:
    """What the add-on costs where it cannot help, and requests that decode beside a round."""
    run = runs[0]
    cpu, wall = run["cpu_ratio"], run["wall_ratio"]
    ratio = Group(
        f"{run['requests']} requests of {run['tokens']} tokens, {run['repetitions']} repetitions",
        [_ratio_bar("CPU", "ours", cpu), _ratio_bar("wall", "c1", wall)],
    )
    plots = [
        bars([ratio], Axis("times, TokenDance over plain vLLM"), [Mark("no cost", "bound", 1.0)])
    ]
    tables = [Table(("", "x"), [("CPU", ranged(cpu, 3)), ("wall", ranged(wall, 3))])]
    worse = [f"CPU {middle(cpu):.3f}x"] if middle(cpu) > 1 else []
    beside = run.get("bystander")
    if beside:
        plots.append(_bystander(beside))
        tables.append(_delays(beside))
        worse += [
            f"the {name} delay of a bystander's token is {_both(beside[key])}"
            for key, name in DELAYS.items()
            if middle(beside[key]["tokendance"]) > middle(beside[key]["plain"])
        ]
    return Figure(
        "Falls back to the ordinary path without loss of performance; no number is given.",
        f"Requests that share nothing cost {ranged(cpu, 3)} times the processor time of plain "
        "vLLM; a range that holds 1 means that no cost can be told from the machine's noise.",
        several(worse, "No measured median is worse than plain vLLM's."),
        plots,
        tables,
        [Glance("CPU of requests that share nothing", "no loss", f"{ranged(cpu, 3)}x", "1x")],
    )


def _both(delay: Run) -> str:
    return f"{middle(delay['tokendance']):.0f} ms instead of {middle(delay['plain']):.0f} ms"


def _bystander(beside: Run) -> str:
    groups = [
        Group(
            f"delay of a token, {name}",
            [
                Bar(who, colour, middle(beside[key][side]), *ends(beside[key][side]))
                for side, who, colour in (
                    ("plain", "beside plain vLLM's round", "c1"),
                    ("tokendance", "beside TokenDance's round", "ours"),
                )
            ],
        )
        for key, name in DELAYS.items()
    ]
    return bars(groups, Axis("ms from token to token of a request beside a round"))


def _delays(beside: Run) -> Table:
    rows = [
        (name, ranged(beside[key]["plain"], 1), ranged(beside[key]["tokendance"], 1))
        for key, name in DELAYS.items()
    ]
    return Table(("a bystander's delay, ms", "plain vLLM", "TokenDance"), rows)
