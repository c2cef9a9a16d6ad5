"""vLLM's own, unmodified layers as a LayerEngine: any rows of any requests in one forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata

from tokendance.engines.vllm.kv_access import VllmKVAccess
from tokendance.engines.vllm.narrow import Narrowing, NothingLeft
from tokendance.engines.vllm.rope import rotary_of
from tokendance.reuse.base import KVAccess, PassHooks, RowBatch, VirtualSequence


class VllmLayers:
    """See reuse.base.LayerEngine. One per worker process."""

    def __init__(
        self, model: torch.nn.Module, vllm_config: VllmConfig, kv_cache_config: Any
    ) -> None:
        (group,) = kv_cache_config.kv_cache_groups
        self._model = model
        self._config = vllm_config
        self._names: list[str] = sorted(group.layer_names, key=extract_layer_index)
        self._layer_of = {name: layer for layer, name in enumerate(self._names)}
        modules = [
            vllm_config.compilation_config.static_forward_context[name] for name in self._names
        ]
        self._modules = modules
        self._decoders = [_decoder_layer(model, name) for name in self._names]
        self.device: torch.device = modules[0].kv_cache.device
        self._builder = self._metadata_builder(modules[0], group.kv_cache_spec)
        access = VllmKVAccess(modules)
        self.kv: KVAccess = access
        self.planes = access.planes()
        self.rotary = rotary_of(model)
        self.block_size = int(group.kv_cache_spec.block_size)
        self._hook: Callable[[int], None] | None = None

    @property
    def pages_per_block(self) -> int:
        """Kernel pages in one block of the KV cache manager."""
        return self.block_size // self.kv.page_size

    def pages(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The manager's blocks as kernel pages, which may be smaller."""
        ratio = self.pages_per_block
        return tuple(b * ratio + i for b in blocks for i in range(ratio))

    def forward(self, batch: RowBatch, hooks: PassHooks) -> None:
        """See LayerEngine.forward."""
        metadata, slots = self._describe(batch)
        self._hook = hooks.before_attention
        try:
            with (
                torch.inference_mode(),
                set_forward_context(
                    metadata,
                    self._config,
                    num_tokens=len(batch),
                    slot_mapping=slots,
                    skip_compiled=True,
                ),
                self._narrowing(hooks),
            ):
                self._model(batch.token_ids, batch.positions)
        except NothingLeft:
            for layer in range(hooks.check_layer or 0, self.kv.num_layers):
                hooks.before_attention(layer)
        finally:
            self._hook = None

    def before_attention(self, layer_name: str) -> None:
        """vLLM's call between writing K/V and attention; does nothing outside a pass."""
        if self._hook is not None:
            self._hook(self._layer_of[layer_name])

    def _narrowing(self, hooks: PassHooks) -> AbstractContextManager[object]:
        if hooks.check_layer is None:
            return nullcontext()
        return Narrowing(self._decoders, self._modules[hooks.check_layer], hooks, self._describe)

    def _describe(self, batch: RowBatch) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Attention metadata and slot mapping of a batch, the same for every layer."""
        metadata = self._builder.build(0, self._common_metadata(batch), fast_build=True)
        return dict.fromkeys(self._names, metadata), dict.fromkeys(self._names, batch.slots)

    def _metadata_builder(self, module: Any, spec: Any) -> Any:
        """An own builder: the runner's may have buffers for max_num_seqs sequences only."""
        config = copy.copy(self._config)
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.max_num_seqs = max(
            config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens
        )
        page_size = module.kv_cache.shape[-2]
        if spec.block_size != page_size:
            spec = spec.copy_with_new_block_size(page_size)
        builder = module.attn_backend.get_builder_cls()
        options = {}
        if getattr(builder, "requires_block_table_width", False):
            options["block_table_width"] = -(-config.model_config.max_model_len // page_size)
        return builder(spec, self._names, config, self.device, **options)

    def _common_metadata(self, batch: RowBatch) -> CommonAttentionMetadata:
        lengths = torch.tensor([s.end - s.start for s in batch.sequences], dtype=torch.int32)
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=starts[1:])
        seq_lens = torch.tensor([s.end for s in batch.sequences], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(self.device),
            num_reqs=len(lengths),
            num_actual_tokens=len(batch),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=_page_tables(batch.sequences, self.kv.page_size).to(self.device),
            slot_mapping=batch.slots,
            positions=batch.positions,
            seq_lens_cpu_upper_bound=seq_lens,
            is_prefilling=torch.ones(len(lengths), dtype=torch.bool),
        )


def _decoder_layer(model: torch.nn.Module, attention_name: str) -> torch.nn.Module:
    """The decoder layer around an attention layer: `model.layers.3` of `model.layers.3.attn`."""
    number = f".{extract_layer_index(attention_name)}."
    return model.get_submodule(attention_name[: attention_name.index(number) + len(number) - 1])


def _page_tables(sequences: tuple[VirtualSequence, ...], page_size: int) -> torch.Tensor:
    """int32 [sequences, pages], as wide as the longest sequence needs."""
    width = max(-(-s.end // page_size) for s in sequences)
    table = torch.zeros((len(sequences), width), dtype=torch.int32)
    for row, sequence in enumerate(sequences):
        pages = torch.tensor(sequence.blocks[:width], dtype=torch.int32)
        table[row, : len(pages)] = pages
    return table
