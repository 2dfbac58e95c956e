"""Quantized checkpoints with something changed in their files: refused by the name of a key, a tensor or a file, or read for what they say,
and nothing else ever happens."""

from __future__ import annotations

import copy
import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forward_helpers import save_model
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_tensors import KINDS, quantize_directory
from safetensors.torch import load_file, save_file

from twostep.checkpoint.description import describe
from twostep.errors import SetupError
from twostep.model.families.registry import build_model, parse_config
from twostep.model.kernels.ops import Linear, Ops
from twostep.model.kernels.quantized_weight import QuantizedWeight, multiply_dense
from twostep.model.loading.kv_scales import read_kv_scales
from twostep.model.loading.weights import load_weights

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


class KeepingOps(Ops):
    """Keeps what linear layers' weights mean."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        self.weights.append(weight)
        return super().prepare_linear(weight, bias)

    def prepare_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False) -> Linear:
        if gated:
            return super().prepare_quantized(weight, bias, dtype, gated=True)
        self.weights.append(weight.dequantize(dtype))
        return lambda x: multiply_dense(weight, x, bias)


def numbers(model_dir: Path) -> list[torch.Tensor]:
    """All that a load gives: weights, then scales of KV. Layers of one product are one here, and one each where their formats differ."""
    describe(model_dir)
    config, ops = parse_config(model_dir), KeepingOps()
    load_weights(build_model(config, torch.float32, ops), model_dir)
    scales = [read_kv_scales(model_dir, config)] if config.kv_scheme is not None and config.kv_scheme.static else []
    return [torch.cat([weight.flatten() for weight in ops.weights]), *scales]


class Checkpoint:
    def __init__(self, config: Config, tensors: Tensors, numbers: list[torch.Tensor]) -> None:
        self.config = config
        self.tensors = tensors
        self.numbers = numbers

    def write(self, model_dir: Path, config: Config | None = None, tensors: Tensors | None = None) -> None:
        (model_dir / "config.json").write_text(json.dumps(config or self.config))
        save_file(tensors or self.tensors, model_dir / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """One of each kind, with scales of KV."""
    dense = tmp_path_factory.mktemp("dense")
    save_model("llama", dense, num_hidden_layers=1)
    made = {}
    for name, kind in KINDS.items():
        model_dir = tmp_path_factory.mktemp("quantized") / "m"
        quantize_directory(dense, model_dir, kind)
        config, tensors = json.loads((model_dir / "config.json").read_text()), load_file(model_dir / "model.safetensors")
        if kind.method in ("fp8", "packed", "int8"):
            config["quantization_config"]["kv_cache_scheme"] = KV_SCHEME
            tensors |= {f"model.layers.0.self_attn.{one}_scale": torch.tensor([0.01]) for one in "kv"}
        checkpoint = Checkpoint(config, tensors, [])
        checkpoint.write(model_dir)
        made[name] = Checkpoint(config, tensors, numbers(model_dir))
    return made


def refused_or_right(model_dir: Path, wanted: list[torch.Tensor], *names: str) -> bool:
    """Returns whether it was refused; fails for a refusal without one of the names, for other numbers, and lets other errors pass."""
    got, said = [], ""
    try:
        got = numbers(model_dir)
    except SetupError as error:
        said = error.message
    assert len(said) < 2000
    assert not said or any(name in said for name in names), said
    # Scales of KV may be given up with the key that asks for them.
    for one, other in zip(got, wanted, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    return bool(said)


def places(raw: Any) -> Iterator[tuple[Any, Any]]:
    """All values inside, each as what holds it and by which key."""
    for key in list(raw) if isinstance(raw, dict) else range(len(raw)) if isinstance(raw, list) else ():
        yield raw, key
        yield from places(raw[key])


STRANGE: list[Any] = [None, True, False, 0, 1, -1, 3, 7, 16, 4.0, 0.5, 1 << 70, 1e400, float("nan"), "", "x", "x" * 5000, "16", "group"]
STRANGE += ["re:(", "re:.*", "static", [], [[]], [None], ["x"], [1, 2, 3], [0, 0], [1 << 40, 1 << 40], {}, {"x": {}}]
# How, where, and to what: the latter two count on from the beginning again.
Change = tuple[str, int, int]
CHANGES = st.lists(
    st.tuples(st.sampled_from(["change", "remove", "add"]), st.integers(0, 999), st.integers(0, 999)), min_size=1, max_size=2
)


def changed(config: Config, changes: list[Change]) -> Config:
    """Returns another one."""
    config = copy.deepcopy(config)
    for how, where, what in changes:
        found = list(places(config))
        if not found:
            break
        holder, key = found[where % len(found)]
        value = copy.deepcopy(STRANGE[what % len(STRANGE)])
        if how == "change":
            holder[key] = value
        elif how == "remove":
            del holder[key]
        elif isinstance(holder, dict):
            holder["new_key"] = value
        else:
            holder.append(value)
    return config


# Without its checkpoint_format, gptq_v2 is gptq, whose zero points are others.
@settings(max_examples=100)
@given(name=st.sampled_from([name for name in KINDS if name != "gptq_v2 asymmetric"]), changes=CHANGES)
def test_a_changed_config_is_refused_or_gives_the_same(checkpoints: dict[str, Checkpoint], name: str, changes: list[Change]) -> None:
    checkpoint = checkpoints[name]
    with tempfile.TemporaryDirectory() as folder:
        quantization = changed(checkpoint.config["quantization_config"], changes)
        checkpoint.write(Path(folder), checkpoint.config | {"quantization_config": quantization})
        refused_or_right(Path(folder), checkpoint.numbers, "quantization_config", "model.layers.", "lm_head.")


# What is done to a tensor, and whether a load may still give the same numbers.
def _set_last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return change


BAD_SCALES = {f"is {value}": _set_last(value) for value in (0.0, float("nan"), float("inf"), float("-inf"))}
OTHER_FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned": lambda tensor: tensor.T.contiguous() if tensor.dim() == 2 else tensor,
    "cut": lambda tensor: tensor[:-1].clone() if tensor.dim() else tensor,
    "longer": lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor.expand(2).contiguous(),
    "flat": lambda tensor: tensor.flatten(),
    "one more side": lambda tensor: tensor.unsqueeze(0),
    "of two": lambda tensor: torch.stack([tensor, tensor]),
    "empty": lambda tensor: torch.empty(0, dtype=tensor.dtype),
    "a number": lambda tensor: tensor.view(-1)[0].clone(),
    **{
        f"as {dtype}": lambda tensor, dtype=dtype: tensor.to(dtype)  # type: ignore[misc]
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
    },
}


@settings(max_examples=100)
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from(["k_proj", "up_proj", "down_proj"]),
    st.integers(0, 99),
    st.sampled_from(list(OTHER_FORMS)),
)
def test_a_tensor_in_another_form_is_refused_by_its_name_or_is_the_same(
    checkpoints: dict[str, Checkpoint], name: str, layer: str, which: int, how: str
) -> None:
    checkpoint = checkpoints[name]
    names = sorted(each for each in checkpoint.tensors if layer in each)
    chosen = names[which % len(names)]
    tensors = checkpoint.tensors | {chosen: OTHER_FORMS[how](checkpoint.tensors[chosen].clone())}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.write(Path(folder), tensors=tensors)
        refused_or_right(Path(folder), checkpoint.numbers, chosen)


@pytest.mark.parametrize("name", KINDS)
def test_scales_that_cannot_be_and_tensors_that_are_not_there_are_refused_by_name(
    checkpoints: dict[str, Checkpoint], name: str, tmp_path: Path
) -> None:
    checkpoint = checkpoints[name]
    for chosen, tensor in checkpoint.tensors.items():
        if "down_proj." not in chosen and "self_attn.k_" not in chosen:
            continue
        broken = {how: change(tensor.clone()) for how, change in BAD_SCALES.items()} if "scale" in chosen else {}
        for changes in ({}, *({chosen: each} for each in broken.values())):
            rest = {key: value for key, value in checkpoint.tensors.items() if key != chosen}
            checkpoint.write(tmp_path, tensors=rest | changes)
            # A group that every column says itself may be left out.
            assert refused_or_right(tmp_path, checkpoint.numbers, chosen) or ("g_idx" in chosen and not KINDS[name].ordered)


@settings(max_examples=80)
@given(name=st.sampled_from(["awq", "packed asymmetric", "fp8 blocks"]), changes=CHANGES)
def test_a_changed_header_is_refused_or_gives_the_same(checkpoints: dict[str, Checkpoint], name: str, changes: list[Change]) -> None:
    checkpoint = checkpoints[name]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.write(Path(folder))
        file = Path(folder, "model.safetensors")
        (size,) = struct.unpack("<Q", (raw := file.read_bytes())[:8])
        header = json.dumps(changed(json.loads(raw[8 : 8 + size]), changes)).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + size :])
        refused_or_right(Path(folder), checkpoint.numbers, "model.safetensors", "layers.", "lm_head", "embed_tokens", "norm")


@given(st.sampled_from(list(KINDS)), st.floats(0, 0.999))
def test_a_config_that_was_cut_off_is_refused(checkpoints: dict[str, Checkpoint], name: str, share: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoints[name].write(Path(folder))
        path = Path(folder, "config.json")
        path.write_bytes((raw := path.read_bytes())[: int(len(raw) * share)])
        assert refused_or_right(Path(folder), [], "config.json")
