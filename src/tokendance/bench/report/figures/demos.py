"""Real traces on plain vLLM and on TokenDance (demo_*.json)."""

from __future__ import annotations

from collections.abc import Sequence

from tokendance.bench.report.model import Figure, Glance, Run, Table, maybe, several
from tokendance.bench.report.svg import Axis, Bar, Group, Mark, Point, Series, bars, lines

COLOURS = ("ours", "c1", "c2", "c3", "c4", "c5", "c6")


def demos(runs: Sequence[Run]) -> Figure:
    groups = [
        Group(
            f"{_name(run)} (N = {run['agents']})",
            [
                Bar(name, colour, run[key], text=f"{run[key]:.2f}x")
                for name, colour, key in (
                    ("prefill CPU after round 1", "ours", "prefill_cpu_ratio_steady"),
                    ("by rows marked as shared", "bound", "row_bound_steady"),
                    ("whole round, wall", "c1", "round_wall_ratio"),
                )
                if run[key] is not None
            ],
        )
        for run in runs
    ]
    by_round = [
        Series(
            _name(run),
            COLOURS[i % len(COLOURS)],
            [Point(r["round"] + 1, r["prefill_cpu_ratio"]) for r in run["by_round"]],
        )
        for i, run in enumerate(runs)
    ]
    best = max(runs, key=lambda run: run["round_wall_ratio"])
    even = [Mark("plain vLLM", "bound", 1.0)]
    return Figure(
        "Rounds with up to 2.3 times lower latency than vLLM with prefix caching.",
        f"A whole round, answers included, is up to {best['round_wall_ratio']:.2f} times as fast "
        f"({_name(best)}); the prefill alone gains more, and decoding gains nothing.",
        several(_losses(runs), "No round is slower than plain vLLM's."),
        [
            bars(groups, Axis("times, plain vLLM over TokenDance"), even),
            lines(
                by_round,
                Axis("round"),
                Axis("times, prefill CPU, plain vLLM over TokenDance"),
                even,
            ),
        ],
        [_table(runs)],
        [
            Glance(
                f"whole rounds of {_name(run)}, wall, vLLM over TokenDance",
                "up to 2.3x",
                f"{run['round_wall_ratio']:.2f}x",
                holds=run["round_wall_ratio"] >= 2.3,
            )
            for run in runs
        ],
    )


def _name(run: Run) -> str:
    return str(run["trace"]).removesuffix(".small")


def _losses(runs: Sequence[Run]) -> list[str]:
    slow = [
        f"round {r['round'] + 1} of {_name(run)} takes longer ({r['round_wall_ratio']:.2f}x)"
        for run in runs
        for r in run["by_round"]
        if r["round_wall_ratio"] < 1
    ]
    below = [
        f"{_name(run)} gains {run['prefill_cpu_ratio_steady']:.2f}x where its marked rows allow "
        f"{run['row_bound_steady']:.2f}x"
        for run in runs
        if run["row_bound_steady"] and run["prefill_cpu_ratio_steady"] < run["row_bound_steady"]
    ]
    return slow + below


def _table(runs: Sequence[Run]) -> Table:
    cells = [
        (
            _name(run),
            str(run["agents"]),
            str(run["rounds"]),
            "{:.1f} / {:.1f}".format(*run["prefill_cpu_s"]),
            "{:.1f} / {:.1f}".format(*run["round_wall_s"]),
            f"{run['plain_computed_tokens']} / {run['computed_tokens']}",
            maybe(run["kl_mean"], ".4f"),
            maybe(run["top1"], ".3f"),
        )
        for run in runs
    ]
    header = ("trace", "N", "rounds", "prefill CPU s, plain / ours", "wall s, plain / ours")
    return Table((*header, "tokens computed, plain / ours", "followers' KL", "top-1"), cells)
