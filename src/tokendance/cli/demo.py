"""Replay a multi-agent trace on plain vLLM and on TokenDance, side by side.

Both run the same requests with the same settings; the agents' stored answers are forced, so both
do the same work. Ratios are plain vLLM over TokenDance: 3.0x means a third of the cost.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from tokendance.bench.engine_process import EngineError
from tokendance.bench.replay import ModelMissing, Progress, Replay, ReplaySettings, RoundReport
from tokendance.bench.summary import round_figures, summarise
from tokendance.bench.trace import TraceError
from tokendance.cli.model import DEFAULT_FOLDER

DEFAULT_TRACE = "benchmarks/workloads/small/5_information_outbreak.jsonl"
COLUMNS = (
    "round",
    "tokens computed",
    "prefill CPU s",
    "",
    "round wall s",
    "",
    "reuse",
    "KL",
    "top-1",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, default=None, help=f"default: {DEFAULT_TRACE}")
    add("--model", default=str(DEFAULT_FOLDER), help="model folder; default: %(default)s")
    add("--rounds", type=_count, help="replay only the first ROUNDS rounds")
    add("--agents", type=_count, help="replay only the requests of the first AGENTS agents")
    add("--repeat", type=_count, default=1, help="repetitions, of which the median is taken")
    add("--threads", type=_count, default=min(2, os.cpu_count() or 1), help="default: %(default)s")
    add("--out", type=Path, help="write the JSON object to this file too")
    add("--json", action="store_true", help="print nothing but the JSON object of the last line")


def run(args: argparse.Namespace) -> int:
    settings = ReplaySettings(
        trace=args.trace or _default_trace(),
        model=args.model,
        rounds=args.rounds,
        agents=args.agents,
        repeat=args.repeat,
        threads=args.threads,
    )
    try:
        replay = Replay(settings)
        reports = _show(replay, quiet=args.json)
    except (ModelMissing, TraceError, EngineError) as error:
        print(f"tokendance demo: {error}", file=sys.stderr)
        return 1
    result = summarise(replay, reports)
    if args.out is not None:
        command = f"tokendance demo --trace {settings.trace.name} --repeat {args.repeat}"
        text = json.dumps({"command": command, **result}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _default_trace() -> Path:
    """The demo's trace, found from the working directory or from a source checkout."""
    here = Path(DEFAULT_TRACE)
    checkout = Path(__file__).resolve().parents[3] / DEFAULT_TRACE
    return here if here.exists() or not checkout.exists() else checkout


def _show(replay: Replay, *, quiet: bool) -> list[RoundReport]:
    console = Console(quiet=quiet, highlight=False)
    reports: list[RoundReport] = []
    console.print(_introduction(replay))
    with _display(console, reports) as progress:
        for report in replay.run(progress):
            reports.append(report)
            progress("")
    if not quiet:
        console.print(_conclusion(summarise(replay, reports)))
    return reports


def _introduction(replay: Replay) -> str:
    rounds, header = len(replay.prompts), replay.header
    return (
        f"{replay.agents} agents talk in {rounds} rounds ({header.scenario}). In each round every "
        "agent reads its own history and what all the others said. Plain vLLM, with its prefix "
        "cache, computes the shared text once for every agent; TokenDance computes it once for all."
    )


def _conclusion(figures: dict[str, Any]) -> str:
    def pair(name: str) -> str:
        later = figures[f"{name}_steady"]
        return f"{figures[name]:.2f}x" + (f" ({later:.2f}x)" if later is not None else "")

    if figures["kl_mean"] is None:
        quality = "No request took another's K/V."
    else:
        quality = (
            f"The answers' distributions differ by a KL of {figures['kl_mean']:.4f} on average; "
            f"{100 * figures['top1']:.1f} % of the most likely tokens are the same."
        )
    return (
        f"Until the first tokens plain vLLM needed {pair('prefill_cpu_ratio')} the CPU time of "
        "TokenDance (in brackets: after the first round); the texts that the trace marks as shared "
        f"account for {pair('row_bound')}. Whole rounds, answers included, took "
        f"{figures['round_wall_ratio']:.2f}x the time. {quality}"
    )


@contextmanager
def _display(console: Console, reports: list[RoundReport]) -> Iterator[Progress]:
    """Yields the function that shows what is being done; "" after a finished round."""
    if not console.is_terminal:
        yield lambda text: console.print(text or _line(reports), soft_wrap=True)
        return
    with Live(console=console, refresh_per_second=8) as live:

        def show(text: str) -> None:
            parts: list[Any] = [_table(reports)] if reports else []
            live.update(Group(*parts, Spinner("dots", text)) if text else Group(*parts))

        yield show


def _line(reports: list[RoundReport]) -> str:
    cells = _cells(round_figures(reports, reports[-1].index))
    named = (f"{name} {cell}".strip() for name, cell in zip(COLUMNS, cells))
    return "  " + "  ".join(named)


def _table(reports: list[RoundReport]) -> Table:
    table = Table(title="plain vLLM/TokenDance", title_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "reuse" else "right")
    for index in sorted({report.index for report in reports}):
        table.add_row(*_cells(round_figures(reports, index)))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    sources = row["tokens_by_source"]
    reuse = " ".join(f"{k} {sources[k]}" for k in ("prefix", "sibling", "stored") if sources.get(k))
    return [
        str(row["round"] + 1),
        "{}/{}".format(*row["computed"]),
        "{:.1f}/{:.1f}".format(*row["prefill_cpu_s"]),
        f"{row['prefill_cpu_ratio']:.2f}x",
        "{:.1f}/{:.1f}".format(*row["round_wall_s"]),
        f"{row['round_wall_ratio']:.2f}x",
        reuse or "none",
        "-" if row["kl_mean"] is None else f"{row['kl_mean']:.4f}",
        "-" if row["top1"] is None else f"{row['top1']:.3f}",
    ]
