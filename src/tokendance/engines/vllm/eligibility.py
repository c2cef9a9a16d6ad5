"""Which models and settings can reuse K/V, and what makes two caches comparable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine cannot reuse K/V, in one line; "" if it can."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    if model.runner_type != "generate":
        return "the model does not generate text"
    if getattr(model, "is_encoder_decoder", False):
        return "encoder-decoder models are not supported"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported"
    if parallel.data_parallel_size > 1 and model.is_moe:
        return "data parallelism with a mixture of experts is not supported"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return "decode context parallelism is not supported"
    if vllm_config.lora_config is not None:
        return "LoRA is not supported"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not supported"
    if getattr(model, "uses_mrope", False):
        return "M-RoPE is not supported"
    if model.is_multimodal_model:
        return "multimodal models are not supported"
    return _kv_cache_refusal(vllm_config, kv_cache_config)


def _kv_cache_refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model needs {len(groups)} KV cache groups; one is supported"
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    windows = [getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if any(windows):
        return "sliding windows and chunked attention are not supported; full attention is"
    if kind != "FullAttentionSpec":
        return f"KV caches of kind {kind} are not supported; full attention is"
    dtype = vllm_config.cache_config.cache_dtype
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        return f"a KV cache quantised to {dtype} is not supported"
    return ""


def model_identity(vllm_config: Any) -> str:
    """Everything about the engine that makes K/V of the same tokens differ (part of every key)."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    rope = getattr(model.hf_text_config, "rope_parameters", None)
    return "|".join(
        str(part)
        for part in (
            model.model,
            model.revision,
            model.dtype,
            vllm_config.cache_config.cache_dtype,
            rope,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
        )
    )


def stored_identity(vllm_config: Any) -> str:
    """The model's identity for K/V that outlives the engine: a folder may get other weights."""
    folder = Path(vllm_config.model_config.model)
    files = sorted(p for kind in WEIGHTS for p in folder.glob(kind)) if folder.is_dir() else []
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return f"{model_identity(vllm_config)}|{stats}"
