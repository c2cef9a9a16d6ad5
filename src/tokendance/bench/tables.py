"""The README's tables, made from the JSON files of benchmarks/results.

python -m tokendance.bench.tables            write them into README.md
python -m tokendance.bench.tables --check    fail if README.md holds anything else

What is said about losses is what the report says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokendance.bench.report.figures import backends, capacity, collective, costs, quality, store
from tokendance.bench.report.model import ENGINES, Figure, load, maybe, middle, ranged

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
RESULTS = Path("benchmarks/results")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    text = args.readme.read_text(encoding="utf-8")
    fresh = insert(text, args.results)
    if args.check:
        if fresh != text:
            print("README.md is out of date: run python -m tokendance.bench.tables")
        return int(fresh != text)
    args.readme.write_text(fresh, encoding="utf-8")
    return 0


def insert(readme: str, results: Path) -> str:
    """The README with the tables of what `results` holds between its marks."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    first, more = ([text for make in group for text in make(results)] for group in (FIRST, MORE))
    if more:
        more = ["<details><summary>Memory, capacity, answers: more tables</summary>\n", *more]
        more.append("</details>\n")
    return before + "\n".join([BEGIN, *first, *more, END]) + after


def _run(results: Path, name: str) -> dict[str, Any] | None:
    path = results / name
    return load(path) if path.exists() else None


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def _losses(make: Callable[[Sequence[Any]], Figure], run: dict[str, Any]) -> str:
    return f"*Where we lose:* {make([run]).lose}\n"


def _demos(results: Path) -> Iterator[str]:
    runs = [load(path) for path in sorted(results.glob("demo_*.json"))]
    if not runs:
        return
    machine = runs[0]["machine"]
    rows = [
        (
            run["trace"].removesuffix(".small"),
            str(run["agents"]),
            f"{run['prefill_cpu_ratio']:.2f}x",
            _times(run["prefill_cpu_ratio_steady"]),
            _times(run["row_bound_steady"]),
            f"{run['round_wall_ratio']:.2f}x",
            maybe(run["kl_mean"], ".4f"),
            maybe(run["top1"], ".3f"),
        )
        for run in runs
    ]
    yield (
        "**Real traces, plain vLLM over TokenDance** "
        f"({machine['model'].rsplit('/', 1)[-1]}, {machine['dtype']}, vLLM {machine['vllm']}, "
        f"{machine['cores']} CPU cores, `tokendance demo --trace ...`):\n"
    )
    header = (
        "trace",
        "agents",
        "prefill CPU",
        "after round 1",
        "marked as shared",
        "round wall time",
        "followers' KL",
        "top-1",
    )
    yield _table(header, rows) + "\n"
    yield (
        "KL and top-1 compare the distributions of all forced answer tokens with plain vLLM's. "
        "*Marked as shared* is what the rows that the trace marks as shared account for; sharing "
        "of other equal text comes on top.\n"
    )


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _prefill(results: Path) -> Iterator[str]:
    run = _run(results, "prefill.json")
    if run is None:
        return
    if "shape" in run:
        shape = run["shape"]
        yield (
            f"**One round of {shape['agents']} agents** ({shape['private']} own tokens, "
            f"{shape['blocks']} x {shape['block']} shared, `{run['command']}`, medians of "
            f"{run['repetitions']}, range in brackets):\n"
        )
        rows = [
            (
                name,
                ranged(run[key]["cpu_ratio"]) + "x",
                ranged(run[key]["wall_ratio"]) + "x",
                ranged(run[key]["kl_mean"], 4),
            )
            for key, name in (("cold", "nothing cached"), ("warm", "histories cached"))
        ]
        yield _table(("", "prefill CPU", "prefill wall", "followers' KL"), rows) + "\n"
    if run.get("paper"):
        rows = [
            (
                row["trace"],
                str(row["agents"]),
                ranged(row["cpu_ratio"]) + "x",
                f"{row['row_bound']:.2f}x",
            )
            for row in run["paper"]
        ]
        yield (
            "**Rounds of the paper's size** (a small model with random weights, "
            f"`{run['paper_command']}`; what shared rows allow beside it):\n"
        )
        yield _table(("round", "agents", "prefill CPU", "allowed"), rows) + "\n"


def _overhead(results: Path) -> Iterator[str]:
    run = _run(results, "overhead.json")
    if run is None:
        return
    yield (
        f"**Requests that share nothing** cost {ranged(run['cpu_ratio'], 3)} times the CPU of "
        f"plain vLLM (`{run['command']}`, median of {run['repetitions']}, range in brackets: "
        "what is measured there is the machine's noise).\n"
    )
    beside = run.get("bystander")
    if beside:
        delays = (
            f"{name} {middle(beside[key]['plain']):.0f} / {middle(beside[key]['tokendance']):.0f}"
            for key, name in (
                ("decode_p50_ms", "median"),
                ("decode_p99_ms", "99th percentile"),
                ("decode_max_ms", "longest"),
            )
        )
        yield (
            "**A request that decodes beside a round** waits for its next token, plain vLLM / "
            f"TokenDance, in ms: {', '.join(delays)}.\n"
        )


def _capacity(results: Path) -> Iterator[str]:
    run = _run(results, "capacity.json")
    if run is None:
        return
    rates = sorted({row["qps"] for row in run["rows"]})
    rate = rates[0]
    found = {(x["engine"], x.get("qps", rate)): x for x in run["largest"]}
    size = max(r["agents"] for r in run["rows"])
    unit = "CPU s" if run.get("clock") == "cpu" else "s"
    at = {r["engine"]: r for r in run["rows"] if (r["agents"], r["qps"]) == (size, rate)}
    rows = [
        (
            name,
            *(
                capacity.up_to(run, found[engine, r]) if (engine, r) in found else "-"
                for r in rates
            ),
            ranged(at[engine]["round_s"]) if engine in at else "-",
            str(at[engine]["peak_pages"]) if engine in at else "-",
        )
        for engine, (name, _) in ENGINES.items()
        if (engine, rate) in found or engine in at
    ]
    yield (
        f"**Agents in a pool of {run['pool_pages']} pages of {run['page_size']} tokens** "
        f"(`{run['command']}`; paper: up to 2.7 times the agents of vLLM with prefix caching, "
        "rounds up to 2.3 times as fast):\n"
    )
    within = (f"agents within {run['target_s']:g} {unit}, {capacity.when(r)}" for r in rates)
    yield _table(("engine", *within, f"round of {size}, {unit}", "pages"), rows) + "\n"
    yield _losses(capacity.agents, run)


def _collective(results: Path) -> Iterator[str]:
    run = _run(results, "collective.json")
    if run is None:
        return
    by_size: dict[int, dict[str, Any]] = {}
    for row in run["rows"]:
        by_size.setdefault(row["agents"], {})[row["backend"]] = row
    rows = [
        (
            str(size),
            *(
                ranged(methods[name][field]) + "x" if name in methods else "-"
                for name, field in (
                    ("region", "over_serial"),
                    ("cacheblend", "over_serial"),
                    ("region", "over_plain"),
                )
            ),
            f"{collective.PAPER[size]}x" if size in collective.PAPER else "-",
        )
        for size, methods in sorted(by_size.items())
    ]
    yield f"**A round at once over CacheBlend request by request**, CPU (`{run['command']}`):\n"
    header = ("agents", "region", "CacheBlend in lock step", "region over plain prefill", "paper")
    yield _table(header, rows) + "\n"
    yield _losses(collective.collective, run)


def _similarity(results: Path) -> Iterator[str]:
    run = _run(results, "similarity.json")
    if run is None:
        return
    last = {row["trace"]: row for row in sorted(run["rows"], key=lambda row: row["round"])}
    rows = [
        (
            trace,
            str(row["agents"]),
            f"{row['shared_tokens']:.0%}",
            f"{row['same_blocks']:.0%}",
            maybe(row["k_cosine"], ".3f"),
            maybe(row["v_cosine"], ".3f"),
        )
        for trace, row in sorted(last.items())
    ]
    yield (
        f"**How alike the last round of a trace is** (`{run['command']}`; paper: 91 to 97 % equal "
        "blocks; cosines: reused against computed rows):\n"
    )
    header = ("trace", "N", "shared tokens", "equal blocks", "cosine of K", "cosine of V")
    yield _table(header, rows) + "\n"


def _storage(results: Path) -> Iterator[str]:
    run = _run(results, "storage.json")
    if run is None:
        return
    last = {row["trace"]: row for row in run["rows"] if row["method"] == "region"}
    rows = [
        (
            trace.rsplit(".", 1)[0],
            str(row["agents"]),
            f"{row['private_share']:.0%}",
            f"{row['family_ratio']:.2f}x",
            f"{row['bound']:.2f}x",
            f"{row['mirror_ratio']:.2f}x",
        )
        for trace, row in last.items()
    ]
    yield (
        "**Full caches over what is stored**, last round of a trace (`tokendance bench storage`; "
        "paper: 11.2x and 17.5x a mirror; of the traces of the paper's size, this repository holds "
        "1 and 5):\n"
    )
    yield _table(("trace", "N", "private", "whole family", "its bound", "one mirror"), rows) + "\n"
    yield _losses(store.storage, run)


def _restore(results: Path) -> Iterator[str]:
    run = _run(results, "restore.json")
    if run is None:
        return
    rows = {
        row["mirrors"]: (
            str(row["mirrors"]),
            f"{row['fused_over_dense']:.2f}x ({row['cpu_fused_over_dense']:.2f}x)",
            f"{row['copy_share']:.0%} ({row['cpu_copy_share']:.0%})",
            f"{row['loaded_masters']:.2f}",
        )
        for row in reversed(run["rows"])  # the first row of a size is the one without a sweep
        if row["private"] == 0.1 and not row["with_master"] and not row["int8"]
    }
    if rows:
        yield (
            "**Restoring mirrors of 10 % own rows from host memory into pages** "
            f"(`{run['command']}`, medians of {run['repetitions']}, in brackets of "
            "processor time; paper: 1.3x to 2.6x):\n"
        )
        header = ("mirrors", "fused over dense", "of copy bandwidth", "bytes loaded, in masters")
        yield _table(header, [rows[size] for size in sorted(rows)]) + "\n"
        yield _losses(store.restore, run)


def _pressure(results: Path) -> Iterator[str]:
    run = _run(results, "pressure.json")
    if run is not None:
        yield (
            f"**Under memory pressure** ({run['agents']} agents in {run['pool_pages']} pages, "
            f"`{run['command']}`) recomputing histories takes {ranged(run['round_ratio'])} times "
            f"as long as restoring them, and {ranged(run['cpu_ratio'])} times the CPU.\n"
        )
        yield _losses(costs.pressure, run)


def _fidelity(results: Path) -> Iterator[str]:
    run = _run(results, "fidelity.json")
    if run is None:
        return
    rows = []
    for engine, (name, _) in ENGINES.items():
        own = [row for row in run["rows"] if row["engine"] == engine]
        if own:
            traces = {row["trace"] for row in own}
            differ = {row["trace"] for row in own if row["diverged_round"] is not None}
            means = [maybe(quality.mean(own, x), form) for x, _, form, _ in quality.FIGURES]
            rows.append((name, f"{len(traces) - len(differ)} of {len(traces)}", *means))
    yield (
        f"**Greedy answers against exact computation** (`{run['command']}`; paper: the same "
        "throughout in 3 of 8 scenarios):\n"
    )
    names = (name for _, _, _, name in quality.FIGURES)
    yield _table(("engine", "same throughout", *names), rows) + "\n"
    yield _losses(quality.fidelity, run)


def _backends(results: Path) -> Iterator[str]:
    run = _run(results, "backends.json")
    if run is None:
        return
    rows = [
        (
            f"{row['rounds']} {row['over']} of {row['agents']}",
            f"`{row['backend']}` {row['ratio']:.0%} ({row['source']})",
            f"{row['kl_end']:.4f}",
            f"{row['top1']:.3f}",
            f"{row['cpu_ratio_plain']:.2f}x",
            f"{row['cpu_ratio_serial_cacheblend']:.2f}x",
        )
        for row in run["summary"]
        if row["ratio"] == 0.15 or row["backend"] in ("region", "naive")
    ]
    yield (
        f"**Recovery backends** (`{run['command']}`, reference engine; share computed again, and "
        "whose K/V is taken):\n"
    )
    header = ("mean of", "backend", "KL", "top-1", "CPU, over plain", "over serial CacheBlend")
    yield _table(header, rows) + "\n"
    yield _losses(backends.backends, run)


FIRST = (_demos, _prefill, _overhead)
MORE = (
    *(_capacity, _collective, _storage, _restore),
    *(_pressure, _similarity, _fidelity, _backends),
)

if __name__ == "__main__":
    sys.exit(main())
