"""Serve a model with vLLM and TokenDance.

Everything but the options below goes to `vllm serve` as it is: tokendance serve MODEL --port 8000
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tokendance.config import Config, ConfigError
from tokendance.engines.vllm.support import CONNECTOR, UnsupportedVLLM, check_version

PASS_UNKNOWN = True
TRANSFER_FLAG = "--kv-transfer-config"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tokendance serve MODEL [any flag of vllm serve] [options]"
    parser.add_argument(
        "--tokendance", metavar="JSON", default="{}", help="options as one JSON object"
    )
    defaults = Config()
    for option in fields(Config):
        parser.add_argument(
            f"--td-{option.name.replace('_', '-')}",
            dest=f"td_{option.name}",
            metavar="JSON" if _kind(option.type) == "dict" else _kind(option.type).upper(),
            help=f"default: {getattr(defaults, option.name)!r}",
        )


def run(args: argparse.Namespace) -> int:
    try:
        check_version()
        command = vllm_arguments(args.rest, options_from(args))
    except (ConfigError, UnsupportedVLLM) as error:
        print(f"tokendance serve: {error}", file=sys.stderr)
        return 2
    from tokendance.engines.vllm.launch import run_vllm

    run_vllm(command)
    return 0


def options_from(args: argparse.Namespace) -> dict[str, Any]:
    """The TokenDance options that the command line sets, checked. Raises ConfigError."""
    try:
        options = json.loads(args.tokendance)
    except ValueError as error:
        raise ConfigError(f"--tokendance takes a JSON object: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--tokendance takes a JSON object, not {args.tokendance}")
    for option in fields(Config):
        text = getattr(args, f"td_{option.name}")
        if text is not None:
            options[option.name] = _value(text, str(option.type))
    Config.from_mapping(options)
    return options


def vllm_arguments(rest: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's command line. Raises ConfigError if they name a connector already."""
    if any(word.split("=")[0].split(".")[0] == TRANSFER_FLAG for word in rest):
        raise ConfigError(
            f"{TRANSFER_FLAG} is what `tokendance serve` sets; "
            f"use `vllm serve` with kv_connector {CONNECTOR} to set it yourself"
        )
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(options),
    }
    return ["serve", *rest, TRANSFER_FLAG, json.dumps(transfer)]


def _kind(declared: Any) -> str:
    """`int` of `int | None`, `dict` of `dict[str, Any]`."""
    return str(declared).split(" ")[0].split("[")[0]


def _value(text: str, declared: str) -> Any:
    """A value as its option declares it; what does not fit is left for Config to refuse."""
    if "None" in declared and text == "none":
        return None
    kind = _kind(declared)
    if kind == "bool":
        return {"true": True, "false": False}.get(text.lower(), text)
    readers: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "dict": json.loads}
    try:
        return readers.get(kind, str)(text)
    except ValueError:
        return text
