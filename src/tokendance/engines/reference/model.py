"""Llama, Qwen2 and Qwen3 as tensors and a few functions over rows.

The weights are those of a Hugging Face model. Everything is row-wise except attention, which is the
engine's, so any set of rows of any requests can go through a layer together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tokendance.reuse.rotary import Rotary

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")

# Matrix products of fewer than four rows take another CPU kernel, which sums in another order.
# Eight rows at least make a row's result independent of what else is in its batch.
_MIN_ROWS = 8


class UnsupportedModel(ValueError):
    """A model that the reference engine would compute wrongly; the text says what is missing."""


class Linear(NamedTuple):
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""
        rows = x.shape[0]
        if rows < _MIN_ROWS:
            x = F.pad(x, (0, 0, 0, _MIN_ROWS - rows))
        return F.linear(x, self.weight, self.bias)[:rows]


class Layer(NamedTuple):
    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None  # Qwen3: RMSNorm over the head, before RoPE
    key_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


@dataclass(frozen=True)
class Model:
    """The weights of one decoder and the maths of its layers, all over [rows, ...] tensors."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    inv_freq: torch.Tensor  # float32 [head_dim / 2]
    rope_scale: float  # YaRN's magnitude factor on cos and sin
    max_position: int | None  # dynamic NTK: the frequencies hold up to here

    @classmethod
    def from_hf(cls, model: Any) -> Model:
        """Take over the weights of a transformers `LlamaForCausalLM`, Qwen2 or Qwen3.

        Raises UnsupportedModel for other families, sliding windows, other activations, rope types
        or partial rotations.
        """
        config = model.config
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        # A fresh one: casting a model to bf16 casts its frequencies too.
        rotary = type(model.model.rotary_emb)(config)
        _refuse(config, rotary, head_dim)
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        return cls(
            embedding=weights["model.embed_tokens.weight"],
            layers=tuple(_layer(weights, i) for i in range(config.num_hidden_layers)),
            norm=weights["model.norm.weight"],
            head=Linear(weights["lm_head.weight"], None),
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            eps=config.rms_norm_eps,
            inv_freq=rotary.inv_freq.to(weights["model.norm.weight"].device),
            rope_scale=float(rotary.attention_scaling),
            max_position=(
                config.max_position_embeddings if rotary.rope_type == "dynamic" else None
            ),
        )

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Model:
        """Read a Hugging Face checkpoint from a local folder; nothing is downloaded."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True
        )
        return cls.from_hf(model.to(device).eval())

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def rotary(self) -> Rotary:
        """The rotation that moves this model's keys."""
        return Rotary(self.inv_freq)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [rows, 1, head_dim / 2], of int64 positions [rows]."""
        if self.max_position is not None and positions.numel():
            last = int(positions.max())
            if last >= self.max_position:
                raise UnsupportedModel(
                    f"position {last}: dynamic NTK changes its frequencies from "
                    f"{self.max_position} on, cached keys would not fit"
                )
        angles = positions[:, None, None].float() * self.inv_freq.to(positions.device)
        return angles.cos() * self.rope_scale, angles.sin() * self.rope_scale

    def project(
        self, layer: Layer, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]; q and k with RoPE."""
        mixed = layer.qkv(rms_norm(x, layer.attention_norm, self.eps))
        mixed = mixed.unflatten(1, (self.heads + 2 * self.kv_heads, self.head_dim))
        q, k, v = mixed.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q = rms_norm(q, layer.query_norm, self.eps)
            k = rms_norm(k, layer.key_norm, self.eps)
        return _rope(q, *angles), _rope(k, *angles), v

    def finish(self, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer after attention: attended [rows, heads, head_dim] -> new x [rows, hidden]."""
        x = x + layer.out(attended.flatten(1))
        gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, self.eps)).chunk(2, dim=-1)
        return x + layer.down(F.silu(gate) * up)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] after the last layer -> float32 [rows, vocab]."""
        return self.head(rms_norm(x, self.norm, self.eps)).float()


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _layer(weights: dict[str, torch.Tensor], index: int) -> Layer:
    prefix = f"model.layers.{index}."

    def fused(*names: str) -> Linear:
        found = [weights[f"{prefix}{name}.weight"] for name in names]
        biases = [weights[key] for name in names if (key := f"{prefix}{name}.bias") in weights]
        return Linear(torch.cat(found), torch.cat(biases) if biases else None)

    def norm(name: str) -> torch.Tensor:
        return weights[f"{prefix}{name}.weight"]

    normed = f"{prefix}self_attn.q_norm.weight" in weights
    return Layer(
        attention_norm=norm("input_layernorm"),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_norm=norm("self_attn.q_norm") if normed else None,
        key_norm=norm("self_attn.k_norm") if normed else None,
        out=fused("self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )


def _refuse(config: Any, rotary: Any, head_dim: int) -> None:
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedModel(f"model type {config.model_type!r} is not one of {MODEL_TYPES}")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModel(f"layers of type {sorted(kinds)}: only full attention is supported")
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"activation {config.hidden_act!r}: only silu is supported")
    if rotary.rope_type not in ROPE_TYPES:
        raise UnsupportedModel(f"rope type {rotary.rope_type!r} is not one of {ROPE_TYPES}")
    if 2 * rotary.inv_freq.numel() != head_dim:
        raise UnsupportedModel("only a part of each head is rotated")
