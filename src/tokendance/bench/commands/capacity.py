"""`tokendance bench capacity`: agents in a KV pool of fixed size (paper, figures 2 and 10).

Rounds with a barrier on real vLLM, for plain vLLM with prefix caching, the same with prompts
reordered shared-first, its own KV offloading, CacheBlend request by request and collectively, and
TokenDance. The session is synthetic unless --trace names one. What is finished is kept beside the
result; with --resume an interrupted run goes on there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokendance.bench.commands.common import (
    BenchError,
    add_clock,
    add_usual,
    need_model,
    say,
    shown_command,
    traces,
    write_result,
)

if TYPE_CHECKING:
    from tokendance.bench.capacity import Cell, Study
    from tokendance.bench.prefill import Words
    from tokendance.bench.sessions import Session

TEXT = "round latency and memory against agents, six engines in a KV pool of fixed size"
PAGE = 32
QUICK = {"agents": [2, 4], "qps": [0.0], "repeat": 1, "output_tokens": 24, "private": 40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, "model", "repeat", "threads", "seed", out="capacity.json")
    add = parser.add_argument
    add("--trace", type=Path, default=None, help="default: a synthetic session")
    add("--agents", "-n", type=int, nargs="+", default=[2, 4, 8, 12], help="default: 2 4 8 12")
    add(
        "--qps",
        type=float,
        nargs="+",
        default=[0.0],
        help="agents that ask per second within a round, 0 for all at once; default: 0",
    )
    add("--pool-pages", type=int, default=128, help="pages of 32 tokens; default: %(default)s")
    add("--target-s", type=float, default=10.0, help="of a round's latency; default: %(default)s")
    add("--private", type=int, default=96, help="an agent's own tokens; default: %(default)s")
    add("--output-tokens", type=int, default=32, help="of an answer; default: %(default)s")
    add("--rounds", type=int, default=2, help="the first is not counted; default: %(default)s")
    add_clock(parser)
    add("--engines", nargs="+", default=None, help="default: all, see below", metavar="ENGINE")
    add("--max-batched-tokens", type=int, default=2048, help="of an engine step; default: 2048")
    add("--offload-gib", type=float, default=1.0, help="host memory of `offload`; default: 1")
    add("--resume", action="store_true", help="go on with an interrupted run")
    add("--quick", action="store_true", help="two small numbers of agents, once")
    parser.epilog = "engines: prefix, reordered, offload, cacheblend-serial, cacheblend, tokendance"


def run(args: argparse.Namespace) -> int:
    from tokendance.bench.capacity import run_study, summarise
    from tokendance.bench.engine_process import EngineError
    from tokendance.bench.partial import close_partial, open_partial
    from tokendance.bench.prefill import words_of
    from tokendance.bench.render import HFTokenizer

    need_model(args.model)
    if args.quick:
        vars(args).update(QUICK)
    tokenizer = HFTokenizer(args.model)
    words = words_of(traces(), tokenizer.encode, args.seed)
    session = _sessions(args, words, tokenizer)
    study, skipped = _study(args, session)
    settings = _settings(args)
    partial = open_partial(args.out, settings, args.resume)
    try:
        lines, not_started = run_study(study, session, words, partial, say)
    except EngineError as error:
        raise BenchError(str(error)) from error
    engines = [baseline.name for baseline in study.baselines]
    skipped |= not_started
    result = {
        **settings,
        "repetitions": args.repeat,
        "target_s": args.target_s,
        "dtype": next((line["dtype"] for line in lines), None),
        **summarise(lines, engines, skipped, args.target_s),
    }
    write_result(args.out, shown_command("capacity"), result)
    close_partial(partial)
    _print(result)
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What has to be equal for a run to be resumed; what is left over makes more or fewer cells."""
    synthetic = {"private": args.private, "seed": args.seed}
    return {
        "model": args.model.name,
        "trace": args.trace.stem if args.trace else "synthetic",
        **({} if args.trace else synthetic),
        "pool_pages": args.pool_pages,
        "page_size": PAGE,
        "output_tokens": args.output_tokens,
        "rounds": args.rounds,
        "threads": args.threads,
        "clock": args.clock,
        "max_num_batched_tokens": args.max_batched_tokens,
    }


def _sessions(args: argparse.Namespace, words: Words, tokenizer: Any) -> Callable[[Cell], Session]:
    """Makes the session of a cell, the same one for every engine and after every resumption."""
    from tokendance.bench.sessions import Shape, from_trace, synthetic

    def session(cell: Cell) -> Session:
        if args.trace:
            return from_trace(args.trace, tokenizer, cell.agents, args.rounds, args.output_tokens)
        shape = Shape(private=args.private, output=args.output_tokens)
        seeded = words.reseeded(f"{args.seed}.{cell.name}")
        return synthetic(cell.name, shape, cell.agents, args.rounds, seeded)

    return session


def _study(
    args: argparse.Namespace, session: Callable[[Cell], Session]
) -> tuple[Study, dict[str, str]]:
    """The study, and the engines that cannot take part. Raises BenchError."""
    from tokendance.bench.baselines import BASELINES, NAMES
    from tokendance.bench.capacity import Cell, Study
    from tokendance.bench.engine_process import EngineSettings

    wanted = args.engines or NAMES
    if unknown := sorted(set(wanted) - set(NAMES)):
        raise BenchError(f"unknown engine {unknown[0]!r}; known are {', '.join(NAMES)}")
    largest = session(Cell(0, max(args.agents), 0.0))
    longest = -(-(largest.longest + 1) // PAGE) * PAGE
    if longest > args.pool_pages * PAGE:
        raise BenchError(
            f"one request of {largest.longest} tokens does not fit {args.pool_pages} pages of "
            f"{PAGE}; see --pool-pages"
        )
    skipped = {}
    if largest.chat and "reordered" in wanted:
        skipped["reordered"] = "a chat template ties the parts of these prompts to their places"
    base = EngineSettings(
        str(args.model),
        tokendance=False,
        block_size=PAGE,
        max_model_len=longest,
        max_num_batched_tokens=args.max_batched_tokens,
        pages=args.pool_pages,
        memory_share=0.28,
        threads=args.threads,
        clock=args.clock,
    )
    baselines = tuple(b for b in BASELINES if b.name in wanted and b.name not in skipped)
    agents, qps = tuple(sorted(set(args.agents))), tuple(sorted(set(args.qps)))
    return Study(baselines, agents, qps, args.repeat, base, args.offload_gib), skipped


def _print(result: dict[str, Any]) -> None:
    print(f"{'':20}{'agents':>7}{'qps':>6}{'round s':>9}{'cpu s':>8}{'ttft s':>8}{'pages':>7}")
    for row in result["rows"]:
        seconds = [row[name]["median"] for name in ("round_s", "cpu_s", "ttft_s")]
        print(
            f"{row['engine']:20}{row['agents']:7}{row['qps']:6g}{seconds[0]:9.2f}"
            f"{seconds[1]:8.2f}{seconds[2]:8.2f}{row['peak_pages']:7}"
        )
    for found in result["largest"]:
        print(
            f"{found['engine']:20}{found['agents']} agents ({found['interpolated']:.1f}) within "
            f"{result['target_s']:g} s at {found['qps']:g} a second"
        )
    for engine, why in result["skipped"].items():
        print(f"{engine:20}skipped: {why}")
