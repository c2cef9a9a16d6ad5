"""Tiny models with random weights, for tests that need an oracle in milliseconds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tokendance.engines.reference.engine import ReferenceEngine
from tokendance.engines.reference.model import Model

VOCAB = 97

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}

_FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@lru_cache(maxsize=16)
def hf_model(family: str = "llama", rope: str = "default", **options: Any) -> Any:
    """A fp32 transformers model: 3 layers, 4 heads over 2 K/V heads, all weights random."""
    config_class, model_class = _FAMILIES[family]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 1000.0, **ROPES[rope]},
        initializer_range=0.2,
        **options,
    )
    if family == "qwen3":
        config.head_dim = 24
    torch.manual_seed(0)
    model = model_class(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def engine(
    family: str = "llama", rope: str = "default", *, num_pages: int = 256, page_size: int = 4
) -> ReferenceEngine:
    """A fresh engine over the tiny model."""
    return ReferenceEngine(
        Model.from_hf(hf_model(family, rope)), num_pages=num_pages, page_size=page_size
    )


@torch.inference_mode()
def oracle(token_ids: list[int], family: str = "llama", rope: str = "default") -> torch.Tensor:
    """Logits [tokens, vocab] of transformers' own forward."""
    return hf_model(family, rope)(torch.tensor([token_ids])).logits[0].float()
