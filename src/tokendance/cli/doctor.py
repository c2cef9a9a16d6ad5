"""Say what works here, one line each; with MODEL also what TokenDance can do with it.

Exit status 1 if something that TokenDance needs is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, NamedTuple

from tokendance.engines.vllm.support import installed_version, version_problem


class Finding(NamedTuple):
    """level: "ok", "note" (works, with a limit) or "no" (does not work)."""

    level: str
    subject: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="folder or name of a model")


def run(args: argparse.Namespace) -> int:
    findings = list(_machine())
    for finding in findings:
        print("{:4}  {:12} {}".format(*finding))
    if args.model:
        for finding in _model(args.model):
            print("{:4}  {:12} {}".format(*finding))
            findings.append(finding)
    return int(any(finding.level == "no" for finding in findings))


def _machine() -> Iterator[Finding]:
    yield Finding("ok", "python", sys.version.split()[0])
    found = installed_version()
    problem = version_problem(found)
    yield Finding("no" if problem else "ok", "vllm", problem or f"{found}, supported")
    for package in ("torch", "transformers"):
        try:
            yield Finding("ok", package, version(package))
        except PackageNotFoundError:
            yield Finding("no", package, "not installed")
    yield _plugin()
    yield _device()


def _plugin() -> Finding:
    registered = "tokendance" in {p.name for p in entry_points(group="vllm.general_plugins")}
    allowed = os.environ.get("VLLM_PLUGINS")
    if not registered:
        return Finding("no", "plugin", "vLLM does not see it: install the package with pip")
    if allowed is not None and "tokendance" not in allowed.split(","):
        return Finding("no", "plugin", f"VLLM_PLUGINS={allowed} leaves tokendance out")
    return Finding("ok", "plugin", "vLLM loads it in every process")


def _device() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("no", "device", "unknown without torch")
    if torch.cuda.is_available():
        return Finding("ok", "device", torch.cuda.get_device_name(0))
    return Finding("ok", "device", f"CPU, {os.cpu_count()} cores")


def _model(name: str) -> Iterator[Finding]:
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        yield Finding("no", "model", str(error).splitlines()[0])
        return
    architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
    problem = config_problem(config)
    yield Finding("no" if problem else "ok", "model", problem or architecture)
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "none")
    yield Finding("no" if kind == "none" else "ok", "rope", f"{kind}, the model's own frequencies")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        yield Finding("no", "tokenizer", str(error).splitlines()[0])
        return
    yield from _tokenizer(tokenizer)


def _tokenizer(tokenizer: Any) -> Iterator[Finding]:
    from tokendance.engines.vllm.tokenizer import message_starts, piece_tokenizer

    pieces = piece_tokenizer(tokenizer)
    if pieces.problem:
        yield Finding("no", "separator", pieces.problem)
    else:
        around = tokenizer.convert_ids_to_tokens([*pieces.prefix, *pieces.suffix])
        special = f"special tokens around a prompt: {' '.join(around) or 'none'}"
        yield Finding("ok", "separator", f"pieces tokenise independently; {special}")
    starts = tokenizer.convert_ids_to_tokens(sorted(message_starts(tokenizer)))
    if starts:
        yield Finding("ok", "chat", f"messages are segments, they begin with {' '.join(starts)}")
    else:
        yield Finding("note", "chat", "the template marks no message; use separators")


def config_problem(config: Any) -> str:
    """Why a model's configuration is outside what TokenDance reuses; empty if it is inside."""
    kinds = set(getattr(config, "layer_types", None) or [])
    rope = getattr(config, "rope_parameters", None) or {}
    checks = {
        "encoder-decoder models are not supported": getattr(config, "is_encoder_decoder", False),
        "models with a vision or audio part are not supported": hasattr(config, "vision_config")
        or hasattr(config, "audio_config"),
        "latent attention (MLA) is not supported": getattr(config, "kv_lora_rank", None),
        "M-RoPE is not supported": rope.get("mrope_section"),
        f"layers of kind {', '.join(sorted(kinds))} are not supported": kinds - {"full_attention"},
    }
    return next((problem for problem, found in checks.items() if found), "")
