"""T5, T5 1.1 and Flan-T5 (Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020, arXiv
1910.10683; Shazeer, GLU Variants Improve Transformer, 2020): an encoder reads the prompt, all of it at once, and a decoder attends to what
comes of it. RMSNorm, no biases, no scale in attention, and in place of positions a bias for how far a key is from its query."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F

from twostep.checkpoint.context import context_of
from twostep.checkpoint.directory import MAX_VOCAB_SIZE
from twostep.checkpoint.fields import Fields
from twostep.engine.batch import Batch
from twostep.errors import SetupError
from twostep.model.families.attention import Attention
from twostep.model.families.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, EncoderConfig, ModelConfig
from twostep.model.families.decoder import Decoder
from twostep.model.families.layer_states import StepTap
from twostep.model.families.layers import DecoderLayer, LayerPart
from twostep.model.families.mlp import GatedMlp, Mlp, PlainMlp
from twostep.model.families.modules import Cut, LinearLayer, Maker, Norm, Place, Places
from twostep.model.families.sharding import ModelPart
from twostep.model.kernels.ops import Activation, AttentionPlan, Linear, Ops
from twostep.model.kernels.torch_encoder import EncoderStep
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.prompt_readout import PromptReadout

_MAX_BUCKETS = 1024
# By `feed_forward_proj`: whether there is a gate, and the activation.
_MLPS: dict[str, tuple[bool, Activation]] = {"relu": (False, "relu"), "gated-gelu": (True, "gelu_tanh"), "gated-silu": (True, "silu")}
_ATTENTION = ("q", "k", "v", "o")


class RelativeBias:
    """What is added to products of queries and keys: for each head a number by the bucket of their distance. Near keys have a bucket each,
    those farther away share ever larger ones, and all from `max_distance` on the last."""

    def __init__(self, encoder: EncoderConfig, num_heads: int, make: Maker, *, both_ways: bool) -> None:
        """`both_ways`: half of the buckets are for keys behind the query."""
        self._encoder = encoder
        self._both_ways = both_ways
        self._weight = make.empty(encoder.num_buckets, num_heads)

    def place(self, places: Places, stack: str) -> None:
        places[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = Place.whole(self._weight)

    def __call__(self, distances: torch.Tensor) -> torch.Tensor:
        """[..., num_heads] from int64 [...]: a key's position less its query's."""
        num_buckets, first = self._encoder.num_buckets, torch.zeros_like(distances)
        if self._both_ways:
            num_buckets //= 2
            first, distances = (distances > 0) * num_buckets, distances.abs()
        else:
            distances = -distances.clamp(max=0)
        # Half of them are for one distance each. As transformers computes it, in float32.
        exact = num_buckets // 2
        share = torch.log(distances.float() / exact) / math.log(self._encoder.max_distance / exact)
        far = (exact + (share * (num_buckets - exact)).to(torch.int64)).clamp(max=num_buckets - 1)
        return F.embedding(first + torch.where(distances < exact, distances, far), self._weight)


class CrossAttention:
    """Attention of an answer's tokens to the prompt. Its keys and values are made once, of what the encoder gave, and kept in the pool."""

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        self._width, self._hidden = config.num_heads * config.head_dim, config.hidden_size
        self._q = make.linear(self._width, self._hidden, bias=False)
        self._kv = make.linear(2 * self._width, self._hidden, bias=False)
        self._o = make.linear(self._hidden, self._width, bias=False)

    def place(self, places: Places, name: str) -> None:
        q, k, v, o = (f"{name}.{each}" for each in _ATTENTION)
        self._q.place(places, (q, self._width, Cut.HEADS))
        self._kv.place(places, (k, self._width, Cut.KV_HEADS), (v, self._width, Cut.KV_HEADS))
        self._o.place(places, (o, self._hidden, Cut.FROM_HEADS))

    def finish_loading(self, ops: Ops) -> None:
        for linear in (self._q, self._kv, self._o):
            linear.finish_loading(ops)

    @property
    def keys_and_values(self) -> LinearLayer:
        """[E, 2 * num_heads * head_dim] from what the encoder gave, [E, hidden_size]."""
        return self._kv

    @property
    def enter(self) -> Linear:
        return self._q.run

    @property
    def leave(self) -> Linear:
        return self._o.run

    def attend(self, plan: AttentionPlan, layer: int, projected: torch.Tensor) -> torch.Tensor:
        return plan.attend(layer, projected)


class CrossLayer(DecoderLayer):
    """A DecoderLayer whose attention is to the prompt, with one before it to the answer: x + own(norm(x)), and from there on as that."""

    def __init__(
        self, index: int, own_norm: Norm, own: Attention, cross_norm: Norm, cross: CrossAttention, post_norm: Norm, mlp: Mlp
    ) -> None:
        names = _names(1)
        super().__init__(index, cross_norm, cross, post_norm, mlp, names=[*names, "layer.0.layer_norm", "layer.0.SelfAttention"])
        self.own_norm, self.own, self.cross = own_norm, own, cross

    @property
    def parts(self) -> Sequence[LayerPart]:
        return *super().parts, self.own_norm, self.own


class T5(Decoder):
    architecture = "t5"
    supported = (
        "[an encoder](#t5-an-encoder-and-a-decoder) reads the prompt; `feed_forward_proj` relu, gated-gelu or gated-silu; tied or not, "
        "`scale_decoder_outputs`; not in float16, nor over several ranks"
    )
    embed_name = "shared"
    layers_name = "decoder.block"
    norm_name = "decoder.final_layer_norm"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        fields.expect("is_encoder_decoder", True, default=True)
        for training in ("dropout_rate", "initializer_factor", "n_positions", "output_past"):
            fields.take(training, None)
        kind = fields.take("feed_forward_proj", "relu")
        if kind not in _MLPS:
            fields.refuse("feed_forward_proj", kind, "supported are " + ", ".join(_MLPS))
        gated, activation = _MLPS[kind]
        fields.expect("is_gated_act", gated, default=gated)
        name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
        fields.expect("dense_act_fn", name, default=name)
        tied = fields.boolean("tie_word_embeddings", True, null=True)
        num_encoder_layers = fields.positive_int("num_layers", MAX_LAYERS)
        num_layers = num_encoder_layers
        if fields.peek("num_decoder_layers") is not None:
            num_layers = fields.positive_int("num_decoder_layers", MAX_LAYERS)
        num_heads = fields.positive_int("num_heads", MAX_HEADS)
        num_buckets = _optional(fields, "relative_attention_num_buckets", 32, _MAX_BUCKETS)
        if num_buckets < 4:
            fields.refuse("relative_attention_num_buckets", num_buckets, "it must be 4 at least")
        max_distance = _optional(fields, "relative_attention_max_distance", 128, 1 << 20)
        if max_distance <= num_buckets // 2:
            fields.refuse("relative_attention_max_distance", max_distance, f"it must be more than half of the {num_buckets} buckets")
        return ModelConfig(
            architecture=cls.architecture,
            vocab_size=fields.positive_int("vocab_size", MAX_VOCAB_SIZE),
            hidden_size=fields.positive_int("d_model", MAX_WIDTH),
            intermediate_size=fields.positive_int("d_ff", MAX_WIDTH),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=fields.positive_int("d_kv", MAX_HEAD_DIM),
            norm_eps=fields.positive_float("layer_norm_epsilon", 1e-6),
            rope=None,
            num_positions=0,
            windows=(0,) * num_layers,
            max_model_len=context_of(fields.whole, fields.path),
            tie_word_embeddings=tied,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            gated_mlp=gated,
            activation=activation,
            dtype=dtype,
            encoder=EncoderConfig(
                num_layers=num_encoder_layers,
                num_buckets=num_buckets,
                max_distance=max_distance,
                # transformers 5 calls it by its name; before, it went by whether the embedding was tied.
                scaled_output=fields.boolean("scale_decoder_outputs", tied),
            ),
        )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ops: Ops, device: str = "cpu", part: ModelPart | None = None) -> None:
        if dtype == torch.float16:
            raise SetupError("t5 in float16 exceeds what that can hold; give --dtype bfloat16 or float32")
        super().__init__(config, dtype, ops, device, part)
        assert config.encoder is not None
        make = self._make
        self._encoder = [
            DecoderLayer(i, self._last_norm(), Attention(config, make, names=_ATTENTION), self._last_norm(), self._mlp(), names=_names(0))
            for i in range(config.encoder.num_layers)
        ]
        self._encoder_norm = self._last_norm()
        self._prompt_bias = RelativeBias(config.encoder, config.num_heads, make, both_ways=True)
        self._answer_bias = RelativeBias(config.encoder, config.num_heads, make, both_ways=False)
        self._cross_layers = [layer for layer in self._layers if isinstance(layer, CrossLayer)]
        self._scale = config.hidden_size**-0.5 if config.encoder.scaled_output else 1.0

    def _layer(self, index: int) -> DecoderLayer:
        c, make = self.config, self._make
        own, cross = Attention(c, make, names=_ATTENTION), CrossAttention(c, make)
        return CrossLayer(index, self._last_norm(), own, self._last_norm(), cross, self._last_norm(), self._mlp())

    def _mlp(self) -> Mlp:
        c, make = self.config, self._make
        return GatedMlp(c, make, names=("wi_0", "wi_1", "wo")) if c.gated_mlp else PlainMlp(c, make, names=("wi", "wo"))

    def _last_norm(self) -> Norm:
        return self._make.rms_norm(self.config.hidden_size)

    def unused(self, names: Collection[str]) -> Collection[str]:
        # The shared embedding again, and a bias that old checkpoints have and nobody reads.
        of_stacks = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
        return *of_stacks, "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

    def places(self) -> Places:
        places = super().places()
        for layer in self._encoder:
            layer.place(places, f"encoder.block.{layer.index}")
        self._encoder_norm.place(places, "encoder.final_layer_norm")
        self._prompt_bias.place(places, "encoder")
        self._answer_bias.place(places, "decoder")
        return places

    def finish_loading(self) -> None:
        for layer in self._encoder:
            layer.finish_loading(self._ops)
        self._encoder_norm.finish_loading(self._ops)
        super().finish_loading()

    def forward(self, batch: Batch, cache: KvCache, reader: PromptReadout | None = None, tap: StepTap | None = None) -> torch.Tensor:
        """The encoder takes the prompts that begin in the step, and leaves keys and values of them for each of the decoder's layers; then
        the decoder takes all other tokens."""
        assert (reader, tap) == (None, None), "an encoder's prompt has no logits, and its states are not asked for"
        step = EncoderStep(batch, cache, self.config.num_heads, self._prompt_bias, self._answer_bias)
        if step.prompts is not None:
            encoded = self._encode(step.prompts)
            for layer in self._cross_layers:
                step.prompts.write(layer.index, layer.cross.keys_and_values(encoded))
        return self._decode(step)

    def _encode(self, plan: AttentionPlan) -> torch.Tensor:
        residual = self._embed(plan)
        projected = self._encoder[0].attention.enter(self._encoder[0].input_norm(residual))
        following = [(layer.input_norm, layer.attention.enter) for layer in self._encoder[1:]] + [(self._encoder_norm, _as_it_is)]
        for layer, (next_norm, next_linear) in zip(self._encoder, following, strict=True):
            attended = layer.attention.attend(plan, layer.index, projected)
            projected = layer.finish(attended, residual, next_norm, next_linear)
        return projected

    def _decode(self, step: EncoderStep) -> torch.Tensor:
        layers = self._cross_layers
        residual = self._embed(step.answers)
        projected = layers[0].own.enter(layers[0].own_norm(residual))
        following = [(layer.own_norm, layer.own.enter) for layer in layers[1:]] + [(self._norm, _as_it_is)]
        for layer, (next_norm, next_linear) in zip(layers, following, strict=True):
            attended = layer.own.attend(step.answers, layer.index, projected)
            query = layer.input_norm.join(layer.own.leave, attended, residual, layer.cross.enter)
            attended = layer.cross.attend(step.crossing, layer.index, query)
            projected = layer.finish(attended, residual, next_norm, next_linear)
        states = projected.index_select(0, step.answers.sample_rows)
        if not len(states):
            return states.new_empty(0, self.config.vocab_size)
        return self.logits(states * self._scale if self._scale != 1.0 else states)


def _names(first: int) -> tuple[str, str, str, str]:
    """Returns what a checkpoint calls a layer's attention and MLP: the norm and then the product of each. The attention is part `first` of
    the layer, the MLP the part after it."""
    attention, mlp = f"layer.{first}", f"layer.{first + 1}"
    kind = "EncDecAttention" if first else "SelfAttention"
    return f"{attention}.layer_norm", f"{attention}.{kind}", f"{mlp}.layer_norm", f"{mlp}.DenseReluDense"


def _optional(fields: Fields, key: str, default: int, at_most: int) -> int:
    return fields.positive_int(key, at_most) if fields.has(key) else default


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x
