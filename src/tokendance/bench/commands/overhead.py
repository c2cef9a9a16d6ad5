"""`tokendance bench overhead`: what TokenDance costs requests that share nothing.

Once among themselves, and once for a single request that is being answered while a round of agents
arrives.
"""

from __future__ import annotations

import argparse

from tokendance.bench.commands.common import (
    add_clock,
    add_usual,
    need_model,
    say,
    shown_command,
    trace_words,
    write_result,
)

TEXT = "requests that share nothing, TokenDance over plain vLLM"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, "model", "repeat", "threads", "seed", out="overhead.json")
    add = parser.add_argument
    add_clock(parser)
    add("--agents", type=int, default=8, help="requests at a time; default: %(default)s")
    add("--tokens", type=int, default=256, help="of each prompt; default: %(default)s")
    add(
        "--max-batched-tokens",
        type=int,
        default=2048,
        help="of an engine step, beside a round; default: %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    from tokendance.bench.bystander import bench_bystander
    from tokendance.bench.prefill import RoundShape, bench_overhead

    need_model(args.model)
    words = trace_words(args.model, args.seed)
    model = str(args.model)
    measured = bench_overhead(
        model, args.agents, args.tokens, words, args.repeat, args.threads, say
    )
    shape = RoundShape(args.agents, private=96, blocks=args.agents, block=32)
    bystander = bench_bystander(
        model, shape, words, args.repeat, args.threads, args.max_batched_tokens, args.clock, say
    )
    result = {"model": args.model.name, **measured, "bystander": bystander}
    write_result(args.out, shown_command("overhead"), result)
    return 0
