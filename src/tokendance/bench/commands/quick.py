"""`tokendance bench quick`: every measurement at its smallest, then the report.

It shows that all of them run on this machine; the figures are too coarse to quote. A command that
fails, or takes more than half of the time left, is named, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tokendance.bench.commands.common import need_model
from tokendance.cli.model import DEFAULT_FOLDER

TEXT = "every measurement at its smallest, then the report; under 10 minutes on two cores"

ORDER = (
    "restore",
    "storage",
    "churn",
    "similarity",
    "collective",
    "prefill",
    "overhead",
    "pressure",
    "fidelity",
    "capacity",
    "backends",
)
SMALL = {
    "prefill": ("--repeat", "1", "--agents", "3"),
    "overhead": ("--repeat", "1", "--agents", "3", "--tokens", "64"),
}
"""Arguments of the commands that have no --quick."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from tokendance.cli.bench import COMMANDS

    names = [name for name in ORDER if name in COMMANDS]
    add = parser.add_argument
    add("--model", type=Path, default=DEFAULT_FOLDER, help="model folder; default: %(default)s")
    add("--only", nargs="+", choices=names, default=names, metavar="COMMAND", help="default: all")
    add("--minutes", type=float, default=10.0, help="for all together; default: %(default)s")
    add("--out", type=Path, default=None, help="folder; default: a new temporary one")


def run(args: argparse.Namespace) -> int:
    from tokendance.bench.report import build

    need_model(args.model)
    out: Path = args.out or Path(tempfile.mkdtemp(prefix="tokendance-quick-"))
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * args.minutes
    failed: dict[str, str] = {}
    for name in args.only:
        began = time.monotonic()
        print(f"{name:12}", end="", flush=True)
        why = _run(_words(name, args.model, out), out / f"{name}.log", (until - began) / 2)
        print(f"{time.monotonic() - began:6.1f} s  {why or 'done'}", flush=True)
        if why:
            failed[name] = why
    report = out / "report.html"
    report.write_text(build(out, failed), encoding="utf-8")
    print(f"written to {report}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


def _words(name: str, model: Path, out: Path) -> list[str]:
    """The command line of one measurement."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(f"tokendance.bench.commands.{name}").add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    words = [name, *(("--quick",) if "--quick" in known else SMALL[name])]
    if "--model" in known:
        words += ["--model", str(model)]
    return [*words, "--out", str(out / f"{name}.json")]


def _run(words: Sequence[str], log: Path, seconds: float) -> str:
    """Run one command in a process group of its own, so that its engines end with it; what went
    wrong, or ""."""
    if seconds <= 0:
        return "not started: the time is up"
    code = "import sys; from tokendance.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "bench", *words]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "stopped: the time is up"
        finally:
            _end(process)
    return "" if status == 0 else f"status {status}, {_last_line(log)}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of the group is left, whether the command ended or not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no output")
