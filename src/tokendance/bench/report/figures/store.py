"""Figures 12 and 13, and the store under churn (storage.json, restore.json, churn.json)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from tokendance.bench.report.model import Figure, Glance, Run, Table, several
from tokendance.bench.report.svg import Axis, Bar, Group, Mark, Point, Series, bars, lines

METHODS = {
    "region": ("region (our default)", "ours"),
    "blocks": ("15 % recomputed, whole blocks", "c1"),
    "tokens": ("15 % recomputed, token by token", "c2"),
}


def storage(runs: Sequence[Run]) -> Figure:
    """Figure 12, from the last round of every trace."""
    rows = list({(r["trace"], r["method"]): r for r in runs[0]["rows"]}.values())
    ours = [r for r in rows if r["method"] == "region"]
    best = max(ours, key=lambda r: r["mirror_ratio"])
    least = min(r["of_bound"] for r in ours)
    size, mirror = best["agents"], best["mirror_ratio"]
    return Figure(
        "A full cache is 11.2 (7B) or 17.5 (14B) times a mirror, whose 53 to 60 changed blocks are "
        "some 10 % of it. For a whole family that would take more agents than there were.",
        f"Whole families reach at least {least:.0%} of what their private share allows; one mirror "
        f"takes 1/{mirror:.1f} of a full cache at best ({_trace(best)}, {size} agents). The share "
        "that agents have in common decides, not the method.",
        several(_storage_losses(rows), "Nothing."),
        [_mirrors(rows), _families(ours)],
        [_storage_table(ours)],
        [
            Glance(
                f"full cache over one mirror, best trace ({size} agents)",
                "11.2x / 17.5x",
                f"{mirror:.1f}x",
                f"{1 / best['private_share']:.1f}x",
                mirror >= 17.5,
            ),
            Glance(
                f"full caches over their whole family, same trace ({size} agents)",
                "not stated",
                f"{best['family_ratio']:.2f}x",
                f"{best['bound']:.2f}x",
            ),
        ],
    )


def _mirrors(rows: Sequence[Run]) -> str:
    curve = [Point(0.05 + 0.01 * i, 1 / (0.05 + 0.01 * i)) for i in range(96)]
    bound = Series("bound, 1 / private share", "bound", curve, marks=False, dashed=True)
    series = [
        Series(
            name,
            colour,
            [Point(r["private_share"], r["mirror_ratio"]) for r in rows if r["method"] == method],
            line=False,
        )
        for method, (name, colour) in METHODS.items()
    ]
    return lines(
        [*series, bound],
        Axis("private share of a prompt"),
        Axis("full cache over one mirror, times", log=True),
        [Mark("paper, 7B: 11.2x", "paper", 11.2), Mark("paper, 14B: 17.5x", "paper", 17.5)],
    )


def _trace(row: Run) -> str:
    return str(row["trace"]).rsplit(".", 1)[0]


def _families(rows: Sequence[Run]) -> str:
    """The traces of the larger size, if there are any."""
    large = [r for r in rows if r["trace"].startswith("paper/")] or rows
    groups = [
        Group(
            f"{_trace(r)} (N = {r['agents']})",
            [
                Bar("whole family", "ours", r["family_ratio"], text=f"{r['family_ratio']:.2f}"),
                Bar("its bound", "bound", r["bound"], text=f"{r['bound']:.2f}"),
            ],
        )
        for r in large
    ]
    return bars(groups, Axis("N full caches over the family's bytes"))


def _storage_losses(rows: Sequence[Run]) -> list[str]:
    found = []
    best = max(r["mirror_ratio"] for r in rows if r["method"] == "region")
    if best < 17.5:
        found.append(f"no trace reaches the paper's 17.5x a mirror (best {best:.1f}x)")
    tokens = [r["family_ratio"] for r in rows if r["method"] == "tokens"]
    if tokens:
        found.append(
            "scattered single-token recomputation leaves nothing to share "
            f"({max(tokens):.2f}x at best), whole blocks do"
        )
    little = [r for r in rows if r["method"] == "region" and r["family_ratio"] < 1.05]
    found += [f"{_trace(r)} shares too little and is kept dense" for r in little]
    return found


def _storage_table(rows: Sequence[Run]) -> Table:
    cells = [
        (
            _trace(r),
            str(r["agents"]),
            f"{r['private_share']:.1%}",
            f"{r['family_ratio']:.2f}",
            f"{r['bound']:.2f}",
            f"{r['of_bound']:.1%}",
            f"{r['mirror_ratio']:.2f}",
        )
        for r in rows
    ]
    header = ("trace", "N", "private", "family", "bound", "of bound", "mirror")
    return Table(header, cells)


def restore(runs: Sequence[Run]) -> Figure:
    """Figure 13."""
    rows, base = runs[0]["rows"], runs[0]["shape"]["private"]
    alone = [r for r in rows if r["private"] == base and not r["with_master"]]
    plain = dict(sorted({r["mirrors"]: r for r in reversed(alone)}.items()))
    low, high = (f(r["fused_over_dense"] for r in plain.values()) for f in (min, max))
    shares = [r["copy_share"] for r in plain.values()]
    return Figure(
        "Fused restore is 1.3 to 2.6 times as fast as building a dense copy first (0.43 instead of "
        "0.59 ms a mirror at 10 agents, a time too short for a PCIe transfer of the data).",
        f"Fused restore is {low:.2f} to {high:.2f} times as fast as dense restore, at "
        f"{min(shares):.0%} to {max(shares):.0%} of the speed of a plain copy of the same bytes; "
        "a master is loaded once, however many mirrors it has.",
        several(_restore_losses(plain), "Nothing slower than dense restore or a plain copy."),
        _restore_plots(plain, rows),
        [_restore_table(rows)],
        [
            Glance(
                f"fused over dense restore, {min(plain)} to {max(plain)} mirrors",
                "1.3-2.6x",
                f"{low:.2f}-{high:.2f}x",
                holds=low >= 1.3 and high >= 2.6,
            ),
            Glance("share of copy speed, median", "not stated", f"{median(shares):.0%}", "100%"),
        ],
    )


def _restore_plots(plain: Mapping[float, Run], rows: Sequence[Run]) -> list[str]:
    count = Axis("mirrors restored together", zero=False)
    plots = [
        lines(
            [
                _restore_series("wall time", plain, "fused_over_dense"),
                _restore_series("processor time", plain, "cpu_fused_over_dense", "c1"),
            ],
            count,
            Axis("times as fast as dense restore"),
            [Mark("paper, 1.3 to 2.6", "paper", 1.3, 2.6)],
        ),
        lines(
            [
                _restore_series("wall time", plain, "copy_share", times=100),
                _restore_series("processor time", plain, "cpu_copy_share", "c1", 100),
            ],
            count,
            Axis("% of the speed of a plain copy"),
            [Mark("bound, a plain copy", "bound", 100)],
        ),
    ]
    five = dict(sorted({r["private"]: r for r in rows if r["mirrors"] == 5}.items()))
    if len(five) > 1:
        swept = [
            _restore_series("over dense restore", five, "fused_over_dense"),
            _restore_series("over a plain copy", five, "copy_share", "c2"),
        ]
        plots.append(lines(swept, Axis("private share of 5 mirrors"), Axis("times as fast")))
    return plots


def _restore_series(
    name: str, rows: Mapping[float, Run], field: str, colour: str = "ours", times: float = 1
) -> Series:
    return Series(name, colour, [Point(at, times * row[field]) for at, row in rows.items()])


def _restore_losses(rows: dict[int, Run]) -> list[str]:
    found = [
        f"with {n} mirrors fused restore is slower than dense ({r['fused_over_dense']:.2f}x)"
        for n, r in rows.items()
        if r["fused_over_dense"] < 1
    ]
    least = min(rows, key=lambda n: rows[n]["copy_share"])
    share = rows[least]["copy_share"]
    if share < 1:
        found.append(f"a plain copy is faster everywhere, most with {least} of them ({share:.0%})")
    return found


def _restore_table(rows: Sequence[Run]) -> Table:
    cells = [
        (
            f"{r['mirrors']}{' + master' if r['with_master'] else ''}",
            f"{r['private']:.0%}",
            f"{r['fused_over_dense']:.2f} ({r['cpu_fused_over_dense']:.2f})",
            f"{r['copy_share']:.0%} ({r['cpu_copy_share']:.0%})",
            f"{1000 * r['seconds']['fused'] / (r['mirrors'] + r['with_master']):.1f}",
            f"{r['copy_gb_per_s']:.1f}",
            f"{r['loaded_masters']:.2f} / {r['allowed_masters']:.2f}",
        )
        for r in rows
    ]
    header = ("mirrors", "private", "over dense (CPU)", "of copy (CPU)", "ms a mirror")
    return Table((*header, "copy GB/s", "masters loaded / allowed"), cells)


def churn(runs: Sequence[Run]) -> Figure:
    """The store over many rounds."""
    run = runs[0]
    samples, grown = run["samples"], run["growth"]
    first = {name: max(1, samples[0][name]) for name in grown}
    names = {
        "held": ("host memory held", "ours"),
        "rss": ("resident memory", "c1"),
        "disk": ("bytes on disk", "c2"),
        "tables": ("table entries", "c3"),
    }
    series = [
        Series(*names[name], [Point(s["round"], s[name] / first[name]) for s in samples])
        for name in names
    ]
    most = max(grown, key=lambda name: grown[name])
    return Figure(
        "No such measurement.",
        f"After {run['rounds']} rounds of sessions that come and go nothing has grown; "
        f"{run['checked']} restored entries were compared, {run['wrong']} were wrong.",
        f"The largest of the second half over that of the first is highest for "
        f"{names[most][0]}: {grown[most]:.2f}.",
        [lines(series, Axis("rounds"), Axis("size over that of the first sample"))],
        [Table(("event", "times"), [(k, str(v)) for k, v in run["counters"].items()])],
        [Glance("wrong entries after churn", "not stated", f"{run['wrong']} of {run['checked']}")],
    )
