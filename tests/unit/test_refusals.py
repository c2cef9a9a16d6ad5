"""What TokenDance does not reuse on, each with one clear line (real engines: tests/engine)."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tokendance.engines.vllm.eligibility import refusal


class FullAttentionSpec(SimpleNamespace):
    """Stands for vLLM's class of the same name; refusals go by the name."""


class MLAAttentionSpec(SimpleNamespace): ...


class MambaSpec(SimpleNamespace): ...


class SlidingWindowSpec(SimpleNamespace): ...


def group(spec: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=["model.layers.0.self_attn.attn"])


def engine(
    groups: list[Any] | None = None, **changes: Any
) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Configurations of vLLM as far as they are read; changes by dotted name."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            runner_type="generate",
            is_encoder_decoder=False,
            uses_mrope=False,
            is_multimodal_model=False,
            is_moe=False,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
        speculative_config=None,
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            setattr(getattr(config, part), field, value)
        else:
            setattr(config, part, value)
    spec = FullAttentionSpec(block_size=16, sliding_window=None)
    return config, SimpleNamespace(kv_cache_groups=groups or [group(spec)])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel_config__tensor_parallel_size": 8},
        {"parallel_config__data_parallel_size": 2},
        {"model_config__is_moe": True},
        *({"cache_config__cache_dtype": d} for d in ("auto", "bfloat16", "float16", "float32")),
    ],
)
def test_supported_engines_are_not_refused(changes: dict[str, Any]) -> None:
    assert refusal(*engine(**changes)) == ""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"lora_config": SimpleNamespace(max_loras=1)}, "LoRA"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, "speculative decoding"),
        ({"model_config__uses_mrope": True, "model_config__is_multimodal_model": True}, "M-RoPE"),
        ({"model_config__is_multimodal_model": True}, "multimodal"),
        ({"model_config__runner_type": "pooling"}, "does not generate text"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallelism"),
        (
            {"model_config__is_moe": True, "parallel_config__data_parallel_size": 2},
            "data parallelism with a mixture of experts",
        ),
        *(
            ({"cache_config__cache_dtype": dtype}, f"quantised to {dtype}")
            for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "nvfp4")
        ),
        ({"groups": [group(MLAAttentionSpec(block_size=16))]}, "kind MLAAttentionSpec"),
        ({"groups": [group(MambaSpec(block_size=16))]}, "kind MambaSpec"),
        (
            {"groups": [group(SlidingWindowSpec(block_size=16, sliding_window=64))]},
            "sliding windows",
        ),
        (
            {"groups": [group(FullAttentionSpec(block_size=16, attention_chunk_size=8192))]},
            "chunked attention",
        ),
        (
            {"groups": [group(FullAttentionSpec(block_size=16, sliding_window=4096))]},
            "sliding windows",
        ),
        (
            {"groups": [group(FullAttentionSpec(block_size=16)), group(MambaSpec(block_size=16))]},
            "2 KV cache groups; one is supported",
        ),
    ],
)
def test_everything_else_is_refused_in_one_line(changes: dict[str, Any], says: str) -> None:
    found = refusal(*engine(**changes))
    assert re.search(re.escape(says), found) and "\n" not in found
