"""What the subcommands of `tokendance bench` share: where traces are, results go, and errors."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokendance.cli.model import DEFAULT_FOLDER

if TYPE_CHECKING:
    from tokendance.bench.prefill import Words

RESULTS = Path("benchmarks/results")
WORKLOADS = Path("benchmarks/workloads/small")


USUAL: dict[str, Any] = {
    "model": {
        "type": Path,
        "default": DEFAULT_FOLDER,
        "help": "model folder; default: %(default)s",
    },
    "repeat": {"type": int, "default": 3, "help": "counted repetitions; default: %(default)s"},
    "threads": {"type": int, "default": 1, "help": "of each engine; default: %(default)s"},
    "seed": {"type": int, "default": 0, "help": "of the texts that are cut; default: %(default)s"},
}


class BenchError(RuntimeError):
    """A measurement that cannot be started; the text says what to do."""


def workloads(size: str = "small") -> Path:
    """The folder of the traces, from the working directory or from a source checkout."""
    here = WORKLOADS.with_name(size)
    checkout = Path(__file__).resolve().parents[4] / here
    return here if here.exists() or not checkout.exists() else checkout


def traces(size: str = "small") -> list[Path]:
    """The traces of that size, in order."""
    return sorted(workloads(size).glob("*.jsonl"))


def trace_words(model: Path, seed: int) -> Words:
    """Token ids of the small traces' texts, in the model's tokens, to cut prompts from."""
    from tokendance.bench.prefill import words_of
    from tokendance.bench.render import HFTokenizer

    return words_of(traces(), HFTokenizer(model).encode, seed)


def add_usual(parser: argparse.ArgumentParser, *names: str, out: str = "") -> None:
    """Arguments that mean the same in every command; out: the file of its result."""
    for name in names:
        parser.add_argument(f"--{name}", **USUAL[name])
    if out:
        parser.add_argument("--out", type=Path, default=RESULTS / out, help="default: %(default)s")


def add_clock(parser: argparse.ArgumentParser) -> None:
    """--clock, for a command whose seconds another program on the machine would spoil."""
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: count CPU seconds of the engine and its waiting, which with one thread is what "
        "the wall clock shows on an idle machine; default: %(default)s",
    )


def need_model(folder: Path) -> None:
    """Raise BenchError unless the folder holds a model."""
    if not (folder / "config.json").exists():
        raise BenchError(f"there is no model in {folder}; `tokendance model` makes one")


def shown_command(name: str) -> str:
    """The command as it was typed, with paths cut to their last part; --resume and --out say
    nothing about the result."""
    typed = [Path(a).name if os.path.isabs(a) else a for a in sys.argv[3:] if a != "--resume"]
    if "--out" in typed:
        at = typed.index("--out")
        del typed[at : at + 2]
    return shlex.join(["tokendance", "bench", name, *typed])


def write_result(path: Path, command: str, measured: Mapping[str, Any]) -> None:
    """Write a result with day, machine, versions and command beside the figures."""
    from tokendance.bench.machine import about

    result = {**about(), "command": command, **measured}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


def say(text: str) -> None:
    """Progress, kept apart from the output."""
    print(text, file=sys.stderr, flush=True)
