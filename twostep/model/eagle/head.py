"""An EAGLE-3 head as a torch module: its weights under the names that checkpoints have for them, and what it computes of positions.

    states of three layers ─ fc ─┐
    the state of a step before ──┴─ h ─┬─ hidden_norm ───────┐
    the next token ─ embedding ────────│─ input_layernorm ───┴─ q, k, v ─ attention ─ o ─ + ─ norm ─ MLP ─ + ─┬─ norm ─ lm_head
                                       └──────────────────────────────────────────────────┘                 └─ h of the next step

What the model is at position t, together with the token at t + 1, tells of the token at t + 2: the row of position t.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from twostep.model.eagle.config import NUM_STATES, EagleConfig
from twostep.model.families.rope import rope_tables


class Projected(NamedTuple):
    """Rows on their way to attention. query [..., num_heads, T, head_dim]; key, value [..., num_kv_heads, T, head_dim], all turned by
    their positions; residual [..., T, hidden_size]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    residual: torch.Tensor


class EagleHead(nn.Module):
    """T positions of one sequence, or of several of equal length, [..., T, anything]. All tensors are of the head's dtype and device.
    `d2t` int64 [draft_vocab_size]: the token of the model that each of the head's is, as the distance from the head's own number."""

    d2t: torch.Tensor
    _cos: torch.Tensor
    _sin: torch.Tensor

    def __init__(self, config: EagleConfig, *, has_embedding: bool = False, num_positions: int = 0) -> None:
        """With weights drawn at random. Without an embedding of its own, it is given the model's (`use_embedding`). `num_positions`: of the
        model's context, which is often longer than the one that the head names; 0: that one."""
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = nn.Linear(NUM_STATES * config.target_hidden_size, size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(size, config.norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if has_embedding else None
        self._embedding: list[torch.Tensor] = []  # in a list, so that it is no weight of this module
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        tables = rope_tables(config.rope, config.head_dim, num_positions or config.max_model_len, str(torch.get_default_device()))
        self.register_buffer("_cos", tables.cos, persistent=False)
        self.register_buffer("_sin", tables.sin, persistent=False)

    def use_embedding(self, weight: torch.Tensor) -> None:
        """Takes the model's embedding [vocab_size, hidden_size], which is not trained with the head and not saved with it."""
        assert self.embed_tokens is None
        assert weight.shape == (self.config.vocab_size, self.config.hidden_size)
        self._embedding = [weight]

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft_vocab_size]: the model's tokens that the head's are."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def use_tokens(self, target_ids: torch.Tensor) -> None:
        """Says which tokens of the model the head may propose: int64 [draft_vocab_size], ascending."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[..., T, hidden_size] of the model's token ids, int64 [..., T]."""
        return F.embedding(token_ids, self.embedding).to(self.fc.weight.dtype)

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size], its own or the model's."""
        return self._embedding[0] if self.embed_tokens is None else self.embed_tokens.weight

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """[..., T, hidden_size] of the model's states at T positions, [..., T, 3 * target_hidden_size]."""
        fused: torch.Tensor = self.fc(states.to(self.fc.weight.dtype))
        return fused

    def project(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Projected:
        """token_ids int64 [..., T], each the one after its position; hidden [..., T, hidden_size], `fuse` of the model's states or what
        `finish` gave of the position before; positions int64 [T]. What is behind the context counts as its last position: no token of it
        is ever wanted."""
        positions = positions.clamp(max=len(self._cos) - 1)
        return self.midlayer.project(self.embed(token_ids), hidden, self._cos[positions], self._sin[positions])

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[..., T, hidden_size], what the next step is given, from attention's [..., num_heads, T, head_dim]."""
        return self.midlayer.finish(attended, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., T, draft_vocab_size] of the token after the one given, from what `finish` gave."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same over the model's vocabulary, [..., T, vocab_size]: minus infinity where the head has no such token."""
        logits = self.logits(hidden)
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.target_ids, logits)


class _Layer(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self._norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = _Mlp(config)

    def project(self, embedded: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Projected:
        normed = self.hidden_norm(hidden)
        query, key, value = self.self_attn.enter(torch.cat((self.input_layernorm(embedded), normed), -1), cos, sin)
        return Projected(query, key, value, normed if self._norm_before_residual else hidden)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        residual = residual + self.self_attn.leave(attended)
        whole: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return whole


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        entering, bias = 2 * config.hidden_size, config.attention_bias
        of_queries, of_keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._head_dim = config.head_dim
        self.q_proj = nn.Linear(entering, of_queries, bias=bias)
        self.k_proj = nn.Linear(entering, of_keys, bias=bias)
        self.v_proj = nn.Linear(entering, of_keys, bias=bias)
        self.o_proj = nn.Linear(of_queries, config.hidden_size, bias=bias)

    def enter(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        return _turn(query, cos, sin), _turn(key, cos, sin), value

    def leave(self, attended: torch.Tensor) -> torch.Tensor:
        left: torch.Tensor = self.o_proj(attended.transpose(-3, -2).flatten(-2))
        return left

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[..., heads, T, head_dim] of [..., T, heads * head_dim]."""
        heads: torch.Tensor = x.unflatten(-1, (-1, self._head_dim))
        return heads.transpose(-3, -2)


class _Mlp(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size, between, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, between, bias=bias)
        self.up_proj = nn.Linear(size, between, bias=bias)
        self.down_proj = nn.Linear(between, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of heads [..., T, head_dim] by tables [T, head_dim / 2], in float32."""
    first, second = x.float().chunk(2, -1)
    turned: torch.Tensor = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)
