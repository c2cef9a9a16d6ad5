"""Moving keys to new positions.

RoPE is a rotation by position * frequency, so a key computed at position p becomes the key at q by
one more rotation by q - p. The rotation is done once, from the engine's own copy, in fp32, with cos
and sin of the integer difference (a chain of rotations, or bf16 tables, loses ten times more). The
frequencies are the model's own, so linear, NTK, YaRN and Llama 3 scaling need no code here; a
magnitude factor (YaRN's mscale) is already in the stored key and is not applied again.
"""

from __future__ import annotations

import torch


class Rotary:
    """The rotation of one model.

    inv_freq: float32 [rotary_dim / 2], angle per position of each rotated pair.
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
        self._tables: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def rotate(self, k: torch.Tensor, delta: int) -> torch.Tensor:
        """K ([rows, kv_heads, head_dim]) moved by `delta` positions; delta 0 returns k itself."""
        if delta == 0:
            return k
        cos, sin = self._table(delta, k.device)
        return self._apply(k, cos, sin)

    def rotate_each(self, k: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
        """K moved by one difference per row: deltas int64 [rows]. Rows with 0 keep their bits."""
        angles = deltas.to(torch.float64).cpu()[:, None] * self.inv_freq[None, :]
        cos = angles.cos().to(k.device, torch.float32)[:, None, :]
        sin = angles.sin().to(k.device, torch.float32)[:, None, :]
        moved = self._apply(k, cos, sin)
        return torch.where((deltas == 0).to(k.device)[:, None, None], k, moved)

    def _table(self, delta: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        key = (delta, device)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) > 4096:
                self._tables.clear()
            angles = delta * self.inv_freq
            table = (
                angles.cos().to(device, torch.float32),
                angles.sin().to(device, torch.float32),
            )
            self._tables[key] = table
        return table

    def _apply(self, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
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
