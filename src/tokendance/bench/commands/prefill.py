"""`tokendance bench prefill`: one synthetic round, cold and warm, plain vLLM over TokenDance."""

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

TEXT = "one synthetic round, cold and warm, plain vLLM over TokenDance"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, default=DEFAULT_FOLDER, help="model folder; default: %(default)s")
    add("--repeat", type=int, default=3, help="counted repetitions; default: %(default)s")
    add("--threads", type=int, default=1, help="default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--out", type=Path, default=RESULTS / "prefill.json", help="default: %(default)s")
    add("--agents", type=int, default=8, help="requests at a time; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    from tokendance.bench.prefill import RoundShape, bench_prefill, words_of
    from tokendance.bench.render import HFTokenizer

    need_model(args.model)
    traces = sorted(workloads().glob("*.jsonl"))
    words = words_of(traces, HFTokenizer(args.model).encode, args.seed)
    measured = bench_prefill(
        str(args.model), RoundShape(agents=args.agents), words, args.repeat, args.threads, say
    )
    write_result(args.out, shown_command("prefill"), {"model": args.model.name, **measured})
    return 0
