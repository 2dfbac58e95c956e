"""Which kernel multiplies, and that a layer of few tokens comes out right whichever it is; through Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pools import DEVICE, tolerance

from twostep.model.kernels.triton_linear import LinearTile, RowTile, StreamedLinear, can_stream, choose_tile
from twostep.model.kernels.triton_ops import TritonOps

SHAPES = st.fixed_dictionaries({"num_out": st.integers(1, 200_000), "width": st.integers(1, 4000).map(lambda n: 8 * n)})


@given(
    tokens=st.integers(1, 300),
    shape=SHAPES,
    gated=st.booleans(),
    in_parts=st.booleans(),
    num_sms=st.integers(1, 200),
    shared=st.integers(0, 300_000),
)
def test_a_layout_keeps_to_what_is_asked(
    tokens: int, shape: dict[str, int], gated: bool, in_parts: bool, num_sms: int, shared: int
) -> None:
    tile = choose_tile(tokens, **shape, gated=gated, in_parts=in_parts and not gated, num_sms=num_sms, shared_bytes=shared)
    if isinstance(tile, RowTile):
        assert tokens <= 4
        # A thread's share of the weight fits its registers.
        assert tile.rows * shape["width"] * (1 + gated) <= 256 * 32 * tile.num_warps
    elif isinstance(tile, LinearTile):
        assert tile.parts == 1 or (in_parts and not gated)
        # One program more than that would wait for a place.
        assert tile.parts == 1 or tile.parts * shape["num_out"] <= 128 * num_sms
        # What is on its way fits a multiprocessor's shared memory.
        padded = max(16, 1 << (tokens - 1).bit_length())
        assert (tile.cols + padded) * tile.depth * 2 * tile.num_stages < shared


@settings(max_examples=12)
@given(
    tokens=st.sampled_from([1, 2, 3, 15, 16, 17, 33, 64, 65, 129]),
    num_out=st.integers(1, 150),
    width=st.integers(1, 20).map(lambda n: 8 * n),
    gated=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_a_layer_is_right(tokens: int, num_out: int, width: int, gated: bool, bias: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    weight = (torch.randn(num_out * (1 + gated), width, device=DEVICE) * width**-0.5).to(dtype)
    b = torch.randn(len(weight), device=DEVICE).to(dtype) if bias else None
    x = torch.randn(tokens, width, device=DEVICE).to(dtype)
    assert can_stream(weight)
    want = F.linear(x.double(), weight.double(), None if b is None else b.double())
    if gated:
        gate, up = want.chunk(2, -1)
        want = F.silu(gate) * up
    layer = StreamedLinear(weight, b, gated=gated)
    got = layer(x)
    assert got.shape == want.shape
    # What cuBLAS multiplies is rounded before the gate as well.
    allowed = {name: 2 * value for name, value in tolerance(dtype).items()}
    torch.testing.assert_close(got.double(), want, **allowed)
    parts = layer.parts(x)
    torch.testing.assert_close((parts.double().sum(0) if parts.dim() == 3 else parts.double()), want, **allowed)
    assert torch.equal(parts, layer.parts(x))


@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_that_fails_its_trial_is_cublas(gated: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr("twostep.model.kernels.triton_linear._TRIAL_TOKENS", (1, 3))
    x = torch.randn(3, 64, device=DEVICE, dtype=torch.bfloat16)

    def prepared(num_out: int) -> tuple[object, torch.Tensor]:
        ops = TritonOps(DEVICE)
        ops.tries = True
        weight = torch.randn(num_out, 64, device=DEVICE, dtype=torch.bfloat16)
        layer = (ops.prepare_gated if gated else ops.prepare_linear)(weight, None)
        want = F.linear(x.float(), weight.float())
        if gated:
            gate, up = want.chunk(2, -1)
            want = F.silu(gate) * up
        assert float((layer(x).float() - want).norm() / want.norm()) < 2e-2
        return layer, weight

    right, _ = prepared(48)
    assert isinstance(right, StreamedLinear)
    assert right.trial() == ""
    module = "twostep.model.kernels.triton_linear"
    real = importlib.import_module(module).linear_tiles
    # Sums are off by a hundredth of what they should be, or the compiler gives up.
    for broken, said in ((lambda *a, **k: real(*a, **k) * 1.05, "differs"), (_raise, "no room")):
        monkeypatch.setattr(f"{module}.linear_tiles", broken)
        caplog.clear()
        fallen_back, _ = prepared(48)
        assert not isinstance(fallen_back, StreamedLinear)
        assert said in caplog.text
        assert "cuBLAS multiplies instead" in caplog.text


def _raise(*args: object, **kwargs: object) -> torch.Tensor:
    raise RuntimeError("no room in shared memory")


def test_what_does_not_stream_is_multiplied_all_the_same() -> None:
    assert not can_stream(torch.zeros(8, 8))
    assert not can_stream(torch.zeros(8, 12, dtype=torch.bfloat16))
    torch.manual_seed(0)
    ops = TritonOps(DEVICE)
    weight, x = torch.randn(6, 12, device=DEVICE), torch.randn(3, 12, device=DEVICE)
    torch.testing.assert_close(ops.prepare_linear(weight, None)(x), x @ weight.T)
    gate, up = (x @ weight.T).chunk(2, -1)
    torch.testing.assert_close(ops.prepare_gated(weight, None)(x), F.silu(gate) * up)


@pytest.mark.parametrize("tokens", [1, 5])
def test_two_layers_and_the_norm_between(tokens: int) -> None:
    """Parts of the first product are added to the residual inside the norm."""
    torch.manual_seed(0)
    ops = TritonOps(DEVICE)
    dtype = torch.bfloat16
    first, then = (torch.randn(*shape, device=DEVICE).mul(0.1).to(dtype) for shape in ((64, 192), (40, 64)))
    x, residual = torch.randn(tokens, 192, device=DEVICE).to(dtype), torch.randn(tokens, 64, device=DEVICE).to(dtype)
    weight = torch.randn(64, device=DEVICE).to(dtype)
    total = residual.double() + x.double() @ first.double().T
    normed = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = ops.join_rms_norm(ops.prepare_linear(first, None), x, residual, weight, 1e-5, ops.prepare_linear(then, None))
    torch.testing.assert_close(residual.double(), total, **tolerance(dtype))
    torch.testing.assert_close(got.double(), normed @ then.double().T, rtol=2e-2, atol=2e-2)
