"""DeepSeek-V2 (2024, arXiv 2405.04434) and DeepSeek-V3 (2024, arXiv 2412.19437): llama's layers with latent attention."""

from __future__ import annotations

import re

from twostep.checkpoint.context import context_of
from twostep.checkpoint.directory import MAX_MODEL_LEN, MAX_VOCAB_SIZE
from twostep.checkpoint.fields import Fields
from twostep.model.families.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelConfig
from twostep.model.families.latent_attention import LatentAttention
from twostep.model.families.layers import DecoderLayer
from twostep.model.families.llama import Llama
from twostep.model.families.mlp import GatedMlp
from twostep.model.families.rope import YarnScaling, parse_rope
from twostep.model.kernels.latent import LatentDims

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# What experts alone read, and what only training does.
_OF_EXPERTS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_layer_freq", "n_group", "topk_group",
    "topk_method", "norm_topk_prob", "routed_scaling_factor", "scoring_func", "ep_size",
)  # fmt: skip
_OF_TRAINING = ("aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef")


class DeepseekV2(Llama):
    architecture = "deepseek_v2"
    supported = "[latent attention](#latent-attention), with `q_lora_rank` or without, YaRN with `mscale_all_dim`; all layers dense"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        return _parse(cls.architecture, fields, dtype, interleaved=True)

    def _layer(self, index: int) -> DecoderLayer:
        c, make = self.config, self._make
        norms = make.rms_norm(c.hidden_size), make.rms_norm(c.hidden_size)
        return DecoderLayer(index, norms[0], LatentAttention(c, make), norms[1], GatedMlp(c, make))


class DeepseekV3(DeepseekV2):
    """Differs in its experts' router, and brings layers of its own that predict several tokens, which are not used."""

    architecture = "deepseek_v3"
    supported = "as V2, `rope_interleave`; layers that predict further tokens are passed over"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        for key in ("num_nextn_predict_layers", "num_mtp_layers"):
            fields.take(key, None)
        return _parse(cls.architecture, fields, dtype, interleaved=fields.boolean("rope_interleave", True))

    def is_unused(self, name: str) -> bool:
        found = _LAYER.match(name)
        return found is not None and int(found[1]) >= self.config.num_layers


def _parse(architecture: str, fields: Fields, dtype: str, *, interleaved: bool) -> ModelConfig:
    fields.expect("hidden_act", "silu", default="silu")
    # No checkpoint is known to have either.
    fields.expect("attention_bias", False, default=False)
    fields.expect("mlp_bias", False, default=False)
    num_layers = fields.positive_int("num_hidden_layers", MAX_LAYERS)
    num_heads = fields.positive_int("num_attention_heads", MAX_HEADS)
    if fields.take("num_key_value_heads", num_heads) not in (None, num_heads):
        fields.refuse("num_key_value_heads", fields.whole["num_key_value_heads"], f"all heads share a latent: it must be {num_heads}")
    dense_layers = fields.take("first_k_dense_replace", 0)
    for key in _OF_TRAINING + _OF_EXPERTS:
        fields.take(key, None)
    if not isinstance(dense_layers, int) or dense_layers < num_layers:
        fields.refuse("first_k_dense_replace", dense_layers, f"only dense layers are supported: it must be {num_layers}")
    rope = parse_rope(fields, fields.positive_int("max_position_embeddings", MAX_MODEL_LEN))
    dims = LatentDims(
        nope=fields.positive_int("qk_nope_head_dim", MAX_HEAD_DIM),
        rope=fields.positive_int("qk_rope_head_dim", MAX_HEAD_DIM),
        value=fields.positive_int("v_head_dim", MAX_HEAD_DIM),
        latent=fields.positive_int("kv_lora_rank", MAX_HEAD_DIM),
        interleaved=interleaved,
    )
    if dims.rope % 2:
        fields.refuse("qk_rope_head_dim", dims.rope, "rotary embedding needs an even one")
    for key, value in (("head_dim", dims.rope), ("qk_head_dim", dims.query)):
        if fields.take(key, value) not in (None, value):
            fields.refuse(key, fields.whole[key], f"the parts of a head make it {value}")
    q_lora_rank = 0
    if fields.peek("q_lora_rank") is not None:
        q_lora_rank = fields.positive_int("q_lora_rank", MAX_WIDTH)
    fields.take("q_lora_rank", None)
    sharper = rope.scaling.score_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size", MAX_VOCAB_SIZE),
        hidden_size=fields.positive_int("hidden_size", MAX_WIDTH),
        intermediate_size=fields.positive_int("intermediate_size", MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=dims.kept,
        norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        rope=rope,
        num_positions=0,
        windows=(0,) * num_layers,
        max_model_len=context_of(fields.whole, fields.path),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        attention_scale=dims.query**-0.5 * sharper,
        latent=dims,
        q_lora_rank=q_lora_rank,
        dtype=dtype,
    )
