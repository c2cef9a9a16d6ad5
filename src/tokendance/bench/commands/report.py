"""`tokendance bench report`: the results as one HTML page, the paper's values beside ours."""

from __future__ import annotations

import argparse
from pathlib import Path

from tokendance.bench.commands.common import RESULTS, BenchError

TEXT = "one HTML page of all results, the paper's values beside ours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--results", type=Path, default=RESULTS, help="folder of results; default: %(default)s")
    add("--out", type=Path, default=None, help="default: report.html beside the results")


def run(args: argparse.Namespace) -> int:
    from tokendance.bench.report import build

    if not args.results.is_dir():
        raise BenchError(f"there is no folder {args.results}")
    out: Path = args.out or args.results / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(build(args.results), encoding="utf-8")
    print(f"written to {out}")
    return 0
