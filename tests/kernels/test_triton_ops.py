"""The whole model on the GPU's operations equals it on the CPU's, also with quantized KV; on the CPU through Triton's interpreter."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_pools import DEVICE

from twostep.engine.batch import Batch, KvShape
from twostep.model.families.decoder import Decoder
from twostep.model.families.registry import build_model, parse_config
from twostep.model.kernels.experts import ExpertWeights
from twostep.model.kernels.ops import AttentionPlan, Ops
from twostep.model.kernels.torch_attention import AttentionSpec, RopeTables
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.loading.weights import load_weights
from twostep.model.runner.model_runner import ModelRunner, kv_shape, with_quantization
from twostep.model.step.graph_ladder import StepShape
from twostep.model.step.kv_cache import KvCache

sys.path.insert(0, str(Path(__file__).parents[1] / "models_forward"))
from forward_helpers import make_batch, of_pool, save_model, scattered_sequences

NUM_BLOCKS, BLOCK_SIZE = 40, 16


def system(*values: Any) -> Any:
    """The interpreter takes seconds for these."""
    return pytest.param(*values, marks=pytest.mark.system)


def seldom(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def on_triton(directory: Path, quantization: str = "auto") -> tuple[Decoder, KvCache]:
    config = parse_config(directory)
    model = build_model(config, torch.float32, TritonOps(DEVICE), DEVICE)
    load_weights(model, directory)
    return model, KvCache(kv_shape(config, "float32", NUM_BLOCKS, BLOCK_SIZE, quantization), DEVICE)


OFTEN = ["qwen3-windows", "deepseek-v2-yarn"]
# Softcaps and a scale; two RoPEs and norms from one; norms of whole queries; heads that turn in part, beside an MLP.
SELDOM = ["llama-biases", "llama3-rope", "opt", "gemma2", "gemma3", "olmo2", "gpt-neox", "phi3-longrope", "falcon", "starcoder2"]


@pytest.mark.parametrize("family", [*OFTEN, system("qwen3-next"), *map(seldom, SELDOM)])
def test_chunks_mixed_with_decode(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    model, cache = on_triton(tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    rng = random.Random(1)
    sequences = scattered_sequences([60, 33, 18, 5], BLOCK_SIZE, NUM_BLOCKS, rng, **of_pool(cache.shape))
    # In the second step the first row is decoded, and the last, which comes after a chunk, attends like a chunk; the third is all decode.
    steps = ([50, 1, 17, 4], [1, 32, 1, 0], [1, 0, 0, 1], [7, 0, 0, 0])
    for counts in steps:
        work = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
        batch = make_batch(work, BLOCK_SIZE, every_row=counts != steps[1])
        with torch.inference_mode():
            got = model.forward(batch, cache)
        torch.testing.assert_close(got.cpu(), runner.forward(batch), rtol=0, atol=1e-4)
        for sequence, count in work:
            sequence.num_computed += count


@pytest.mark.system
def test_torch_serves_delta_nets_whose_kernels_failed_their_trial(tmp_path: Path) -> None:
    save_model("qwen3-next", tmp_path)
    model, cache = on_triton(tmp_path)
    assert isinstance(model._ops, TritonOps)
    model._ops.has_delta_kernels = False
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    sequences = scattered_sequences([6, 2], BLOCK_SIZE, NUM_BLOCKS, random.Random(1), **of_pool(cache.shape))
    for counts in ([5, 1], [1, 1]):
        work = list(zip(sequences, counts, strict=True))
        batch = make_batch(work, BLOCK_SIZE)
        with torch.inference_mode():
            got = model.forward(batch, cache)
        torch.testing.assert_close(got.cpu(), runner.forward(batch), rtol=0, atol=1e-4)
        for sequence, count in work:
            sequence.num_computed += count


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2-moe", {}),
        ("deepseek-v2-moe", {"num_hidden_layers": 2}),  # whose shared experts are two more of the others
        ("qwen2-moe", {"shared_expert_intermediate_size": 28, "num_hidden_layers": 2}),  # one more, with a gate
        system("mixtral", {}),
        system("gpt-oss", {}),
    ],
)
def test_experts(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    save_model(family, tmp_path, **changes)
    model, cache = on_triton(tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    sequences = scattered_sequences([6, 2], BLOCK_SIZE, NUM_BLOCKS, random.Random(1), **of_pool(cache.shape))
    for counts in ([5, 1], [1, 1]):
        work = list(zip(sequences, counts, strict=True))
        batch = make_batch(work, BLOCK_SIZE)
        with torch.inference_mode():
            got = model.forward(batch, cache)
        torch.testing.assert_close(got.cpu(), runner.forward(batch), rtol=0, atol=1e-4)
        for sequence, count in work:
            sequence.num_computed += count


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_quantized_shared_expert_is_one_of_the_others(quantization: str, tmp_path: Path) -> None:
    """As large as one of them: quantized as they are, it is one more in their products."""
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_hidden_layers": 2}
    save_model("qwen2-moe", tmp_path, **sizes)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, quantization=quantization)
    config = with_quantization(parse_config(tmp_path), quantization)
    ops, experts = TritonOps(DEVICE), list[ExpertWeights]()
    prepare = ops.prepare_experts

    def noted(weights: ExpertWeights, *rest: Any) -> Any:
        experts.append(weights)
        return prepare(weights, *rest)

    ops.prepare_experts = noted  # type: ignore[method-assign]
    model = build_model(config, torch.float32, ops, DEVICE)
    load_weights(model, tmp_path)
    assert [len(weights.gate_up) for weights in experts] == [config.experts.router.num_experts + 1]
    cache = KvCache(kv_shape(config, "float32", NUM_BLOCKS, BLOCK_SIZE), DEVICE)
    sequences = scattered_sequences([6, 2], BLOCK_SIZE, NUM_BLOCKS, random.Random(1))
    batch = make_batch([(sequences[0], 5), (sequences[1], 1)], BLOCK_SIZE)
    with torch.inference_mode():
        got, want = model.forward(batch, cache).cpu(), runner.forward(batch)
    # Where a number lies in the middle of two of 8 bits, either is right.
    assert float((got - want).norm() / want.norm()) < 1e-2


def test_a_batch_without_sample_rows_only_writes(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    model, cache = on_triton(tmp_path)
    (sequence,) = scattered_sequences([20], BLOCK_SIZE, NUM_BLOCKS, random.Random(2))
    batch = make_batch([(sequence, 20)], BLOCK_SIZE)
    silent = Batch(**({name: getattr(batch, name) for name in batch.__slots__} | {"sample_rows": batch.sample_rows[:0], "sampling": ()}))
    with torch.inference_mode():
        assert model.forward(silent, cache).shape == (0, model.config.vocab_size)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    runner.forward(batch)
    torch.testing.assert_close(cache.tensor.cpu(), runner._cache.tensor, rtol=0, atol=1e-4)


# Nothing attends for rows of padding: what the memory held before is multiplied.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", ["llama", "deepseek-v2"])
def test_a_planned_decode_follows_its_inputs(family: str, tmp_path: Path) -> None:
    """As a CUDA graph is replayed: one plan, other tokens, lengths, blocks and slots in the same tensors, rows of padding."""
    save_model(family, tmp_path)
    model, cache = on_triton(tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    sequences = scattered_sequences([20, 9, 3], BLOCK_SIZE, NUM_BLOCKS, random.Random(3))
    tables = torch.zeros(5, 8, dtype=torch.int32, device=DEVICE)
    ops = model._ops
    assert isinstance(ops, TritonOps)
    with torch.inference_mode():
        inputs = ops.captured_inputs(StepShape(5, 5), cache, model.attention)
        plan = ops.plan_captured(inputs, [tables], cache, model.attention)
        prompts = make_batch([(s, len(s.tokens) - 2) for s in sequences], BLOCK_SIZE)
        torch.testing.assert_close(model.forward(prompts, cache).cpu(), runner.forward(prompts), rtol=0, atol=1e-4)
        for sequence in sequences:
            sequence.num_computed = len(sequence.tokens) - 2
        for _ in range(2):
            batch = make_batch([(s, 1) for s in sequences], BLOCK_SIZE)
            inputs.memory.copy_(torch.from_numpy(inputs.packed(batch, 3, 1)))
            tables[:3, : batch.block_tables.shape[2]] = torch.from_numpy(batch.block_tables[0])
            torch.testing.assert_close(model.compute(plan)[:3].cpu(), runner.forward(batch), rtol=0, atol=1e-4)
            for sequence in sequences:
                sequence.num_computed += 1


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Attention of two layers: the first with a window and a rotary table of its own."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated: int
    softcap: float = 0.0
    scale: float | None = None
    sinks: bool = False
    quantization: str = "none"

    def spec(self, device: str) -> AttentionSpec:
        generator = torch.Generator().manual_seed(3)

        def made(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator)

        angles = [made(100, self.rotated // 2).to(device) for _ in range(2)]
        return AttentionSpec(
            num_heads=self.num_heads,
            rope=[RopeTables(cos=angle.cos(), sin=angle.sin()) for angle in angles],
            windows=(9, 0),
            scale=self.scale,
            softcap=self.softcap,
            sinks=[made(self.num_heads).to(device) * 3 for _ in range(2)] if self.sinks else (),
        )


KINDS = [
    Kind(num_heads=6, num_kv_heads=2, head_dim=24, rotated=12, scale=0.3, softcap=2.0, sinks=True),
    system(Kind(num_heads=4, num_kv_heads=2, head_dim=256, rotated=256, softcap=3.0, scale=0.1)),  # gemma 2
    system(Kind(num_heads=8, num_kv_heads=2, head_dim=64, rotated=64, sinks=True)),  # gpt-oss
    system(Kind(num_heads=2, num_kv_heads=2, head_dim=80, rotated=20)),  # gpt_neox
    system(Kind(num_heads=2, num_kv_heads=1, head_dim=96, rotated=72, scale=0.2, quantization="int8")),  # phi 3
    system(Kind(num_heads=3, num_kv_heads=1, head_dim=112, rotated=28, softcap=2.0, sinks=True, quantization="int8")),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention_of_every_kind_is_the_cpu_s_planned_and_captured(kind: Kind) -> None:
    shape = KvShape(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_layers=2,
        num_kv_heads=kind.num_kv_heads,
        head_dim=kind.head_dim,
        dtype="float32",
        quantization=kind.quantization,
    )
    ops, on_cpu, on_device = TritonOps(DEVICE), KvCache(shape, "cpu"), KvCache(shape, DEVICE)
    spec, cpu_spec = kind.spec(DEVICE), kind.spec("cpu")
    tables = torch.zeros(3, 8, dtype=torch.int32, device=DEVICE)
    sequences = scattered_sequences([23, 9, 6], BLOCK_SIZE, NUM_BLOCKS, random.Random(1))

    def attend(plan: AttentionPlan, qkv: torch.Tensor) -> torch.Tensor:
        outs = []
        for layer in range(2):
            rotated = qkv.clone()
            plan.rotate_and_write(layer, rotated)
            outs.append(plan.attend(layer, rotated).clone())
        return torch.stack(outs)

    with torch.inference_mode():
        inputs = ops.captured_inputs(StepShape(3, 3), on_device, spec)
        captured = ops.plan_captured(inputs, [tables], on_device, spec)
        for counts in ([21, 7, 5], [1, 1, 0], [1, 0, 1]):
            work = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
            batch = make_batch(work, BLOCK_SIZE)
            qkv = torch.randn(sum(counts), (kind.num_heads + 2 * kind.num_kv_heads) * kind.head_dim)
            want = attend(Ops().plan_attention(batch, on_cpu, cpu_spec), qkv)
            got = attend(ops.plan_attention(batch, on_device, spec), qkv.to(DEVICE)).cpu()
            tolerance = 1e-5 if kind.quantization == "none" else 1e-2
            assert (got - want).norm() < tolerance * want.norm()
            if max(counts) == 1:
                inputs.memory.copy_(torch.from_numpy(inputs.packed(batch, len(work), 1)))
                tables[: len(work), : batch.block_tables.shape[2]] = torch.from_numpy(batch.block_tables[0])
                padded = torch.zeros(3, qkv.shape[1], device=DEVICE)
                padded[: len(qkv)] = qkv
                assert (attend(captured, padded)[:, : len(qkv)].cpu() - want).norm() < tolerance * want.norm()
            for sequence, count in work:
                sequence.num_computed += count


@pytest.mark.parametrize(
    ("family", "quantization", "steps"),
    # Few tokens for fp8: the search for its scales takes the interpreter long.
    [
        ("qwen2", "int8", ([7, 1, 3], [1, 3, 1])),
        system("qwen2", "fp8", ([7, 1, 3], [1, 3, 1])),
        system("qwen3-windows", "int8", ([35, 1, 17], [1, 18, 1], [1, 1, 0])),
    ],
)
def test_quantized_chunks_mixed_with_decode(family: str, quantization: str, steps: tuple[list[int], ...], tmp_path: Path) -> None:
    save_model(family, tmp_path)
    """A rounding of the last bit may turn a stored byte to its neighbour, so logits are near, not equal."""
    model, cache = on_triton(tmp_path, quantization)
    same, exact = (ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kv_cache_dtype=kv) for kv in (quantization, "auto"))
    sequences = scattered_sequences([40, 20, 18], BLOCK_SIZE, NUM_BLOCKS, random.Random(1), **of_pool(cache.shape))
    for counts in steps:
        work = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
        batch = make_batch(work, BLOCK_SIZE)
        with torch.inference_mode():
            got = model.forward(batch, cache).cpu()
        want, lossless = same.forward(batch), exact.forward(batch)
        assert float((got - want).norm()) < 0.1 * float((want - lossless).norm())
        for sequence, count in work:
            sequence.num_computed += count
