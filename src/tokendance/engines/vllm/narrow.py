"""Going on with fewer rows in the middle of vLLM's forward (check layers, M7-M8).

The model's own forward is called once and stays unmodified. A hook on the check layer runs that
layer up to its attention on all rows, shows the fresh K and V, and then hands the layer the
chosen rows only; hooks on the later layers hand them the matching positions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from tokendance.reuse.base import PassHooks, RowBatch

Describe = Callable[[RowBatch], tuple[dict[str, Any], dict[str, torch.Tensor]]]
"""From a batch to the forward context's attention metadata and slot mapping, by layer name."""


class _Seen(Exception):
    """Carries fresh K and V out of a layer that is run up to its attention only."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__()
        self.k, self.v = k, v


class NothingLeft(Exception):
    """Raised out of the model's forward: no row goes on from the check layer."""


class Narrowing:
    """Hooks for one forward pass; use as a context manager around the model's call.

    decoders: the decoder layers, in order, called with (positions, hidden, residual).
    attention: the Attention module of the check layer.
    """

    def __init__(
        self, decoders: list[torch.nn.Module], attention: Any, hooks: PassHooks, describe: Describe
    ) -> None:
        assert hooks.check_layer is not None and hooks.on_check is not None
        self._on_check = hooks.on_check
        self._layers = decoders[hooks.check_layer :]
        self._attention = attention
        self._describe = describe
        self._looking = False
        self._positions: torch.Tensor | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Narrowing:
        first, *later = self._layers
        handles = [
            self._attention.register_forward_pre_hook(self._show),
            first.register_forward_pre_hook(self._narrow),
            *(layer.register_forward_pre_hook(self._follow) for layer in later),
        ]
        for handle in handles:
            self._stack.callback(handle.remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _show(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        if self._looking:
            _, k, v = args[:3]
            shape = (-1, module.num_kv_heads, module.head_size)
            raise _Seen(k.reshape(shape), v.reshape(shape))

    def _narrow(
        self, layer: torch.nn.Module, args: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        if self._looking:
            return args
        seen = self._look(layer, args)
        answer = self._on_check(seen.k, seen.v)
        if answer is None:
            return args
        batch, kept = answer
        if not len(batch):
            raise NothingLeft
        context = get_forward_context()
        context.attn_metadata, context.slot_mapping = self._describe(batch)
        self._positions = batch.positions
        return (batch.positions, *(None if a is None else a[kept] for a in args[1:]))

    def _look(self, layer: torch.nn.Module, args: tuple[torch.Tensor | None, ...]) -> _Seen:
        """Run a layer up to its attention, on copies: layers add to their inputs in place."""
        self._looking = True
        try:
            layer(*(None if a is None else a.clone() for a in args))
        except _Seen as seen:
            return seen
        finally:
            self._looking = False
        raise RuntimeError("the check layer has run without calling its attention")

    def _follow(
        self, layer: torch.nn.Module, args: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...] | None:
        return None if self._positions is None else (self._positions, *args[1:])
