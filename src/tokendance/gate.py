"""The gate: a model's verdict on reuse, measured by `tokendance gate` and looked up by servers.

A verdict is kept in the user's cache, under the identity of the weights, the recovery backend and
this version of TokenDance; another checkpoint, backend or version has to pass anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokendance import __version__

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLE = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model has to keep to; KL in nats, averaged over the followers' answers.

    max_recall_loss: share of the needles that are found with exact K/V and lost with reused K/V.
    """

    max_kl: float = 0.05
    min_top1: float = 0.9
    max_recall_loss: float = 0.1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was measured and whether that is good enough. problems: every limit that was missed."""

    model: str
    backend: str
    kl: float
    top1: float
    recall_exact: float
    recall_reuse: float
    problems: tuple[str, ...]
    version: str = __version__
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.problems


def judge(
    limits: Limits, *, kl: float, top1: float, recall_exact: float, recall_reuse: float
) -> tuple[str, ...]:
    """The limits that are missed, in words; empty if none."""
    lost = recall_exact - recall_reuse
    checks = (
        (kl <= limits.max_kl, f"KL {kl:.4f} is above {limits.max_kl}"),
        (top1 >= limits.min_top1, f"top-1 agreement {top1:.3f} is below {limits.min_top1}"),
        (
            lost <= limits.max_recall_loss,
            f"needle recall falls from {recall_exact:.2f} to {recall_reuse:.2f}",
        ),
    )
    return tuple(text for held, text in checks if not held)


def store(verdict: Verdict, model: str, revision: str | None, options: Mapping[str, Any]) -> Path:
    """Keep a verdict; replaces an earlier one at once."""
    path = verdict_path(model, revision, verdict.backend, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as scratch:
        json.dump({**asdict(verdict), "passed": verdict.passed}, scratch, indent=1)
    os.replace(scratch.name, path)
    return path


def objection(model: str, revision: str | None, backend: str, options: Mapping[str, Any]) -> str:
    """Why the gate keeps this model from reuse, in one line; "" if it has passed."""
    path = verdict_path(model, revision, backend, options)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        passed, problems = found["passed"] is True, found["problems"]
    except FileNotFoundError:
        return (
            f"require_gate is set and there is no verdict on {model} with {backend} and "
            f"TokenDance {__version__}; run `tokendance gate`"
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"require_gate is set and the verdict {path} cannot be read: {error!r}"
    return "" if passed else f"the model did not pass the gate: {'; '.join(map(str, problems))}"


def verdict_path(
    model: str, revision: str | None, backend: str, options: Mapping[str, Any]
) -> Path:
    """Where the verdict on a model with a recovery backend is kept."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = json.dumps(
        [model_key(model, revision), backend, dict(options), __version__], sort_keys=True
    )
    return root / "tokendance" / "gate" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def model_key(model: str, revision: str | None = None) -> str:
    """Identity of a checkpoint: its configuration, and every weight file's size and samples of it.

    A folder may move and keeps its key. A name on the hub has the key of its local snapshot, and
    its name and revision only if there is none.
    """
    folder = _folder(model, revision)
    if folder is None:
        return f"{model}@{revision or 'main'}"
    digest = hashlib.sha256()
    for name, part in _parts(folder):
        digest.update(f"{name}:{len(part)}:".encode() + part)
    return digest.hexdigest()


def _parts(folder: Path) -> Iterator[tuple[str, bytes]]:
    yield "config", (folder / "config.json").read_bytes()
    weights = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    for path in weights:
        size = path.stat().st_size
        yield path.name, str(size).encode()
        with path.open("rb") as file:
            for start in (0, size // 3, 2 * size // 3, max(0, size - _SAMPLE)):
                file.seek(start)
                yield str(start), file.read(_SAMPLE)


def _folder(model: str, revision: str | None) -> Path | None:
    folder = Path(model)
    if (folder / "config.json").is_file():
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, ValueError):  # not a name that the hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None
