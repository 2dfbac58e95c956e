"""The llama family of decoders (Llama, Mistral without window), and the base of its relatives.

    hidden ─ norm ─ qkv ─ RoPE, KV write ─ attention ─ o ─ + ─ norm ─ gate_up ─ silu·mul ─ down ─ + ─ … ─ norm ─ lm_head

Fused weights, in the row order of the checkpoint's parts: qkv = [q; k; v], gate_up = [gate; up].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from twostep.engine.batch import Batch
from twostep.engine.kv_cache import KvCache
from twostep.kernels.ops import AttentionPlan, Linear, Ops
from twostep.models.config import ModelConfig


class _LinearWeights:
    """One linear layer: dense while it is being loaded, whatever the device likes best after that."""

    def __init__(self, rows: int, cols: int, bias: bool, dtype: torch.dtype, device: str) -> None:
        self.weight: torch.Tensor | None = torch.empty(rows, cols, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None

    def place(self, places: dict[str, torch.Tensor], name: str, start: int, rows: int) -> None:
        """Registers rows [start, start + rows) under a checkpoint name."""
        assert self.weight is not None
        places[f"{name}.weight"] = self.weight[start : start + rows]
        if self.bias is not None:
            places[f"{name}.bias"] = self.bias[start : start + rows]

    def prepare(self, ops: Ops) -> Linear:
        assert self.weight is not None
        weight, self.weight = self.weight, None
        return ops.prepare_linear(weight, self.bias)


class _Layer:
    """Weights of one decoder layer."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        c = config
        self.config = c
        heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.weights = {
            "qkv": _LinearWeights(heads, c.hidden_size, c.qkv_bias, dtype, device),
            "o": _LinearWeights(c.hidden_size, c.num_heads * c.head_dim, c.o_bias, dtype, device),
            "gate_up": _LinearWeights(2 * c.intermediate_size, c.hidden_size, c.mlp_bias, dtype, device),
            "down": _LinearWeights(c.hidden_size, c.intermediate_size, c.mlp_bias, dtype, device),
        }
        self.input_norm = torch.empty(c.hidden_size, dtype=dtype, device=device)
        self.post_norm = torch.empty(c.hidden_size, dtype=dtype, device=device)
        self.q_norm = torch.empty(c.head_dim, dtype=dtype, device=device) if c.qk_norm else None
        self.k_norm = torch.empty(c.head_dim, dtype=dtype, device=device) if c.qk_norm else None
        self.qkv: Linear
        self.o: Linear
        self.gate_up: Linear
        self.down: Linear

    def place(self, places: dict[str, torch.Tensor], prefix: str) -> None:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        w = self.weights
        w["qkv"].place(places, f"{prefix}.self_attn.q_proj", 0, q)
        w["qkv"].place(places, f"{prefix}.self_attn.k_proj", q, kv)
        w["qkv"].place(places, f"{prefix}.self_attn.v_proj", q + kv, kv)
        w["o"].place(places, f"{prefix}.self_attn.o_proj", 0, c.hidden_size)
        w["gate_up"].place(places, f"{prefix}.mlp.gate_proj", 0, c.intermediate_size)
        w["gate_up"].place(places, f"{prefix}.mlp.up_proj", c.intermediate_size, c.intermediate_size)
        w["down"].place(places, f"{prefix}.mlp.down_proj", 0, c.hidden_size)
        places[f"{prefix}.input_layernorm.weight"] = self.input_norm
        places[f"{prefix}.post_attention_layernorm.weight"] = self.post_norm
        if self.q_norm is not None and self.k_norm is not None:
            places[f"{prefix}.self_attn.q_norm.weight"] = self.q_norm
            places[f"{prefix}.self_attn.k_norm.weight"] = self.k_norm

    def finish_loading(self, ops: Ops) -> None:
        self.qkv = self.weights["qkv"].prepare(ops)
        self.o = self.weights["o"].prepare(ops)
        self.gate_up = self.weights["gate_up"].prepare(ops)
        self.down = self.weights["down"].prepare(ops)


class Llama:
    """A decoder whose KV lives in a KvCache. Use: build, fill the tensors of `places()`, `finish_loading()`, then `forward`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ops: Ops, device: str = "cpu") -> None:
        self.config = config
        self.dtype = dtype
        self._ops = ops
        self._embed = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._layers = [_Layer(config, dtype, device) for _ in range(config.num_layers)]
        self._norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self._head_weights = (
            None if config.tie_word_embeddings else _LinearWeights(config.vocab_size, config.hidden_size, False, dtype, device)
        )
        self._head: Linear
        self._cos, self._sin = rope_tables(config, device)

    def places(self) -> dict[str, torch.Tensor]:
        """Where each tensor of the checkpoint goes: its Hugging Face name, and a view of its final (fused) buffer."""
        places = {"model.embed_tokens.weight": self._embed, "model.norm.weight": self._norm}
        if self._head_weights is not None:
            self._head_weights.place(places, "lm_head", 0, self.config.vocab_size)
        for i, layer in enumerate(self._layers):
            layer.place(places, f"model.layers.{i}")
        return places

    def finish_loading(self) -> None:
        """Hands the linear weights to the device, layer by layer. Views given out by `places` are dead after it."""
        for layer in self._layers:
            layer.finish_loading(self._ops)
        if self._head_weights is None:
            self._head = self._ops.prepare_linear(self._embed, None)
        else:
            self._head = self._head_weights.prepare(self._ops)

    @property
    def rope_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [max_model_len, head_dim / 2] each, on the device."""
        return self._cos, self._sin

    def forward(self, batch: Batch, cache: KvCache) -> torch.Tensor:
        """Writes the KV of the batch's T tokens and returns the logits of its R sample rows, [R, vocab_size] in the model's dtype."""
        return self.compute(self._ops.plan_attention(batch, cache, num_heads=self.config.num_heads, cos=self._cos, sin=self._sin))

    def compute(self, plan: AttentionPlan) -> torch.Tensor:
        """forward of a planned step. All it takes is on the device already: it can be captured."""
        c, ops = self.config, self._ops
        rows = plan.sample_rows
        residual = F.embedding(plan.token_ids, self._embed)
        normed = ops.rms_norm(residual, self._layers[0].input_norm, c.rms_norm_eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        for i, layer in enumerate(self._layers):
            attended = self._attend(i, layer, plan, normed)
            if i == c.num_layers - 1 and rows is not None:
                # Past the last attention, only the rows to sample matter.
                if not len(rows):
                    return residual.new_empty(0, c.vocab_size)
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
            normed = ops.add_rms_norm(layer.o(attended), residual, layer.post_norm, c.rms_norm_eps)
            mlp = layer.down(ops.silu_mul(layer.gate_up(normed)))
            normed = ops.add_rms_norm(mlp, residual, next_norms[i], c.rms_norm_eps)
        return self._head(normed)

    def _attend(self, index: int, layer: _Layer, plan: AttentionPlan, normed: torch.Tensor) -> torch.Tensor:
        qkv = layer.qkv(normed)
        plan.rotate_and_write(index, qkv)
        return plan.attend(index, qkv)


def rope_tables(config: ModelConfig, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency, float32 [max_model_len, head_dim / 2] each."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequency = 1.0 / (config.rope_theta ** (half / config.head_dim))
    scaling = config.rope_scaling
    if scaling is not None:
        # Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between interpolated.
        wavelength = 2 * math.pi / frequency
        ratio = scaling.original_max_position_embeddings / wavelength
        smooth = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = smooth.clamp(0.0, 1.0)
        frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    angle = torch.outer(torch.arange(config.max_model_len, dtype=torch.float32), frequency)
    return angle.cos().to(device), angle.sin().to(device)
