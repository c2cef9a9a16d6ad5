"""`tokendance bench pressure`: a pool that holds a third of the agents; restore or recompute."""

from __future__ import annotations

import argparse

from tokendance.bench.commands.common import (
    BenchError,
    add_clock,
    add_usual,
    need_model,
    say,
    shown_command,
    trace_words,
    write_result,
)

TEXT = "a pool of pages that holds a third of the agents: restore against recompute"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, "model", "threads", "seed", out="pressure.json")
    add = parser.add_argument
    add("--agents", type=int, default=6, help="at least 3; default: %(default)s")
    add("--private", type=int, default=800, help="own tokens of each agent; default: %(default)s")
    add("--answer", type=int, default=16, help="tokens of each answer; default: %(default)s")
    add("--rounds", type=int, default=3, help="counted rounds; default: %(default)s")
    add("--store-gib", type=float, default=2.0, help="budget of the store; default: %(default)s")
    add_clock(parser)
    add("--quick", action="store_true", help="three agents, short histories, one round")


def run(args: argparse.Namespace) -> int:
    from tokendance.bench.pressure import PressureShape, bench_pressure

    need_model(args.model)
    if args.agents < 3 or args.rounds < 1:
        raise BenchError("pressure needs at least 3 agents and 1 counted round")
    shape = PressureShape(args.agents, args.private, args.answer, rounds=args.rounds)
    if args.quick:
        shape = PressureShape(agents=3, private=150, answer=8, rounds=1)
    words = trace_words(args.model, args.seed)
    measured = bench_pressure(
        str(args.model), shape, words, args.threads, args.clock, args.store_gib, say
    )
    result = {"model": args.model.name, **measured}
    write_result(args.out, shown_command("pressure"), result)
    return 0
