"""What a head learns from: the model, looked into while it reads one of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twostep.lab.one_prompt import prompt_batch
from twostep.model.eagle.config import EagleConfig, usual_layers
from twostep.model.eagle.head import EagleHead
from twostep.model.families.config import ModelConfig
from twostep.model.families.layer_states import LayerStates
from twostep.model.families.modules import RmsNorm
from twostep.model.families.rope import Rope
from twostep.model.runner.model_runner import ModelRunner

# Of a position's distribution; what is less likely than so many others is hardly ever said.
NUM_LABELS = 64
# In host memory, so that the model need not read its answers again in each round.
_KEPT_BYTES = 4 << 30
_HEAD_DIM = 64
# Rows of a unit matrix that the output layer is read with, at a time.
_ROWS = 256


@dataclass(frozen=True, slots=True)
class Looked:
    """Of a sequence of T tokens: states [T, 3 * hidden_size] in the model's dtype; of the token after each, labels int32 [T, K], numbers
    among the head's tokens, and shares float32 [T, K], their probabilities. In host memory."""

    states: torch.Tensor
    labels: torch.Tensor
    shares: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.states, self.labels, self.shares))


class Target:
    """A model, for one head. What it saw of a sequence is kept as long as there is room."""

    def __init__(self, runner: ModelRunner, head: EagleHead) -> None:
        self._runner = runner
        self._states = LayerStates(head.config.layers_of(runner.config))
        self._ids = head.target_ids
        self._kept: dict[int, Looked] = {}
        self._room = _KEPT_BYTES

    def look(self, key: int, token_ids: Sequence[int]) -> Looked:
        """`key`: the same for the same sequence."""
        found = self._kept.get(key)
        if found is None:
            found = self._look(token_ids)
            if found.num_bytes <= self._room:
                self._room -= found.num_bytes
                self._kept[key] = found
        return found

    def _look(self, token_ids: Sequence[int]) -> Looked:
        logits = self._runner.forward(prompt_batch(token_ids, self._runner.kv_shape), self._states)
        shares = logits.float().softmax(-1).index_select(1, self._ids)
        best = shares.topk(min(NUM_LABELS, len(self._ids)))
        return Looked(self._states.joined().cpu(), best.indices.int().cpu(), best.values.cpu())


def new_head(runner: ModelRunner, target_ids: torch.Tensor, seed: int) -> EagleHead:
    """Returns a head to be trained, in float32, that begins near what the model itself says: its state is the high layer's, its output
    layer the rows of the model's. `target_ids` int64 [draft_vocab_size], ascending: the tokens that it may propose."""
    model, c = runner.model, runner.config
    torch.manual_seed(seed)
    head = EagleHead(_config(c, len(target_ids))).to(model.embedding.device)
    head.use_embedding(model.embedding)
    head.use_tokens(target_ids.to(model.embedding.device))
    with torch.no_grad():
        size = c.hidden_size
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -size:] += torch.eye(size, device=head.fc.weight.device)
        for leaving in (head.midlayer.self_attn.o_proj, head.midlayer.mlp.down_proj):
            leaving.weight.zero_()
        head.lm_head.weight.copy_(_output_rows(runner, head.target_ids))
        if isinstance(model.last_norm, RmsNorm):
            head.norm.weight.copy_(model.last_norm.weight)
    return head


def _config(target: ModelConfig, draft_vocab_size: int) -> EagleConfig:
    num_heads, num_kv_heads, head_dim = target.num_heads, target.num_kv_heads, target.head_dim
    if target.latent is not None or num_heads % num_kv_heads or head_dim % 2:
        # What the model has there a head of published shape cannot have.
        num_heads = num_kv_heads = max(1, target.hidden_size // _HEAD_DIM)
        head_dim = _HEAD_DIM
    usual_layers(target.num_layers)
    return EagleConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=target.norm_eps,
        rope=Rope(theta=10000.0),
        max_model_len=target.max_model_len,
        dtype=target.dtype,
    )


def _output_rows(runner: ModelRunner, ids: torch.Tensor) -> torch.Tensor:
    """float32 [len(ids), hidden_size]: the output layer's weight, in whatever layout the device has it: what it makes of a unit matrix."""
    model, size = runner.model, runner.config.hidden_size
    unit = torch.eye(size, dtype=model.dtype, device=ids.device)
    with torch.inference_mode():
        columns = [model.logits(rows).float().index_select(1, ids) for rows in unit.split(_ROWS)]
    return torch.cat(columns).T.contiguous()
