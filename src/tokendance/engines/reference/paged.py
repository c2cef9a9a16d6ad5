"""A paged KV cache and its pages."""

from __future__ import annotations

import torch


class OutOfPages(RuntimeError):
    """The cache has fewer free pages than were asked for."""


class PagedKV:
    """K and V of every layer in pages of `page_size` rows (implements reuse.base.KVAccess).

    Slot = page * page_size + offset. Pages are taken with `allocate` and given back with `release`.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_layers, 2, num_pages, page_size, kv_heads, head_dim)
        self._pages = torch.zeros(shape, dtype=dtype, device=device)
        self._rows = self._pages.flatten(2, 3)
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, rows: int) -> tuple[int, ...]:
        """Pages for `rows` rows; raises OutOfPages and takes nothing if there are too few."""
        count = -(-rows // self.page_size)
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        return tuple(self._free.pop() for _ in range(count))

    def release(self, pages: tuple[int, ...]) -> None:
        """Give pages back; giving a free page back is a ValueError."""
        if len(set(pages)) != len(pages) or not set(pages).isdisjoint(self._free):
            raise ValueError(f"pages {pages} are not all in use")
        self._free.extend(reversed(pages))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `slots` (int64 [rows]) as new tensors [rows, kv_heads, head_dim]."""
        k, v = self._rows[layer]
        return k.index_select(0, slots), v.index_select(0, slots)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [rows, kv_heads, head_dim] at `slots`."""
        self._rows[layer, 0].index_copy_(0, slots, k)
        self._rows[layer, 1].index_copy_(0, slots, v)

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of whole pages (int64 [pages]), [pages * page_size, kv_heads, head_dim]."""
        k, v = self._pages[layer]
        return k.index_select(0, pages).flatten(0, 1), v.index_select(0, pages).flatten(0, 1)
