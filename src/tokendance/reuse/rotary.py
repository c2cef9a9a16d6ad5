"""Moving keys to new positions.

RoPE is a rotation by position * frequency, so a key computed at position p becomes the key at q by
one more rotation by q - p. The rotation is done once, from the engine's own copy, in fp32, with cos
and sin of the integer difference (a chain of rotations, or bf16 tables, loses ten times more). The
frequencies are the model's own, so linear, NTK, YaRN and Llama 3 scaling need no code here; a
magnitude factor (YaRN's mscale) is already in the stored key and is not applied again.
"""

from __future__ import annotations

import torch

RotationTable = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, float32 [rows, 1, rotary_dim / 2], of one position difference per row."""


class Rotary:
    """The rotation of one model.

    inv_freq: float [rotary_dim / 2], angle per position of each rotated pair.
    interleaved: True if pairs are neighbours (GPT-J style), False if they are the two halves
        (NeoX style: Llama, Qwen).
    rotary_dim: leading dimensions of the head that are rotated; the rest is position free.
    """

    def __init__(
        self, inv_freq: torch.Tensor, *, interleaved: bool = False, rotary_dim: int | None = None
    ) -> None:
        self.inv_freq = inv_freq.to(torch.float64).cpu()
        self.interleaved = interleaved
        self.rotary_dim = rotary_dim if rotary_dim is not None else 2 * inv_freq.numel()

    def table(self, deltas: torch.Tensor) -> RotationTable:
        """Rotation by `deltas` (int64 [rows]) positions; the angles are computed in fp64."""
        distinct, inverse = deltas.cpu().unique(return_inverse=True)
        angles = distinct.to(torch.float64)[:, None] * self.inv_freq[None, :]
        cos, sin = (f(angles).float()[inverse][:, None, :] for f in (torch.cos, torch.sin))
        return cos.to(deltas.device), sin.to(deltas.device)

    def apply(self, k: torch.Tensor, table: RotationTable) -> torch.Tensor:
        """K ([rows, kv_heads, head_dim]) rotated; rows with difference 0 keep their bits.

        The result is a new tensor of k's dtype.
        """
        cos, sin = table
        rotated, rest = k[..., : self.rotary_dim], k[..., self.rotary_dim :]
        x = rotated.float()
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
        else:
            a, b = x.chunk(2, dim=-1)
        first = torch.addcmul(a * cos, b, sin, value=-1)
        second = torch.addcmul(b * cos, a, sin)
        if self.interleaved:
            moved = torch.stack((first, second), dim=-1).flatten(-2)
        else:
            moved = torch.cat((first, second), dim=-1)
        moved = moved.to(k.dtype)
        return moved if rest.shape[-1] == 0 else torch.cat((moved, rest), dim=-1)

    def rotate(self, k: torch.Tensor, delta: int) -> torch.Tensor:
        """K moved by the same difference in every row."""
        return self.apply(k, self.table(torch.tensor([delta], device=k.device)))
