"""`tokendance bench collective`: a round at once against request by request (figure 11).

Runs on the reference engine with warm histories. Finished sizes are kept beside the result; with
--resume an interrupted run goes on there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tokendance.bench.commands.common import (
    BenchError,
    add_usual,
    need_model,
    say,
    shown_command,
    trace_words,
    write_result,
)
from tokendance.bench.partial import append_line, close_partial, open_partial, read_lines

TEXT = "lock-step reuse against serial CacheBlend and plain prefill, by number of agents"
AGENTS = (3, 5, 8, 10, 15, 20)
QUICK_AGENTS = (3, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, "model", "repeat", "threads", "seed", out="collective.json")
    add = parser.add_argument
    add("--agents", type=int, nargs="+", default=None, help="default: 3 5 8 10 15 20")
    add("--history", type=int, default=128, help="tokens in the cache; default: %(default)s")
    add("--blocks", type=int, default=8, help="shared texts; default: %(default)s")
    add("--block", type=int, default=48, help="tokens of each; default: %(default)s")
    add("--resume", action="store_true", help="go on with an interrupted run")
    add("--quick", action="store_true", help="3 and 8 agents, half the texts, one repetition")


def run(args: argparse.Namespace) -> int:
    import torch

    from tokendance.bench.collective import Shape, measure
    from tokendance.engines.reference.model import Model

    need_model(args.model)
    settings = _settings(args)
    shape, sizes = Shape(**settings["shape"]), settings["agents"]
    partial = open_partial(args.out, settings, args.resume)
    done = {line["key"]: line["rows"] for line in read_lines(partial)}
    torch.set_num_threads(args.threads)
    words = trace_words(args.model, args.seed)
    model = Model.load(args.model)
    for size in sizes:
        if size not in done:
            done[size] = measure(shape, size, words, model, settings["repetitions"], say)
            append_line(partial, {"key": size, "rows": done[size]})
    rows = [row for size in sizes for row in done[size]]
    write_result(args.out, shown_command("collective"), {**settings, "rows": rows})
    close_partial(partial)
    _print(rows)
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What has to be equal for a run to be resumed; it stands in the result."""
    from tokendance.bench.collective import Shape

    sizes = args.agents or (QUICK_AGENTS if args.quick else AGENTS)
    if min(sizes) < 2 or min(args.history, args.blocks, args.block, args.repeat) < 1:
        raise BenchError("this needs two agents at least, and texts and repetitions above zero")
    blocks = max(1, args.blocks // 2) if args.quick else args.blocks
    return {
        "model": args.model.name,
        "dtype": "float32",
        "threads": args.threads,
        "seed": args.seed,
        "repetitions": 1 if args.quick else args.repeat,
        "agents": sorted(set(sizes)),
        "shape": asdict(Shape(args.history, blocks, args.block)),
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'agents':>6} {'in lock step':12} {'CPU s':>8} {'x serial':>9} {'x plain':>9}")
    for row in rows:
        figures = (row[name]["median"] for name in ("cpu_s", "over_serial", "over_plain"))
        cpu, serial, plain = figures
        print(f"{row['agents']:>6} {row['backend']:12} {cpu:8.2f} {serial:9.2f} {plain:9.2f}")
