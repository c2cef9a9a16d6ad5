"""Figure 11: reuse of a whole round against request by request (collective.json)."""

from __future__ import annotations

from collections.abc import Sequence

from tokendance.bench.report.model import (
    Figure,
    Glance,
    Run,
    Table,
    ends,
    middle,
    ranged,
    several,
)
from tokendance.bench.report.svg import Axis, Mark, Point, Series, lines

PAPER = {3: 1.17, 5: 1.31, 10: 2.57, 15: 1.61, 20: 1.73}
"""Collective over serial at QPS 1, by agents."""

METHODS = {"region": ("TokenDance's region pass", "ours"), "cacheblend": ("CacheBlend", "c4")}


def collective(runs: Sequence[Run]) -> Figure:
    run = runs[0]
    rows = sorted(run["rows"], key=lambda r: r["agents"])
    names = [m for m in METHODS if any(r["backend"] == m for r in rows)]
    paper = Series("paper, QPS 1", "paper", [Point(*p) for p in PAPER.items()], dashed=True)
    even = [Mark("no gain", "bound", 1.0)]
    agents = Axis("agents", zero=False)
    table = [
        (
            METHODS[r["backend"]][0],
            str(r["agents"]),
            ranged(r["cpu_s"]),
            ranged(r["over_serial"]),
            ranged(r["over_plain"]),
        )
        for r in rows
    ]
    best = {m: max((r for r in rows if r["backend"] == m), key=_over_serial) for m in names}
    top = " and ".join(
        f"up to {_over_serial(r):.2f} times as fast with {METHODS[m][0]} ({r['agents']} agents)"
        for m, r in best.items()
    )
    return Figure(
        "A round at once is 1.17 (3 agents) to 2.57 times (10 agents) as fast as CacheBlend "
        "request by request at QPS 1, and 1.2 to 1.6 times above QPS 4.",
        f"In processor time a round at once is, over CacheBlend request by request, {top}.",
        several(_losses(rows), "No measured size is slower than serial reuse or plain prefill."),
        [
            lines(
                [*_series(rows, "over_serial"), paper],
                agents,
                Axis("times as fast as serial CacheBlend"),
                even,
            ),
            lines(
                _series(rows, "over_plain"), agents, Axis("times as fast as plain prefill"), even
            ),
        ],
        [Table(("in lock step", "agents", "CPU s", "over serial", "over plain"), table)],
        [
            Glance(
                f"a round at once over serial CacheBlend ({METHODS[m][0]})",
                "peak 2.57x",
                f"{_over_serial(r):.2f}x",
                holds=_over_serial(r) >= 2.57,
            )
            for m, r in best.items()
        ],
    )


def _over_serial(row: Run) -> float:
    return middle(row["over_serial"])


def _series(rows: Sequence[Run], field: str) -> list[Series]:
    found = []
    for method, (name, colour) in METHODS.items():
        own = [r for r in rows if r["backend"] == method]
        points = [Point(r["agents"], middle(r[field]), *ends(r[field])) for r in own]
        if points:
            found.append(Series(name, colour, points))
    return found


def _losses(rows: Sequence[Run]) -> list[str]:
    found = []
    for r in rows:
        name, size = METHODS[r["backend"]][0], r["agents"]
        for field, what in (("over_serial", "serial reuse"), ("over_plain", "plain prefill")):
            if middle(r[field]) < 1:
                found.append(
                    f"{name} is slower than {what} with {size} agents ({middle(r[field]):.2f}x)"
                )
        if r["backend"] == "region" and size in PAPER and middle(r["over_serial"]) < PAPER[size]:
            found.append(
                f"at {size} agents the gain is {middle(r['over_serial']):.2f}x, the paper's "
                f"{PAPER[size]:.2f}x"
            )
    return found
