"""The llama family of decoders (Llama, Mistral), and the base of its relatives: RMSNorm, RoPE, a gated MLP.

MLP = down(silu(gate) · up), gate and up one product, their weights in that order of rows
"""

from __future__ import annotations

from twostep.model.families.config import ModelConfig
from twostep.model.families.decoder import Decoder, DecoderLayer
from twostep.model.families.modules import LinearLayer, Maker, Norm
from twostep.model.kernels.ops import Linear
from twostep.model.loading.places import Places


class LlamaLayer(DecoderLayer):
    def __init__(self, index: int, config: ModelConfig, make: Maker) -> None:
        c = config
        super().__init__(index, c, make, make.rms_norm(c.hidden_size), make.rms_norm(c.hidden_size))
        self.gate_up = make.gated_linear(2 * c.intermediate_size, c.hidden_size, bias=c.mlp_bias)
        self.down = make.linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

    def place(self, places: Places, prefix: str) -> None:
        c = self.config
        self._place_qkv(places, f"{prefix}.self_attn")
        self.o.place(places, f"{prefix}.self_attn.o_proj", 0, c.hidden_size)
        self.gate_up.place(places, f"{prefix}.mlp.gate_proj", 0, c.intermediate_size)
        self.gate_up.place(places, f"{prefix}.mlp.up_proj", c.intermediate_size, c.intermediate_size)
        self.down.place(places, f"{prefix}.mlp.down_proj", 0, c.hidden_size)
        self.input_norm.place(places, f"{prefix}.input_layernorm")
        self.post_norm.place(places, f"{prefix}.post_attention_layernorm")

    def linears(self) -> list[LinearLayer]:
        return [self.qkv, self.o, self.gate_up, self.down]

    @property
    def mlp_in(self) -> Linear:
        return self.gate_up.run

    @property
    def mlp_out(self) -> Linear:
        return self.down.run


class Llama(Decoder):
    embed_name = "model.embed_tokens"
    layers_name = "model.layers"
    norm_name = "model.norm"

    def _layer(self, index: int) -> LlamaLayer:
        return LlamaLayer(index, self.config, self._make)

    def _last_norm(self) -> Norm:
        return self._make.rms_norm(self.config.hidden_size)
