"""A head proposes what the published model would, unrolled over all positions at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle_cases import PlainHead, random_head, random_sequence

from twostep.model.eagle.head import EagleHead
from twostep.model.eagle.unrolled import Unrolled

SHAPES: dict[str, dict[str, Any]] = {
    "usual": {},
    "all tokens": {"draft_vocab_size": 61},
    "norm before residual": {"norm_before_residual": True},
    "another width": {"target_hidden_size": 17, "has_embedding": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "heads alike": {"num_kv_heads": 6},
}


@pytest.fixture(params=list(SHAPES))
def head(request: pytest.FixtureRequest) -> EagleHead:
    return random_head(**SHAPES[request.param])


def plain(head: EagleHead) -> PlainHead:
    return PlainHead(head.state_dict(), head.embed(torch.arange(head.config.vocab_size)), head.config)


def test_unrolled_proposals_are_those_of_each_position(head: EagleHead) -> None:
    """Two sequences of different lengths beside each other, the shorter one padded."""
    cases = [random_sequence(head, 9, seed=1), random_sequence(head, 5, seed=2)]
    states, given = torch.zeros(2, 9, cases[0][0].shape[1]), torch.zeros(2, 9, dtype=torch.int64)
    for row, (of_one, token_ids) in enumerate(cases):
        states[row, : len(of_one)], given[row, : len(of_one)] = of_one, torch.tensor(token_ids[1:])
    unrolled, proposed = Unrolled(head, states), []
    for _ in range(4):
        given = head.target_ids[head.logits(unrolled.step(given)).argmax(-1)]
        proposed.append(given)
    for row, (of_one, token_ids) in enumerate(cases):
        for end in range(1, len(of_one) + 1):
            assert [int(step[row, end - 1]) for step in proposed] == plain(head).propose(of_one[:end], token_ids[: end + 1], 4)


@pytest.mark.parametrize("first", [1, 5, 8])
def test_rows_that_are_only_seen_change_nothing(head: EagleHead, first: int) -> None:
    states, token_ids = random_sequence(head, 9)
    whole, later = Unrolled(head, states[None]), Unrolled(head, states[None], first)
    given = torch.tensor([token_ids[1:]])
    for number in range(3):
        want = whole.step(given)
        got = later.step(given[:, first:] if number else given)
        torch.testing.assert_close(got, want[:, first:], rtol=1e-4, atol=1e-4)
        given = given.roll(-1)
