"""Contracts between the collective pass and an engine.

The pass (collective.py) knows rows, slots and layers. An engine adapter gives it three things: the
paged KV cache (KVAccess), the model's rotary embedding (rotary.Rotary) and a forward pass over an
arbitrary set of rows (LayerEngine). Nothing here knows vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from tokendance.reuse.rotary import Rotary


class KVAccess(Protocol):
    """Reads and writes rows of this rank's paged KV cache, whatever its memory layout.

    A slot is block_id * page_size + offset. K is held as the engine wrote it, with RoPE applied.
    """

    num_layers: int
    page_size: int

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at `slots` (int64 [rows]), new: [rows, kv_heads, head_dim] of cache dtype."""
        ...

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v ([rows, kv_heads, head_dim]) at `slots`. Mutates the cache only there."""
        ...


class VirtualSequence(NamedTuple):
    """A run of rows for the attention backend: query rows [start, end), keys [0, end) of one table.

    Every paged attention backend takes this, it is what a chunk of a chunked prefill is; the
    causal mask inside the run is exact.
    """

    start: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows of one forward pass, grouped into virtual sequences, in order.

    token_ids, positions, slots: int64 [rows]; row i of the batch belongs to the sequence that
    covers it, and its K/V is written to slots[i].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sequences: tuple[VirtualSequence, ...]

    def __len__(self) -> int:
        return int(self.positions.shape[0])


@dataclass(frozen=True, slots=True)
class PassHooks:
    """What the pass does inside an engine's forward.

    before_attention(layer): called once per layer after the batch's own K/V of that layer is in the
        cache and before attention reads it. May write other rows through KVAccess.
    check_layer / on_check(k, v): at this layer, before the batch's K/V is written, the fresh K
        (with RoPE) and V, [rows, kv_heads, head_dim], are shown; the returned RowBatch, a subset of
        the rows in the same order, and the int64 indices of its rows in the old batch replace the
        batch from this layer's write and attention on. None keeps the batch.
    """

    before_attention: Callable[[int], None]
    check_layer: int | None = None
    on_check: (
        Callable[[torch.Tensor, torch.Tensor], tuple[RowBatch, torch.Tensor] | None] | None
    ) = None


class LayerEngine(Protocol):
    """An engine's own, unmodified layers, driven over any set of rows."""

    kv: KVAccess
    rotary: Rotary
    device: torch.device

    def forward(self, batch: RowBatch, hooks: PassHooks) -> None:
        """Compute K/V of every row of the batch in every layer and write it to its slot.

        Raises whatever the engine raises; rows of the batch are then undefined and the caller
        has to compute them in another way.
        """
        ...
