"""`tokendance bench backends`: every recovery backend on the same rounds (M9).

The rounds are the last ones of the traces and of synthetic towns, one per seed. What is finished is
kept beside the result; with --resume an interrupted run goes on there.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokendance.bench.commands.common import (
    add_usual,
    need_model,
    say,
    shown_command,
    traces,
    workloads,
    write_result,
)
from tokendance.bench.partial import close_partial, open_partial

if TYPE_CHECKING:
    from tokendance.bench.backends import Case
    from tokendance.bench.render import HFTokenizer

TEXT = "every recovery backend at 0, 5, 15 and 30 %%: closeness, rows, CPU seconds"
TRACES = ("1_meet_and_greet", "4_winning_the_election", "5_information_outbreak")

COLUMNS = (
    ("KL end", "kl_end", ".4f"),
    ("KL after", "kl_cont", ".4f"),
    ("top-1", "top1", ".3f"),
    ("rows", "rows", ".0f"),
    ("changed", "changed_blocks", ".0%"),
    ("x plain", "cpu_ratio_plain", ".2f"),
    ("x serial", "cpu_ratio_serial_cacheblend", ".2f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, "model", "threads", out="backends.json")
    add = parser.add_argument
    add("--trace", type=Path, nargs="+", default=None, help=f"default: {', '.join(TRACES)}")
    add("--seeds", type=int, default=5, help="towns to make; default: %(default)s")
    add("--agents", type=int, default=5, help="agents a round, leader included; default: 5")
    add(
        *("--speed-agents", "-n"),
        type=int,
        nargs="*",
        default=[8, 16],
        help="sizes at which the first town is run with region and cacheblend; default: 8 16",
    )
    add("--resume", action="store_true", help="go on with an interrupted run")
    add("--quick", action="store_true", help="one town, three agents, three backends")


def run(args: argparse.Namespace) -> int:
    import torch

    from tokendance.bench.backends import run_cases, summary
    from tokendance.bench.render import HFTokenizer
    from tokendance.engines.reference.model import Model

    need_model(args.model)
    torch.set_num_threads(args.threads)
    settings = _settings(args)
    partial = open_partial(args.out, settings, args.resume)
    with tempfile.TemporaryDirectory() as scratch:
        cases = list(_cases(args, Path(scratch), HFTokenizer(args.model)))
        lines = run_cases(cases, Model.load(args.model), partial, say)
    result: dict[str, Any] = {
        "settings": settings,
        "summary": summary(lines),
        "rows": [{k: v for k, v in line.items() if k != "key"} for line in lines],
    }
    write_result(args.out, shown_command("backends"), result)
    close_partial(partial)
    _print(result["summary"])
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What has to be equal for a run to be resumed."""
    return {
        "traces": [p.stem for p in _traces(args)],
        "seeds": 1 if args.quick else args.seeds,
        "agents": min(3, args.agents) if args.quick else args.agents,
        "speed_agents": [] if args.quick else args.speed_agents,
        "model": args.model.name,
        "dtype": "float32",
        "threads": args.threads,
        "quick": args.quick,
    }


def _traces(args: argparse.Namespace) -> list[Path]:
    if args.trace:
        return list(args.trace)
    return [] if args.quick else [workloads() / f"{name}.jsonl" for name in TRACES]


def _cases(args: argparse.Namespace, folder: Path, tokenizer: HFTokenizer) -> Iterator[Case]:
    from tokendance.bench.backends import METHODS, QUICK_METHODS, SPEED_METHODS, Case
    from tokendance.bench.rounds import last_round
    from tokendance.bench.town import SEGMENTS, sentences, write_town
    from tokendance.bench.trace import Trace

    settings = _settings(args)
    methods, agents = QUICK_METHODS if args.quick else METHODS, settings["agents"]

    def case(path: Path, agents: int, methods: Sequence[Any]) -> Case:
        name = Trace(path).header.name
        return Case(name, agents, lambda: last_round(path, tokenizer, agents), tuple(methods))

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    yield from (case(path, agents, methods) for path in _traces(args))
    pool = sentences(traces())
    for seed in range(settings["seeds"]):
        town = write_town(folder / f"{seed}.jsonl", pool, seed, count)
        yield case(town, agents, methods)
    for size in settings["speed_agents"]:
        town = folder / f"of{size}.jsonl"
        yield case(write_town(town, pool, 0, count, max(size, SEGMENTS)), size, SPEED_METHODS)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'':48}" + "".join(f"{title:>10}" for title, _, _ in COLUMNS))
    for row in rows:
        over = f"{row['rounds']} {row['over']} of {row['agents']}"
        method = f"{row['backend']} {row['ratio']:.0%} ({row['source']})"
        figures = (format(row[name], form) for _, name, form in COLUMNS)
        print(f"{over:14}{method:34}" + "".join(f"{figure:>10}" for figure in figures))
