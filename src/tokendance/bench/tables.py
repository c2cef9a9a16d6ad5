"""The README's tables, made from the JSON files of benchmarks/results.

python -m tokendance.bench.tables            write them into README.md
python -m tokendance.bench.tables --check    fail if README.md holds anything else
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    sections = [section for make in SECTIONS for section in make(results)]
    return before + "\n".join([BEGIN, *sections, END]) + after


def _load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def _range(figure: dict[str, float], digits: int = 2) -> str:
    median, low, high = (f"{figure[k]:.{digits}f}" for k in ("median", "min", "max"))
    return f"{median} ({low}-{high})"


def _demos(results: Path) -> Iterator[str]:
    runs = [_load(path) for path in sorted(results.glob("demo_*.json"))]
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
            "-" if run["kl_mean"] is None else f"{run['kl_mean']:.4f}",
            "-" if run["top1"] is None else f"{run['top1']:.3f}",
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
    path = results / "prefill.json"
    if not path.exists():
        return
    run = _load(path)
    shape = run["shape"]
    yield (
        f"**One round of {shape['agents']} agents** ({shape['private']} own tokens, "
        f"{shape['blocks']} x {shape['block']} shared, `{run['command']}`, medians of "
        f"{run['repetitions']}, range in brackets):\n"
    )
    rows = [
        (
            name,
            _range(run[key]["cpu_ratio"]) + "x",
            _range(run[key]["wall_ratio"]) + "x",
            _range(run[key]["kl_mean"], 4),
        )
        for key, name in (("cold", "nothing cached"), ("warm", "histories cached"))
    ]
    yield _table(("", "prefill CPU", "prefill wall", "followers' KL"), rows) + "\n"


def _overhead(results: Path) -> Iterator[str]:
    path = results / "overhead.json"
    if path.exists():
        run = _load(path)
        yield (
            f"**Requests that share nothing** cost {_range(run['cpu_ratio'], 3)} times the CPU of "
            f"plain vLLM (`{run['command']}`, median of {run['repetitions']}, range in brackets: "
            "what is measured there is the machine's noise).\n"
        )


def _restore(results: Path) -> Iterator[str]:
    path = results / "restore.json"
    if not path.exists():
        return
    run = _load(path)
    rows = {
        row["mirrors"]: (
            str(row["mirrors"]),
            f"{row['fused_over_dense']:.2f}x",
            f"{100 * row['copy_share']:.0f} %",
            f"{row['loaded_masters']:.2f}",
        )
        for row in reversed(run["rows"])  # the first row of a size is the one without a sweep
        if row["private"] == 0.1 and not row["with_master"] and not row["int8"]
    }
    if rows:
        yield (
            f"**Restoring mirrors of 10 % own rows from host memory into pages** "
            f"(`{run['command']}`, medians of {run['repetitions']}):\n"
        )
        header = ("mirrors", "fused over dense", "of copy bandwidth", "bytes loaded, in masters")
        yield _table(header, [rows[size] for size in sorted(rows)]) + "\n"


SECTIONS = (_demos, _prefill, _overhead, _restore)

if __name__ == "__main__":
    sys.exit(main())
