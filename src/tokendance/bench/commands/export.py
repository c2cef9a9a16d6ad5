"""`tokendance bench export`: a trace as a custom dataset of `vllm bench serve`.

The same prompts then load any server that vLLM's own benchmark can drive. That client knows no
rounds, so it measures throughput, not the latency of a round.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokendance.bench.commands.common import add_usual, need_model

TEXT = "a trace as a custom dataset of `vllm bench serve`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, "model")
    add = parser.add_argument
    add("trace", type=Path, help="a trace file")
    add("--out", type=Path, required=True, help="the JSONL file to write")
    add(
        "--output-tokens",
        type=int,
        default=64,
        help="where the trace has no answer; default: %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    from tokendance.bench.export import USAGE, export
    from tokendance.bench.render import HFTokenizer

    need_model(args.model)
    count = export(args.trace, args.out, HFTokenizer(args.model), args.output_tokens)
    print(f"{count} requests written to {args.out}; replay them with")
    print("  " + USAGE.format(path=args.out, count=count))
    return 0
