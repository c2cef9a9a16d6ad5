"""The rotation that a loaded vLLM model uses, read from its own cos/sin table.

vLLM keeps no frequencies, and every scaling (linear, dynamic NTK, YaRN, Llama 3) computes its
table in another way. All of them are rotations by position * frequency, so the frequencies are
recovered from the table itself and checked against it; a table that is no such rotation (LongRoPE's
two tables, M-RoPE) is refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tokendance.reuse.rotary import Rotary

REFUSED = ("MRotaryEmbedding", "DualChunkRotaryEmbedding", "Phi3LongRoPEScaledRotaryEmbedding")


class UnsupportedRope(RuntimeError):
    """The model's position encoding is not one plain rotation."""


def rotary_of(model: torch.nn.Module) -> Rotary:
    """The model's rotation. Raises UnsupportedRope if it has none, several or an unknown one."""
    found = {id(m): m for m in model.modules() if hasattr(m, "cos_sin_cache")}
    if not found:
        raise UnsupportedRope("the model has no rotary embedding")
    rotaries = []
    for module in found.values():
        name = type(module).__name__
        if any(refused in name for refused in REFUSED):
            raise UnsupportedRope(f"rotary embedding {name} is not supported")
        rotaries.append(_from_table(module))
    first = rotaries[0]
    for other in rotaries[1:]:
        if first.interleaved != other.interleaved or not torch.equal(
            first.inv_freq, other.inv_freq
        ):
            raise UnsupportedRope("the layers use different rotary embeddings")
    return first


def _from_table(module: Any) -> Rotary:
    with torch.device("cpu"):
        table = module._compute_cos_sin_cache().float().cpu()
    cos, sin = table.chunk(2, dim=-1)
    angles = torch.atan2(sin, cos).double()
    inv_freq = _frequencies(angles)
    _check(angles, inv_freq, type(module).__name__)
    rotary_dim = 2 * inv_freq.numel()
    return Rotary(inv_freq, interleaved=not module.is_neox_style, rotary_dim=rotary_dim)


def _frequencies(angles: torch.Tensor) -> torch.Tensor:
    """Angle per position, fp64 [pairs], from angles modulo 2 pi [positions, pairs].

    Position 1 gives it to fp32 accuracy of a small number; every doubling of the position halves
    what is left of the error.
    """
    estimate = angles[1].clone()
    position = 2
    while position < min(len(angles), 4096):
        error = _wrapped(angles[position] - estimate * position)
        estimate += error / position
        position *= 2
    return estimate


def _check(angles: torch.Tensor, inv_freq: torch.Tensor, name: str) -> None:
    positions = torch.linspace(0, len(angles) - 1, 64).long()
    expected = positions.double()[:, None] * inv_freq
    # fp32 tables are off by position * 2^-24 themselves; anything else is off by whole radians.
    if float(_wrapped(angles[positions] - expected).abs().max()) > 0.05:
        raise UnsupportedRope(f"rotary embedding {name} is not a rotation by position * frequency")


def _wrapped(angle: torch.Tensor) -> torch.Tensor:
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
