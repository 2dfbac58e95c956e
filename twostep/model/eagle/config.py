"""The shape of an EAGLE-3 head, out of its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.checkpoint.directory import MAX_MODEL_LEN, MAX_VOCAB_SIZE, read_json, stored_dtype
from twostep.checkpoint.fields import Fields
from twostep.errors import SetupError
from twostep.model.families.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelConfig
from twostep.model.families.rope import Rope, parse_rope

# As makers of heads call it, and as vLLM does.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
NUM_STATES = 3
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """What a head is made of.

    vocab_size            of the model that it drafts for; draft_vocab_size: tokens that it may propose
    target_hidden_size    of that model, whose states of three layers it is given
    layers                which: the residual as it enters layers of these numbers; empty: usual_layers() of the model
    norm_before_residual  what the layer adds to is the state after its norm
    dtype                 of the weights on disk
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_model_len: int
    layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        assert self.draft_vocab_size <= self.vocab_size
        assert self.num_heads % self.num_kv_heads == 0

    def layers_of(self, target: ModelConfig) -> tuple[int, ...]:
        """Returns the layers of the model whose inputs the head is given. Raises SetupError if the model has none such."""
        layers = self.layers or usual_layers(target.num_layers)
        if max(layers) >= target.num_layers:
            raise SetupError(f"{_LAYER_IDS} is {list(layers)}, but the model has {target.num_layers} layers; give a head of this model")
        return layers

    def check_target(self, target: ModelConfig, *, has_embedding: bool) -> None:
        """Raises SetupError, naming the key, if the head is none of this model. `has_embedding`: it brings one of its own."""
        theirs = {"vocab_size": target.vocab_size, "target_hidden_size": target.hidden_size}
        for key, value in theirs.items():
            if getattr(self, key) != value:
                raise SetupError(f"the head's {key} is {getattr(self, key)}, the model's {value}; give a head that was made for this model")
        if not has_embedding and self.hidden_size != target.hidden_size:
            raise SetupError(
                f"the head has no embed_tokens.weight, and its hidden_size {self.hidden_size} is not the model's {target.hidden_size}, "
                "whose embedding it would use; download the head again"
            )
        self.layers_of(target)


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose inputs published heads are given: one low, one in the middle, one high. Raises SetupError for a model that
    is too small."""
    layers = (2, num_layers // 2, num_layers - 3)
    if num_layers < NUM_STATES:
        raise SetupError(f"a model of {num_layers} layers is too small for an EAGLE-3 head, which looks at layers 2, n/2 and n - 3 of n")
    return layers


def parse_eagle_config(head_dir: Path) -> EagleConfig:
    """Reads a head's config.json. Raises SetupError, naming the file and the key, for what is missing, contradicts itself or is not known
    here."""
    path = head_dir / "config.json"
    fields = Fields(path, read_json(path))
    names = fields.take("architectures", None)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        fields.refuse("architectures", names, f"an EAGLE-3 head has one of {', '.join(ARCHITECTURES)}")
    fields.expect("model_type", "llama", default="llama")
    fields.expect("num_hidden_layers", 1, default=1)
    fields.expect("hidden_act", "silu", default="silu")
    # The head's output layer is its own; whatever the key says, there is no embedding to tie it to.
    fields.take("tie_word_embeddings", None)
    hidden_size = fields.positive_int("hidden_size", MAX_WIDTH)
    num_heads = fields.positive_int("num_attention_heads", MAX_HEADS)
    num_kv_heads = fields.positive_int("num_key_value_heads", MAX_HEADS) if fields.peek("num_key_value_heads") is not None else num_heads
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})")
    if fields.peek("head_dim") is not None:
        head_dim = fields.positive_int("head_dim", MAX_HEAD_DIM)
    elif hidden_size % num_heads:
        fields.refuse("num_attention_heads", num_heads, f"it must divide hidden_size ({hidden_size}), or head_dim must be given")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "it must be even")
    vocab_size = fields.positive_int("vocab_size", MAX_VOCAB_SIZE)
    draft_vocab_size = vocab_size
    if fields.peek("draft_vocab_size") is not None:
        draft_vocab_size = fields.positive_int("draft_vocab_size", MAX_VOCAB_SIZE)
    if draft_vocab_size > vocab_size:
        fields.refuse("draft_vocab_size", draft_vocab_size, f"it is more than vocab_size ({vocab_size})")
    longest = fields.positive_int("max_position_embeddings", MAX_MODEL_LEN)
    target_hidden_size = hidden_size
    if fields.peek("target_hidden_size") is not None:
        target_hidden_size = fields.positive_int("target_hidden_size", MAX_WIDTH)
    config = EagleConfig(
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=hidden_size,
        target_hidden_size=target_hidden_size,
        intermediate_size=fields.positive_int("intermediate_size", MAX_WIDTH),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        rope=parse_rope(fields, longest, head_dim=head_dim),
        max_model_len=longest,
        layers=_layers(fields),
        norm_before_residual=fields.boolean("norm_before_residual", False, null=False),
        attention_bias=fields.boolean("attention_bias", False, null=False),
        mlp_bias=fields.boolean("mlp_bias", False, null=False),
        dtype=_dtype(fields, head_dir),
    )
    for key in ("draft_vocab_size", "head_dim", "num_key_value_heads", "target_hidden_size"):
        fields.take(key, None)  # null is absent
    fields.refuse_rest()
    return config


def eagle_config_json(config: EagleConfig) -> dict[str, Any]:
    """Returns what `parse_eagle_config` makes `config` of, as published heads write it. Only plain RoPE is written."""
    assert config.rope.scaling is None
    assert config.rope.dim is None
    found: dict[str, Any] = {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_model_len,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "norm_before_residual": config.norm_before_residual,
        "tie_word_embeddings": False,
        "torch_dtype": config.dtype,
    }
    if config.layers:
        found[_LAYER_IDS] = list(config.layers)
    return found


def _layers(fields: Fields) -> tuple[int, ...]:
    """Takes the layers' numbers, which stand at the top or in `eagle_config`. Empty: the file does not say."""
    inner = fields.take("eagle_config", None)
    given = fields.take(_LAYER_IDS, None)
    if inner is not None:
        if not isinstance(inner, dict):
            fields.refuse("eagle_config", inner, "it must be an object or null")
        own = fields.inner("eagle_config", inner)
        own.expect("use_aux_hidden_state", True, default=True)
        nested = own.take(_LAYER_IDS, None)
        own.refuse_rest()
        if given is not None and nested is not None and given != nested:
            fields.refuse(_LAYER_IDS, given, f"it contradicts eagle_config, which says {nested}")
        given = nested if given is None else given
    if given is None:
        return ()
    numbers = isinstance(given, list) and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < MAX_LAYERS for n in given)
    if not numbers or len(given) != NUM_STATES:
        fields.refuse(_LAYER_IDS, given, f"it must be a list of {NUM_STATES} layers' numbers")
    return tuple(given)


def _dtype(fields: Fields, head_dir: Path) -> str:
    old = fields.take("torch_dtype", None)
    dtype = fields.take("dtype", None) or old
    if dtype is None:
        return stored_dtype(head_dir)
    if isinstance(dtype, str):
        dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        fields.refuse("dtype", dtype, "supported are " + ", ".join(_DTYPES))
    return str(dtype)
