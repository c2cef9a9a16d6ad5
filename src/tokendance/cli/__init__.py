"""The `tokendance` command: one file per subcommand, loaded only when it is called.

A subcommand module has `add_arguments(parser)` and `run(args) -> int`; if it sets
`PASS_UNKNOWN = True`, arguments that its parser does not know arrive in `args.rest`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": "serve a model with vLLM and TokenDance (takes every flag of `vllm serve`)",
    "demo": "replay a multi-agent trace, plain vLLM and TokenDance side by side",
    "explain": "say what a round of prompts shares, or why not, segment by segment",
    "gate": "measure how reuse changes a model's answers, and keep the verdict",
    "bench": "measure recovery backends against one another",
    "stats": "show what a running server reuses, stores and restores",
    "doctor": "say what works on this machine and with this model, one line each",
    "model": "unpack the small test model into a folder",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        from tokendance import __version__

        print(__version__)
        return 0
    command = words[0]
    if command not in COMMANDS:
        print(f"tokendance: no command {command!r}\n\n{_overview()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"tokendance.cli.{command}")
    parser = argparse.ArgumentParser(
        prog=f"tokendance {command}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    if getattr(module, "PASS_UNKNOWN", False):
        args, rest = parser.parse_known_args(words[1:])
        args.rest = rest
    else:
        args = parser.parse_args(words[1:])
    return int(module.run(args))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tokendance COMMAND [options]     (tokendance COMMAND --help says more)",
            "",
            "Collective KV cache reuse for multi-agent rounds, as an add-on for vLLM.",
            "",
            *lines,
        ]
    )
