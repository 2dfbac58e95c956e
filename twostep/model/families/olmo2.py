"""OLMo 2 (OLMo Team, 2 OLMo 2 Furious, 2025, arXiv 2501.00656): Llama's layers, normed behind attention and MLP instead of before them, and
with norms of all queries and of all keys together."""

from __future__ import annotations

from twostep.checkpoint.fields import Fields
from twostep.model.families.attention import Attention, WholeNorms
from twostep.model.families.config import ModelConfig
from twostep.model.families.layers import DecoderLayer, SandwichLayer
from twostep.model.families.llama import Llama, parse_relative
from twostep.model.families.mlp import GatedMlp
from twostep.model.families.modules import NoNorm


class Olmo2(Llama):
    architecture = "olmo2"
    supported = "norms behind attention and MLP, and of whole queries and keys; `attention_bias`"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        bias = fields.boolean("attention_bias", False)
        return parse_relative(
            cls.architecture, fields, dtype, names_kv_heads=False, null_kv_heads=True, norm_eps=1e-5, qkv_bias=bias, o_bias=bias
        )

    def _layer(self, index: int) -> DecoderLayer:
        c, make = self.config, self._make
        after, after_mlp = make.rms_norm(c.hidden_size), make.rms_norm(c.hidden_size)
        return SandwichLayer(index, NoNorm(), self._attention(), after, NoNorm(), GatedMlp(c, make), after_mlp)

    def _attention(self) -> Attention:
        num_ranks = 1 if self._part is None else self._part.shard.size
        return Attention(self.config, self._make, whole_norms=WholeNorms(self.config, self._make, num_ranks))
