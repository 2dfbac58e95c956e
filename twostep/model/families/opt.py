"""OPT (Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022): learned positions, LayerNorm, a plain ReLU MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twostep.model.families.config import ModelConfig
from twostep.model.families.decoder import Decoder, DecoderLayer
from twostep.model.families.modules import LinearLayer, Maker, Norm
from twostep.model.families.sharding import ModelPart
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops
from twostep.model.loading.places import Place, Places

# The first rows of a checkpoint's position table stand for padding: position p is row p + 2.
_POSITION_OFFSET = 2


class _OptLayer(DecoderLayer):
    def __init__(self, index: int, config: ModelConfig, make: Maker) -> None:
        c = config
        super().__init__(index, c, make, make.layer_norm(c.hidden_size), make.layer_norm(c.hidden_size))
        self._ops = make.ops
        self.fc1 = make.linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)
        self.fc2 = make.linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

    def place(self, places: Places, prefix: str) -> None:
        c = self.config
        self._place_qkv(places, f"{prefix}.self_attn")
        self.o.place(places, f"{prefix}.self_attn.out_proj", 0, c.hidden_size)
        self.fc1.place(places, f"{prefix}.fc1", 0, c.intermediate_size)
        self.fc2.place(places, f"{prefix}.fc2", 0, c.hidden_size)
        self.input_norm.place(places, f"{prefix}.self_attn_layer_norm")
        self.post_norm.place(places, f"{prefix}.final_layer_norm")

    def linears(self) -> list[LinearLayer]:
        return [self.qkv, self.o, self.fc1, self.fc2]

    @property
    def mlp_in(self) -> Linear:
        return lambda normed: self._ops.relu(self.fc1(normed))

    @property
    def mlp_out(self) -> Linear:
        return self.fc2.run


class Opt(Decoder):
    embed_name = "model.decoder.embed_tokens"
    layers_name = "model.decoder.layers"
    norm_name = "model.decoder.final_layer_norm"

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ops: Ops, device: str = "cpu", part: ModelPart | None = None) -> None:
        super().__init__(config, dtype, ops, device, part)
        self._positions = self._make.empty(config.num_positions + _POSITION_OFFSET, config.hidden_size)

    def places(self) -> Places:
        return super().places() | {"model.decoder.embed_positions.weight": Place.whole(self._positions)}

    def _layer(self, index: int) -> _OptLayer:
        return _OptLayer(index, self.config, self._make)

    def _last_norm(self) -> Norm:
        return self._make.layer_norm(self.config.hidden_size)

    def _embed(self, plan: AttentionPlan) -> torch.Tensor:
        return super()._embed(plan).add_(F.embedding(plan.positions, self._positions[_POSITION_OFFSET:]))
