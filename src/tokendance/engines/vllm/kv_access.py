"""Rows of vLLM's paged KV cache, whatever its memory layout.

Writing goes through the attention backend's own `do_kv_cache_update`. Reading needs to know where
the backend put each number, so the layout is learned at start-up: digit patterns are written into
one page and found again. A layout that cannot be learned is refused with one clear line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokendance.restore.target import PagedPlanes

DIGIT = 64
"""Base of the written pattern: integers below it are exact in every cache dtype."""


class UnsupportedLayout(RuntimeError):
    """This KV cache cannot be read and written by rows."""


@dataclass(frozen=True, slots=True)
class _Plane:
    """Where K or V of (offset, head, dim) stands inside a page's memory.

    index: int64 [page_size * kv_heads * head_dim] into the page in its logical order.
    strides: (offset, head, dim) element strides if the plane is affine, and `start` its first one.
    """

    index: torch.Tensor
    start: int
    strides: tuple[int, int, int] | None


class VllmKVAccess:
    """KVAccess over the layers of one KV cache group (see reuse.base.KVAccess)."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = list(layers)
        self.num_layers = len(self._layers)
        cache = self._cache(0)
        if cache.dim() != 4 or cache.shape[-1] % 2:
            raise UnsupportedLayout(f"KV cache of shape {tuple(cache.shape)} is not understood")
        first = self._layers[0]
        self.heads = int(first.num_kv_heads)
        self.head_dim = int(first.head_size)
        self.page_size = cache.shape[-2]
        self._check_alike()
        try:
            self._k, self._v = self._learn()
            self._self_test()
        except UnsupportedLayout:
            raise
        except Exception as error:  # whatever the attention backend raises
            raise UnsupportedLayout(f"rows cannot be written to the KV cache: {error}") from error

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVAccess.read."""
        cache = self._cache(layer)
        block = torch.div(slots, self.page_size, rounding_mode="floor")
        offset = slots - block * self.page_size
        return (
            self._gather(cache, self._k, block, offset),
            self._gather(cache, self._v, block, offset),
        )

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See KVAccess.write."""
        module = self._layers[layer]
        module.impl.do_kv_cache_update(module, k, v, module.kv_cache, slots)

    def planes(self) -> PagedPlanes | None:
        """The same rows as strided tensors, for kernels; None if the layout is no such thing."""
        if self._k.strides is None or self._v.strides is None:
            return None
        if self._k.strides[-1] != 1 or self._v.strides[-1] != 1:
            return None
        k, v = (
            [self._strided(self._cache(layer), plane) for layer in range(self.num_layers)]
            for plane in (self._k, self._v)
        )
        return PagedPlanes(k, v)

    def _cache(self, layer: int) -> torch.Tensor:
        cache: torch.Tensor = self._layers[layer].kv_cache
        return cache

    def _gather(
        self, cache: torch.Tensor, plane: _Plane, block: torch.Tensor, offset: torch.Tensor
    ) -> torch.Tensor:
        if plane.strides is not None:
            return self._strided(cache, plane)[block, offset]
        pages, which = block.unique(return_inverse=True)
        flat = cache[pages].reshape(len(pages), -1)[:, plane.index]
        return flat.view(len(pages), self.page_size, self.heads, self.head_dim)[which, offset]

    def _strided(self, cache: torch.Tensor, plane: _Plane) -> torch.Tensor:
        """[pages, page_size, kv_heads, head_dim], a view."""
        assert plane.strides is not None
        size = (cache.shape[0], self.page_size, self.heads, self.head_dim)
        return cache.as_strided(
            size, (cache.stride(0), *plane.strides), cache.storage_offset() + plane.start
        )

    # -- learning the layout -------------------------------------------------------------------

    def _check_alike(self) -> None:
        first = self._cache(0)
        for module in self._layers:
            cache = module.kv_cache
            if cache.shape != first.shape or cache.stride() != first.stride():
                raise UnsupportedLayout("the layers' KV caches differ in shape or strides")
            if cache.dtype != first.dtype or cache.dtype not in (
                torch.float32,
                torch.bfloat16,
                torch.float16,
            ):
                raise UnsupportedLayout(f"a KV cache of type {cache.dtype} cannot be rotated")

    def _learn(self) -> tuple[_Plane, _Plane]:
        """Number every element of a page, write the numbers and see where they come to stand."""
        cache = self._cache(0)
        page = cache.shape[0] - 1  # nothing runs yet, so any page is free
        count = self.page_size * self.heads * self.head_dim
        shape = (self.page_size, self.heads, self.head_dim)
        slots = torch.arange(self.page_size, device=cache.device) + page * self.page_size
        number = torch.arange(2 * count, device=cache.device)
        found = torch.zeros(cache[page].numel(), dtype=torch.int64, device=cache.device)
        weight = 1
        while weight < 2 * count:
            digits = torch.div(number, weight, rounding_mode="floor") % DIGIT
            k, v = (d.view(shape).to(cache.dtype) for d in digits.split(count))
            cache[page].zero_()
            self.write(0, slots, k.contiguous(), v.contiguous())
            found += cache[page].reshape(-1).to(torch.int64) * weight
            weight *= DIGIT
        cache[page].zero_()
        order = found.argsort()
        if found.numel() != 2 * count or not bool((found[order] == number).all()):
            raise UnsupportedLayout("a page of the KV cache does not hold K and V once each")
        return self._plane(order[:count]), self._plane(order[count:])

    def _plane(self, index: torch.Tensor) -> _Plane:
        cache = self._cache(0)
        heads, rows, width = cache.shape[1:]
        memory = (
            torch.arange(heads)[:, None, None] * cache.stride(1)
            + torch.arange(rows)[None, :, None] * cache.stride(2)
            + torch.arange(width)[None, None, :] * cache.stride(3)
        ).reshape(-1)[index.cpu()]
        grid = memory.view(self.page_size, self.heads, self.head_dim)
        start = int(grid[0, 0, 0])
        strides = tuple(
            int(grid.select(axis, min(1, grid.shape[axis] - 1)).flatten()[0]) - start
            for axis in range(3)
        )
        axes = [torch.arange(n) * s for n, s in zip(grid.shape, strides)]
        affine = start + axes[0][:, None, None] + axes[1][None, :, None] + axes[2][None, None, :]
        same = bool((affine == grid).all())
        return _Plane(index, start, (strides[0], strides[1], strides[2]) if same else None)

    def _self_test(self) -> None:
        """Write random rows into two pages and read them back, in another order."""
        cache = self._cache(0)
        pages = [cache.shape[0] - 1, max(0, cache.shape[0] - 2)]
        slots = torch.cat(
            [torch.arange(self.page_size, device=cache.device) + p * self.page_size for p in pages]
        )
        slots = slots.unique()
        slots = slots[torch.randperm(len(slots), device=cache.device)]
        shape = (len(slots), self.heads, self.head_dim)
        k = torch.randn(shape, device=cache.device).to(cache.dtype)
        v = torch.randn(shape, device=cache.device).to(cache.dtype)
        last = self.num_layers - 1
        self.write(last, slots, k, v)
        back_k, back_v = self.read(last, slots)
        self._cache(last)[pages] = 0
        if not (torch.equal(k, back_k) and torch.equal(v, back_v)):
            raise UnsupportedLayout("rows written to the KV cache did not read back")
