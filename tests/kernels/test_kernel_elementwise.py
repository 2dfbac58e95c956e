"""Elementwise kernels against float64 definitions, on shapes that fit no tile; on the CPU through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from kernel_pools import DEVICE, DTYPES, poisoned_pool, relative_limit, tolerance

from twostep.model.kernels import triton_elementwise as kernels
from twostep.model.kernels.ops import Activation, Ops

# (rows, width, dtype)
SHAPES = [(1, 24, torch.float32), (5, 576, torch.bfloat16), (37, 1031, torch.float16), (5, 24, torch.bfloat16), (37, 576, torch.float32)]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that a kernel allocates are NaN until it writes them."""

    def poisoned(make):
        def made(*args, **options):
            tensor = make(*args, **options)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.mark.parametrize(("rows", "width", "dtype"), SHAPES, ids=str)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, width, dtype=dtype), random(width, dtype=dtype)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-3).double(), normed(x, weight, 1e-3), **tolerance(dtype))


@pytest.mark.parametrize("weights", ["same", "float32"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 20), (32, 4, 128)])
def test_norms_of_heads_in_place(num_heads: int, num_kv_heads: int, head_dim: int, weights: str) -> None:
    for dtype in DTYPES:
        of_weights = dtype if weights == "same" else torch.float32
        q_weight, k_weight = random(head_dim, dtype=of_weights), random(head_dim, dtype=of_weights)
        qkv = random(3, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        query, key, value = qkv.clone().view(3, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), 1)
        Ops().norm_heads(qkv, q_weight, k_weight, num_heads, num_kv_heads, 1e-3)
        parts = qkv.view(3, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), 1)
        # Torch rounds what is normed, and again behind the weights.
        torch.testing.assert_close(parts[0].double(), normed(query, q_weight, 1e-3), **tolerance(dtype, roundings=2))
        torch.testing.assert_close(parts[1].double(), normed(key, k_weight, 1e-3), **tolerance(dtype, roundings=2))
        assert torch.equal(parts[2], value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_inside_a_fused_projection(dtype: torch.dtype) -> None:
    qkv, weight = random(7, 11, 20, dtype=dtype), random(20, dtype=dtype)
    heads = qkv[:, 2:7]
    got = kernels.rms_norm(heads, weight, 1e-6)
    assert got.shape == heads.shape
    torch.testing.assert_close(got.double(), normed(heads, weight, 1e-6), **tolerance(dtype))
    columns = qkv[:, :, ::2]
    torch.testing.assert_close(
        kernels.rms_norm(columns, weight[:10], 1e-6).double(), normed(columns, weight[:10], 1e-6), **tolerance(dtype)
    )


@pytest.mark.parametrize(("rows", "width", "dtype"), SHAPES, ids=str)
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype), random(width, dtype=dtype)
    want = x.double() + residual.double()
    got = kernels.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(residual.double(), want, **tolerance(dtype))
    torch.testing.assert_close(got.double(), normed(residual, weight, 1e-5), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 37])
def test_parts_are_summed_before_they_are_normed(rows: int, dtype: torch.dtype) -> None:
    parts, residual = random(3, rows, 72, dtype=torch.float32), random(rows, 72, dtype=dtype)
    w1, w2 = random(72, dtype=dtype), random(72, dtype=dtype)
    want = residual.double() + normed(parts.double().sum(0), w1, 1e-5)
    got = kernels.add_rms_norm(parts, residual, w2, 1e-5, first_weight=w1)
    torch.testing.assert_close(residual.double(), want, **tolerance(dtype))
    torch.testing.assert_close(got.double(), normed(residual, w2, 1e-5), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 37])
def test_add_rms_norm_of_parts(rows: int, dtype: torch.dtype) -> None:
    parts, residual, weight = random(3, rows, 72, dtype=torch.float32), random(rows, 72, dtype=dtype), random(72, dtype=dtype)
    want = parts.double().sum(0) + residual.double()
    got = kernels.add_rms_norm(parts, residual, weight, 1e-5)
    torch.testing.assert_close(residual.double(), want, **tolerance(dtype))
    torch.testing.assert_close(got.double(), normed(residual, weight, 1e-5), **tolerance(dtype))


@pytest.mark.parametrize("weights", [(None, None), (None, torch.float32), (torch.float32, None)], ids=str)
@pytest.mark.parametrize(("rows", "width", "dtype"), SHAPES, ids=str)
def test_what_is_added_may_be_normed_itself(rows: int, width: int, dtype: torch.dtype, weights: tuple[torch.dtype | None, ...]) -> None:
    x, residual = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype)
    w1, w2 = (random(width, dtype=kind or dtype) for kind in weights)
    want = residual.double() + normed(x, w1, 1e-3)
    got = kernels.add_rms_norm(x, residual, w2, 1e-3, first_weight=w1)
    torch.testing.assert_close(residual.double(), want, **tolerance(dtype))
    torch.testing.assert_close(got.double(), normed(residual, w2, 1e-3), **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_may_be_float32(dtype: torch.dtype) -> None:
    x, residual, weight = random(5, 72, dtype=dtype), random(5, 72, dtype=dtype), random(72, dtype=torch.float32)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), normed(x, weight, 1e-5), **tolerance(dtype))
    got = kernels.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(got.double(), normed(residual, weight, 1e-5), **tolerance(dtype))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize(("rows", "width", "dtype"), SHAPES, ids=str)
def test_gate(rows: int, width: int, dtype: torch.dtype, activation: Activation) -> None:
    gate_up = random(rows, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    want = Ops().activate(gate.clone(), activation) * up
    torch.testing.assert_close(kernels.gate(gate_up, activation).double(), want, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotated", "block_size"), [(9, 3, 64, 64, 16), (7, 1, 80, 80, 3), (8, 1, 24, 20, 5)]
)
def test_rotate_and_write(num_heads: int, num_kv_heads: int, head_dim: int, rotated: int, block_size: int, dtype: torch.dtype) -> None:
    cache = poisoned_pool(dtype, num_blocks=7, num_layers=3, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim)
    before = cache.tensor.clone()
    num_tokens, layer, half = 6, 1, rotated // 2
    slots = torch.randperm(7 * block_size)[:num_tokens].to(DEVICE)
    slots[2] = -1  # padding
    positions = torch.randint(0, 50, (num_tokens,), device=DEVICE)
    angle = torch.randn(50, half, device=DEVICE)
    cos, sin = angle.cos(), angle.sin()
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)

    want = qkv.double().view(num_tokens, -1, head_dim).clone()
    turning = want[:, : num_heads + num_kv_heads]
    low, high = turning[..., :half].clone(), turning[..., half:rotated].clone()
    c, s = cos[positions].double()[:, None], sin[positions].double()[:, None]
    turning[..., :half], turning[..., half:rotated] = low * c - high * s, high * c + low * s

    kernels.rotate_and_write(qkv, positions, slots, cos, sin, cache, layer, num_heads)
    got = qkv.view(num_tokens, -1, head_dim)
    torch.testing.assert_close(got.double(), want, **tolerance(dtype))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            written = cache.tensor[slot // block_size, layer, :, :, slot % block_size]
            assert torch.equal(written.reshape(-1, head_dim), got[token, num_heads:])
            cache.tensor[slot // block_size, layer, :, :, slot % block_size] = torch.nan
    assert torch.equal(cache.tensor.isnan(), before.isnan())  # and nothing else was touched


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(("rotated", "weights"), [(32, "same"), (24, "float32"), (0, "same")])
def test_heads_are_normed_before_they_turn(rotated: int, weights: str, quantization: str) -> None:
    """The same as in two steps, the first of which rounds, but for the order of a mean's sum."""
    dtype, num_heads, num_kv_heads, head_dim = torch.float16, 18, 3, 32
    of_weights = dtype if weights == "same" else torch.float32
    norms = kernels.HeadNorms(random(head_dim, dtype=of_weights), random(head_dim, dtype=of_weights), 1e-3)
    sizes = {"num_blocks": 3, "num_layers": 2, "num_kv_heads": num_kv_heads, "block_size": 16, "head_dim": head_dim}
    cache, want = (poisoned_pool(dtype, **sizes, quantization=quantization) for _ in range(2))
    want.tensor.copy_(cache.tensor)
    slots = torch.tensor([5, 40, -1, 17], device=DEVICE)
    positions, angle = torch.tensor([3, 0, 9, 6], device=DEVICE), torch.randn(10, rotated // 2, device=DEVICE)
    qkv = random(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    apart = qkv.clone()
    query, key, _ = apart.view(4, -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), 1)
    query.copy_(normed(query, norms.queries, norms.eps))
    key.copy_(normed(key, norms.keys, norms.eps))
    where = (positions, slots, angle.cos(), angle.sin())
    right = kernels.rotate_and_write(apart, *where, want, 1, num_heads)
    got = kernels.rotate_and_write(qkv, *where, cache, 1, num_heads, norms=norms)
    assert relative(got, right) < relative_limit(dtype, 1)
    blocks = torch.arange(3, device=DEVICE)
    numbers, expected = (pool.tensor[:, 1] if quantization == "none" else pool.numbers(1, blocks) for pool in (cache, want))
    assert torch.equal(numbers.isnan(), expected.isnan())
    assert relative(numbers.nan_to_num(0.0), expected.nan_to_num(0.0)) < (0.05 if quantization == "int4" else 1e-2)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_no_rows_is_no_work() -> None:
    nothing = torch.zeros(0, 24, device=DEVICE)
    weight = torch.ones(24, device=DEVICE)
    assert kernels.rms_norm(nothing, weight, 1e-5).shape == (0, 24)
    assert kernels.add_rms_norm(nothing, nothing.clone(), weight, 1e-5).shape == (0, 24)
    assert kernels.silu_mul(nothing).shape == (0, 12)
