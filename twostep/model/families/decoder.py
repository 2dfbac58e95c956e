"""The skeleton of every decoder served here: layers of attention and MLP around one residual.

    embedded ─ norm ─ qkv ─ KV write ─ attention ─ o ─ + ─ norm ─ MLP ─ + ─ … ─ norm ─ lm_head

A family says what its layers are made of (layers.py, attention.py, mlp.py), what a checkpoint calls them, and how its config.json is
read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F

from twostep.checkpoint.fields import Fields
from twostep.checkpoint.quantization import HEAD
from twostep.engine.batch import Batch
from twostep.model.families.config import ModelConfig
from twostep.model.families.experts import ExpertsMlp
from twostep.model.families.fused import Fused
from twostep.model.families.layer_states import Reads, StepTap
from twostep.model.families.layers import DecoderLayer
from twostep.model.families.modules import Cut, Maker, Norm, Place, Places
from twostep.model.families.next_token import NextTokenLayer
from twostep.model.families.rope import rope_tables
from twostep.model.families.sharding import ModelPart
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops
from twostep.model.kernels.torch_attention import AttentionSpec
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.prompt_readout import PromptReadout


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class Decoder(ABC):
    """A model whose KV lives in a KvCache. Use: build, fill the `places()`, `finish_loading()`, then `forward`."""

    architecture: str  # config.json's model_type
    supported: str  # what config.json may ask for, in a line of docs/models.md
    # What a checkpoint calls the embedding, the layers, the last norm and the output layer.
    embed_name: str
    layers_name: str
    norm_name: str
    head_name = HEAD
    # Learned positions, if the config has any: their name, and how many rows stand before that of position 0.
    positions_name = ""
    positions_start = 0

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ops: Ops, device: str = "cpu", part: ModelPart | None = None) -> None:
        """With a `part`, `config` is that rank's, and `ops` add up the ranks' partial sums."""
        self.config = config
        self.dtype = dtype
        self._ops = ops
        self._part = part
        whole = config if part is None else part.shard.config
        self._make = make = Maker(ops, dtype, device, config.norm_eps, config.quantization, self.fused(whole))
        self._embed_weight = make.empty(config.vocab_size, config.hidden_size)
        # In the model's dtype, as transformers multiplies by it.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self._positions: torch.Tensor | None = None
        if config.num_positions:
            self._positions = make.empty(config.num_positions + self.positions_start, config.hidden_size)
        self._layers = [self._layer(i) for i in range(config.num_layers)]
        self._norm = self._last_norm()
        rows = self._head_rows
        self._head = make.linear(rows.stop - rows.start, config.hidden_size, bias=False)
        self.attention = self._attention_spec(device)
        # Who is told of every step; None: nobody is.
        self.tap: StepTap | None = None
        # A layer of the checkpoint that predicts further tokens, if it is to be used.
        self.next_token: NextTokenLayer | None = None

    @classmethod
    @abstractmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        """Takes the keys of config.json that this family knows; `dtype` is that of the weights. Raises SetupError, naming the key, for what
        cannot be honoured; what is not taken is refused by the caller."""

    @classmethod
    def fused(cls, config: ModelConfig) -> Mapping[str, Fused]:
        """Returns the layers that a checkpoint has inside larger ones, by how their names end."""
        return {}

    @classmethod
    def prefix(cls) -> str:
        """Returns how all names of a checkpoint begin but that of the output layer, if it was saved with one."""
        return cls.embed_name.partition(".")[0] + "."

    @abstractmethod
    def _layer(self, index: int) -> DecoderLayer: ...

    @abstractmethod
    def _last_norm(self) -> Norm: ...

    def _attention_spec(self, device: str) -> AttentionSpec:
        c = self.config
        ropes = c.layer_ropes or (c.rope,) * c.num_layers
        turning = c.head_dim if c.latent is None else c.latent.rope
        tables = {rope: rope_tables(rope, turning, c.max_model_len, device) for rope in dict.fromkeys(ropes)}
        return AttentionSpec(
            num_heads=c.num_heads,
            rope=[tables[rope] for rope in ropes],
            windows=c.windows,
            scale=c.attention_scale,
            softcap=c.attention_softcap,
            latent=c.latent,
        )

    def unused(self, names: Collection[str]) -> Collection[str]:
        """Returns which of a checkpoint's tensors may be there although nothing here reads them."""
        return ()

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
        if self._positions is not None:
            places[f"{self.positions_name}.weight"] = Place.whole(self._positions)
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

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size], as it is looked up: nobody else changes it."""
        return self._embed_weight

    @property
    def last_norm(self) -> Norm:
        return self._norm

    def forward(self, batch: Batch, cache: KvCache, reader: PromptReadout | None = None, tap: StepTap | None = None) -> torch.Tensor:
        """Writes the KV of the batch's T tokens and returns the logits of its R sample rows, [R, vocab_size] in the model's dtype.
        `reader`: of the batch's rows that are not sampled; `tap`: is told of this step in place of the one that is told of all."""
        return self.compute(self._ops.plan_attention(batch, cache, self.attention), reader, tap)

    def compute(self, plan: AttentionPlan, reader: PromptReadout | None = None, tap: StepTap | None = None) -> torch.Tensor:
        """forward of a planned step. All it takes is on the device already: it can be captured."""
        rows = plan.sample_rows
        tap = tap or self.tap
        reads = Reads.NOTHING if tap is None else tap.reads
        if reader is not None:
            assert rows is not None, "captured steps are only sampled"
            rows = torch.cat((reader.rows, rows))
        residual = self._embed(plan)
        projected = self._layers[0].attention.enter(self._layers[0].input_norm(residual))
        last: Linear = self._head.run if reader is None and reads is Reads.NOTHING else _as_it_is
        following = [(layer.input_norm, layer.attention.enter) for layer in self._layers[1:]] + [(self._norm, last)]
        for layer, (next_norm, next_linear) in zip(self._layers, following, strict=True):
            if tap is not None:
                tap.enter(layer.index, residual)
            attended = layer.attention.attend(plan, layer.among_its_kind, projected)
            if layer is self._layers[-1] and rows is not None and reads is not Reads.ALL:
                # Past the last attention, only the rows to sample matter.
                if not len(rows):
                    if tap is not None and reads is Reads.NOTHING:
                        tap.leave(plan, None, None)
                    return residual.new_empty(0, self.config.vocab_size)
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
            projected = layer.finish(attended, residual, next_norm, next_linear)
        if tap is not None:
            tap.leave(plan, None if reads is Reads.NOTHING else projected, rows if reads is Reads.SAMPLED else None)
        if last is not _as_it_is:
            return self._whole(projected)
        if reads is Reads.ALL and rows is not None:
            projected = projected.index_select(0, rows)
        num_read = 0
        if reader is not None:
            num_read = len(reader.rows)
            reader.read(projected[:num_read], self.logits, self.config.vocab_size)
        return self.logits(projected[num_read:]) if len(projected) > num_read else residual.new_empty(0, self.config.vocab_size)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [R, vocab_size]. `x`: the last norm's output, [R, hidden_size]."""
        return self._whole(self._head(x))

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        whole = logits if self._part is None else self._part.gather(logits)
        cap = self.config.logit_softcap
        return torch.tanh(whole.float() / cap).mul_(cap).to(whole.dtype) if cap else whole

    def _embed(self, plan: AttentionPlan) -> torch.Tensor:
        embedded = F.embedding(plan.token_ids, self._embed_weight)
        if self._embedding_scale != 1.0:
            embedded = embedded * self._embedding_scale
        if self._positions is not None:
            embedded.add_(F.embedding(plan.positions, self._positions[self.positions_start :]))
        return embedded
