"""Layers that a checkpoint holds inside larger ones, and checkpoints whose names begin or end otherwise."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from forward_helpers import make_batch, reference_logits, save_model, scattered_sequences
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from twostep.errors import SetupError
from twostep.model.families.fused import fused
from twostep.model.families.modules import Place
from twostep.model.loading.weight_files import StoredTensor, read_weights, stored_tensors
from twostep.model.runner.model_runner import ModelRunner

Tensors = dict[str, torch.Tensor]


@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    times=st.integers(1, 4),
    turned=st.booleans(),
    is_bias=st.booleans(),
    part=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_any_part_of_a_layer_is_read_out_of_a_larger_one(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], times: int, turned: bool, is_bias: bool, part: tuple[float, float]
) -> None:
    directory = tmp_path_factory.mktemp("fused")
    names = [f"l{i}" for i in range(len(rows))]
    layers = [torch.randn(times * count, *(() if is_bias else (5,))) for count in rows]
    # So many rows of each, again and again.
    whole = torch.cat([layer[i * count : (i + 1) * count] for i in range(times) for layer, count in zip(layers, rows, strict=True)])
    whole = whole.t().contiguous() if turned and not is_bias else whole
    save_file({"larger": whole}, directory / "model.safetensors")
    (stored,) = stored_tensors(directory)
    held = fused("larger", dict(zip(names, rows, strict=True)), turned=turned)
    work: list[tuple[StoredTensor, Place]] = []
    wanted = []
    for name, layer in zip(names, layers, strict=True):
        first = int(part[0] * (len(layer) - 1))
        stop = first + 1 + int(part[1] * (len(layer) - first - 1))
        place = Place(torch.empty_like(layer[first:stop]), tuple(layer.shape), (first, *(0,) * (layer.dim() - 1)), fused=held[name])
        assert place.stored_shape == whole.shape
        work += [(stored, run) for run in place.runs()]
        wanted.append((place.tensor, layer[first:stop]))
    read_weights(work)
    for got, want in wanted:
        assert torch.equal(got, want)


def edited(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def check_logits(directory: Path, oracle: transformers.PreTrainedModel) -> None:
    runner = ModelRunner(directory, num_blocks=8, block_size=4)
    (sequence,) = scattered_sequences([19], 4, 8, random.Random(0))
    got = runner.forward(make_batch([(sequence, 19)], 4))
    torch.testing.assert_close(got, reference_logits(oracle, sequence.tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "prefix"), [("gpt2", "transformer."), ("gpt-neox-in-turn", "gpt_neox."), ("falcon-old", "transformer.")]
)
def test_names_without_a_prefix(family: str, prefix: str, tmp_path: Path) -> None:
    """As older files have them, causal masks among the weights."""
    oracle = save_model(family, tmp_path)

    def older(tensors: Tensors) -> Tensors:
        masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "layers.1.attention.masked_bias": torch.tensor(-1e9)}
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()} | masks

    edited(tmp_path, older)
    check_logits(tmp_path, oracle)


@pytest.mark.parametrize("head", ["embed_out.weight", "lm_head.weight"])
def test_a_head_by_either_name(head: str, tmp_path: Path) -> None:
    oracle = save_model("gpt-neox", tmp_path)
    heads = ("embed_out.weight", "lm_head.weight")
    edited(tmp_path, lambda tensors: {head if name in heads else name: tensor for name, tensor in tensors.items()})
    check_logits(tmp_path, oracle)


def test_a_head_that_is_not_the_embedding_is_found_by_its_other_name(tmp_path: Path) -> None:
    save_model("gpt-neox-in-turn", tmp_path)
    edited(tmp_path, lambda tensors: tensors | {"embed_out.weight": tensors["gpt_neox.embed_in.weight"].flip(0)})
    assert not ModelRunner(tmp_path, num_blocks=1).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "layer"), [("phi3", "self_attn.qkv_proj"), ("falcon", "self_attention.query_key_value"), ("gpt2", "attn.c_attn")]
)
def test_larger_layers_are_named_as_the_files_name_them(family: str, layer: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    edited(tmp_path, lambda tensors: {name: t[:-1].clone() if name.endswith(f"{layer}.weight") else t for name, t in tensors.items()})
    with pytest.raises(SetupError, match=rf"{layer}.weight"):
        ModelRunner(tmp_path, num_blocks=1)
    edited(tmp_path, lambda tensors: {name: t for name, t in tensors.items() if not name.endswith(f"{layer}.weight")})
    with pytest.raises(SetupError, match=rf"{layer}.weight"):
        ModelRunner(tmp_path, num_blocks=1)


def test_a_config_that_contradicts_its_tensors_is_refused(tmp_path: Path) -> None:
    save_model("gemma2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(
            config
            | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
            | dict.fromkeys(("layer_types", "sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"))
        )
    )
    with pytest.raises(SetupError, match="feedforward_layernorm"):
        ModelRunner(tmp_path, num_blocks=1)
