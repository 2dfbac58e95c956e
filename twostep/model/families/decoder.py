"""The skeleton of every decoder served here: layers of attention and MLP, each behind a norm, around one residual.

    embedded ─ norm ─ qkv ─ KV write ─ attention ─ o ─ + ─ norm ─ MLP ─ + ─ … ─ norm ─ lm_head

A family says what its norms, its MLP and its embedding are, what a checkpoint calls them, and how its config.json is read. q, k and v
are one product, their weights in that order of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from twostep.checkpoint.fields import Fields
from twostep.checkpoint.quantization import HEAD
from twostep.engine.batch import Batch
from twostep.model.families.config import ModelConfig
from twostep.model.families.modules import Cut, LinearLayer, Maker, Norm, Place, Places
from twostep.model.families.rope import rope_tables
from twostep.model.families.sharding import ModelPart
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops
from twostep.model.kernels.torch_attention import AttentionSpec
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.prompt_reader import PromptReader


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class DecoderLayer(ABC):
    """One layer's weights. Families add an MLP."""

    def __init__(self, index: int, config: ModelConfig, make: Maker, input_norm: Norm, post_norm: Norm) -> None:
        c = config
        self.index = index
        self.config = c
        self.input_norm = input_norm
        self.post_norm = post_norm
        self.qkv = make.linear((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size, bias=c.qkv_bias)
        self.o = make.linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.o_bias)

    @abstractmethod
    def place(self, places: Places, prefix: str) -> None:
        """Registers all weights under the checkpoint's names."""

    @property
    @abstractmethod
    def mlp_in(self) -> Linear:
        """The MLP up to its last product: [T, anything] from [T, hidden_size]."""

    @property
    @abstractmethod
    def mlp_out(self) -> Linear:
        """The MLP's last product."""

    @abstractmethod
    def linears(self) -> list[LinearLayer]:
        """All linear layers, in the order of their use."""

    def attend(self, plan: AttentionPlan, qkv: torch.Tensor) -> torch.Tensor:
        """[T, num_heads * head_dim] from what `self.qkv` gave; writes the tokens' keys and values."""
        plan.rotate_and_write(self.index, qkv)
        return plan.attend(self.index, qkv)

    def _place_attention(self, places: Places, prefix: str, o_name: str) -> None:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.qkv.place(
            places, (f"{prefix}.q_proj", q, Cut.HEADS), (f"{prefix}.k_proj", kv, Cut.KV_HEADS), (f"{prefix}.v_proj", kv, Cut.KV_HEADS)
        )
        self.o.place(places, (f"{prefix}.{o_name}", c.hidden_size, Cut.FROM_HEADS))


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
        cos, sin = rope_tables(config.rope, config.head_dim, config.max_model_len, device)
        self.attention = AttentionSpec(num_heads=config.num_heads, cos=cos, sin=sin, windows=config.windows)

    @classmethod
    @abstractmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        """Takes the keys of config.json that this family knows; `dtype` is that of the weights. Raises SetupError, naming the key, for what
        cannot be honoured; what is not taken is refused by the caller."""

    @abstractmethod
    def _layer(self, index: int) -> DecoderLayer: ...

    @abstractmethod
    def _last_norm(self) -> Norm: ...

    @property
    def _head_rows(self) -> slice:
        """The part of the vocabulary that the output layer is for."""
        return slice(0, self.config.vocab_size) if self._part is None else self._part.shard.vocabulary.slice

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
            for linear in layer.linears():
                linear.finish_loading(self._ops)
        if self.config.tie_word_embeddings:
            self._head.use(HEAD, self._embed_weight[self._head_rows])
        self._head.finish_loading(self._ops)

    def forward(self, batch: Batch, cache: KvCache, reader: PromptReader | None = None) -> torch.Tensor:
        """Writes the KV of the batch's T tokens and returns the logits of its R sample rows, [R, vocab_size] in the model's dtype.
        `reader`: of the batch's rows that are not sampled."""
        return self.compute(self._ops.plan_attention(batch, cache, self.attention), reader)

    def compute(self, plan: AttentionPlan, reader: PromptReader | None = None) -> torch.Tensor:
        """forward of a planned step. All it takes is on the device already: it can be captured."""
        rows = plan.sample_rows
        if reader is not None:
            assert rows is not None, "captured steps are only sampled"
            rows = torch.cat((reader.rows, rows))
        residual = self._embed(plan)
        projected = self._layers[0].qkv(self._layers[0].input_norm(residual))
        last: Linear = self._head.run if reader is None else _as_it_is
        following = [(layer.input_norm, layer.qkv.run) for layer in self._layers[1:]] + [(self._norm, last)]
        for layer, (next_norm, next_linear) in zip(self._layers, following, strict=True):
            attended = layer.attend(plan, projected)
            if layer is self._layers[-1] and rows is not None:
                # Past the last attention, only the rows to sample matter.
                if not len(rows):
                    return residual.new_empty(0, self.config.vocab_size)
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
            entered = layer.post_norm.join(layer.o.run, attended, residual, layer.mlp_in)
            projected = next_norm.join(layer.mlp_out, entered, residual, next_linear)
        if reader is None:
            return self._whole(projected)
        num_read = len(reader.rows)
        reader.read(projected[:num_read], self._logits, self.config.vocab_size)
        return self._logits(projected[num_read:]) if len(projected) > num_read else residual.new_empty(0, self.config.vocab_size)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: the last norm's output, [R, hidden_size]."""
        return self._whole(self._head(x))

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._part is None else self._part.gather(logits)

    def _embed(self, plan: AttentionPlan) -> torch.Tensor:
        return F.embedding(plan.token_ids, self._embed_weight)
