"""Quantized checkpoints give the logits of their own arithmetic: dequantized weights, and inputs rounded as the format says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from forward_helpers import make_batch, of_pool, reference_logits, save_model, scattered_sequences
from quantized_tensors import KINDS, Kind, config_of, quantize, rounded_input
from safetensors.torch import load_file, save_file

from twostep.checkpoint.description import describe
from twostep.errors import SetupError
from twostep.model.families.registry import build_model, parse_config
from twostep.model.families.sharding import ModelPart, shard_of
from twostep.model.kernels.ops import Linear, Ops
from twostep.model.kernels.quantized_weight import QuantizedWeight, multiply_dense
from twostep.model.loading import weights
from twostep.model.loading.weights import load_weights
from twostep.model.runner.model_runner import ModelRunner, kv_shape
from twostep.model.step.kv_cache import KvCache

Tensors = dict[str, torch.Tensor]


def quantize_model(
    directory: Path, model: transformers.PreTrainedModel, kinds: dict[str, Kind], config: dict[str, object], *, unrounded: str = "none"
) -> transformers.PreTrainedModel:
    """Quantizes the layers whose names end so, in the files and in transformers' model, which rounds their inputs from now on, but those of
    layers whose names end with `unrounded`."""
    tensors = load_file(directory / "model.safetensors")
    for name, module in model.named_modules():
        kind = next((kind for end, kind in kinds.items() if name.endswith(end)), None)
        if kind is None or not isinstance(module, torch.nn.Linear):
            continue
        made = quantize(kind, module.weight.detach().numpy(), scale_dtype=torch.float32, seed=len(name))
        tensors.pop(f"{name}.weight", None)
        tensors |= {f"{name}.{part}": tensor for part, tensor in made.tensors.items()}
        module.weight = torch.nn.Parameter(torch.from_numpy(made.dense))
        if not name.endswith(unrounded):
            module.register_forward_pre_hook(rounding(kind))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, quantization_config=config)
    return model


def rounding(kind: Kind) -> Callable[[torch.nn.Module, tuple[torch.Tensor]], torch.Tensor]:
    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        x = inputs[0]
        return torch.from_numpy(rounded_input(kind, x.reshape(-1, x.shape[-1]).numpy())).view(x.shape)

    return hook


def edit_config(directory: Path, **keys: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def edit(directory: Path, change: Callable[[Tensors], object]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def error_of(directory: Path, oracle: transformers.PreTrainedModel) -> float:
    """The largest difference of any logit, as a share of the largest."""
    runner = ModelRunner(directory, num_blocks=24, block_size=4)
    num_blocks = 16 if runner.kv_shape.num_groups == 1 else 24
    (sequence,) = scattered_sequences([23], 4, num_blocks, random.Random(0), **of_pool(runner.kv_shape))
    got = runner.forward(make_batch([(sequence, 23)], 4))
    wanted = reference_logits(oracle, sequence.tokens)
    return float((got - wanted).abs().max() / wanted.abs().max())


ALL = ("_proj", "fc1", "fc2")


def everywhere(kind: Kind) -> dict[str, Kind]:
    return dict.fromkeys(ALL, kind)


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_formats_own_arithmetic(name: str, tmp_path: Path) -> None:
    """Layers with biases; neither width is a multiple of the groups of 24 or the blocks of 32."""
    model = save_model("llama-biases", tmp_path)
    unquantized = load_file(tmp_path / "model.safetensors")
    oracle = quantize_model(tmp_path, model, everywhere(KINDS[name]), config_of(KINDS[name]))
    assert error_of(tmp_path, oracle) < 1e-2
    described = describe(tmp_path)
    assert [share.num_layers for share in described.formats] == [21]
    assert described.unquantized == ("lm_head", "model.embed_tokens")
    assert described.num_weights >= sum(tensor.numel() for tensor in unquantized.values())
    assert described.loaded_bytes <= described.cpu_bytes <= 4 * described.num_weights


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "opt", "llama-tied", "gemma3"])
@pytest.mark.parametrize("name", ["gptq", "w8a8"])
def test_all_families_take_them(family: str, name: str, tmp_path: Path) -> None:
    oracle = quantize_model(tmp_path, save_model(family, tmp_path), everywhere(KINDS[name]), config_of(KINDS[name]))
    assert error_of(tmp_path, oracle) < 1e-2


@pytest.mark.parametrize("name", ["fp8 blocks", "packed", "w8a8"])
def test_latent_attention_takes_them(name: str, tmp_path: Path) -> None:
    """What makes keys and values is unpacked and multiplied from both sides: its input is not rounded."""
    kind = KINDS[name]
    sizes = {"hidden_size": 64, "kv_lora_rank": 64, "q_lora_rank": 32, "intermediate_size": 96, "v_head_dim": 16, "num_attention_heads": 4}
    model = save_model("deepseek-v2", tmp_path, **sizes, num_key_value_heads=4, initializer_range=0.1)
    oracle = quantize_model(tmp_path, model, everywhere(kind) | {"mqa": kind}, config_of(kind), unrounded="kv_b_proj")
    assert error_of(tmp_path, oracle) < 1e-2


@pytest.mark.parametrize("name", ["awq", "gptq", "fp8", "fp8 static", "fp8 blocks", "packed"])
def test_layers_of_a_larger_one_take_their_rows_of_it(name: str, tmp_path: Path) -> None:
    """Rows of k and v begin within the words of AWQ, and within blocks."""
    model = save_model("phi3", tmp_path, hidden_size=60, num_attention_heads=6, num_key_value_heads=2, intermediate_size=84)
    oracle = quantize_model(tmp_path, model, everywhere(KINDS[name]), config_of(KINDS[name]))
    assert error_of(tmp_path, oracle) < 1e-2


def test_larger_layers_with_rows_in_turn_are_refused_where_they_are_quantized(tmp_path: Path) -> None:
    kinds = {"query_key_value": KINDS["gptq"], "dense": KINDS["gptq"], "_4h": KINDS["gptq"], "to_h": KINDS["gptq"]}
    quantize_model(tmp_path, save_model("gpt-neox", tmp_path), kinds, config_of(KINDS["gptq"]))
    with pytest.raises(SetupError, match="query_key_value"):
        ModelRunner(tmp_path, num_blocks=1)


def group(targets: Iterable[str], kind: Kind) -> dict[str, object]:
    config = config_of(kind)
    groups = config["config_groups"]
    assert isinstance(groups, dict)
    return groups["group_0"] | {"targets": list(targets), "format": config["format"]}


def test_layers_of_one_product_may_have_unequal_formats(tmp_path: Path) -> None:
    """q, k and v are one product here, and so are gate and up: with another format, other inputs, or none."""
    kinds = {
        "q_proj": KINDS["fp8 rows"],
        "k_proj": KINDS["w8a8"],
        "gate_proj": KINDS["packed asymmetric"],
        "up_proj": KINDS["fp8 rows"],
        "down_proj": KINDS["int8"],
    }
    config = config_of(KINDS["packed"]) | {
        "format": "mixed-precision",
        "config_groups": {
            "a": group([r"re:.*(q|up)_proj$"], KINDS["fp8 rows"]),
            "b": group([r"re:.*\.k_proj$"], KINDS["w8a8"]),
            "c": group([f"model.layers.{i}.mlp.gate_proj" for i in range(3)], KINDS["packed asymmetric"]),
            "d": group(["Linear"], KINDS["int8"]),
        },
        "ignore": ["lm_head", "re:.*v_proj", "model.layers.0.self_attn.o_proj", r"re:.*\.[12]\.self_attn\.o_proj"],
    }
    oracle = quantize_model(tmp_path, save_model("llama-biases", tmp_path), kinds, config)
    assert error_of(tmp_path, oracle) < 1e-2
    assert sorted(share.num_layers for share in describe(tmp_path).formats) == [3, 3, 3, 6]


def test_static_scales_of_one_product_may_be_unequal(tmp_path: Path) -> None:
    kind = KINDS["fp8 static"]
    model = save_model("llama-biases", tmp_path)
    oracle = quantize_model(tmp_path, model, everywhere(kind), config_of(kind))
    equal = ModelRunner(tmp_path, num_blocks=16, block_size=4)
    (sequence,) = scattered_sequences([9], 4, 16, random.Random(0))
    before = equal.forward(make_batch([(sequence, 9)], 4))
    torch.testing.assert_close(before, reference_logits(oracle, sequence.tokens), rtol=0, atol=1e-2 * float(before.abs().max()))
    name = "model.layers.0.mlp.up_proj"
    edit(tmp_path, lambda tensors: tensors.update({f"{name}.input_scale": torch.tensor(0.3)}))
    module = model.get_submodule(name)
    module._forward_pre_hooks.clear()
    module.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 0.3).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.3)
    assert error_of(tmp_path, model) < 1e-2
    after = ModelRunner(tmp_path, num_blocks=16, block_size=4).forward(make_batch([(sequence, 9)], 4))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_layer_may_be_quantized(tied: bool, tmp_path: Path) -> None:
    """Also where config.json still says that it is the embedding, as GPTQ's tools leave it."""
    model = save_model("llama", tmp_path)
    # 211 rows of the vocabulary are no multiple of the eight of a word.
    kind = KINDS["packed"]
    config = config_of(kind) | {"ignore": []}
    oracle = quantize_model(tmp_path, model, everywhere(kind) | {"lm_head": kind}, config)
    edit_config(tmp_path, tie_word_embeddings=tied)
    assert error_of(tmp_path, oracle) < 1e-2
    assert describe(tmp_path).unquantized == ("model.embed_tokens",)


def test_an_index_and_shards(tmp_path: Path) -> None:
    kind = KINDS["gptq asymmetric"]
    oracle = quantize_model(tmp_path, save_model("llama-biases", tmp_path), everywhere(kind), config_of(kind))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    where = {}
    for number in range(3):
        names = sorted(tensors)[number::3]
        save_file({name: tensors[name] for name in names}, tmp_path / f"part-{number}.safetensors")
        where |= dict.fromkeys(names, f"part-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert error_of(tmp_path, oracle) < 1e-2


class RecordingOps(Ops):
    """Keeps all weights that linear layers are prepared from."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.quantized: list[QuantizedWeight] = []

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        self.weights.append(weight)
        return super().prepare_linear(weight, bias)

    def prepare_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False) -> Linear:
        if gated:
            return super().prepare_quantized(weight, bias, dtype, gated=True)
        self.quantized.append(weight)
        self.weights.append(weight.dequantize(dtype))
        return lambda x: multiply_dense(weight, x, bias)


# Bits of a number with its scale of float32, and a byte or half for its zero point.
BITS = {
    "awq": 4 + (32 + 8) / 16,
    "gptq": 4 + 32 / 16,
    "packed": 4 + 32 / 16,
    "packed, fp8 inputs": 4 + 32 / 16,
    "packed rows": 8,
    "int8": 8,
    "int8 groups": 8 + 32 / 16,
    "w8a8": 8,
    "fp8": 8,
    "fp8 static": 8,
    "fp8 blocks": 8,
}


@pytest.mark.parametrize("name", BITS)
def test_weights_keep_their_bits(name: str, tmp_path: Path) -> None:
    """A layer's tensors take the bytes that the format says, q, k and v are one, and nothing is dense."""
    oracle = quantize_model(tmp_path, save_model("llama-biases", tmp_path), everywhere(KINDS[name]), config_of(KINDS[name]))
    ops = RecordingOps()
    model = build_model(parse_config(tmp_path), torch.float32, ops)
    load_weights(model, tmp_path)
    assert len(ops.quantized) == 12
    numbers = sum(weight.shape[0] * weight.shape[1] for weight in ops.quantized)
    rows = sum(weight.shape[0] for weight in ops.quantized)
    # Scales and zero points of whole rows, and of blocks or groups that are not full, are few.
    assert numbers * BITS[name] / 8 <= sum(weight.num_bytes for weight in ops.quantized) <= numbers * BITS[name] / 8 + 15 * rows
    stored = load_file(tmp_path / "model.safetensors")
    dense = sum(tensor.numel() * 4 for name, tensor in stored.items() if "proj" not in name or name.endswith(".bias"))
    held = dense + sum(weight.num_bytes for weight in ops.quantized)
    # Blocks that reach over the end of q, k or v have scales for each row.
    assert describe(tmp_path).loaded_bytes == pytest.approx(held, rel=0.05)
    (sequence,) = scattered_sequences([23], 4, 16, random.Random(0))
    cache = KvCache(kv_shape(parse_config(tmp_path), "float32", 16, 4))
    with torch.inference_mode():
        got = model.forward(make_batch([(sequence, 23)], 4), cache)
    wanted = reference_logits(oracle, sequence.tokens)
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-2


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq in order of activations", "packed asymmetric", "fp8 blocks", "int8 groups"])
def test_ranks_hold_their_parts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has 24 of 48 columns, 40 of 80: they begin within groups, blocks and words. Few bytes are read at a time."""
    monkeypatch.setattr(weights, "_QUANTIZED_BYTES_AT_ONCE", 3000)
    quantize_model(tmp_path, save_model("llama-biases", tmp_path), everywhere(KINDS[name]), config_of(KINDS[name]))
    config = parse_config(tmp_path)
    whole = RecordingOps()
    load_weights(build_model(config, torch.float32, whole), tmp_path)
    ranks = []
    for rank in range(2):
        shard, ops = shard_of(config, rank, 2), RecordingOps()
        load_weights(build_model(shard.local, torch.float32, ops, "cpu", ModelPart(shard=shard, gather=lambda x: x)), tmp_path)
        ranks.append(ops.weights)
    heads = (48, 16, 16)
    for layer in range(3):
        qkv, o, gate_up, down = whole.weights[4 * layer : 4 * layer + 4]
        halves = [weight[4 * layer : 4 * layer + 4] for weight in ranks]
        for at, sizes in ((0, heads), (2, (80, 80))):
            split = [half[at].split([size // 2 for size in sizes]) for half in halves]
            joined = torch.cat([part for parts in zip(*split, strict=True) for part in parts])
            assert torch.equal(joined, (qkv, o, gate_up)[at])
        assert torch.equal(torch.cat([half[1] for half in halves], 1), o)
        assert torch.equal(torch.cat([half[3] for half in halves], 1), down)


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    quantize_model(tmp_path, save_model("llama", tmp_path), everywhere(KINDS["gptq"]), config_of(KINDS["gptq"]))
    return tmp_path


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(SetupError) as caught:
        ModelRunner(directory, num_blocks=4, block_size=4)
    for word in words:
        assert word in caught.value.message


LAYER = "model.layers.1.mlp.up_proj"


def test_biases_of_zeros_that_the_model_has_not_are_passed_over(gptq: Path) -> None:
    edit(gptq, lambda tensors: tensors.update({f"{LAYER}.bias": torch.zeros(80)}))
    ModelRunner(gptq, num_blocks=4, block_size=4)
    edit(gptq, lambda tensors: tensors[f"{LAYER}.bias"].add_(1e-3))
    refused(gptq, f"{LAYER}.bias")


def test_kv_scales_are_passed_over(gptq: Path) -> None:
    edit(gptq, lambda tensors: tensors.update({"model.layers.1.self_attn.k_scale": torch.ones(1)}))
    ModelRunner(gptq, num_blocks=4, block_size=4)


@pytest.mark.parametrize("part", ["qweight", "scales", "qzeros"])
def test_missing_tensors_are_named(gptq: Path, part: str) -> None:
    edit(gptq, lambda tensors: tensors.pop(f"{LAYER}.{part}"))
    refused(gptq, f"{LAYER}.{part}")


def test_what_the_config_does_not_say_is_refused_by_the_tensors_name(gptq: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    edit(gptq, lambda tensors: tensors.update({f"{LAYER}.weight": torch.zeros(80, 48)}))
    refused(gptq, f"{LAYER}.weight")
    edit(gptq, lambda tensors: [tensors.pop(f"{LAYER}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")])
    refused(gptq, f"{LAYER}.qweight")
    other = tmp_path_factory.mktemp("fp8")
    quantize_model(other, save_model("llama", other), {"up_proj": KINDS["fp8"]}, config_of(KINDS["fp8"]))
    edit_config(other, quantization_config=None)
    refused(other, "up_proj.weight", "F8_E4M3")
    with pytest.raises(SetupError, match="F8_E4M3"):
        describe(other)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_input_scales_that_are_no_numbers_are_refused(tmp_path: Path, scale: float) -> None:
    kind = KINDS["fp8 static"]
    quantize_model(tmp_path, save_model("llama", tmp_path), everywhere(kind), config_of(kind))
    edit(tmp_path, lambda tensors: tensors.update({f"{LAYER}.input_scale": torch.tensor([scale])}))
    refused(tmp_path, f"{LAYER}.input_scale")


def test_loading_says_how_far_it_is(gptq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_QUANTIZED_BYTES_AT_ONCE", 3000)
    seen: list[tuple[int, int]] = []
    load_weights(build_model(parse_config(gptq), torch.bfloat16, Ops()), gptq, lambda done, total: seen.append((done, total)))
    stored = sum(tensor.nbytes for tensor in load_file(gptq / "model.safetensors").values())
    assert seen == sorted(seen)
    assert seen[-1] == (stored, stored)


def test_made_up_weights_need_no_scales(tmp_path: Path) -> None:
    kind = replace(KINDS["fp8 static"])
    quantize_model(tmp_path, save_model("llama", tmp_path), everywhere(kind), config_of(kind))
    (tmp_path / "model.safetensors").unlink()
    runner = ModelRunner(tmp_path, num_blocks=4, block_size=4, load_format="dummy")
    (sequence,) = scattered_sequences([9], 4, 4, random.Random(0))
    logits = runner.forward(make_batch([(sequence, 9)], 4)).numpy()
    assert np.isfinite(logits).all()
    assert logits.std() > 0
