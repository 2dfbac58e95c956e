"""How many bytes a model's weights and a token's KV take, read from config.json and the weight files' headers alone, without torch; and how
a worker's memory is divided into weights, what its steps need, and KV blocks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twostep.checkpoint.config_file import read_config
from twostep.checkpoint.description import describe
from twostep.checkpoint.expert_sizes import ExpertSizes, read_expert_sizes
from twostep.checkpoint.held import held_in_head, held_in_layers
from twostep.checkpoint.kv_scheme import kv_format, read_kv_scheme
from twostep.checkpoint.quantization import HEAD, check_unquantized, quantization_at_load, read_quantization
from twostep.checkpoint.state_sizes import StateSizes
from twostep.checkpoint.usual_keys import WITH_ENCODER, kind_of, mlp_products, num_kv_layers, usual_keys
from twostep.errors import InvalidRequest, SetupError
from twostep.quantized_vector import SLOTS_TOGETHER, number_bytes, reasons_against, scale_bytes

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# By such a share weights may differ of which it is said that they are of the same size.
_SAME_WEIGHTS = 0.02
GIB = 1 << 30
# The most that weights may take in float32 for a CPU to hold them so: two workers of such a model fit a laptop.
_SMALL_BYTES = 2 * GIB
# Libraries, the largest step and captured graphs, where they have not been measured: an H200 with Llama-3.1-8B's shape and steps of 8192
# tokens took 0.8 + 1.4 + 0.6 GiB.
DEFAULT_RUNTIME_BYTES = 3 * GIB
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """`num_layers` counts those with KV. `item_bytes` is that of a number of K or V; `scale_bytes` what each vector of them takes besides
    (quantized KV only). `num_planes` is 1 where a token keeps one vector for keys and values (latent attention). `num_heads`,
    `intermediate_size` and `experts` say into how many parts it can be cut. `num_state_layers` keep a state of each sequence in place of
    KV, of `state_bytes` each, which `num_state_heads` make up. `has_encoder`: an encoder reads the prompt, before a decoder."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: int
    item_bytes: float = 2
    scale_bytes: int = 0
    num_planes: int = 2
    num_heads: int = 0
    intermediate_size: int = 0  # of dense layers; 0: there are none
    experts: ExpertSizes | None = None
    num_state_layers: int = 0
    state_bytes: int = 0
    num_state_heads: int = 0
    has_encoder: bool = False

    @property
    def kv_token_bytes(self) -> int:
        """planes · layers · kv_heads · head_dim · bytes, and for quantized KV the scales."""
        return self.num_planes * self.num_layers * self.num_kv_heads * (int(self.head_dim * self.item_bytes) + self.scale_bytes)

    def kv_token_bytes_of_rank(self, tensor_parallel_size: int) -> int:
        """Returns what each of several ranks holds of it: its KV heads, or one that others hold too."""
        return self.kv_token_bytes // self.num_kv_heads * -(-self.num_kv_heads // tensor_parallel_size)

    def num_state_blocks(self, block_size: int) -> int:
        """Returns how many blocks a sequence takes beside those of its tokens: each layer's state lies in whole ones, where they have
        numbers, not scales."""
        of_numbers = self.num_planes * self.num_layers * self.num_kv_heads * int(self.head_dim * self.item_bytes)
        return self.num_state_layers * -(-self.state_bytes // (of_numbers * block_size))

    def resembles(self, other: PlannedModel) -> bool:
        """Returns whether its steps take about the same times: KV of the same shape, and weights of the same size."""

        def kept(model: PlannedModel) -> tuple[int, ...]:
            return model.num_layers, model.num_planes, model.num_kv_heads, model.head_dim, model.num_state_layers

        return kept(self) == kept(other) and abs(self.weight_bytes - other.weight_bytes) <= _SAME_WEIGHTS * other.weight_bytes

    def cut_beside_heads(self, *, whole_experts: bool) -> dict[str, int]:
        """Returns what check_parts asks of MLPs, and of layers with states."""
        cut = {"linear_num_key_heads": self.num_state_heads} if self.num_state_heads else {}
        cut |= {"intermediate_size": self.intermediate_size}
        if self.experts is None:
            return cut
        cut |= {"shared_expert_intermediate_size": self.experts.shared_width}
        return cut | ({"num_experts": self.experts.num_experts} if whole_experts else {"moe_intermediate_size": self.experts.width})

    @property
    def formula(self) -> str:
        """How kv_token_bytes comes about, with numbers."""
        vector = f"{self.head_dim} · {self.item_bytes:g}"
        vector = f"({vector} + {self.scale_bytes})" if self.scale_bytes else vector
        if self.num_planes == 1:
            names = "layers · " + ("(latent · bytes + scale)" if self.scale_bytes else "latent · bytes")
            return f"{names} = {self.num_layers} · {vector} = {self.kv_token_bytes:,} bytes"
        names = "2 · layers · kv_heads · " + ("(head_dim · bytes + scale)" if self.scale_bytes else "head_dim · bytes")
        return f"{names} = 2 · {self.num_layers} · {self.num_kv_heads} · {vector} = {self.kv_token_bytes:,} bytes"


def quantized_model(model: PlannedModel, quantization: str) -> PlannedModel:
    """Returns the model with its KV quantized. Raises SetupError where it cannot be."""
    head_dim = model.head_dim
    reasons = reasons_against(quantization, head_dim=head_dim, block_size=SLOTS_TOGETHER, num_planes=model.num_planes)
    if reasons:
        raise SetupError(f"{model.name}: {'; '.join(reasons)}; give another --kv-cache-dtype")
    item_bytes = number_bytes(head_dim, quantization) / head_dim
    return replace(model, item_bytes=item_bytes, scale_bytes=scale_bytes(head_dim, quantization))


def read_model(
    model_dir: Path, *, dtype: str = "auto", kv_cache_dtype: str = "auto", quantization: str = "none", architecture: str = ""
) -> PlannedModel:
    """Weights in `dtype` ("auto": as config.json says) and as --quantization says, on a GPU. Raises SetupError, naming the file and what is
    missing in it."""
    config = read_config(model_dir, architecture)
    return model_of(config, model_dir, dtype=dtype, kv_cache_dtype=kv_cache_dtype, quantization=quantization)


def weight_bytes(model_dir: Path, dtype: str, quantization: str = "none") -> int:
    """Returns the size of the weights once a CPU has loaded them; 0 where that is not known before."""
    try:
        return describe(model_dir, dtype=dtype, quantization=quantization).cpu_bytes
    except SetupError:
        # Whoever loads it says what is wrong with it.
        return 0


def dtype_on_cpu(model_dir: Path, dtype: str, quantization: str = "none", architecture: str = "") -> str:
    """Returns what --dtype means on a CPU: auto is float32 where all weights are unquantized and take at most 2 GiB in float32. The best
    tokens of small models often lie so close together that rounding to 16 bits picks another one."""
    if dtype != "auto" or quantization != "none":
        return dtype
    try:
        config = read_config(model_dir, architecture)
        quantized = read_quantization(model_dir, config) is not None
        return dtype if quantized or model_of(config, model_dir, dtype="float32").weight_bytes > _SMALL_BYTES else "float32"
    except SetupError:
        # The loader reports what is wrong with the model.
        return dtype


def model_of(
    config: dict[str, Any], model_dir: Path, *, dtype: str = "auto", kv_cache_dtype: str = "auto", quantization: str = "none"
) -> PlannedModel:
    """`config` is that of `model_dir`, whose weight files are looked at if they are there, and else counted from the shape."""
    path = model_dir / "config.json"
    config = usual_keys(config)

    def number(*names: str, default: int | None = None) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SetupError(f"{path} has no usable {' or '.join(names)} ({value!r}); give the directory of a decoder model")
        return value

    num_layers = number("num_hidden_layers")
    num_heads = number("num_attention_heads")
    hidden = number("hidden_size")
    num_kv_heads = number("num_key_value_heads", default=num_heads)
    head_dim = number("head_dim", default=hidden // num_heads)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if stored not in _ITEM_BYTES:
        raise SetupError(f"{path} says dtype {stored}; planned can be {', '.join(_ITEM_BYTES)}: use the unquantized model")
    item_bytes = _ITEM_BYTES[stored if dtype == "auto" else dtype]
    intermediate = number("intermediate_size")
    num_mlp, has_encoder = mlp_products(config), kind_of(config) in WITH_ENCODER
    attention = [(num_heads * head_dim, hidden), *[(num_kv_heads * head_dim, hidden)] * 2, (hidden, num_heads * head_dim)]
    num_planes = 2
    if config.get("kv_lora_rank") is not None:
        latent, rope, nope, value = map(number, ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        num_planes, num_kv_heads, head_dim = 1, 1, latent + rope
        queries = [(num_heads * (nope + rope), hidden)]
        if config.get("q_lora_rank") is not None:
            rank = number("q_lora_rank")
            queries = [(rank, hidden), (num_heads * (nope + rope), rank)]
        attention = [*queries, (head_dim, hidden), (num_heads * (nope + value), latent), (hidden, num_heads * value)]

    num_kept, linear, state_bytes, num_state_heads = num_kv_layers(config, num_layers), list[tuple[int, int]](), 0, 0
    if num_kept < num_layers:
        # Gated delta nets beside gated attention (qwen3_next).
        delta = StateSizes(
            num_key_heads=number("linear_num_key_heads"),
            num_value_heads=number("linear_num_value_heads"),
            key_dim=number("linear_key_head_dim"),
            value_dim=number("linear_value_head_dim"),
            kernel=number("linear_conv_kernel_dim"),
        )
        linear = [(delta.num_inputs + 2 * delta.num_value_heads, hidden), (hidden, delta.num_value_heads * delta.value_dim)]
        state_bytes, num_state_heads = delta.state_bytes(item_bytes), delta.num_key_heads
        attention.append((num_heads * head_dim, hidden))

    def mlp(width: int) -> list[tuple[int, int]]:
        return [*[(width, hidden)] * (num_mlp - 1), (hidden, width)]

    experts = read_expert_sizes(config)
    num_dense = num_layers if experts is None else num_layers - experts.num_layers
    tied = bool(config.get("tie_word_embeddings"))
    found = read_quantization(model_dir, config)
    if quantization != "none":
        check_unquantized(found, quantization)
        found = quantization_at_load(quantization)
    if any(model_dir.glob("*.safetensors")):
        weight_bytes = describe(model_dir, dtype=stored if dtype == "auto" else dtype, quantization=quantization).loaded_bytes
    else:
        head = number("vocab_size"), hidden
        weight_bytes = num_kept * held_in_layers(found, attention, item_bytes=item_bytes) + math.prod(head) * item_bytes
        weight_bytes += (num_layers - num_kept) * held_in_layers(found, linear, item_bytes=item_bytes)
        weight_bytes += num_dense * held_in_layers(found, mlp(intermediate), item_bytes=item_bytes)
        if has_encoder:
            # Its layers, and the decoder's attention to what it gives.
            each = held_in_layers(found, [*attention, *mlp(intermediate)], item_bytes=item_bytes)
            weight_bytes += number("num_layers") * each + num_layers * held_in_layers(found, attention, item_bytes=item_bytes)
        if experts is not None:
            each = experts.num_experts * held_in_layers(found, mlp(experts.width), item_bytes=item_bytes, experts=True)
            each += held_in_layers(found, mlp(experts.shared_width), item_bytes=item_bytes) + experts.num_experts * hidden * item_bytes
            weight_bytes += experts.num_layers * each
        if not tied or (found is not None and found.format_of(HEAD) is not None):
            weight_bytes += held_in_head(found, *head, item_bytes=item_bytes)
    model = PlannedModel(
        name=model_dir.name,
        num_layers=num_kept,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        weight_bytes=weight_bytes,
        item_bytes=item_bytes,
        num_planes=num_planes,
        num_heads=num_heads,
        intermediate_size=intermediate if num_dense else 0,
        experts=experts,
        num_state_layers=num_layers - num_kept,
        state_bytes=state_bytes,
        num_state_heads=num_state_heads,
        has_encoder=has_encoder,
    )
    format = kv_format(kv_cache_dtype, read_kv_scheme(model_dir, config))
    return model if format == "none" else quantized_model(model, format)


# ---- a worker's memory ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Bytes of one GPU of a worker that may use `utilization` of it."""

    gpu_bytes: int
    utilization: float
    weight_bytes: int
    runtime_bytes: int
    kv_token_bytes: int
    block_size: int

    @property
    def pool_bytes(self) -> int:
        return int(self.gpu_bytes * self.utilization) - self.weight_bytes - self.runtime_bytes

    @property
    def num_blocks(self) -> int:
        return self.pool_bytes // (self.kv_token_bytes * self.block_size)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


def worker_memory(
    model: PlannedModel,
    gpu_bytes: int,
    *,
    utilization: float = 0.9,
    runtime_bytes: int = DEFAULT_RUNTIME_BYTES,
    block_size: int = 16,
    tensor_parallel_size: int = 1,
) -> WorkerMemory:
    """Raises SetupError if no KV fits beside the weights, with how much is missing, and for parts of a model that is not cut."""
    if model.has_encoder and tensor_parallel_size > 1:
        raise SetupError(f"{model.name} cannot be cut into parts: give --tensor-parallel-size 1, or more workers")
    memory = WorkerMemory(
        gpu_bytes=gpu_bytes,
        utilization=utilization,
        weight_bytes=-(-model.weight_bytes // tensor_parallel_size),
        runtime_bytes=runtime_bytes,
        kv_token_bytes=model.kv_token_bytes_of_rank(tensor_parallel_size),
        block_size=block_size,
    )
    if memory.num_blocks < 1:
        raise SetupError(
            f"{model.name} does not fit: weights {gib(memory.weight_bytes)} and steps {gib(runtime_bytes)} leave nothing for KV in "
            f"{utilization:g} of {gib(gpu_bytes)}; take larger GPUs or a higher --tensor-parallel-size"
        )
    return memory


def parse_bytes(text: str) -> int:
    """`141GiB`, `80GB`, `24e9`. Raises InvalidRequest."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    try:
        amount = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    except (ValueError, OverflowError):
        amount = 0
    if amount < 1:
        raise InvalidRequest(f"{text!r} is no amount of memory; give one such as 141GiB or 80GB")
    return amount


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"
