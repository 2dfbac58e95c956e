"""Small models with heads, and what those propose by a straightforward reading: transformers' own modules, no cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from twostep.engine.batch import SamplingRow
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.proposer import WantedDrafts
from twostep.engine.types import EngineRequest
from twostep.lab.eagle.target import new_head
from twostep.model.eagle.files import save_head
from twostep.model.heads.source import HeadSource
from twostep.model.runner.head_proposer import HeadProposer
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.runner.sampler import sample
from twostep.sampling_params import SamplingParams
from twostep.settings.speculative import SpeculativeConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "models_forward"))
from forward_helpers import save_model

Choice = Callable[[torch.Tensor, int], int]
NUM_MEDUSA = 3


@dataclass(frozen=True)
class HeadCase:
    """A model's directory and that of its head. `plain`: tokens that may follow, by the plain reading."""

    model_dir: Path
    source: HeadSource
    plain: Callable[[Sequence[int], int, Choice], list[int]]


def head_case(method: str, directory: Path, most_tokens: int = 3, *, dense: bool = False) -> HeadCase:
    """`dense`: without a mixture of experts."""
    model_dir, head_dir = directory / "model", directory / "head"
    for each in (model_dir, head_dir):
        each.mkdir()
    source = HeadSource(method=method, head_dir=head_dir, most_tokens=most_tokens)
    if method == "mtp":
        changes = {"first_k_dense_replace": 9} if dense else {}
        model = save_model("deepseek-v3" if dense else "deepseek-v3-moe", model_dir, num_nextn_predict_layers=1, **changes)
        return HeadCase(model_dir, source, PlainMtp(model, model_dir).propose)
    model = save_model("llama", model_dir)
    if method == "medusa":
        return HeadCase(model_dir, source, PlainMedusa(model, head_dir).propose)
    runner = ModelRunner(model_dir, num_blocks=8, dtype="float32")
    save_head(new_head(runner, torch.arange(0, runner.vocab_size, 2), 1), head_dir)
    return HeadCase(model_dir, source, lambda tokens, count, choose: [])


class PlainMtp:
    def __init__(self, model: transformers.PreTrainedModel, directory: Path) -> None:
        """Adds a random layer to the model's files."""
        config = model.config
        self._model = model
        torch.manual_seed(3)
        self._layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers).float().eval()
        self._norms = {name: DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps) for name in ("enorm", "hnorm", "shared_head.norm")}
        self._join = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        named = {**self._layer.state_dict(), "eh_proj.weight": self._join.weight.data}
        named |= {f"{name}.weight": norm.weight.data for name, norm in self._norms.items()}
        for tensor in named.values():
            tensor.normal_(0.0, 0.2).add_(1.0 if tensor.dim() == 1 and len(tensor) != config.n_routed_experts else 0.0)
        path = directory / "model.safetensors"
        tensors = load_file(path)
        behind = f"model.layers.{config.num_hidden_layers}."
        for name, tensor in named.items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                for expert, weight in enumerate(tensor):
                    of_one = name.replace("experts.", f"experts.{expert}.")
                    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[name.rpartition(".")[2]]
                    for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
                        tensors[behind + f"{of_one.rpartition('.')[0]}.{part}.weight"] = rows.clone()
            else:
                tensors[behind + name] = tensor.clone()
        # As published: again what is the model's.
        tensors[behind + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[behind + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors, path, metadata={"format": "pt"})

    @torch.no_grad()
    def propose(self, tokens: Sequence[int], count: int, choose: Choice) -> list[int]:
        """A sequence's first token is seen with its own state."""
        inner = self._model.model
        hidden = inner(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        states = [hidden[0], *hidden]
        given, drafted = list(tokens), list[int]()
        while len(drafted) < count:
            embedded = inner.embed_tokens(torch.tensor(given))
            joined = torch.cat((self._norms["enorm"](embedded), self._norms["hnorm"](torch.stack(states))), -1)
            x, positions = self._join(joined)[None], torch.arange(len(given))[None]
            mask = torch.full((len(given),) * 2, -torch.inf).triu(1)[None, None]
            out = self._layer(
                x, attention_mask=mask, position_ids=positions, position_embeddings=inner.rotary_emb(x, position_ids=positions)
            )
            last = (out[0] if isinstance(out, tuple) else out)[0, -1]
            drafted.append(choose(self._model.lm_head(self._norms["shared_head.norm"](last)), len(drafted)))
            given.append(drafted[-1])
            states.append(last)
        return drafted


class PlainMedusa:
    def __init__(self, model: transformers.PreTrainedModel, directory: Path, **config: Any) -> None:
        """Writes random heads, of two blocks each and every second token."""
        torch.manual_seed(5)
        self._model, size = model, model.config.hidden_size
        self._ids = torch.arange(0, model.config.vocab_size, 2)
        self._tensors = {"token_map": self._ids.flip(0).contiguous()}
        for n in range(NUM_MEDUSA):
            for j in range(2):
                self._tensors[f"blocks.{n}.layers.{j}.weight"] = torch.randn(size, size) * 0.2
                self._tensors[f"blocks.{n}.layers.{j}.bias"] = torch.randn(size)
            self._tensors[f"lm_heads.{n}.weight"] = torch.randn(len(self._ids), size)
        written = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": size, "vocab_size": model.config.vocab_size}
        written |= {"num_heads": NUM_MEDUSA, "num_hidden_layers": 2, "truncated_vocab_size": len(self._ids)} | config
        (directory / "config.json").write_text(json.dumps(written))
        save_file(self._tensors, directory / "model.safetensors")

    @torch.no_grad()
    def propose(self, tokens: Sequence[int], count: int, choose: Choice) -> list[int]:
        state, drafted = self._model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1], list[int]()
        for n in range(min(count, NUM_MEDUSA)):
            x = state
            for j in range(2):
                x = x + torch.nn.functional.silu(
                    self._tensors[f"blocks.{n}.layers.{j}.weight"] @ x + self._tensors[f"blocks.{n}.layers.{j}.bias"]
                )
            logits = torch.full((self._model.config.vocab_size,), -torch.inf)
            logits[self._tensors["token_map"]] = self._tensors[f"lm_heads.{n}.weight"] @ x
            drafted.append(choose(logits, n))
        return drafted


def asked_requests() -> list[EngineRequest]:
    """Returns requests of different kinds, two with the same beginning."""
    beginning = [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6, 5, 14, 15, 16, 17, 18]
    kinds: list[tuple[list[int], dict[str, Any]]] = [
        (beginning, {"max_tokens": 9}),
        ([*beginning, 31, 32, 33], {"max_tokens": 7, "temperature": 0.8, "top_p": 0.9, "seed": 7}),
        ([40], {"max_tokens": 9, "temperature": 1.5, "seed": -3}),
        ([50, 51, 52], {"max_tokens": 8, "repetition_penalty": 1.3}),
        ([60, 61], {"max_tokens": 9, "temperature": 1.0, "logit_bias": ((5, 3.0),), "seed": 2}),
    ]
    return [
        EngineRequest(
            seq_id=f"r{number}",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | options)),
            prefix_key=b"k",
        )
        for number, (prompt, options) in enumerate(kinds)
    ]


def drafting(runner: ModelRunner, source: HeadSource, **bounds: Any) -> tuple[Engine, HeadProposer]:
    proposer = HeadProposer(runner)
    config = SpeculativeConfig(
        method=source.method, model="" if source.uses_mtp else str(source.head_dir), num_speculative_tokens=source.most_tokens
    )
    usual = {"max_num_batched_tokens": 24, "max_num_seqs": 24, "hash_unit": 16}
    return Engine(runner, EngineConfig(**(usual | bounds), speculative=config), proposer=proposer), proposer


def as_the_model(wanted: WantedDrafts, tokens: Sequence[int], *, sees_drafts: bool = True) -> Choice:
    """A Choice that picks as the model's next rows will. `sees_drafts`: penalties do, all of them."""
    request, drafted = wanted.sequence.request, list[int]()

    def choose(logits: torch.Tensor, number: int) -> int:
        position = len(tokens) - request.num_prompt_tokens + number
        seen = drafted if sees_drafts else drafted[-1:]
        row = SamplingRow(request.sampling, position, [*tokens, *seen], request.num_prompt_tokens, frozenset())
        drafted.append(int(sample(logits[None].float(), [row]).token_ids[0]))
        return drafted[-1]

    return choose
