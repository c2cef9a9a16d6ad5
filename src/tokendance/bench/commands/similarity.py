"""`tokendance bench similarity`: what the agents of a round have in common (figures 3 and 12).

Counts tokens, blocks and bytes of every round of every trace; computes K/V on the reference engine
for the last round of the small ones. Finished traces are kept beside the result; with --resume an
interrupted run goes on there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokendance.bench.commands.common import (
    BenchError,
    add_usual,
    need_model,
    say,
    shown_command,
    traces,
    workloads,
    write_result,
)
from tokendance.bench.partial import append_line, close_partial, open_partial, read_lines

TEXT = "tokens, blocks and K/V rows that the agents of a round have in common"
QUICK = ("2_valentines_day_party",)
BLENDED = ("1_meet_and_greet", "5_information_outbreak")
"""Traces on which CacheBlend runs too: the contexts that it takes K/V from cost minutes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, "model", "threads", out="similarity.json")
    add = parser.add_argument
    add("--trace", type=Path, nargs="+", default=None, help="default: all; paper size: tokens only")
    add("--agents", type=int, default=4, help="whose K/V is computed; default: %(default)s")
    add("--blend", nargs="*", default=BLENDED, help="traces for CacheBlend; default: %(default)s")
    add("--no-engine", action="store_true", help="count only, run no model")
    add("--resume", action="store_true", help="go on with an interrupted run")
    add("--quick", action="store_true", help="one trace, two agents")


def run(args: argparse.Namespace) -> int:
    import torch

    from tokendance.bench.render import HFTokenizer
    from tokendance.bench.trace import Trace
    from tokendance.engines.reference.model import Model

    need_model(args.model)
    agents = min(2, args.agents) if args.quick else args.agents
    if agents < 2:
        raise BenchError("K/V is compared between agents; take two at least")
    paths = _traces(args)
    settings = {
        "model": args.model.name,
        "dtype": "float32",
        "threads": args.threads,
        "repetitions": 1,
        "engine_agents": None if args.no_engine else agents,
        "blended": [] if args.quick else sorted(args.blend),
        "traces": [f"{path.parent.name}/{path.stem}" for path in paths],
    }
    partial = open_partial(args.out, settings, args.resume)
    done = {line["key"]: line["rows"] for line in read_lines(partial)}
    torch.set_num_threads(args.threads)
    tokenizer = HFTokenizer(args.model)
    model = None if args.no_engine else Model.load(args.model)
    for path, key in zip(paths, settings["traces"]):
        if key not in done:
            small = Trace(path).header.size == "small"
            methods = ("region", "cacheblend") if path.stem in settings["blended"] else ("region",)
            done[key] = _measure(path, tokenizer, model if small else None, agents, methods)
            append_line(partial, {"key": key, "rows": done[key]})
    rows = [row for key in settings["traces"] for row in done[key]]
    write_result(args.out, shown_command("similarity"), {**settings, "rows": rows})
    close_partial(partial)
    _print(rows)
    return 0


def _traces(args: argparse.Namespace) -> list[Path]:
    if args.trace:
        return list(args.trace)
    if args.quick:
        return [workloads() / f"{name}.jsonl" for name in QUICK]
    return [path for size in ("small", "paper") for path in traces(size)]


def _measure(
    path: Path, tokenizer: Any, model: Any, agents: int, methods: Sequence[str]
) -> list[dict[str, Any]]:
    from tokendance.bench.similarity import count_rounds, on_engine
    from tokendance.bench.trace import Trace

    say(f"{path.parent.name}/{path.stem}: counting")
    rows = count_rounds(path, tokenizer)
    # Separate conversations have no last round that all agents are in.
    if model is not None and rows and not Trace(path).header.serial:
        found = on_engine(path, tokenizer, model, agents, say, methods)
        region = found["region"]
        rows[-1] |= {name: region[name] for name in ("k_cosine", "v_cosine")} | found
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("shared_tokens", "same_blocks", "family_ratio", "k_cosine", "v_cosine")
    print(f"{'':34} {'round':>5} {'agents':>6}" + "".join(f"{name:>14}" for name in columns))
    for row in rows:
        figures = ("" if row[name] is None else f"{row[name]:.3f}" for name in columns)
        cells = "".join(f"{figure:>14}" for figure in figures)
        print(f"{row['trace']:34} {row['round']:>5} {row['agents']:>6}{cells}")
