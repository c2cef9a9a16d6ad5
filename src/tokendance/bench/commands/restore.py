"""`tokendance bench restore`: fused against dense restore, and both against a plain copy (M17-M19).

The K/V is random: no model runs.
"""

from __future__ import annotations

import argparse

from tokendance.bench.commands.common import add_usual, shown_command, write_result

TEXT = "fused against dense restore from the store into pages, beside a plain copy"
MIRRORS = (1, 3, 5, 10, 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, out="restore.json")
    add = parser.add_argument
    add("--mirrors", type=int, nargs="+", default=MIRRORS, help="default: 1 3 5 10 20")
    add("--rows", type=int, default=2048, help="rows of every request; default: %(default)s")
    add("--private", type=float, default=0.1, help="share of private rows; default: %(default)s")
    add(
        "--shape",
        type=int,
        nargs=3,
        default=(28, 4, 128),
        metavar=("LAYERS", "HEADS", "DIM"),
        help="of the K/V; default: 28 4 128",
    )
    add("--int8", action="store_true", help="store values as int8")
    add("--kernel", choices=("best", "torch"), default="best", help="default: %(default)s")
    add("--threads", type=int, default=0, help="0, the default: what torch uses")
    add("--repeat", type=int, default=7, help="counted repetitions; default: %(default)s")
    add("--sweep", action="store_true", help="also over the share of private rows")
    add("--quick", action="store_true", help="1 and 5 mirrors of 512 rows, three repetitions")


def run(args: argparse.Namespace) -> int:
    import torch

    from tokendance.bench.restore import Setting, bench_restore
    from tokendance.restore.kernels import reference

    if args.threads:
        torch.set_num_threads(args.threads)
    layers, heads, dim = args.shape
    rows = min(512, args.rows) if args.quick else args.rows
    measured = bench_restore(
        Setting(layers, heads, dim, rows, args.private, args.int8),
        (1, 5) if args.quick else args.mirrors,
        min(3, args.repeat) if args.quick else args.repeat,
        print,
        sweep=args.sweep,
        kernel=reference.KERNEL if args.kernel == "torch" else None,
    )
    write_result(args.out, shown_command("restore"), measured)
    return 0
