"""Recovery backends on the same rounds (backends.json)."""

from __future__ import annotations

from collections.abc import Sequence

from tokendance.bench.report.model import Figure, Run, Table, several
from tokendance.bench.report.svg import Axis, Point, Series, lines

COLOURS = ("ours", "c1", "c2", "c3", "c4", "c5", "c6")


def backends(runs: Sequence[Run]) -> Figure:
    summary = runs[0]["summary"]
    groups = [(over, _of(summary, over)) for over in _overs(summary)]
    full = [(over, rows) for over, rows in groups if len(rows) > 2] or groups
    (over, agents), rows = full[-1]
    region = next(r for r in rows if r["backend"] == "region")
    return Figure(
        "CacheBlend's selective recomputation is the only backend measured.",
        f"Right and low is better: `region` needs 1/{region['cpu_ratio_plain']:.1f} of plain "
        f"prefill's processor time at a KL of {region['kl_end']:.4f} ({agents} agents, mean of "
        f"{region['rounds']} {over}).",
        several(
            [loss for _, rows in groups for loss in _losses(rows)],
            "No backend is closer to plain computation than `region`, nor faster.",
        ),
        [_scatter(name, rows) for name, rows in full],
        [_table(summary)],
    )


def _scatter(over: tuple[str, int], rows: Sequence[Run]) -> str:
    """Shares recomputed stand beside the points. What is exact has no place on a log scale."""
    kinds = list(dict.fromkeys((r["backend"], r["source"]) for r in rows if r["kl_end"] > 0))
    series = [
        Series(
            f"{kind[0]} ({kind[1]})",
            COLOURS[i % len(COLOURS)],
            [
                Point(r["cpu_ratio_plain"], r["kl_end"], text=f"{r['ratio']:.0%}")
                for r in rows
                if (r["backend"], r["source"]) == kind and r["kl_end"] > 0
            ],
            line=False,
        )
        for i, kind in enumerate(kinds)
    ]
    x = Axis(f"times as fast as plain prefill (CPU; {over[0]}, {over[1]} agents)")
    return lines(series, x, Axis("KL at the first answer token", log=True), height=290)


def _overs(summary: Sequence[Run]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((r["over"], r["agents"]) for r in summary))


def _of(summary: Sequence[Run], over: tuple[str, int]) -> list[Run]:
    return [r for r in summary if (r["over"], r["agents"]) == over]


def _losses(rows: Sequence[Run]) -> list[str]:
    """Of the same rounds, whoever is closest and whoever is fastest, if that is not the region."""
    region = next((r for r in rows if r["backend"] == "region"), None)
    if region is None:
        return []
    over = f"{region['over']} of {region['agents']}"
    closest = min((r for r in rows if r["ratio"] < 1), key=lambda r: r["kl_end"])
    fastest = max(rows, key=lambda r: r["cpu_ratio_plain"])
    found = []
    if closest["kl_end"] < region["kl_end"]:
        kl = f"KL {closest['kl_end']:.4f}, region {region['kl_end']:.4f}"
        found.append(f"on {over} {_name(closest)} is closer ({kl})")
    if fastest["cpu_ratio_plain"] > region["cpu_ratio_plain"]:
        times = f"{fastest['cpu_ratio_plain']:.1f}x plain, region {region['cpu_ratio_plain']:.1f}x"
        found.append(f"on {over} {_name(fastest)} is faster ({times})")
    return found


def _name(row: Run) -> str:
    return f"{row['backend']} {row['ratio']:.0%} ({row['source']})"


def _table(summary: Sequence[Run]) -> Table:
    cells = [
        (
            f"{r['rounds']} {r['over']} of {r['agents']}",
            _name(r),
            f"{r['kl_end']:.4f}",
            f"{r['kl_cont']:.4f}",
            f"{r['top1']:.3f}",
            f"{r['rows']:.0f}",
            f"{r['changed_blocks']:.0%}",
            f"{r['cpu_ratio_plain']:.2f}",
            f"{r['cpu_ratio_serial_cacheblend']:.2f}",
        )
        for r in summary
    ]
    header = ("rounds", "backend", "KL end", "KL after", "top-1", "rows", "changed blocks")
    return Table((*header, "x plain", "x serial CacheBlend"), cells)
