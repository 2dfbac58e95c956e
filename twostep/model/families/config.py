"""The shape of a decoder, as models need it, and which of its layers see only the last so many keys.

Strict: what config.json asks for and a model cannot honour is refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from twostep.checkpoint.fields import Fields
from twostep.checkpoint.kv_scheme import KvScheme
from twostep.checkpoint.quantization import Quantization
from twostep.model.families.rope import Rope
from twostep.model.kernels.delta_net import DeltaDims
from twostep.model.kernels.experts import ClampedGate, ExpertRouter
from twostep.model.kernels.latent import LatentDims
from twostep.model.kernels.ops import Activation

# Beyond every model there is, and far below what would take all memory.
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_WIDTH = 1 << 20
MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The MLPs of a mixture of experts.

    layers             which have experts; the others have a dense MLP
    intermediate_size  of one expert
    shared_size        of all shared experts together; 0: there are none
    shared_gated       a gate of their own says how much of them counts
    corrected          the checkpoint has a bias for the choice of experts
    in_float32         the router's logits are a product in float32
    biased             the router and the experts' products have biases
    clamped            how experts are gated; None: silu(gate) · up
    whole              ranks hold whole experts (expert parallel); else a part of each
    part               of a rank that does: which of how many
    """

    router: ExpertRouter
    layers: tuple[bool, ...]
    intermediate_size: int
    shared_size: int = 0
    shared_gated: bool = False
    corrected: bool = False
    in_float32: bool = False
    biased: bool = False
    clamped: ClampedGate | None = None
    whole: bool = False
    part: tuple[int, int] = (0, 1)

    @property
    def held(self) -> range:
        """Experts that this rank has weights of."""
        (rank, size), count = self.part, self.router.num_experts
        return range(rank * count // size, (rank + 1) * count // size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig(DeltaDims):
    """Layers with a gated delta net in place of attention (families/gated_delta_net.py).

    layers  which have one; the others have attention
    """

    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The encoder that reads the prompt of a decoder (families/t5.py), as wide as that.

    num_layers     of the encoder
    num_buckets    of distances between a query and a key, in both stacks
    max_distance   from which on all distances are one
    scaled_output  the output layer takes hidden_size ** -0.5 of what the last norm gives
    """

    num_layers: int
    num_buckets: int
    max_distance: int
    scaled_output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str  # config.json's model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope | None  # None: learned positions
    layer_ropes: tuple[Rope, ...] = ()  # of each layer, where they differ; then `rope` is the whole context's
    num_positions: int  # learned ones; 0 with RoPE
    windows: tuple[int, ...]  # of each layer: keys that a query sees, its own included; 0: all
    max_model_len: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    gated_mlp: bool = True  # three products; else two
    parallel_residual: bool = False  # attention and MLP beside each other
    norms_per_layer: int = 2
    activation: Activation = "silu"
    attention_scale: float | None = None  # what products of queries and keys are multiplied by; None: head_dim ** -0.5
    attention_softcap: float = 0.0  # c: x counts as c * tanh(x / c); 0: as it is
    logit_softcap: float = 0.0  # the same of the output
    embedding_scale: float = 1.0
    latent: LatentDims | None = None  # of latent attention, whose one KV head has head_dim latent.kept; None: keys and values are kept
    q_lora_rank: int = 0  # numbers that latent attention's queries are compressed to; 0: they are not
    dtype: str  # of the weights on disk: "bfloat16" | "float16" | "float32"; of quantized ones, what they are made of
    quantization: Quantization | None = None  # which linear layers are quantized on disk
    experts: ExpertsConfig | None = None
    gated_delta: GatedDeltaConfig | None = None
    encoder: EncoderConfig | None = None  # of the prompt; None: the decoder reads it
    gated_attention: bool = False  # the queries' product has a gate beside each head's numbers: sigmoid of it multiplies the result
    kv_scheme: KvScheme | None = None  # how the checkpoint wants its KV held; None: it does not say
    num_mtp_layers: int = 0  # behind the last one in the checkpoint: they predict further tokens (families/next_token.py)
    uses_mtp: bool = False  # the first of them is loaded, to draft with
    generates: bool = True  # False: the checkpoint has no output layer, and the embedding stands in its place

    @property
    def num_kv_layers(self) -> int:
        """Layers whose keys and values are kept."""
        return self.num_layers if self.gated_delta is None else self.gated_delta.layers.count(False)

    def among_its_kind(self, layer: int) -> int:
        """Returns which of the layers with KV, or of those with a state, a layer is."""
        if self.gated_delta is None:
            return layer
        kinds = self.gated_delta.layers
        return kinds[:layer].count(kinds[layer])


class WindowRule(Enum):
    """Which layers of an architecture see only the last so many keys, as transformers has it."""

    NONE = "none"  # llama
    ALL = "all"  # mistral: `sliding_window` holds for all layers, or for none
    PATTERN = "pattern"  # gemma: the layers that `layer_types` names, else all but every so many-th
    SWITCHED = "switched"  # qwen: with `use_sliding_window`, the layers that `layer_types` names, else those from `max_window_layers` on


_FULL, _SLIDING = "full_attention", "sliding_attention"
# transformers' own defaults. An old Mistral config without the key means a window of 4096.
DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28


def parse_windows(
    fields: Fields,
    architecture: str,
    rule: WindowRule,
    num_layers: int,
    max_model_len: int,
    *,
    default: int | None = DEFAULT_WINDOW,
    period: int = 1,
) -> tuple[int, ...]:
    """Returns the number of keys that a query of each layer sees, its own included; 0: all. A window at least as long as the context is
    none. `default`: where the file says nothing of windows; `period`: of a pattern, of so many layers the last has none. Raises SetupError,
    naming the key, for what contradicts itself or is not supported."""
    window = fields.take("sliding_window", None if rule is WindowRule.NONE else default)
    full_layers = 0
    if rule is WindowRule.SWITCHED:
        full_layers = fields.take("max_window_layers", _DEFAULT_FULL_LAYERS)
        if not isinstance(full_layers, int) or isinstance(full_layers, bool) or full_layers < 0:
            fields.refuse("max_window_layers", full_layers, "it must be a whole number from 0 on")
        if not fields.boolean("use_sliding_window", False):
            window = None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        fields.refuse("sliding_window", window, "it must be a positive whole number or null")
    if rule is WindowRule.NONE and window is not None and window < max_model_len:
        fields.refuse("sliding_window", window, f"{architecture} has none; set it to null, or name the architecture that has it")

    sliding = [window is not None and i >= full_layers for i in range(num_layers)]
    if rule is WindowRule.PATTERN:
        sliding = [on and (i + 1) % period != 0 for i, on in enumerate(sliding)]
    layer_types = fields.take("layer_types", None)
    if layer_types is not None:
        if not isinstance(layer_types, list):
            fields.refuse("layer_types", layer_types, f"it must be a list of {_FULL} and {_SLIDING}")
        for kind in layer_types:
            if kind not in (_FULL, _SLIDING):
                fields.refuse("layer_types", kind, f"only {_FULL} and {_SLIDING} layers are supported")
        if len(layer_types) != num_layers:
            fields.refuse("layer_types", layer_types, f"it must name num_hidden_layers ({num_layers}) layers")
        named = [kind == _SLIDING for kind in layer_types]
        if any(named) and window is None:
            fields.refuse("layer_types", _SLIDING, "but no sliding_window is in use; give one, or full_attention layers only")
        if rule in (WindowRule.NONE, WindowRule.ALL) and named != sliding:
            fields.refuse("layer_types", layer_types, f"it contradicts sliding_window, which {architecture} uses in all layers or none")
        sliding = named
    if window is None or window >= max_model_len:
        return (0,) * num_layers
    return tuple(window if on else 0 for on in sliding)


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def parse_activation(fields: Fields, key: str, default: str) -> Activation:
    """Takes an activation by transformers' name of it. Raises SetupError for others."""
    name = fields.take(key, default)
    if name not in _ACTIVATIONS:
        fields.refuse(key, name, "supported are " + ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]
