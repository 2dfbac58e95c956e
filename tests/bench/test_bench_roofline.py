"""The arithmetic behind MFU, MBU and the roofline verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.batch import KvShape
from twostep.lab.bench.roofline import Bound, DeviceLimits, ModelShape, Work
from twostep.model.families.config import ExpertsConfig, ModelConfig
from twostep.model.families.registry import build_model
from twostep.model.families.rope import Rope
from twostep.model.kernels.experts import ExpertRouter
from twostep.model.kernels.latent import LatentDims
from twostep.model.kernels.ops import Ops

LLAMA_8B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope=Rope(theta=500000.0),
    num_positions=0,
    windows=(0,) * 32,
    max_model_len=8192,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    dtype="bfloat16",
)
TINY = replace(
    LLAMA_8B,
    vocab_size=97,
    hidden_size=64,
    intermediate_size=112,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    windows=(0, 0, 0),
)


def shape_of(config: ModelConfig, dtype: str = "bfloat16") -> ModelShape:
    kv = KvShape(
        num_blocks=1,
        block_size=16,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    return ModelShape.of(config, kv, dtype)


def test_llama_8b_is_what_it_is_called() -> None:
    shape = shape_of(LLAMA_8B)
    embedding = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    norms = (2 * LLAMA_8B.num_layers + 1) * LLAMA_8B.hidden_size
    assert shape.num_params + embedding + norms == 8_030_261_248  # its model card's
    assert shape.kv_token_bytes == 131072


EXPERTS = ExpertsConfig(
    router=ExpertRouter(num_experts=6, top_k=2), layers=(True, False, True), intermediate_size=40, shared_size=24, shared_gated=True
)


@pytest.mark.parametrize("architecture", ["llama", "opt", "qwen3", "qwen2_moe", "deepseek_v2", "deepseek_v3"])
def test_parameters_are_those_of_the_model_as_it_is_built(architecture: str) -> None:
    config = replace(TINY, architecture=architecture)
    if architecture == "opt":
        config = replace(config, rope=None, num_positions=64, max_model_len=64, num_kv_heads=config.num_heads, qkv_bias=True, o_bias=True)
        config = replace(config, gated_mlp=False)
    if architecture.startswith("deepseek"):
        dims = LatentDims(nope=10, rope=4, value=6, latent=20)
        rank = 24 if architecture == "deepseek_v3" else 0
        config = replace(config, latent=dims, q_lora_rank=rank, num_kv_heads=1, head_dim=dims.kept, attention_scale=1.0)
    if architecture == "qwen2_moe":
        config = replace(config, experts=EXPERTS)
    model = build_model(config, torch.float32, Ops())
    matrices = sum(place.tensor.numel() for name, place in model.places().items() if place.tensor.dim() == 2 and "embed" not in name)
    tied = config.tie_word_embeddings
    assert not tied
    assert shape_of(config).num_params == matrices


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    dense, sparse = shape_of(TINY), shape_of(replace(TINY, architecture="qwen2_moe", experts=EXPERTS))
    one, expert = 3 * 64, 3 * 40 * 64
    in_place_of_dense = 2 * (one * 24 + 6 * 64 + 64 - one * 112)
    assert sparse.token_params == dense.token_params + in_place_of_dense + 2 * 2 * expert
    # Of two tokens that choose two of six each, the second finds a third of its experts chosen.
    chosen = 2 + 2 * 2 / 3
    assert sparse.weight_bytes(2) == pytest.approx(dense.weight_bytes(2) + 2 * (in_place_of_dense + 2 * chosen * expert))
    assert sparse.weight_bytes(1e6) == pytest.approx(2 * sparse.num_params)
    assert sparse.decode([1]).flops == sparse.prefill([1], 1).flops


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.tuples(*[st.sampled_from([0, 1, 7, 40])] * 3))
def test_prefill_is_the_sum_of_its_queries(lengths: list[int], windows: tuple[int, int, int]) -> None:
    shape = shape_of(replace(TINY, windows=windows))
    one_by_one = sum(
        4 * TINY.num_heads * TINY.head_dim * (min(place, window) if window else place)
        for length in lengths
        for place in range(1, length + 1)
        for window in windows
    )
    products = 2 * shape.token_params * sum(lengths) + 2 * shape.head_params * len(lengths)
    assert shape.prefill(lengths, 1).flops == one_by_one + products


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_a_decode_step_reads_the_weights_once_and_every_key_and_value(contexts: list[int]) -> None:
    shape = shape_of(TINY)
    work = shape.decode(contexts)
    assert work.num_bytes == pytest.approx(shape.weight_bytes(len(contexts)) + sum(contexts) * shape.kv_token_bytes)
    assert work.flops == 2 * shape.num_params * len(contexts) + 4 * TINY.num_layers * TINY.num_heads * TINY.head_dim * sum(contexts)
    # The last token of a prompt costs what a decode step of the same context does, but for the others' keys.
    assert shape.decode([7]).flops == pytest.approx(shape.prefill([7], 1).flops - shape.prefill([6], 1).flops + 2 * shape.head_params)


@given(st.floats(1e9, 1e16), st.floats(1e6, 1e13), st.floats(1e-6, 1e3))
def test_utilization_and_verdict_agree_with_the_floor(flops: float, num_bytes: float, seconds: float) -> None:
    limits, work = DeviceLimits(bytes_per_s=4.4e12, flops_per_s=790e12), Work(flops, num_bytes)
    assert max(work.mfu(seconds, limits), work.mbu(seconds, limits)) * seconds == pytest.approx(work.floor_s(limits))
    is_compute = flops / limits.flops_per_s > num_bytes / limits.bytes_per_s
    assert (work.bound(limits) is Bound.COMPUTE) == is_compute or flops / num_bytes == pytest.approx(limits.ridge)


def test_verdicts_of_an_8b_model_on_an_h200() -> None:
    limits, shape = DeviceLimits(bytes_per_s=4.41e12, flops_per_s=794e12), shape_of(LLAMA_8B)
    assert shape.decode([1024] * 64).bound(limits) is Bound.BANDWIDTH
    assert shape.prefill([2048], 1).bound(limits) is Bound.COMPUTE
    # Its weights alone take 3.4 ms, whatever the batch.
    assert shape.decode([1024]).floor_s(limits) == pytest.approx(3.43e-3, rel=0.01)
