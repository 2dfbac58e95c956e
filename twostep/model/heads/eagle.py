"""An EAGLE-3 head (twostep/model/eagle) over the operations of a device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twostep.model.eagle.config import EagleConfig
from twostep.model.eagle.head import EagleHead
from twostep.model.families.config import ModelConfig
from twostep.model.families.decoder import Decoder
from twostep.model.families.rope import rope_tables
from twostep.model.heads.head import Drafted, DraftHead
from twostep.model.kernels.ops import AttentionPlan, Ops
from twostep.model.kernels.torch_attention import AttentionSpec


def shares_rope(head: EagleConfig, target: ModelConfig) -> bool:
    """Returns whether heads of both turn alike, by the same tables."""
    return not target.layer_ropes and head.rope == target.rope and head.head_dim == target.head_dim


class EagleDrafts(DraftHead):
    def __init__(self, head: EagleHead, model: Decoder, ops: Ops, num_layers: int, window: int) -> None:
        """`head`: in the model's dtype and on its device; it may be dropped. `num_layers`: of the pool, the head's among them; `window`:
        keys that it sees, 0: all."""
        c, layer = head.config, head.midlayer
        device = str(head.fc.weight.device)
        shares = shares_rope(c, model.config)
        tables = model.attention.rope[0] if shares else rope_tables(c.rope, c.head_dim, model.config.max_model_len, device)
        self.layers = c.layers_of(model.config)
        self.state_size = c.hidden_size
        self.vocab_size = c.vocab_size
        self.attention = AttentionSpec(
            num_heads=c.num_heads, rope=[tables] * num_layers, windows=[window] * num_layers, first=num_layers - 1
        )
        ids = head.target_ids
        # In another order, noise would fall on other tokens than the model's; of the whole vocabulary the order is the same.
        self.target_ids = None if torch.equal(ids, torch.arange(c.vocab_size, device=ids.device)) else ids.sort().values
        order = None if self.target_ids is None else ids.argsort()
        attention, mlp = layer.self_attn, layer.mlp
        of_qkv = attention.q_proj, attention.k_proj, attention.v_proj
        weight = torch.cat([each.weight for each in of_qkv])
        bias = torch.cat([each.bias for each in of_qkv]) if c.attention_bias else None
        self._query_width = c.num_heads * c.head_dim
        self._layer = num_layers - 1
        self._ops, self._eps = ops, c.norm_eps
        self._norm_before_residual = c.norm_before_residual
        self._embedding = head.embedding
        self._norms = layer.input_layernorm.weight, layer.hidden_norm.weight, layer.post_attention_layernorm.weight, head.norm.weight
        self._fuse = ops.prepare_linear(head.fc.weight, None)
        self._qkv = ops.prepare_linear(weight, bias)
        self._kv = ops.prepare_linear(weight[self._query_width :].contiguous(), None if bias is None else bias[self._query_width :])
        self._leave = ops.prepare_linear(attention.o_proj.weight, attention.o_proj.bias)
        gated = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        self._gated = ops.prepare_gated(gated, torch.cat((mlp.gate_proj.bias, mlp.up_proj.bias)) if c.mlp_bias else None)
        self._down = ops.prepare_linear(mlp.down_proj.weight, mlp.down_proj.bias)
        self._output = ops.prepare_linear(head.lm_head.weight if order is None else head.lm_head.weight[order], None)

    def state(self, seen: torch.Tensor) -> torch.Tensor:
        return self._fuse(seen)

    def write(self, plan: AttentionPlan, token_ids: torch.Tensor, states: torch.Tensor) -> None:
        assert self.attention is not None
        entering, _ = self._enter(token_ids, states)
        kv = self._kv(entering)
        # Queries are in the way of what writes: zeros.
        qkv = kv.new_zeros(len(kv), self._query_width + kv.shape[1])
        qkv[:, self._query_width :] = kv
        plan.write_beside(self._layer, qkv, self.attention)

    def step(self, plan: AttentionPlan | None, token_ids: torch.Tensor, states: torch.Tensor, number: int) -> Drafted:
        assert plan is not None
        ops, eps, (_, _, post_norm, norm) = self._ops, self._eps, self._norms
        entering, normed = self._enter(token_ids, states)
        qkv = self._qkv(entering)
        plan.rotate_and_write(self._layer, qkv)
        attended = plan.attend(self._layer, qkv)
        residual = normed if self._norm_before_residual else states.clone()
        gated = ops.join_rms_norm(self._leave, attended, residual, post_norm, eps, self._gated)
        logits = ops.join_rms_norm(self._down, gated, residual, norm, eps, self._output)
        return Drafted(residual, logits)

    def _enter(self, token_ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 2 * hidden_size], what attention's products are given, and its second half apart."""
        input_norm, hidden_norm, _, _ = self._norms
        embedded = F.embedding(token_ids, self._embedding).to(states.dtype)
        normed = self._ops.rms_norm(states, hidden_norm, self._eps)
        return torch.cat((self._ops.rms_norm(embedded, input_norm, self._eps), normed), -1), normed
