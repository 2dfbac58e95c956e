"""The skeleton of every decoder served here: layers of attention and MLP around one residual.

    embedded ─ norm ─ qkv ─ KV write ─ attention ─ o ─ + ─ norm ─ MLP ─ + ─ … ─ norm ─ lm_head

A family says what its layers are made of (layers.py, attention.py, mlp.py), what a checkpoint calls them, and how its config.json is
read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from twostep.checkpoint.fields import Fields
from twostep.checkpoint.quantization import HEAD
from twostep.engine.batch import Batch
from twostep.model.families.config import ModelConfig
from twostep.model.families.experts import ExpertsMlp
from twostep.model.families.layers import DecoderLayer
from twostep.model.families.modules import Cut, Maker, Norm, Place, Places
from twostep.model.families.rope import rope_tables
from twostep.model.families.sharding import ModelPart
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops
from twostep.model.kernels.torch_attention import AttentionSpec
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.prompt_scores import PromptScorer


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class Decoder(ABC):
    """A model whose KV lives in a KvCache. Use: build, fill the `places()`, `finish_loading()`, then `forward`."""

    architecture: str  # config.json's model_type
    # What a checkpoint calls the embedding, the layers and the last norm.
    embed_name: str
    layers_name: str
    norm_name: str

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ops: Ops, device: str = "cpu", part: ModelPart | None = None) -> None:
        """With a `part`, `config` is that rank's, and `ops` add up the ranks' partial sums."""
        self.config = config
        self.dtype = dtype
        self._ops = ops
        self._part = part
        self._make = make = Maker(ops, dtype, device, config.norm_eps, config.quantization)
        self._embed_weight = make.empty(config.vocab_size, config.hidden_size)
        self._layers = [self._layer(i) for i in range(config.num_layers)]
        self._norm = self._last_norm()
        rows = self._head_rows
        self._head = make.linear(rows.stop - rows.start, config.hidden_size, bias=False)
        self.attention = self._attention_spec(device)

    @classmethod
    @abstractmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        """Takes the keys of config.json that this family knows; `dtype` is that of the weights. Raises SetupError, naming the key, for what
        cannot be honoured; what is not taken is refused by the caller."""

    @abstractmethod
    def _layer(self, index: int) -> DecoderLayer: ...

    @abstractmethod
    def _last_norm(self) -> Norm: ...

    def _attention_spec(self, device: str) -> AttentionSpec:
        c = self.config
        tables = rope_tables(c.rope, c.head_dim, c.max_model_len, device)
        return AttentionSpec(
            num_heads=c.num_heads,
            rope=[tables] * c.num_layers,
            windows=c.windows,
            scale=c.attention_scale,
            softcap=c.attention_softcap,
        )

    @property
    def _head_rows(self) -> slice:
        """The part of the vocabulary that the output layer is for."""
        return slice(0, self.config.vocab_size) if self._part is None else self._part.shard.vocabulary.slice

    @property
    def expert_loads(self) -> list[torch.Tensor]:
        """Of each layer with experts int64 [num_experts]: how many tokens each has had, on the device."""
        return [layer.mlp.load for layer in self._layers if isinstance(layer.mlp, ExpertsMlp)]

    def places(self) -> Places:
        """Where each tensor of the checkpoint goes."""
        places = {f"{self.embed_name}.weight": Place.whole(self._embed_weight)}
        self._norm.place(places, self.norm_name)
        if not self.config.tie_word_embeddings:
            self._head.place(places, (HEAD, self._head_rows.stop - self._head_rows.start, Cut.VOCABULARY))
        for layer in self._layers:
            layer.place(places, f"{self.layers_name}.{layer.index}")
        return places if self._part is None else self._part.shard.places(places)

    def finish_loading(self) -> None:
        """Hands the linear weights to the device, layer by layer. What `places` gave out is dead after it."""
        for layer in self._layers:
            layer.finish_loading(self._ops)
        self._norm.finish_loading(self._ops)
        if self.config.tie_word_embeddings:
            self._head.use(HEAD, self._embed_weight[self._head_rows])
        self._head.finish_loading(self._ops)

    def forward(self, batch: Batch, cache: KvCache, scorer: PromptScorer | None = None) -> torch.Tensor:
        """Writes the KV of the batch's T tokens and returns the logits of its R sample rows, [R, vocab_size] in the model's dtype.
        `scorer`: of the batch's scored rows."""
        return self.compute(self._ops.plan_attention(batch, cache, self.attention), scorer)

    def compute(self, plan: AttentionPlan, scorer: PromptScorer | None = None) -> torch.Tensor:
        """forward of a planned step. All it takes is on the device already: it can be captured."""
        rows = plan.sample_rows
        if scorer is not None:
            assert rows is not None, "captured steps score nothing"
            rows = torch.cat((scorer.rows, rows))
        residual = self._embed(plan)
        projected = self._layers[0].attention.enter(self._layers[0].input_norm(residual))
        last: Linear = self._head.run if scorer is None else _as_it_is
        following = [(layer.input_norm, layer.attention.enter) for layer in self._layers[1:]] + [(self._norm, last)]
        for layer, (next_norm, next_linear) in zip(self._layers, following, strict=True):
            attended = layer.attention.attend(plan, layer.index, projected)
            if layer is self._layers[-1] and rows is not None:
                # Past the last attention, only the rows to sample matter.
                if not len(rows):
                    return residual.new_empty(0, self.config.vocab_size)
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
            projected = layer.finish(attended, residual, next_norm, next_linear)
        if scorer is None:
            return self._whole(projected)
        num_scored = len(scorer.rows)
        scorer.score(projected[:num_scored], self._logits, self.config.vocab_size)
        return self._logits(projected[num_scored:]) if len(projected) > num_scored else residual.new_empty(0, self.config.vocab_size)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: the last norm's output, [R, hidden_size]."""
        return self._whole(self._head(x))

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        whole = logits if self._part is None else self._part.gather(logits)
        cap = self.config.logit_softcap
        return torch.tanh(whole.float() / cap).mul_(cap).to(whole.dtype) if cap else whole

    def _embed(self, plan: AttentionPlan) -> torch.Tensor:
        embedded = F.embedding(plan.token_ids, self._embed_weight)
        return embedded if self.config.embedding_scale == 1.0 else embedded * self.config.embedding_scale
