"""`tokendance bench quick`: every measurement at its smallest, then the report.

It shows that all of them run on this machine; the figures are too coarse to quote. A command that
fails, or takes more than half of the time left to it and others, is named, and the others go on.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokendance.bench.commands.common import add_usual, need_model

TEXT = "every measurement at its smallest, then the report; under 10 minutes on two cores"

LANES = (
    ("restore", "storage", "churn", "similarity", "collective", "fidelity", "backends"),
    ("prefill", "overhead", "pressure", "capacity"),
)
"""What runs side by side, each in order: what needs one process, and what starts vLLM."""

SMALL = {
    "overhead": ("--repeat", "1", "--agents", "3", "--tokens", "64"),
}
"""Arguments of the commands that have no --quick."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, "model")
    from tokendance.cli.bench import COMMANDS

    names = [name for lane in LANES for name in lane if name in COMMANDS]
    add = parser.add_argument
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
    lanes = [[(n, _words(n, args.model, out)) for n in lane if n in args.only] for lane in LANES]
    for job, why in _follow(lanes, out, until):
        print(f"{job.name:12}{time.monotonic() - job.began:6.1f} s  {why or 'done'}", flush=True)
        if why:
            failed[job.name] = why
    report = out / "report.html"
    report.write_text(build(out, failed), encoding="utf-8")
    print(f"written to {report}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


@dataclass(frozen=True, slots=True)
class Job:
    """A command that has been started, in a process group of its own: its engines end with it.

    until: on the monotonic clock, when it is stopped.
    """

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    began: float
    until: float

    @classmethod
    def start(cls, name: str, words: Sequence[str], log: Path, until: float) -> Job:
        code = "import sys; from tokendance.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "bench", *words]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        return cls(name, log, process, time.monotonic(), until)

    def outcome(self) -> str | None:
        """None while it runs; what went wrong, or ""."""
        status = self.process.poll()
        if status is None:
            return None if time.monotonic() < self.until else "stopped: the time is up"
        return "" if status == 0 else f"status {status}, {_last_line(self.log)}"

    def end(self) -> None:
        """Nothing of the group is left, whether the command ended or not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _follow(
    lanes: Sequence[Sequence[tuple[str, Sequence[str]]]], out: Path, until: float
) -> Iterator[tuple[Job, str]]:
    """Run all lanes side by side; every job as it ends, with what went wrong."""
    waiting = [list(lane) for lane in lanes]
    running: dict[int, Job] = {}
    try:
        while running or any(waiting):
            for index, lane in enumerate(waiting):
                if lane and index not in running:
                    name, words = lane.pop(0)
                    now = time.monotonic()
                    limit = now + (until - now) / (2 if lane else 1)
                    running[index] = Job.start(name, words, out / f"{name}.log", limit)
            time.sleep(0.1)
            for index, job in list(running.items()):
                why = job.outcome()
                if why is not None:
                    running.pop(index).end()
                    yield job, why
    finally:
        for job in running.values():
            job.end()


def _words(name: str, model: Path, out: Path) -> list[str]:
    """The command line of one measurement."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(f"tokendance.bench.commands.{name}").add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    words = [name, *(("--quick",) if "--quick" in known else SMALL[name])]
    if "--model" in known:
        words += ["--model", str(model)]
    return [*words, "--out", str(out / f"{name}.json")]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no output")
