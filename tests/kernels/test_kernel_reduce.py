"""The sum over ranks fused with residual and norm, several ranks in one process: all push, then all pull."""

from __future__ import annotations

import pytest
import torch
from kernel_pools import DEVICE, tolerance

from twostep.model.kernels.triton_reduce import RowExchange, inbox_bytes


def exchanges(size: int, width: int, dtype: torch.dtype, max_rows: int) -> tuple[list[RowExchange], list[torch.Tensor]]:
    num_bytes = inbox_bytes(width, dtype.itemsize, size=size, max_rows=max_rows)
    inboxes = [torch.zeros(num_bytes // 8, dtype=torch.int64, device=DEVICE) for _ in range(size)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=DEVICE)
    return [RowExchange(addresses, rank, max_rows=max_rows) for rank in range(size)], inboxes


def normed(wide: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(
    ("size", "width", "dtype"), [(2, 24, torch.float32), (2, 70, torch.float16), (4, 134, torch.bfloat16), (8, 64, torch.bfloat16)], ids=str
)
def test_all_ranks_have_the_sum_added_and_normed_with_the_same_bits(size: int, width: int, dtype: torch.dtype) -> None:
    ranks, _ = exchanges(size, width, dtype, max_rows=5)
    weight = torch.randn(width, device=DEVICE).to(dtype)
    # Odd numbers of tokens one after the other: each token's exchanges are counted apart.
    for rows in (2, 3, 1):
        terms = [torch.randn(rows, width, device=DEVICE).to(dtype) for _ in ranks]
        before = torch.randn(rows, width, device=DEVICE).to(dtype)
        residuals = [before.clone() for _ in ranks]
        for rank, exchange in enumerate(ranks):
            exchange.add_rms_norm(terms[rank], residuals[rank], weight, 1e-3, pull=False)
        results = [exchange.add_rms_norm(terms[rank], residuals[rank], weight, 1e-3, push=False) for rank, exchange in enumerate(ranks)]
        want = before.double() + sum(term.double() for term in terms)
        torch.testing.assert_close(residuals[0].double(), want, **tolerance(dtype))
        torch.testing.assert_close(results[0].double(), normed(residuals[0].double(), weight, 1e-3), **tolerance(dtype))
        for rank in range(1, size):
            assert torch.equal(residuals[rank], residuals[0])
            assert torch.equal(results[rank], results[0])


def test_the_sum_may_be_normed_before_it_is_added() -> None:
    ranks, _ = exchanges(2, 70, torch.bfloat16, max_rows=3)
    w1, w2 = torch.randn(70, device=DEVICE), torch.randn(70, device=DEVICE)
    terms = [torch.randn(3, 70, device=DEVICE).bfloat16() for _ in ranks]
    before = torch.randn(3, 70, device=DEVICE).bfloat16()
    for rank, exchange in enumerate(ranks):
        exchange.add_rms_norm(terms[rank], before.clone(), w2, 1e-3, first_weight=w1, pull=False)
    residual = before.clone()
    got = ranks[1].add_rms_norm(terms[1], residual, w2, 1e-3, first_weight=w1, push=False)
    want = before.double() + normed(terms[0].double() + terms[1].double(), w1, 1e-3)
    torch.testing.assert_close(residual.double(), want, **tolerance(torch.bfloat16))
    torch.testing.assert_close(got.double(), normed(residual.double(), w2, 1e-3), **tolerance(torch.bfloat16))


def test_parts_of_a_term_are_added_before_they_are_exchanged() -> None:
    ranks, _ = exchanges(2, 24, torch.float32, max_rows=4)
    weight = torch.ones(24, device=DEVICE)
    parts = [torch.randn(3, 4, 24, device=DEVICE) for _ in ranks]
    residuals = [torch.zeros(4, 24, device=DEVICE) for _ in ranks]
    for rank, exchange in enumerate(ranks):
        exchange.add_rms_norm(parts[rank], residuals[rank], weight, 1e-6, pull=False)
    ranks[1].add_rms_norm(parts[1], residuals[1], weight, 1e-6, push=False)
    torch.testing.assert_close(residuals[1].double(), sum(part.double().sum(0) for part in parts), **tolerance(torch.float32))


def test_numbers_of_exchanges_wrap_around_without_meeting_an_unused_inbox() -> None:
    ranks, inboxes = exchanges(2, 8, torch.float32, max_rows=1)
    weight = torch.ones(8, device=DEVICE)
    for exchange in ranks:
        exchange._numbers.fill_(-2)
    for _ in range(3):
        residuals = [torch.zeros(1, 8, device=DEVICE) for _ in ranks]
        terms = [torch.randn(1, 8, device=DEVICE) for _ in ranks]
        for rank, exchange in enumerate(ranks):
            exchange.add_rms_norm(terms[rank], residuals[rank], weight, 1e-6, pull=False)
        for rank, exchange in enumerate(ranks):
            exchange.add_rms_norm(terms[rank], residuals[rank], weight, 1e-6, push=False)
        torch.testing.assert_close(residuals[0], terms[0] + terms[1])
    numbers = {int(number) for number in (inboxes[0] >> 32).unique()} - {0}
    assert numbers == {2, 3}, "0 was skipped, and both halves took turns"
