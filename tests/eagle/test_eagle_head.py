"""What a head proposes is what the published model would, greedily and drawn, at once and unrolled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle_cases import PlainHead, random_head, random_sequence

from twostep.model.eagle.head import EagleHead
from twostep.model.eagle.proposals import Choice, DraftedSequence, drawn, likeliest, propose
from twostep.model.eagle.unrolled import Unrolled
from twostep.sampling_params import SamplingParams

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


def choices() -> list[Choice]:
    drawing = [SamplingParams(max_tokens=9, temperature=t, top_p=p, seed=s) for t, p, s in ((1.0, 1.0, 5), (0.7, 0.9, -3))]
    return [likeliest, *(drawn(params, position=4) for params in drawing)]


@pytest.mark.parametrize("length", [1, 2, 13])
def test_proposals_are_the_published_model_s(head: EagleHead, length: int) -> None:
    states, token_ids = random_sequence(head, length)
    for ours, theirs in zip(choices(), choices(), strict=True):
        proposed = propose(head, states, token_ids, 4, ours)
        assert proposed == plain(head).propose(states, token_ids, 4, theirs)
        assert set(proposed) <= set(head.target_ids.tolist())


def test_a_choice_among_its_own_tokens_is_the_same(head: EagleHead) -> None:
    states, token_ids = random_sequence(head, 6)
    sequence = DraftedSequence(head)
    sequence.extend(states, token_ids[1:])
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 0.9, 0.05)):
        for seed in range(8):
            params = SamplingParams(max_tokens=9, temperature=1.5, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
            assert sequence.propose(4, drawn(params, 2), own=True) == sequence.propose(4, drawn(params, 2))
    assert sequence.propose(4, own=True) == sequence.propose(4)


def test_a_sequence_that_grows_is_one_that_was_there(head: EagleHead) -> None:
    states, token_ids = random_sequence(head, 12)
    sequence, done = DraftedSequence(head), 0
    for count in (5, 1, 1, 3, 2):
        sequence.extend(states[done : done + count], token_ids[done + 1 : done + 1 + count])
        done += count
        # What is drafted in between leaves nothing behind.
        assert sequence.propose(4) == propose(head, states[:done], token_ids[: done + 1], 4)
    assert len(sequence) == 12


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
            assert [int(step[row, end - 1]) for step in proposed] == propose(head, of_one[:end], token_ids[: end + 1], 4)


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


def test_noise_is_that_of_the_answer() -> None:
    """Of seed and position: another of either draws something else."""
    head = random_head()
    states, token_ids = random_sequence(head, 6)
    params = [SamplingParams(max_tokens=9, temperature=3.0, seed=seed) for seed in range(20)]
    at = {position: [propose(head, states, token_ids, 3, drawn(each, position)) for each in params] for position in (0, 7)}
    assert len({tuple(each) for each in at[0]}) > 10
    assert at[0] != at[7]


def test_behind_the_context_nothing_breaks() -> None:
    head = random_head(max_model_len=8)
    states, token_ids = random_sequence(head, 8)
    assert len(propose(head, states, token_ids, 5)) == 5
