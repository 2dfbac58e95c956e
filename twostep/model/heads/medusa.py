"""Medusa heads (Cai et al.: Medusa, 2024, arXiv 2401.10774) as a chain: the n-th says what comes n tokens after the model's next one,
whatever comes between.

    state of the last norm ─┬─ + SiLU(W x + b) … ─ lm_head 0      the token after the next
                            └─ + SiLU(W x + b) … ─ lm_head 1      the one after that

A directory has config.json and model.safetensors, with names as vLLM reads them, or as the authors' code writes them:

    blocks.N.layers.J.{weight, bias}    N.J.linear.{weight, bias}     [hidden, hidden]
    lm_heads.N.weight                   N.num_layers.weight           [vocabulary, hidden], or of the tokens in token_map int64 [N]
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from twostep.checkpoint.directory import FLOAT_DTYPES, read_json
from twostep.checkpoint.fields import Fields
from twostep.errors import SetupError
from twostep.model.families.config import MAX_HEADS, MAX_LAYERS, ModelConfig
from twostep.model.families.layer_states import Reads
from twostep.model.families.modules import Place
from twostep.model.heads.head import Drafted, DraftHead
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops
from twostep.model.loading.weight_files import StoredTensor, read_weights, stored_tensors

_TOKENS = "token_map"
_BLOCK, _HEAD = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), re.compile(r"(\d+)\.(\d+)\.weight")
_PASSED_OVER = ("base_model_name_or_path", "version", "max_paths", "topk", "max_seq_len", "medusa_fc_bias", "torch_dtype", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    num_heads: int
    num_layers: int  # residual blocks of each
    num_tokens: int  # of the model's vocabulary that they may propose
    shares_output: bool  # one output layer serves all


def parse_medusa_config(head_dir: Path, target: ModelConfig) -> MedusaConfig:
    """Reads config.json. Raises SetupError, naming the key, for heads of another model, and for what is not known."""
    path = head_dir / "config.json"
    fields = Fields(path, read_json(path))
    names = fields.take("architectures", ["MedusaModel"])
    if names != ["MedusaModel"]:
        fields.refuse("architectures", names, "Medusa heads have MedusaModel")
    fields.expect("model_type", "medusa", default="medusa")
    fields.expect("logit_scale", 1.0, default=1.0)
    for key, value in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if (given := fields.take(key, value)) != value:
            fields.refuse(key, given, f"the model's is {value}; give heads that were made for this model")
    for key in _PASSED_OVER:
        fields.take(key, None)
    count_key = "medusa_num_heads" if fields.has("medusa_num_heads") else "num_heads"
    layers_key = "medusa_num_layers" if fields.has("medusa_num_layers") else "num_hidden_layers"
    num_tokens = fields.take("truncated_vocab_size", None) or target.vocab_size
    if not isinstance(num_tokens, int) or not 1 <= num_tokens <= target.vocab_size:
        fields.refuse("truncated_vocab_size", num_tokens, f"it must be a whole number up to vocab_size ({target.vocab_size})")
    config = MedusaConfig(
        num_heads=fields.positive_int(count_key, MAX_HEADS),
        num_layers=fields.positive_int(layers_key, MAX_LAYERS) if fields.has(layers_key) else 1,
        num_tokens=num_tokens,
        shares_output=fields.boolean("original_lm_head", False, null=False),
    )
    fields.refuse_rest()
    return config


class MedusaDrafts(DraftHead):
    reads = Reads.SAMPLED
    counts_rounds = True

    def __init__(self, head_dir: Path, target: ModelConfig, dtype: torch.dtype, device: str, ops: Ops) -> None:
        """Reads the heads of a directory. Raises SetupError, naming the tensor, for what is missing, not known or of the wrong shape."""
        c = parse_medusa_config(head_dir, target)
        self.state_size, self.vocab_size, self.most_tokens = target.hidden_size, target.vocab_size, c.num_heads
        stored = {_name_here(tensor.name, c): tensor for tensor in stored_tensors(head_dir)}
        self._dtype, self._device = dtype, device
        blocks = [[self._layer(stored, f"blocks.{n}.layers.{j}", ops) for j in range(c.num_layers)] for n in range(c.num_heads)]
        order = None
        if _TOKENS in stored:
            ids = _read_tokens(stored.pop(_TOKENS), c, target.vocab_size).to(device)
            self.target_ids, order = ids.sort()
        elif c.num_tokens < target.vocab_size:
            raise SetupError(f"the heads' directory lacks {_TOKENS}, which says what their {c.num_tokens} tokens are; download it again")
        outputs = [self._output(stored, f"lm_heads.{n}", c, order, ops) for n in range(1 if c.shares_output else c.num_heads)]
        if c.shares_output:
            outputs = outputs * c.num_heads
            stored = {name: tensor for name, tensor in stored.items() if not name.startswith("lm_heads.")}
        if unknown := sorted(stored):
            raise SetupError(f"{head_dir} has tensors that Medusa heads do not know: {', '.join(unknown[:8])}")
        self._heads = list(zip(blocks, outputs, strict=True))

    def state(self, seen: torch.Tensor) -> torch.Tensor:
        return seen

    def step(self, plan: AttentionPlan | None, token_ids: torch.Tensor, states: torch.Tensor, number: int) -> Drafted:
        layers, output = self._heads[number]
        x = states
        for layer in layers:
            x = x + F.silu(layer(x))
        return Drafted(states, output(x))

    def _layer(self, stored: dict[str, StoredTensor], name: str, ops: Ops) -> Linear:
        size = self.state_size
        bias = self._read(stored, f"{name}.bias", (size,)) if f"{name}.bias" in stored else None
        return ops.prepare_linear(self._read(stored, f"{name}.weight", (size, size)), bias)

    def _output(self, stored: dict[str, StoredTensor], name: str, c: MedusaConfig, order: torch.Tensor | None, ops: Ops) -> Linear:
        weight = self._read(stored, f"{name}.weight", (c.num_tokens, self.state_size))
        return ops.prepare_linear(weight if order is None else weight[order], None)

    def _read(self, stored: dict[str, StoredTensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = stored.pop(name, None)
        if tensor is None:
            raise SetupError(f"the heads' directory lacks {name}; download it again, or fix its config.json")
        if tensor.stored_as not in FLOAT_DTYPES or tensor.shape != shape:
            raise SetupError(
                f"tensor {tensor.name} of the heads is {tensor.stored_as} {list(tensor.shape)}, and should be a float {list(shape)}"
            )
        weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        read_weights([(tensor, Place.whole(weight))])
        return weight


def _name_here(name: str, c: MedusaConfig) -> str:
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if block := _BLOCK.fullmatch(name):
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    if (head := _HEAD.fullmatch(name)) and int(head[2]) == c.num_layers:
        return f"lm_heads.{head[1]}.weight"
    return "lm_heads.0.weight" if name == "lm_head.weight" else name


def _read_tokens(tensor: StoredTensor, c: MedusaConfig, vocab_size: int) -> torch.Tensor:
    """int64 [num_tokens]. Raises SetupError."""
    ids = torch.empty(c.num_tokens, dtype=torch.int64)
    if tensor.stored_as != "I64" or tensor.shape != (c.num_tokens,):
        raise SetupError(f"{_TOKENS} of the heads is {tensor.stored_as} {list(tensor.shape)}, and should be I64 [{c.num_tokens}]")
    read_weights([(replace(tensor, dtype=torch.int64), Place.whole(ids))])
    if not bool(((ids >= 0) & (ids < vocab_size)).all()) or len(ids.unique()) < len(ids):
        raise SetupError(f"{_TOKENS} of the heads does not name different tokens of the model's {vocab_size}; download the heads again")
    return ids
