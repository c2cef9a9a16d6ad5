"""Measure. One subcommand per question; every one writes a JSON file that says how it was made."""

from __future__ import annotations

import argparse
import importlib
import sys

from tokendance.bench.commands.common import BenchError
from tokendance.bench.partial import OtherSettings
from tokendance.bench.trace import TraceError

COMMANDS = (
    "prefill",
    "overhead",
    "backends",
    "collective",
    "storage",
    "restore",
    "churn",
    "pressure",
    "capacity",
    "export",
    "similarity",
    "fidelity",
    "report",
    "quick",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"tokendance.bench.commands.{name}")
        command = commands.add_parser(name, help=module.TEXT, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(command=module.run)


def run(args: argparse.Namespace) -> int:
    try:
        return int(args.command(args))
    except (TraceError, BenchError, OtherSettings) as error:
        print(f"tokendance bench: {error}", file=sys.stderr)
        return 1
