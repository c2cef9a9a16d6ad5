"""Rows of a paged cache whose layout only its attention backend knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tokendance.engines.vllm.kv_access import UnsupportedLayout, VllmKVAccess  # noqa: E402

PAGES, PAGE, HEADS, DIM = 5, 8, 3, 4

Write = Callable[[Any, Any, Any, Any], None]


def tokens_first(page: Any, offset: int, k: Any, v: Any) -> None:
    """[heads, rows, K then V]: what vLLM's GPU backends do."""
    page[:, offset, :DIM], page[:, offset, DIM:] = k, v


def keys_transposed(page: Any, offset: int, k: Any, v: Any) -> None:
    """K as [dim, rows] per head, then V as [rows, dim]: what its CPU backend does."""
    flat = page.view(HEADS, -1)
    flat[:, offset : PAGE * DIM : PAGE] = k
    flat[:, PAGE * DIM + offset * DIM :][:, :DIM] = v


def scrambled(page: Any, offset: int, k: Any, v: Any) -> None:
    """A permutation that no strides describe."""
    order = torch.randperm(2 * PAGE * HEADS * DIM, generator=torch.Generator().manual_seed(1))
    places = order.view(2, PAGE, HEADS, DIM)
    page.view(-1)[places[0, offset]], page.view(-1)[places[1, offset]] = k, v


class Layer:
    """An attention module of vLLM, as far as the access looks at it."""

    num_kv_heads, head_size = HEADS, DIM

    def __init__(self, write: Write, *, swap: bool = False, dtype: Any = torch.float32) -> None:
        shape = (PAGES, PAGE, HEADS, 2 * DIM) if swap else (PAGES, HEADS, PAGE, 2 * DIM)
        memory = torch.zeros(shape, dtype=dtype)
        self.kv_cache = memory.transpose(1, 2) if swap else memory
        self.impl = self
        self._write = write

    def do_kv_cache_update(self, layer: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
        for row, slot in enumerate(slots.tolist()):
            self._write(cache[slot // PAGE], slot % PAGE, k[row], v[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("write", "swap"),
    [(tokens_first, False), (tokens_first, True), (keys_transposed, False), (scrambled, False)],
)
def test_rows_come_back_from_any_layout(write: Write, swap: bool, dtype: Any) -> None:
    layers = [Layer(write, swap=swap, dtype=dtype) for _ in range(2)]
    access = VllmKVAccess(layers)
    assert all(not layer.kv_cache.any() for layer in layers), "the tests at start leave nothing"
    slots = torch.tensor([17, 3, 39, 4, 16])
    k, v = torch.randn(2, len(slots), HEADS, DIM).to(dtype)
    access.write(1, slots, k, v)
    for order in (slice(None), [3, 0], [2, 2, 1]):
        found_k, found_v = access.read(1, slots[order])
        assert torch.equal(found_k, k[order]) and torch.equal(found_v, v[order])
    assert not layers[0].kv_cache.any()
    assert int((layers[1].kv_cache != 0).sum()) == 2 * k.numel()


def broken(page: Any, offset: int, k: Any, v: Any) -> None:
    raise RuntimeError("head_dim=16")


def forgetful(page: Any, offset: int, k: Any, v: Any) -> None:
    page[:, offset, :DIM] = k


def test_what_is_not_understood_is_refused_with_a_reason() -> None:
    for write, reason in ((broken, "head_dim=16"), (forgetful, "K and V once each")):
        with pytest.raises(UnsupportedLayout, match=reason):
            VllmKVAccess([Layer(write)])
    with pytest.raises(UnsupportedLayout, match="cannot be rotated"):
        VllmKVAccess([Layer(tokens_first, dtype=torch.int8)])
    with pytest.raises(UnsupportedLayout, match="differ"):
        VllmKVAccess([Layer(tokens_first), Layer(tokens_first, swap=True)])
