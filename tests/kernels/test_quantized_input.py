"""Inputs rounded by kernels are those of the oracle in torch, to the last bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pools import DEVICE
from quantized_weights import FP8_GROUP, FP8_STATIC, FP8_TOKEN, INT8_STATIC, INT8_TOKEN, input_quantizer

from twostep.checkpoint.linear_format import Activations
from twostep.model.kernels.triton_elementwise import add_rms_norm, add_rms_norm_beside
from twostep.model.kernels.triton_quantized_input import INPUT_GROUP, RoundedBeside, RoundedInput, round_input

HOWS = [FP8_TOKEN, FP8_STATIC, FP8_GROUP, INT8_TOKEN, INT8_STATIC]


def numbers(rounded: RoundedInput) -> torch.Tensor:
    """float32 [T, K]: what was rounded, again."""
    scales = rounded.scales[:, None]
    if rounded.scales.dim() == 2:
        scales = rounded.scales.T.repeat_interleave(INPUT_GROUP, 1)[:, : rounded.values.shape[1]]
    return rounded.values.float() * scales


@settings(max_examples=25)
@given(
    how=st.sampled_from(HOWS),
    tokens=st.integers(1, 4),
    width=st.integers(1, 300),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 100.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_rounded_as_the_oracle_does(how: Activations, tokens: int, width: int, size: float, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x = (torch.randn(tokens, width + 8, device=DEVICE) * size).to(dtype)[:, :width]
    x[0] = 0
    quantizer = input_quantizer(how)
    assert quantizer is not None
    assert torch.equal(numbers(round_input(x, quantizer)), quantizer(x.float()))


@pytest.mark.parametrize("how", [FP8_TOKEN, FP8_GROUP, INT8_STATIC], ids=str)
def test_a_norm_gives_both_what_it_norms_and_that_rounded(how: Activations) -> None:
    quantizer, dtype = input_quantizer(how), torch.float16
    assert quantizer is not None
    x, residual, weight = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((5, 200), (5, 200), (200,)))
    before = residual.clone()
    normed, rounded = add_rms_norm_beside(x, residual, weight, 1e-5, quantizer)
    assert torch.equal(normed, add_rms_norm(x, before, weight, 1e-5))
    assert torch.equal(residual, before)
    assert torch.equal(numbers(rounded), numbers(round_input(normed, quantizer)))


def test_what_was_rounded_ahead_is_taken_once_and_of_that_input_alone() -> None:
    quantizer = input_quantizer(FP8_TOKEN)
    assert quantizer is not None
    beside, (x, other) = RoundedBeside(quantizer, 2), torch.randn(2, 3, 32, device=DEVICE)
    assert (beside(x) is x, beside.wants(2), beside.wants(3)) == (True, False, True)
    ahead = round_input(x, quantizer)
    beside.leave(x, ahead)
    assert beside.take(x) is ahead
    assert beside.take(x) is not ahead
    beside.leave(x, ahead)
    assert torch.equal(numbers(beside.take(other)), numbers(round_input(other, quantizer)))
    assert beside.take(x) is not ahead


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_token_that_is_no_number_stays_none(how: Activations) -> None:
    x = torch.randn(3, 200, device=DEVICE)
    x[1, 130] = torch.nan
    quantizer = input_quantizer(how)
    assert quantizer is not None
    got = numbers(round_input(x, quantizer))
    assert got.isfinite().all(1).tolist() == [True, False, True]
