"""Measure. `tokendance bench backends` compares every recovery backend on the same rounds.

The rounds are the last ones of the traces and of synthetic towns, one per seed. What is finished is
kept beside the result; with --resume an interrupted run goes on there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokendance.bench.trace import TraceError
from tokendance.cli.model import DEFAULT_FOLDER

if TYPE_CHECKING:
    from tokendance.bench.backends import Case
    from tokendance.bench.render import HFTokenizer

WORKLOADS = Path("benchmarks/workloads/small")
TRACES = ("1_meet_and_greet", "4_winning_the_election", "5_information_outbreak")
OUT = Path("benchmarks/results/backends.json")

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
    commands = parser.add_subparsers(dest="what", required=True)
    backends = commands.add_parser("backends", help="every backend at 0, 5, 15 and 30 %%")
    add = backends.add_argument
    add("--trace", type=Path, nargs="+", default=None, help=f"default: {', '.join(TRACES)}")
    add("--seeds", type=int, default=5, help="towns to make; default: %(default)s")
    add("--model", type=Path, default=DEFAULT_FOLDER, help="model folder; default: %(default)s")
    add("--agents", type=int, default=5, help="agents a round, leader included; default: 5")
    add(
        *("--speed-agents", "-n"),
        type=int,
        nargs="*",
        default=[8, 16],
        help="sizes at which the first town is run with region and cacheblend; default: 8 16",
    )
    add("--threads", type=int, default=1, help="default: %(default)s")
    add("--resume", action="store_true", help="go on with an interrupted run")
    add("--quick", action="store_true", help="one town, three agents, three backends")
    add("--out", type=Path, default=OUT, help="default: %(default)s")

    for name, text in (
        ("prefill", "one synthetic round, cold and warm, plain vLLM over TokenDance"),
        ("overhead", "requests that share nothing, TokenDance over plain vLLM"),
    ):
        command = commands.add_parser(name, help=text)
        add = command.add_argument
        add("--model", type=Path, default=DEFAULT_FOLDER, help="model folder; default: %(default)s")
        add("--repeat", type=int, default=3, help="counted repetitions; default: %(default)s")
        add("--threads", type=int, default=1, help="default: %(default)s")
        add("--seed", type=int, default=0, help="default: %(default)s")
        add("--out", type=Path, default=OUT.with_name(f"{name}.json"), help="default: %(default)s")
        add("--agents", type=int, default=8, help="requests at a time; default: %(default)s")
        if name == "overhead":
            add("--tokens", type=int, default=256, help="of each prompt; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    try:
        return _backends(args) if args.what == "backends" else _engines(args)
    except (TraceError, ResumeError) as error:
        print(f"tokendance bench: {error}", file=sys.stderr)
        return 1


class ResumeError(RuntimeError):
    """A partial result that belongs to a run with other settings."""


def _backends(args: argparse.Namespace) -> int:
    import torch

    from tokendance.bench.backends import run_cases, summary
    from tokendance.bench.machine import about
    from tokendance.bench.render import HFTokenizer
    from tokendance.engines.reference.model import Model

    if not (args.model / "config.json").exists():
        raise TraceError(f"there is no model in {args.model}; `tokendance model` makes one")
    torch.set_num_threads(args.threads)
    settings = _settings(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(args.out, settings, args.resume)
    with tempfile.TemporaryDirectory() as scratch:
        cases = list(_cases(args, Path(scratch), HFTokenizer(args.model)))
        lines = run_cases(cases, Model.load(args.model), partial, _say)
    command = shlex.join(["tokendance", "bench", "backends", *_short(sys.argv[3:])])
    result = {
        **about(["backends"]),
        "command": command,
        "settings": settings,
        "summary": summary(lines),
        "rows": [{k: v for k, v in line.items() if k != "key"} for line in lines],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.unlink()
    partial.with_suffix(".settings").unlink()
    _print(result["summary"])
    print(f"written to {args.out}")
    return 0


def _engines(args: argparse.Namespace) -> int:
    """The benches that run two engines side by side."""
    from tokendance.bench import prefill
    from tokendance.bench.machine import about
    from tokendance.bench.render import HFTokenizer

    if not (args.model / "config.json").exists():
        raise TraceError(f"there is no model in {args.model}; `tokendance model` makes one")
    traces = sorted(_workloads().glob("*.jsonl"))
    words = prefill.words_of(traces, HFTokenizer(args.model).encode, args.seed)
    if args.what == "prefill":
        shape = prefill.RoundShape(agents=args.agents)
        measured = prefill.bench_prefill(
            str(args.model), shape, words, args.repeat, args.threads, _say
        )
    else:
        measured = prefill.bench_overhead(
            str(args.model), args.agents, args.tokens, words, args.repeat, args.threads, _say
        )
    command = shlex.join(["tokendance", "bench", args.what, *_short(sys.argv[3:])])
    result = {**about([args.what]), "command": command, "model": args.model.name, **measured}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}))
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
    return [] if args.quick else [_workloads() / f"{name}.jsonl" for name in TRACES]


def _workloads() -> Path:
    """From the working directory or from a source checkout."""
    checkout = Path(__file__).resolve().parents[3] / WORKLOADS
    return WORKLOADS if WORKLOADS.exists() or not checkout.exists() else checkout


def _partial(out: Path, settings: dict[str, Any], resume: bool) -> Path:
    """The file of finished cells; emptied unless it is to be resumed. Raises ResumeError."""
    partial, beside = out.with_suffix(".partial"), out.with_suffix(".settings")
    if resume and partial.exists() and beside.exists():
        if json.loads(beside.read_text()) != settings:
            raise ResumeError(f"{partial} was made with other settings; run without --resume")
        return partial
    partial.unlink(missing_ok=True)
    beside.write_text(json.dumps(settings))
    return partial


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
    pool = sentences(sorted(_workloads().glob("*.jsonl")))
    for seed in range(settings["seeds"]):
        town = write_town(folder / f"{seed}.jsonl", pool, seed, count)
        yield case(town, agents, methods)
    for size in settings["speed_agents"]:
        town = folder / f"of{size}.jsonl"
        yield case(write_town(town, pool, 0, count, max(size, SEGMENTS)), size, SPEED_METHODS)


def _short(arguments: Sequence[str]) -> list[str]:
    """Arguments with paths cut to their last part; --resume says nothing about the result."""
    cut = (Path(a).name if os.path.isabs(a) else a for a in arguments)
    return [a for a in cut if a != "--resume"]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'':48}" + "".join(f"{title:>10}" for title, _, _ in COLUMNS))
    for row in rows:
        over = f"{row['rounds']} {row['over']} of {row['agents']}"
        method = f"{row['backend']} {row['ratio']:.0%} ({row['source']})"
        figures = (format(row[name], form) for _, name, form in COLUMNS)
        print(f"{over:14}{method:34}" + "".join(f"{figure:>10}" for figure in figures))
