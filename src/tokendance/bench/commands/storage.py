"""`tokendance bench storage`: how small families of real rounds get, beside the bound (M12-M16).

Bytes follow from the layout of the rounds, so that no model runs; the tokenizer is the model's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokendance.bench.commands.common import (
    add_usual,
    need_model,
    shown_command,
    traces,
    write_result,
)

TEXT = "bytes of a family and of a mirror on the layouts of real traces"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, "model", out="storage.json")
    add = parser.add_argument
    add("traces", nargs="*", type=Path, help="trace files; default: all, both sizes")
    add(
        "--shape",
        type=int,
        nargs=3,
        default=(2, 3, 64),
        metavar=("LAYERS", "HEADS", "DIM"),
        help="of the K/V; ratios hardly depend on it; default: 2 3 64",
    )
    add("--quick", action="store_true", help="the small traces only")


def run(args: argparse.Namespace) -> int:
    from tokendance.bench.render import HFTokenizer
    from tokendance.bench.storage import Shape, bench_storage

    need_model(args.model)
    sizes = ("small",) if args.quick else ("small", "paper")
    paths = args.traces or [p for size in sizes for p in traces(size)]
    measured = bench_storage(paths, HFTokenizer(args.model), Shape(*args.shape), print)
    write_result(args.out, shown_command("storage"), {"model": args.model.name, **measured})
    return 0
