"""Quantized blocks written by kernels equal, byte for byte, those of the CPU's code."""

from __future__ import annotations

import pytest
import torch
from kernel_pools import DEVICE

from twostep.engine.batch import KvShape
from twostep.model.kernels import triton_elementwise as kernels
from twostep.model.kernels.triton_quantized_kv import write_values
from twostep.model.step.kv_cache import KvCache

LAYER = 1


def pool(
    quantization: str,
    dtype: torch.dtype,
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    device: str = DEVICE,
    scales: torch.Tensor | None = None,
) -> KvCache:
    shape = KvShape(
        num_blocks=7,
        block_size=block_size,
        num_layers=3,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        quantization=quantization,
    )
    cache = KvCache(shape, device, scales=scales)
    cache.tensor.copy_((torch.arange(cache.tensor.numel()) % 113).view(cache.tensor.shape))
    return cache


SHAPES = [
    (9, 3, 64, 64, 16, torch.bfloat16),
    (7, 1, 80, 80, 4, torch.float16),
    (3, 3, 96, 24, 32, torch.float32),
    (4, 2, 12, 0, 8, torch.float32),
]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotated", "block_size", "dtype", "quantization"),
    [
        *((*shape, format) for shape in SHAPES for format in ("fp8", "int8")),
        (*SHAPES[0], "int4"),
        pytest.param(*SHAPES[2], "int4", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_new_vectors_are_quantized_as_on_the_cpu(
    num_heads: int, num_kv_heads: int, head_dim: int, rotated: int, block_size: int, dtype: torch.dtype, quantization: str
) -> None:
    cache = pool(quantization, dtype, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    num_tokens, half = 6, rotated // 2
    slots = torch.randperm(7 * block_size)[:num_tokens]
    slots[2] = -1  # padding
    positions = torch.randint(0, 50, (num_tokens,), device=DEVICE)
    angle = torch.randn(50, half, device=DEVICE)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    qkv *= torch.exp(3 * torch.randn(num_tokens, num_heads + 2 * num_kv_heads, 1))
    qkv[0, num_heads] = 0.0
    qkv[1, -1, 3] = torch.inf
    qkv[1, -2, 5] = torch.nan
    qkv = qkv.view(num_tokens, -1).to(DEVICE).to(dtype)

    got = kernels.rotate_and_write(qkv, positions, slots.to(DEVICE), angle.cos(), angle.sin(), cache, LAYER, num_heads)
    want = pool(quantization, dtype, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, device="cpu")
    vectors = got.view(num_tokens, -1, head_dim)[:, num_heads:].cpu()
    kept = slots >= 0
    assert want.quantized is not None
    want.quantized.write(LAYER, slots[kept] // block_size, slots[kept] % block_size, vectors[kept])
    if not torch.equal(cache.tensor.cpu(), want.tensor):
        # Two scales of fp8 can be as good as each other, but for the order in which the errors are summed.
        assert quantization == "fp8"
        block, slot = slots[kept] // block_size, slots[kept] % block_size
        found, right = (pool.numbers(LAYER, torch.arange(7, device=pool.tensor.device)).cpu() for pool in (cache, want))
        ours, theirs = (numbers[block, :, :, slot].flatten(1, 2) for numbers in (found, right))
        errors = [(numbers - vectors[kept].float()).square().sum(-1) for numbers in (ours, theirs)]
        torch.testing.assert_close(*errors, rtol=1e-4, atol=0.0, equal_nan=True)
        assert int((ours != theirs).any(-1).sum() - theirs.isnan().any(-1).sum()) <= 2
        found[block, :, :, slot] = right[block, :, :, slot]
        assert torch.equal(found.nan_to_num(7.0), right.nan_to_num(7.0))
        assert torch.equal(cache.tensor[:, [0, 2]].cpu(), want.tensor[:, [0, 2]])


@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (96, 24)])
def test_scales_of_a_checkpoint_stand_at_every_vector(head_dim: int, rotated: int) -> None:
    scales = torch.rand(3, 2, 2) * 0.01 + 1e-3
    sizes = {"num_kv_heads": 2, "head_dim": head_dim, "block_size": 16, "scales": scales}
    cache, want = (pool("fp8", torch.float32, **sizes, device=device) for device in (DEVICE, "cpu"))
    num_tokens, num_heads = 5, 4
    slots, positions = torch.randperm(7 * 16)[:num_tokens], torch.randint(0, 50, (num_tokens,), device=DEVICE)
    angle = torch.randn(50, rotated // 2, device=DEVICE)
    qkv = torch.randn(num_tokens, num_heads + 4, head_dim)
    qkv[1, -1, 3] = torch.inf
    qkv[2, -4, 0] = 1e4
    got = kernels.rotate_and_write(
        qkv.view(num_tokens, -1).to(DEVICE), positions, slots.to(DEVICE), angle.cos(), angle.sin(), cache, LAYER, num_heads
    )
    assert want.quantized is not None
    want.quantized.write(LAYER, slots // 16, slots % 16, got.view(num_tokens, -1, head_dim)[:, num_heads:].cpu())
    assert torch.equal(cache.tensor.cpu(), want.tensor)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(2, 64, 16), (5, 24, 4)])
def test_values_of_many_rows_are_written_by_words_where_they_can_be(
    num_kv_heads: int, head_dim: int, block_size: int, quantization: str
) -> None:
    """Runs of slots that begin and end anywhere, padding, a run that goes on in another block, and single slots."""
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    scales = None if quantization == "int8" else torch.rand(3, 2, num_kv_heads) * 0.01 + 1e-3
    cache, want = (pool(quantization, torch.float32, **sizes, device=device, scales=scales) for device in (DEVICE, "cpu"))
    slots = torch.tensor([7, 0, 1, 2, 3, 4, 5, 6, -1, -1, 13, 14, 15, 8, 9, 10, 11, 20, 24, 25, 27, 16, 17, 18, 19, 26])
    qkv = torch.randn(len(slots), 3 + 2 * num_kv_heads, head_dim)
    qkv[2, -1, 0] = torch.nan
    write_values(qkv.view(len(slots), -1).to(DEVICE), slots.to(DEVICE), cache, LAYER, 3)
    kept = slots >= 0
    assert want.quantized is not None
    keys = want.tensor.clone()
    want.quantized.write(LAYER, slots[kept] // block_size, slots[kept] % block_size, qkv[kept, 3:])
    # Keys are not its business.
    size = num_kv_heads * block_size * head_dim
    want.tensor[:, :, :size] = keys[:, :, :size]
    want.tensor[:, :, 2 * size :].unflatten(-1, (-1, 2, 2))[..., 0, :] = keys[:, :, 2 * size :].unflatten(-1, (-1, 2, 2))[..., 0, :]
    assert torch.equal(cache.tensor.cpu(), want.tensor)


def test_a_long_step_writes_the_same_as_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_kv_heads": 2, "head_dim": 24, "block_size": 16}
    apart, together = pool("int8", torch.bfloat16, **sizes), pool("int8", torch.bfloat16, **sizes)
    qkv, slots = torch.randn(21, 7 * 24, device=DEVICE).bfloat16(), torch.arange(3, 24, device=DEVICE)
    angle = torch.randn(30, 12, device=DEVICE)
    for cache, limit in ((together, 22), (apart, 21)):
        monkeypatch.setattr(kernels, "_VALUES_APART", limit)
        kernels.rotate_and_write(qkv.clone(), slots, slots, angle.cos(), angle.sin(), cache, LAYER, 3)
    assert torch.equal(apart.tensor, together.tensor)
