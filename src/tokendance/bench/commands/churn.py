"""`tokendance bench churn`: many rounds through a store that is far too small for them.

Every restored entry is compared with what was stored; bytes, resident memory and tables must stay
flat. Fails if an entry was wrong.
"""

from __future__ import annotations

import argparse

from tokendance.bench.commands.common import add_usual, shown_command, write_result

TEXT = "ten thousand rounds through a store that is far too small: nothing grows, nothing is wrong"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, out="churn.json")
    add = parser.add_argument
    add("--rounds", type=int, default=10_000, help="default: %(default)s")
    add("--budget", type=int, default=400_000, help="bytes of host memory; default: %(default)s")
    add("--quick", action="store_true", help="200 rounds")


def run(args: argparse.Namespace) -> int:
    from tokendance.bench.churn import bench_churn

    measured = bench_churn(min(200, args.rounds) if args.quick else args.rounds, args.budget)
    write_result(args.out, shown_command("churn"), measured)
    grown, checked, wrong = (measured[name] for name in ("growth", "checked", "wrong"))
    print(f"growth {grown}, {checked} entries checked, {wrong} wrong")
    return int(wrong > 0)
