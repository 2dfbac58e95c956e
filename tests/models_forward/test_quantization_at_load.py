"""--quantization: an unquantized checkpoint gives the logits of the quantized one that it becomes, and is never in memory as a whole."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from forward_helpers import make_batch, reference_logits, save_model, scattered_sequences
from hypothesis import given
from hypothesis import strategies as st
from quantized_tensors import KINDS, Kind, config_of, quantize, quantize_directory, rounded_input
from transformers.pytorch_utils import Conv1D

from twostep.checkpoint.description import describe
from twostep.checkpoint.quantization import fitting, quantization_at_load
from twostep.errors import SetupError
from twostep.model.families.registry import build_model, parse_config
from twostep.model.families.sharding import ModelPart, shard_of
from twostep.model.kernels import weight_quantizer
from twostep.model.kernels.ops import Linear, Ops
from twostep.model.kernels.quantized_weight import QuantizedWeight, multiply_dense
from twostep.model.loading import weights
from twostep.model.loading.weights import load_weights
from twostep.model.runner.model_runner import ModelRunner, with_quantization

HEAD = KINDS["int8"]
LAYERS = {"fp8": KINDS["fp8 rows"], "int8": KINDS["int8"], "int4": Kind("packed", group=32)}
INT4 = quantization_at_load("int4").groups[0].format


def dense_of(kind: Kind, weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight as it becomes: of 8 bits by a definition of the test's own. Scales of 4 bits are chosen by what is tested."""
    if kind.method == "packed":
        return weight_quantizer.quantize(weight, fitting(INT4, weight.shape[1])).dequantize(torch.float32)
    return torch.from_numpy(quantize(kind, weight.numpy(), scale_dtype=torch.float32).dense)


@given(st.integers(1, 9), st.integers(1, 100), st.integers(0, 99), st.sampled_from([32, 64]))
def test_4_bits_lose_half_a_step_at_most_and_use_all_of_them(rows: int, columns: int, seed: int, group: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns) * torch.rand(rows, 1)
    weight[0] = 0
    made = weight_quantizer.quantize(weight, replace(INT4, block=(1, group)))
    dense, scale = made.dequantize(torch.float32), made.spread(made.scales).expand(rows, -1)
    assert not dense[0].any()
    # But for those between 7 and 8 steps on the side that has no 8.
    beyond = weight / scale > 7.5
    assert bool((((dense - weight).abs() <= scale.abs() * 0.5001) | beyond).all())
    assert bool(((dense - weight).abs() <= scale.abs() * 1.0001).all())
    for row in range(1, rows):
        for start in range(0, columns, group):
            part = weight[row, start : start + group]
            assert float(made.scales[row, start // group].abs() * 8) == pytest.approx(float(part.abs().max()))


def quantized_oracle(model: transformers.PreTrainedModel, name: str) -> transformers.PreTrainedModel:
    """transformers' model with what the weights become, its inputs rounded as the format says. A tied head is of its own then."""
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear | Conv1D) or (path == "lm_head" and name == "fp8"):
            continue
        kind = HEAD if path == "lm_head" else LAYERS[name]
        weight = module.weight.detach()
        # GPT-2's lie as [in, out].
        weight = dense_of(kind, weight.t().contiguous()).t() if isinstance(module, Conv1D) else dense_of(kind, weight)
        module.weight = torch.nn.Parameter(weight)

        def rounded(_: torch.nn.Module, inputs: tuple[torch.Tensor], kind: Kind = kind) -> torch.Tensor:
            x = inputs[0]
            return torch.from_numpy(rounded_input(kind, x.reshape(-1, x.shape[-1]).numpy())).view(x.shape)

        module.register_forward_pre_hook(rounded)
    return model


@pytest.mark.parametrize("family", ["llama-biases", "llama-tied", "qwen2", "qwen3", "opt", "phi3", "gpt2", "falcon"])
@pytest.mark.parametrize("name", LAYERS)
def test_logits_are_those_of_what_the_weights_become(name: str, family: str, tmp_path: Path) -> None:
    oracle = quantized_oracle(save_model(family, tmp_path), name)
    runner = ModelRunner(tmp_path, num_blocks=16, block_size=4, quantization=name)
    (sequence,) = scattered_sequences([23], 4, 16, random.Random(0))
    got, wanted = runner.forward(make_batch([(sequence, 23)], 4)), reference_logits(oracle, sequence.tokens)
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-2


class KeepingOps(Ops):
    """Keeps all quantized weights as they come."""

    def __init__(self) -> None:
        self.weights: list[QuantizedWeight] = []

    def prepare_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False) -> Linear:
        if gated:
            return super().prepare_quantized(weight, bias, dtype, gated=True)
        self.weights.append(weight)
        return lambda x: multiply_dense(weight, x, bias)


def bytes_in_memory() -> int:
    """Returns the bytes of all tensors there are, each storage once."""
    storages = {}
    for each in gc.get_objects():
        # Some objects warn as soon as they are asked anything.
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu":
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("name", [name if name == "fp8" else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYERS])
def test_both_are_never_in_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what is quantized there is no more than what is on its way."""
    at_once = 100_000
    monkeypatch.setattr(weights, "_QUANTIZED_BYTES_AT_ONCE", at_once)
    save_model("llama", tmp_path, hidden_size=128, intermediate_size=256, num_attention_heads=4)
    config, ops = with_quantization(parse_config(tmp_path), name), KeepingOps()
    before, seen = bytes_in_memory(), [0]
    model = build_model(config, torch.float32, ops)
    load_weights(model, tmp_path, lambda done, total: seen.append(bytes_in_memory() - before))
    kept = bytes_in_memory() - before
    numbers = sum(weight.shape[0] * weight.shape[1] for weight in ops.weights)
    bits = 4 if name == "int4" else 8
    assert sum(weight.num_bytes for weight in ops.weights) < numbers * bits / 8 * 1.3 + 4 * numbers / 32
    largest = max(weight.shape[0] * weight.shape[1] for weight in ops.weights) * 4
    # The embedding and the norms beside them, and with 8 bits or less a head that is not dense.
    described = describe(tmp_path, quantization=name)
    rope = model.attention.rope[0].cos.nbytes + model.attention.rope[0].sin.nbytes
    assert described.loaded_bytes == pytest.approx(kept - rope, rel=0.03)
    assert max(seen) < kept + at_once + largest
    assert kept + at_once + largest < 4 * numbers, "else the test says nothing"


@pytest.mark.parametrize("family", ["gpt2", "llama-tied"])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_described_is_what_is_quantized(name: str, family: str, tmp_path: Path) -> None:
    """Scales and all: of GPT-2, whose weights lie as [in, out], and of a tied output layer, which becomes one of its own."""
    save_model(family, tmp_path)
    config, ops = with_quantization(parse_config(tmp_path), name), KeepingOps()
    load_weights(build_model(config, torch.float32, ops), tmp_path)
    described = describe(tmp_path, quantization=name)
    dense = described.num_weights - sum(share.num_weights for share in described.formats)
    assert described.loaded_bytes == sum(weight.num_bytes for weight in ops.weights) + 4 * dense


@pytest.mark.parametrize("name", LAYERS)
def test_ranks_hold_their_parts(name: str, tmp_path: Path) -> None:
    """Rows of the whole weight; of columns, scales of what a rank has."""
    save_model("llama-biases", tmp_path, hidden_size=128, intermediate_size=256, num_attention_heads=4)
    config = with_quantization(parse_config(tmp_path), name)
    whole, ranks = KeepingOps(), []
    load_weights(build_model(config, torch.float32, whole), tmp_path)
    for rank in range(2):
        shard, ops = shard_of(config, rank, 2), KeepingOps()
        load_weights(build_model(shard.local, torch.float32, ops, "cpu", ModelPart(shard=shard, gather=lambda x: x)), tmp_path)
        ranks.append([weight.dequantize(torch.float32) for weight in ops.weights])
    for at, weight in enumerate(whole.weights):
        dense, halves = weight.dequantize(torch.float32), [rank[at] for rank in ranks]
        if halves[0].shape[1] < dense.shape[1]:
            # By half a step of each, of 4 bits by one.
            step = weight.scales.abs().max() * (2 if name == "int4" else 1) + (dense.abs() / 8 if name == "fp8" else 0)
            assert bool(((torch.cat(halves, 1) - dense).abs() <= step).all())
        else:
            torch.testing.assert_close(torch.cat(halves).sort(0).values, dense.sort(0).values)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "dense")
    quantize_directory(tmp_path / "dense", tmp_path / "gptq", KINDS["gptq"])
    assert config_of(KINDS["gptq"])["quant_method"] == "gptq"
    with pytest.raises(SetupError, match=r"--quantization int8 .* gptq"):
        ModelRunner(tmp_path / "gptq", num_blocks=4, block_size=4, quantization="int8")
    with pytest.raises(SetupError, match=r"--quantization int8 .* gptq"):
        describe(tmp_path / "gptq", quantization="int8")
    with pytest.raises(SetupError, match="int3"):
        ModelRunner(tmp_path / "dense", num_blocks=4, block_size=4, quantization="int3")


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=r"layers\.1\.mlp\.up_proj"):
        ModelRunner(tmp_path, num_blocks=4, block_size=4, quantization="int4")


@pytest.mark.parametrize("name", LAYERS)
def test_made_up_weights_are_quantized_too(name: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=4, block_size=4, load_format="dummy", quantization=name)
    (sequence,) = scattered_sequences([9], 4, 4, random.Random(0))
    logits = runner.forward(make_batch([(sequence, 9)], 4))
    assert bool(logits.isfinite().all())
    assert float(logits.std()) > 0
