"""Makes checkpoints with llm-compressor in many formats, and compares them with compressed-tensors' own arithmetic, layer by layer.

By hand, in an environment of its own: it needs older transformers than the project's.

    python -m venv /tmp/quantize
    /tmp/quantize/bin/pip install llmcompressor==0.14.0.1 transformers==5.17.0
    PYTHONPATH=. /tmp/quantize/bin/python tests/outside/quantized_checkpoints.py /tmp/checkpoints [MODEL_DIR]

Without MODEL_DIR: a random llama with biases, whose widths (192, 320) are no multiples of 128. For each format it says

- whether all weights are the library's, bit by bit, and the largest difference of any product of the same input (a share of the largest)
- how far the library's own logits move if its norms' weights move by 1e-7: rounding turns the smallest difference into a step, so that the
  logits of whole models cannot be nearer than that
- how far our logits are from the library's
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle import forward as library
from compressed_tensors.quantization.utils import helpers
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from twostep.engine.batch import Batch
from twostep.model.families.registry import build_model, parse_config
from twostep.model.kernels.ops import Linear, Ops
from twostep.model.loading.weights import as_stored, load_weights
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.kv_quantization import static_scales

LINEAR = ("Linear",)
NUM_TOKENS = 40


def ints(bits: int, group: int, symmetric: bool = True) -> QuantizationArgs:
    scope = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **scope)


def scheme(weights: QuantizationArgs, inputs: QuantizationArgs | None = None, targets: tuple[str, ...] = LINEAR) -> QuantizationScheme:
    return QuantizationScheme(targets=list(targets), weights=weights, input_activations=inputs)


def per_token(symmetric: bool) -> QuantizationArgs:
    return QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=symmetric)


FORMATS: dict[str, list[QuantizationScheme]] = {
    "fp8-static": [preset_name_to_scheme("FP8", list(LINEAR))],
    "fp8-dynamic": [preset_name_to_scheme("FP8_DYNAMIC", list(LINEAR))],
    "fp8-block": [preset_name_to_scheme("FP8_BLOCK", list(LINEAR))],
    "w4a16": [scheme(ints(4, 64))],
    "w4a16-asym": [scheme(ints(4, 64, False))],
    "w4a16-channel-asym": [scheme(ints(4, 0, False))],
    "w8a16": [scheme(ints(8, 64))],
    "w8a8": [scheme(ints(8, 0), per_token(True))],
    "w8a8-asym": [scheme(ints(8, 0), per_token(False))],
    "mixed": [
        preset_name_to_scheme("FP8_DYNAMIC", [r"re:.*(q|k)_proj$"]),
        scheme(ints(4, 64), None, (r"re:.*mlp\.(gate|down)_proj$",)),
        scheme(ints(8, 0), per_token(True), (r"re:.*o_proj$",)),
    ],
    "head": [scheme(ints(8, 64))],
    "kv": [],  # nothing but KV
}
KV = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)


def save_random(directory: Path) -> None:
    torch.manual_seed(1)
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    biases = {"attention_bias": True, "mlp_bias": True, "initializer_range": 0.1, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=512, **sizes, **biases))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)


def make(source: Path, target: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(source)
    rng = random.Random(0)
    rows = [[rng.randrange(model.config.vocab_size) for _ in range(48)] for _ in range(4)]
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 48] * 4})
    groups = {f"group_{number}": each for number, each in enumerate(FORMATS[name])}
    recipe = QuantizationModifier(
        config_groups=groups, ignore=[] if name == "head" else ["lm_head"], kv_cache_scheme=None if groups else KV
    )
    # The library wants one, and has no use for it here.
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    oneshot(model=model, dataset=data, recipe=recipe, processor=words, max_seq_length=48, num_calibration_samples=4, pipeline="basic")
    model.save_pretrained(target, save_compressed=True)


class RecordingOps(Ops):
    """Keeps the weights, and gives gated products as they are, without their activation."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        self.weights.append(weight)
        return super().prepare_linear(weight, bias)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self.prepare_linear(weight, bias)


def parts_of(layer: Any) -> Iterator[tuple[Linear, list[str]]]:
    yield layer.qkv, [f"self_attn.{name}_proj" for name in "qkv"]
    yield layer.o, ["self_attn.o_proj"]
    yield layer.gate_up, ["mlp.gate_proj", "mlp.up_proj"]
    yield layer.down, ["mlp.down_proj"]


def compare(directory: Path) -> str:
    quantized = CompressedTensorsConfig(run_compressed=False)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, quantization_config=quantized).float().eval()
    for name, scale in (*theirs.named_parameters(), *theirs.named_buffers()):
        if name.endswith((".k_scale", ".v_scale")):
            # As a pool stores it.
            scale.copy_(static_scales(scale))
    rng = random.Random(3)
    tokens = torch.tensor([[rng.randrange(theirs.config.vocab_size) for _ in range(NUM_TOKENS)]])
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = [
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: (inputs[0][0].clone(), output[0].clone())}))
        for name, module in theirs.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    logits = theirs(tokens).logits[0]
    for hook in hooks:
        hook.remove()
    ops = RecordingOps()
    config = as_stored(parse_config(directory), directory, torch.float32)
    ours = build_model(config, torch.float32, ops)
    load_weights(ours, directory)
    dense = {name: module.weight for name, module in theirs.named_modules() if isinstance(module, torch.nn.Linear)}
    worst, wanted = 0.0, []
    for layer in ours._layers:
        for linear, names in parts_of(layer):
            whole = [f"model.layers.{layer.index}.{name}" for name in names]
            product = torch.cat([seen[name][1] for name in whole], -1)
            worst = max(worst, float((linear(seen[whole[0]][0]) - product).abs().max() / product.abs().max()))
            wanted += [dense[name].flatten() for name in whole]
    kept = torch.cat([weight.flatten() for weight in ops.weights])
    exact = torch.equal(kept[: sum(map(len, wanted))], torch.cat(wanted))
    mine = logits_of(directory, tokens[0].tolist())
    apart = float((mine - logits).abs().max() / logits.abs().max())
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if name.endswith("norm.weight"):
            parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
    moved = float((theirs(tokens).logits[0] - logits).abs().max() / logits.abs().max())
    return f"weights equal: {exact}; products {worst:.1e}; logits {apart:.1e}, the library's own move by {moved:.1e}"


def logits_of(directory: Path, tokens: list[int]) -> torch.Tensor:
    count = len(tokens)
    batch = Batch(
        token_ids=np.array(tokens),
        positions=np.arange(count),
        query_start=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_tables=np.arange(-(-count // 16), dtype=np.int32)[None, None],
        slots=np.arange(count)[None],
        sample_rows=np.arange(count),
        sampling=[],
    )
    return ModelRunner(directory, dtype="float32", num_blocks=8).forward(batch)


def as_served() -> None:
    """Lets the library pad inputs to whole groups, and take 127 for the largest int8, as twostep and vLLM do."""
    forward_quantize, calculate_qparams = library.forward_quantize, helpers.calculate_qparams

    def padded(module: Any, value: torch.Tensor, base_name: str, args: QuantizationArgs) -> torch.Tensor:
        width, group = value.shape[-1], args.group_size
        if base_name == "input" and group:
            value = torch.nn.functional.pad(value, (0, -width % group))
        return forward_quantize(module, value, base_name, args)[..., :width]

    def scaled(low: torch.Tensor, high: torch.Tensor, args: QuantizationArgs, **rest: Any) -> Any:
        scales, zeros = calculate_qparams(low, high, args, **rest)
        return (scales * (127.5 / 127) if args.symmetric and args.type == "int" and args.dynamic else scales), zeros

    library.forward_quantize, helpers.calculate_qparams = padded, scaled


def main() -> None:
    folder = Path(sys.argv[1])
    source = Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "random"
    if not source.exists():
        save_random(source)
    for name in FORMATS:
        target = folder / f"{source.name}-{name}"
        if not target.exists():
            make(source, target, name)
    as_served()
    with torch.inference_mode():
        for name in FORMATS:
            print(f"{name:20} {compare(folder / f'{source.name}-{name}')}", flush=True)


if __name__ == "__main__":
    main()
