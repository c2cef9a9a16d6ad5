"""`tokendance bench overhead`: what TokenDance costs requests that share nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from tokendance.bench.commands.common import (
    RESULTS,
    need_model,
    say,
    shown_command,
    workloads,
    write_result,
)
from tokendance.cli.model import DEFAULT_FOLDER

TEXT = "requests that share nothing, TokenDance over plain vLLM"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, default=DEFAULT_FOLDER, help="model folder; default: %(default)s")
    add("--repeat", type=int, default=3, help="counted repetitions; default: %(default)s")
    add("--threads", type=int, default=1, help="default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--out", type=Path, default=RESULTS / "overhead.json", help="default: %(default)s")
    add("--agents", type=int, default=8, help="requests at a time; default: %(default)s")
    add("--tokens", type=int, default=256, help="of each prompt; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    from tokendance.bench.prefill import bench_overhead, words_of
    from tokendance.bench.render import HFTokenizer

    need_model(args.model)
    traces = sorted(workloads().glob("*.jsonl"))
    words = words_of(traces, HFTokenizer(args.model).encode, args.seed)
    measured = bench_overhead(
        str(args.model), args.agents, args.tokens, words, args.repeat, args.threads, say
    )
    write_result(args.out, shown_command("overhead"), {"model": args.model.name, **measured})
    return 0
