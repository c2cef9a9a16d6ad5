"""`tokendance bench prefill`: one round, plain vLLM over TokenDance.

Without --paper a synthetic round on a real model, cold and warm. With --paper rounds of the paper's
size, 10 agents and 20, on a small model with random weights: CPU seconds beside the bound by rows.
Each part leaves the figures of the other in the result as they are.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokendance.bench.commands.common import (
    BenchError,
    add_usual,
    need_model,
    say,
    shown_command,
    trace_words,
    workloads,
    write_result,
)

TEXT = "one round, plain vLLM over TokenDance; with --paper of the paper's size"
PAPER = (
    ("1_meet_and_greet", False),
    ("5_information_outbreak", False),
    ("1_meet_and_greet", True),
)
"""Trace, and whether its last round or the first that quotes answers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, "model", "repeat", "threads", "seed", out="prefill.json")
    add = parser.add_argument
    add("--agents", type=int, default=8, help="requests at a time; default: %(default)s")
    add("--paper", action="store_true", help="rounds of the paper's size, in place of the others")
    add("--quick", action="store_true", help="3 agents with short prompts, or one paper round")


def run(args: argparse.Namespace) -> int:
    need_model(args.model)
    if min(args.repeat, args.agents) < 1:
        raise BenchError("agents and repetitions have to be above zero")
    repeat = 1 if args.quick else args.repeat
    before = _before(args.out)
    command = shown_command("prefill")
    if args.paper:
        # The date, the machine and the command of the other figures stay theirs.
        found = {**before, **_paper(args, repeat), "paper_command": command}
    else:
        kept = {name: value for name, value in before.items() if name.startswith("paper")}
        found = {**_synthetic(args, repeat), **kept}
    write_result(args.out, command, found)
    return 0


def _before(out: Path) -> Mapping[str, Any]:
    """The figures that are there already. Raises BenchError if the file cannot be read."""
    if not out.exists():
        return {}
    try:
        return dict(json.loads(out.read_text(encoding="utf-8")))
    except ValueError as error:
        raise BenchError(f"{out} is no result: {error}; remove it or take another --out") from error


def _synthetic(args: argparse.Namespace, repeat: int) -> dict[str, Any]:
    from tokendance.bench.prefill import RoundShape, bench_prefill

    words = trace_words(args.model, args.seed)
    shape = RoundShape(3, 64, 4, 64) if args.quick else RoundShape(agents=args.agents)
    measured = bench_prefill(str(args.model), shape, words, repeat, args.threads, say)
    return {"model": args.model.name, **measured}


def _paper(args: argparse.Namespace, repeat: int) -> dict[str, Any]:
    from dataclasses import asdict

    from tokendance.bench.machine import about
    from tokendance.bench.paper import Case, ModelShape, bench_paper, load, make_model
    from tokendance.bench.render import HFTokenizer

    tokenizer, shape = HFTokenizer(args.model), ModelShape()
    cases = PAPER[:1] if args.quick else PAPER
    say("reading the traces")
    rounds = [
        load(Case(workloads("paper") / f"{name}.jsonl", last), tokenizer) for name, last in cases
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "random-llama", args.model, shape)
        measured = bench_paper(model, rounds, repeat, args.threads, say)
    return {
        **measured,
        "paper_model": {"weights": "random", **asdict(shape)},
        "paper_machine": about()["machine"],
    }
