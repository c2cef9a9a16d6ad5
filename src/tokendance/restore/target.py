"""Where restored rows go: plain paged tensors, or anything that is a KVAccess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class PagedPlanes:
    """K and V pages of every layer as tensors or strided views [pages, page_size, kv_heads, dim].

    It is a KVAccess; kernels also write its pages directly. Views of an engine's own buffers are
    fine as long as head_dim is contiguous.
    """

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    num_layers: int = field(init=False)
    page_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_layers = len(self.k)
        self.page_size = int(self.k[0].shape[1])

    @classmethod
    def empty(
        cls, layers: int, pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype
    ) -> PagedPlanes:
        """Zeroed pages on the CPU."""
        shape = (pages, page_size, heads, dim)
        k = [torch.zeros(shape, dtype=dtype) for _ in range(layers)]
        return cls(k, [torch.zeros(shape, dtype=dtype) for _ in range(layers)])

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, row = slots // self.page_size, slots % self.page_size
        return self.k[layer][page, row], self.v[layer][page, row]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        page, row = slots // self.page_size, slots % self.page_size
        self.k[layer][page, row] = k
        self.v[layer][page, row] = v
