"""The CPU's operations against their plain definitions, and the model in bfloat16."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from forward_helpers import make_batch, reference_logits, save_model, scattered_sequences

from twostep.model.kernels import ops
from twostep.model.kernels.ops import Ops
from twostep.model.runner.model_runner import ModelRunner

OPS = Ops()


@pytest.mark.parametrize("num_rows", [1, 7, 130])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear(num_rows: int, bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight, x = torch.randn(70, 33, generator=generator).to(dtype), torch.randn(num_rows, 33, generator=generator).to(dtype)
    b = torch.randn(70, generator=generator).to(dtype) if bias else None
    want = x.double() @ weight.double().T + (0 if b is None else b.double())
    got = OPS.prepare_linear(weight, b)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), want, rtol=0.01 if dtype != torch.float32 else 1e-5, atol=0.05 if dtype != torch.float32 else 1e-5
    )


def test_linear_without_packing_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    ops._packing_works.cache_clear()
    try:
        weight, x = torch.randn(5, 4).bfloat16(), torch.randn(3, 4).bfloat16()
        assert torch.equal(OPS.prepare_linear(weight, None)(x), torch.nn.functional.linear(x, weight))
        assert not ops._packing_works(torch.bfloat16)
    finally:
        ops._packing_works.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_activation(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 24).to(dtype), torch.randn(5, 24).to(dtype), torch.randn(24).to(dtype)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    wide = (x + residual).double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    summed = residual.clone()
    torch.testing.assert_close(OPS.add_rms_norm(x, summed, weight, 1e-3).double(), want, **tolerance)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(OPS.rms_norm(summed, weight, 1e-3).double(), want, **tolerance)
    gate, up = x[:, :12].double(), x[:, 12:].double()
    torch.testing.assert_close(OPS.silu_mul(x.clone()).double(), gate * gate.sigmoid() * up, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_may_be_normed_itself(dtype: torch.dtype) -> None:
    x, residual, w1, w2 = torch.randn(5, 24).to(dtype), torch.randn(5, 24).to(dtype), torch.randn(24), torch.randn(24).to(dtype)

    def normed(wide: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()

    tolerance = {"rtol": 0.03, "atol": 0.03} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    want = residual.double() + normed(x.double(), w1)
    got = OPS.add_normed(x, residual, w1, w2, 1e-3)
    torch.testing.assert_close(residual.double(), want, **tolerance)
    torch.testing.assert_close(got.double(), normed(want, w2), **tolerance)


@pytest.mark.parametrize("family", ["llama-tied", "llama-biases", "qwen3"])
def test_bfloat16_stays_as_near_float32_as_it_does_in_transformers(tmp_path: Path, family: str) -> None:
    oracle = save_model(family, tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=40, block_size=8, dtype="bfloat16")
    (sequence,) = scattered_sequences([150], 8, 40, random.Random(5))
    first = runner.forward(make_batch([(sequence, 149)], 8))
    sequence.num_computed = 149
    got = torch.cat((first, runner.forward(make_batch([(sequence, 1)], 8)))).float()
    want = reference_logits(oracle, sequence.tokens)
    theirs = reference_logits(copy.deepcopy(oracle).bfloat16(), sequence.tokens)
    ours, hugging_face = (float((logits - want).square().mean().sqrt() / want.std()) for logits in (got, theirs))
    assert ours < 0.05
    assert ours < 1.5 * hugging_face, "what bfloat16 costs there, it costs here, give or take the order of rounding"


def test_a_batch_without_sample_rows_only_writes(tmp_path: Path) -> None:
    oracle = save_model("llama", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=40, block_size=8)
    (sequence,) = scattered_sequences([300], 8, 40, random.Random(6))
    batch = make_batch([(sequence, 299)], 8)  # three tiles, the last one short
    whole = type(batch)(
        **({name: getattr(batch, name) for name in batch.__slots__} | {"sample_rows": batch.sample_rows[:0], "sampling": ()})
    )
    assert runner.forward(whole).shape == (0, runner.vocab_size)
    assert runner.run(whole).token_ids == ()
    sequence.num_computed = 299
    got = runner.forward(make_batch([(sequence, 1)], 8))
    torch.testing.assert_close(got, reference_logits(oracle, sequence.tokens)[-1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 3, 700])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_rms_norm(dtype: torch.dtype, rows: int, wide_weight: bool) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, 2, 48) * 3).to(dtype), torch.randn(48).to(torch.float32 if wide_weight else dtype)
    x[:1] *= 1e-3  # where eps counts
    got = Ops().rms_norm(x[:, 1], weight, 1e-4)
    wide = x[:, 1].double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-4).sqrt() * weight.double()
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps, atol=1e-6)
