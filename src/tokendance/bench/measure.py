"""What is counted and compared: the rows a trace needs at least, and how close two answers are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokendance.bench.engine_process import CallResult, RoundResult
from tokendance.bench.render import Prompt
from tokendance.plan.ticket import common_prefix

Logits = npt.NDArray[np.float32]


class Bound(NamedTuple):
    """Prompt rows of one round that have to be computed, counted from the token ids.

    plain: with an unlimited prefix cache in which every agent finds its own earlier prompts.
    region: what one region pass over the rows marked as shared needs: every agent's private and
    task rows that its own prefix cache does not hold, and the largest shared part once.
    """

    plain: int
    region: int

    @property
    def ratio(self) -> float:
        return self.plain / self.region


class BoundCounter:
    """Counts the bound of round after round."""

    def __init__(self, block_size: int = 32) -> None:
        self.block_size = block_size
        self._last: dict[str, tuple[int, ...]] = {}

    def add(self, prompts: Sequence[Prompt]) -> Bound:
        plain = own = shared = 0
        for prompt in prompts:
            ids = prompt.ids
            hit = self._hit(ids, self._last.get(prompt.agent, ()))
            self._last[prompt.agent] = ids
            rest = _rows_after(prompt, hit)
            plain += len(ids) - hit
            own += len(ids) - hit - rest
            shared = max(shared, rest)
        return Bound(plain, own + shared)

    def _hit(self, ids: tuple[int, ...], earlier: tuple[int, ...]) -> int:
        """Rows of whole blocks shared with an earlier prompt; the last row never hits."""
        common = common_prefix(ids[:-1], earlier)
        return common - common % self.block_size


def _rows_after(prompt: Prompt, start: int) -> int:
    """Shared rows of a prompt from row `start` on."""
    rows = position = 0
    for kind, ids in prompt.pieces:
        end = position + len(ids)
        if kind == "shared":
            rows += max(0, end - max(start, position))
        position = end
    return rows


def rows_by_source(result: CallResult) -> dict[str, int]:
    """Prompt tokens of one call by where their K/V came from: prefix, sibling, stored, computed.

    The last prompt token is always computed by the engine, outside the collective pass.
    """
    reported = _outcome(result).get("rows")
    if not reported:
        return {"prefix": result.cached, "computed": result.prompt_tokens - result.cached}
    rows = dict(reported)
    rows["computed"] = result.prompt_tokens - sum(n for k, n in rows.items() if k != "computed")
    return rows


def is_follower(result: CallResult) -> bool:
    """Whether a call took rows of another request or of the store."""
    return any(rows_by_source(result).get(source) for source in ("sibling", "stored"))


def reason(result: CallResult) -> str:
    """Why a call reused nothing from others, as the engine says it."""
    return str(_outcome(result).get("reason", ""))


def _outcome(result: CallResult) -> Mapping[str, Any]:
    return (result.outcome or {}).get("tokendance") or {}


class Closeness(NamedTuple):
    """One call on two engines: KL(reference || other) and equal most likely tokens.

    end: KL at the last prompt token. cont: KL of each forced token after it. top1: steps with the
    same most likely token, of `steps`.
    """

    end: float
    cont: tuple[float, ...]
    top1: int
    steps: int

    @property
    def mean(self) -> float:
        """KL over all steps."""
        return (self.end + sum(self.cont)) / self.steps


def compare(reference: RoundResult, other: RoundResult) -> Iterator[Closeness]:
    """The closeness of every call of a round, in order. Both have to have kept their logits."""
    if reference.logits is None or other.logits is None:
        raise ValueError("both rounds need their logits")
    ours, theirs = _open(reference.logits), _open(other.logits)
    for a, b in zip(reference.calls, other.calls, strict=True):
        if a.id != b.id or a.output != b.output:
            raise ValueError(f"{a.id} and {b.id} are not the same call with the same answer")
        p, q = _logits(ours[a.logits]), _logits(theirs[b.logits])
        kl = kl_divergence(p, q)
        same = int((p.argmax(-1) == q.argmax(-1)).sum())
        yield Closeness(float(kl[0]), tuple(map(float, kl[1:])), same, len(kl))


def kl_divergence(p: Logits, q: Logits) -> npt.NDArray[np.float64]:
    """KL(softmax(p) || softmax(q)) of each row ([rows, vocab] -> [rows]), in nats."""
    a, b = _log_softmax(p), _log_softmax(q)
    kl: npt.NDArray[np.float64] = (np.exp(a) * (a - b)).sum(-1, dtype=np.float64)
    return np.maximum(kl, 0.0)


def _log_softmax(x: Logits) -> Logits:
    shifted = x - x.max(-1, keepdims=True)
    sums = np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)
    result: Logits = shifted - np.log(sums).astype(np.float32)
    return result


def _open(path: str | Path) -> npt.NDArray[Any]:
    table: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    return table


def _logits(table: npt.NDArray[Any]) -> Logits:
    """float32 logits; uint16 are the bits of bf16."""
    if table.dtype == np.uint16:
        return (table.astype(np.uint32) << 16).view(np.float32)
    return table.astype(np.float32)
