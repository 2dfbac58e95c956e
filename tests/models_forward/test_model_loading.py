"""Checks of model directories and of a runner's options."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forward_helpers import FAMILIES, make_batch, reference_logits, save_model, scattered_sequences
from safetensors.torch import load_file, save_file

from twostep.checkpoint.architectures import MODEL_TYPES
from twostep.checkpoint.usual_keys import own_name
from twostep.errors import SetupError
from twostep.model.families.registry import ARCHITECTURES, build_model, parse_config
from twostep.model.kernels.ops import Ops
from twostep.model.loading import weights
from twostep.model.loading.weights import check_weights, load_weights
from twostep.model.runner.model_runner import ModelRunner, num_blocks_for

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_model("llama", tmp_path)
    return tmp_path


def edit(directory: Path, change: Callable[[Tensors], object]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def load(directory: Path, **options: object) -> ModelRunner:
    return ModelRunner(directory, **({"num_blocks": 4, "block_size": 4} | options))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"), r"model\.layers\.1\.self_attn\.k_proj\.weight"),
        (lambda tensors: tensors.update({"model.layers.0.o.bias": torch.zeros(48)}), r"model\.layers\.0\.o\.bias"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}), r"model\.norm\.weight .*\[47\].*\[48\]"),
        (lambda tensors: [tensors.pop(name) for name in list(tensors) if ".1." in name], "lacks .* and 1 more"),
    ],
    ids=["missing", "unexpected", "of another shape", "many missing"],
)
def test_tensors_that_do_not_fit_are_named(directory: Path, change: Callable[[Tensors], object], named: str) -> None:
    check_weights(directory)
    edit(directory, change)
    with pytest.raises(SetupError, match=named):
        load(directory)
    with pytest.raises(SetupError, match=named):
        check_weights(directory)


@pytest.mark.parametrize("family", {config_class: family for family, (config_class, _) in FAMILIES.items()}.values())
def test_layers_that_the_config_does_not_count_are_refused(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    key = own_name(config, "num_hidden_layers")
    last = config[key] - 1
    cut = {name: value[:last] if name == "layer_types" else value for name, value in config.items()} | {key: last}
    if "mlp_only_layers" in cut:
        cut["mlp_only_layers"] = [layer for layer in cut["mlp_only_layers"] if layer < last]
    check_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(cut))
    with pytest.raises(SetupError, match=rf"layer {last} .*\.{last}\..*{last} layers"):
        check_weights(tmp_path)


@pytest.mark.parametrize(("counted", "num_stored", "served"), [(1, 1, True), (..., 1, True), (2, 2, True), (1, 2, False), (None, 1, False)])
def test_layers_that_predict_tokens_are_passed_over_as_far_as_they_are_counted(
    counted: Any, num_stored: int, served: bool, tmp_path: Path
) -> None:
    save_model("deepseek-v3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        config.pop(key, None)
    if counted is not ...:
        config["num_nextn_predict_layers"] = counted
    (tmp_path / "config.json").write_text(json.dumps(config))
    first = config["num_hidden_layers"]
    for layer in range(first, first + num_stored):
        more = {f"model.layers.{layer}.eh_proj.weight": torch.zeros(48, 96), f"model.layers.{layer}.enorm.weight": torch.zeros(48)}
        edit(tmp_path, lambda tensors, more=more: tensors.update(more))
    if served:
        check_weights(tmp_path)
    else:
        with pytest.raises(SetupError, match=f"layer {first + num_stored - 1} "):
            check_weights(tmp_path)


def test_architectures_are_known_before_anything_is_loaded() -> None:
    assert {name: kind.architecture for name, kind in ARCHITECTURES.items()} == MODEL_TYPES


def test_computed_buffers_of_old_checkpoints_are_ignored(directory: Path) -> None:
    edit(directory, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load(directory)


def test_a_tied_head_in_the_file_is_ignored(tmp_path: Path) -> None:
    save_model("llama-tied", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    load(tmp_path)


EMBEDDINGS = {"llama-tied": "model.embed_tokens.weight", "opt": "model.decoder.embed_tokens.weight"}


@pytest.mark.parametrize("family", EMBEDDINGS)
@pytest.mark.parametrize("stored", ["another head", "an equal head", "a head in another dtype", "no head", "the head alone"])
def test_what_is_tied_is_what_transformers_ties(family: str, stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """config.json says tie_word_embeddings, whatever the file holds."""
    save_model(family, tmp_path)
    name = EMBEDDINGS[family]

    def change(tensors: Tensors) -> None:
        embedding = tensors[name]
        if stored == "another head":
            # In the last row only: equal so far.
            tensors["lm_head.weight"] = torch.cat([embedding[:-1], torch.randn(1, embedding.shape[1])])
        elif stored == "the head alone":
            tensors["lm_head.weight"] = tensors.pop(name)
        elif stored == "a head in another dtype":
            tensors["lm_head.weight"] = embedding.to(torch.bfloat16)
        elif stored == "an equal head":
            tensors["lm_head.weight"] = embedding.clone()

    edit(tmp_path, change)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    caplog.clear()
    runner = load(tmp_path, num_blocks=8)
    (sequence,) = scattered_sequences([9], 4, 8, random.Random(0))
    got = runner.forward(make_batch([(sequence, 9)], 4))
    torch.testing.assert_close(got, reference_logits(oracle, sequence.tokens), rtol=0, atol=1e-4)
    differs = stored in ("another head", "a head in another dtype")
    assert runner.config.tie_word_embeddings == (not differs)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * differs


def test_a_head_of_another_shape_is_named(tmp_path: Path) -> None:
    save_model("llama-tied", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(9, 48)}))
    with pytest.raises(SetupError, match=r"lm_head\.weight"):
        load(tmp_path)


def test_heads_are_compared_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_COMPARED_ELEMENTS", 10 * 48)
    save_model("llama-tied", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert load(tmp_path).config.tie_word_embeddings
    edit(tmp_path, lambda tensors: tensors["lm_head.weight"][-1].add_(1.0))
    assert not load(tmp_path).config.tie_word_embeddings


def test_a_checkpoint_of_the_decoder_alone_has_no_prefix(tmp_path: Path) -> None:
    """As facebook/opt-125m is stored."""
    oracle = save_model("opt", tmp_path)
    edit(tmp_path, lambda tensors: [tensors.update({name.removeprefix("model."): tensors.pop(name)}) for name in list(tensors)])
    runner = load(tmp_path, num_blocks=8)
    (sequence,) = scattered_sequences([9], 4, 8, random.Random(0))
    got = runner.forward(make_batch([(sequence, 9)], 4))
    torch.testing.assert_close(got, reference_logits(oracle, sequence.tokens), rtol=0, atol=1e-4)
    edit(tmp_path, lambda tensors: tensors.update({"model.decoder.final_layer_norm.bias": torch.zeros(48)}))
    with pytest.raises(SetupError, match=r"decoder\.final_layer_norm\.bias"):
        load(tmp_path)


def test_loading_says_how_far_it_is(directory: Path) -> None:
    model = build_model(parse_config(directory), torch.bfloat16, Ops())
    seen: list[tuple[int, int]] = []
    load_weights(model, directory, lambda done, total: seen.append((done, total)))
    stored = sum(tensor.numel() * 4 for tensor in load_file(directory / "model.safetensors").values())
    assert seen == sorted(seen)
    assert seen[-1] == (stored, stored)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "int4"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda:"}, "cuda:"),
        ({"load_format": "none"}, "load_format"),
        ({"num_blocks": 0}, "blocks"),
        ({"max_model_len": 513}, "max_model_len"),
        ({"num_blocks": 1 << 50}, "KV cache"),
    ],
)
def test_bad_options_are_refused(directory: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        load(directory, **options)


def test_dtype_auto_is_that_of_the_weights_and_can_be_chosen(directory: Path) -> None:
    assert load(directory).kv_shape.dtype == "float32"
    assert load(directory, dtype="bfloat16").kv_shape.dtype == "bfloat16"
    assert load(directory, max_model_len=100).max_model_len == 100


def test_blocks_for_a_memory_budget(directory: Path) -> None:
    config = parse_config(directory)
    per_block = 3 * 2 * 2 * 16 * 8 * 2  # layers, K and V, heads, slots, head_dim, bytes
    assert num_blocks_for(config, "bfloat16", 16, 10 * per_block + 1) == 10
    with pytest.raises(SetupError):
        num_blocks_for(config, "bfloat16", 16, per_block - 1)


def test_dummy_weights_need_config_alone_and_are_the_same_each_time(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    bare = tmp_path_factory.mktemp("bare")
    (bare / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(SetupError, match="safetensors"):
        load(bare)
    first, second = (load(bare, load_format="dummy", num_blocks=8) for _ in range(2))
    (sequence,) = scattered_sequences([9], 4, 8, random.Random(0))
    batch = make_batch([(sequence, 9)], 4)
    logits = first.forward(batch)
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert torch.equal(second.forward(batch), logits)


def test_a_gpu_that_is_not_there_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SetupError, match="'cuda'"):
        load(directory, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SetupError, match="'cuda:2'"):
        load(directory, device="cuda:2")


@pytest.mark.system
def test_the_cpu_needs_no_triton(directory: Path) -> None:
    load = f"from twostep.model.runner.model_runner import ModelRunner; ModelRunner({str(directory)!r}, num_blocks=4)"
    code = f"import sys; {load}; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
