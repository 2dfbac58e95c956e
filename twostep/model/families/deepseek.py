"""DeepSeek-V2 (2024, arXiv 2405.04434) and DeepSeek-V3 (2024, arXiv 2412.19437): llama's layers with latent attention, and all but the
first few with a mixture of experts, beside which shared ones take every token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from twostep.checkpoint.context import context_of, rope_of
from twostep.checkpoint.directory import MAX_MODEL_LEN, MAX_VOCAB_SIZE
from twostep.checkpoint.fields import Fields
from twostep.model.families.config import MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ExpertsConfig, ModelConfig
from twostep.model.families.experts import ExpertNames, parse_router
from twostep.model.families.latent_attention import LatentAttention
from twostep.model.families.llama import Llama
from twostep.model.families.mlp import Mlp
from twostep.model.families.modules import Places
from twostep.model.families.next_token import NextTokenLayer
from twostep.model.families.rope import YarnScaling, parse_rope
from twostep.model.families.sharding import ModelPart
from twostep.model.kernels.experts import ExpertRouter, GroupScore, Scores
from twostep.model.kernels.latent import LatentDims
from twostep.model.kernels.ops import Ops

_OF_EXPERTS = (
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_layer_freq", "n_group", "topk_group",
    "topk_method", "norm_topk_prob", "routed_scaling_factor", "scoring_func",
)  # fmt: skip
_V3_KV_HEADS, _Q_LORA_RANK = 128, 1536  # where the file says nothing
_OF_TRAINING = ("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "router_aux_loss_coef")


class DeepseekV2(Llama):
    architecture = "deepseek_v2"
    supported = (
        "[latent attention](#latent-attention), with `q_lora_rank` or without, YaRN with `mscale_all_dim`; dense layers first, then "
        "[experts](#mixtures-of-experts) and shared ones, `topk_method` greedy or group_limited_greedy"
    )
    expert_names = ExpertNames(shared="shared_experts")

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        return _parse(cls.architecture, fields, dtype, interleaved=True)

    def _attention(self) -> LatentAttention:
        return LatentAttention(self.config, self._make)


class DeepseekV3(DeepseekV2):
    """Differs in its experts' router, and brings a layer of its own that predicts further tokens, which drafts if it is asked for."""

    architecture = "deepseek_v3"
    supported = (
        "as V2, `rope_interleave`, experts chosen by sigmoids in groups; the layer that predicts further tokens "
        "[drafts](speculative.md#heads) if it is asked for, and is passed over else"
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ops: Ops, device: str = "cpu", part: ModelPart | None = None) -> None:
        super().__init__(config, dtype, ops, device, part)
        if config.uses_mtp:
            self.next_token = NextTokenLayer(self._make, config.hidden_size, self._layer(config.num_layers))

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        # Two names of one number, of which either may be there.
        default = 0 if fields.has("num_mtp_layers") else 1
        counts = [fields.take("num_nextn_predict_layers", default) or 0, fields.take("num_mtp_layers", 0)]
        if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
            fields.refuse("num_nextn_predict_layers", counts, "it must be a whole number from 0 on")
        config = _parse(cls.architecture, fields, dtype, interleaved=fields.boolean("rope_interleave", True, null=False))
        return replace(config, num_mtp_layers=max(counts))

    def _mlp(self, index: int) -> Mlp:
        # What stands behind the last layer is as that is.
        return super()._mlp(min(index, self.config.num_layers - 1))

    def places(self) -> Places:
        places = super().places()
        if self.next_token is not None:
            self.next_token.place(places, f"{self.layers_name}.{self.config.num_layers}")
        return places

    def finish_loading(self) -> None:
        if self.next_token is not None:
            self.next_token.finish_loading(self._ops)
        super().finish_loading()

    def unused(self, names: Collection[str]) -> Collection[str]:
        # Layers that predict tokens: of the one that is used, embedding and output layer are the model's, which are stored again.
        first = self.config.num_layers
        layers = [f"{self.layers_name}.{i}." for i in range(first, first + self.config.num_mtp_layers)]
        of_drafts = tuple(layer for layer in layers if any(name.startswith(f"{layer}eh_proj.") for name in names))
        return {name for name in names if name.startswith(of_drafts)}


def _parse(architecture: str, fields: Fields, dtype: str, *, interleaved: bool) -> ModelConfig:
    fields.expect("hidden_act", "silu", default="silu")
    # No checkpoint is known to have either.
    fields.expect("attention_bias", False, default=False)
    fields.expect("mlp_bias", False, default=False)
    num_layers = fields.positive_int("num_hidden_layers", MAX_LAYERS)
    num_heads = fields.positive_int("num_attention_heads", MAX_HEADS)
    is_v3 = architecture == DeepseekV3.architecture
    num_kv_heads = fields.take("num_key_value_heads", _V3_KV_HEADS if is_v3 else None)
    if num_kv_heads not in (None, num_heads):
        fields.refuse("num_key_value_heads", num_kv_heads, f"all heads share a latent: it must be {num_heads}, or null")
    num_dense = fields.take("first_k_dense_replace", 3 if is_v3 else 0)
    if not isinstance(num_dense, int) or isinstance(num_dense, bool) or num_dense < 0:
        fields.refuse("first_k_dense_replace", num_dense, "it must be a whole number from 0 on")
    for key in _OF_TRAINING + (_OF_EXPERTS if num_dense >= num_layers else ()):
        fields.take(key, None)
    dims = LatentDims(
        nope=fields.positive_int("qk_nope_head_dim", MAX_HEAD_DIM),
        rope=fields.positive_int("qk_rope_head_dim", MAX_HEAD_DIM),
        value=fields.positive_int("v_head_dim", MAX_HEAD_DIM),
        latent=fields.positive_int("kv_lora_rank", MAX_HEAD_DIM),
        interleaved=interleaved,
    )
    if dims.rope % 2:
        fields.refuse("qk_rope_head_dim", dims.rope, "rotary embedding needs an even one")
    rope = parse_rope(fields, fields.positive_int("max_position_embeddings", MAX_MODEL_LEN), head_dim=dims.rope)
    for key, value in (("head_dim", dims.rope), ("qk_head_dim", dims.query)):
        if fields.take(key, value) not in (None, value):
            fields.refuse(key, fields.whole[key], f"the parts of a head make it {value}")
    q_lora_rank = _Q_LORA_RANK
    if fields.has("q_lora_rank"):
        q_lora_rank = 0 if fields.peek("q_lora_rank") is None else fields.positive_int("q_lora_rank", MAX_WIDTH)
    fields.take("q_lora_rank", None)
    sharper = rope.scaling.score_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    name, raw = rope_of(fields.whole)
    if sharper != 1.0 and raw["factor"] is None:
        fields.refuse(f"{name}.factor", None, "with mscale_all_dim it must be a number")
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
        experts=None if num_dense >= num_layers else _parse_experts(architecture, fields, num_dense, num_layers),
        dtype=dtype,
    )


def _parse_experts(architecture: str, fields: Fields, num_dense: int, num_layers: int) -> ExpertsConfig:
    fields.expect("moe_layer_freq", 1, default=1)
    size = fields.positive_int("moe_intermediate_size", MAX_WIDTH)
    is_v3 = architecture == DeepseekV3.architecture
    num_shared = 1 if is_v3 else 2
    if fields.has("n_shared_experts"):
        num_shared = 0 if fields.peek("n_shared_experts") == 0 else fields.positive_int("n_shared_experts", MAX_EXPERTS)
    fields.take("n_shared_experts", None)
    return ExpertsConfig(
        router=_parse_groups(fields, is_v3=is_v3),
        layers=(False,) * num_dense + (True,) * (num_layers - num_dense),
        intermediate_size=size,
        shared_size=num_shared * size,
        corrected=is_v3,
        in_float32=True,
    )


def _parse_groups(fields: Fields, *, is_v3: bool) -> ExpertRouter:
    """V2's softmax, of all experts or of the groups with the largest; V3's sigmoids, of the groups whose best two are the largest."""
    if is_v3:
        fields.expect("scoring_func", "sigmoid", default="sigmoid")
        fields.expect("topk_method", "noaux_tc", default="noaux_tc")
        renormalize, grouped = fields.boolean("norm_topk_prob", True, null=False), True
    else:
        fields.expect("scoring_func", "softmax", default="softmax")
        # DeepSeek's own code and transformers differ in what it means, and no published model has it.
        fields.expect("norm_topk_prob", False, default=False)
        method = fields.take("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            fields.refuse("topk_method", method, "supported are greedy and group_limited_greedy")
        renormalize, grouped = False, method != "greedy"
    router = replace(
        parse_router(fields, "n_routed_experts", renormalize=renormalize),
        scores=Scores.SIGMOID if is_v3 else Scores.SOFTMAX,
        scale=fields.positive_float("routed_scaling_factor", 2.5 if is_v3 else 1.0),
    )
    if not grouped:
        for key in ("n_group", "topk_group"):
            fields.take(key, None)
        return router
    num_groups = fields.positive_int("n_group", MAX_EXPERTS)
    top_groups = fields.positive_int("topk_group", MAX_EXPERTS)
    per_group = router.num_experts // num_groups
    if router.num_experts % num_groups or (is_v3 and per_group < 2):
        fields.refuse("n_group", num_groups, f"it must cut n_routed_experts ({router.num_experts}) into equal groups, of two or more in V3")
    if top_groups > num_groups or router.top_k > top_groups * per_group:
        fields.refuse("topk_group", top_groups, f"of {num_groups} groups it must leave num_experts_per_tok ({router.top_k}) experts")
    group_score = GroupScore.BEST_TWO if is_v3 else GroupScore.LARGEST
    return replace(router, num_groups=num_groups, top_groups=top_groups, group_score=group_score)
