"""The token budget of steps that mix prompts and tokens: where it was left to the machine, at the knee of what was measured."""

from __future__ import annotations

import dataclasses

import pytest

from twostep.step_curve import StepCurve
from twostep.worker.config import WorkerConfig, config_in_role
from twostep.worker.model import at_knee, settle

# Each token beyond the 16th costs the same; and a device that is not busy with 512 yet.
SLOW, FAST = StepCurve(fixed_s=1e-6, per_row_s=1e-3), StepCurve(fixed_s=1.0, per_row_s=1e-6)


def settled(role: str, step_tokens: int = 0, max_num_seqs: int = 0) -> WorkerConfig:
    return settle(WorkerConfig(role=role, runner="fake", max_num_batched_tokens=step_tokens, max_num_seqs=max_num_seqs))


def test_a_decode_worker_s_budget_is_at_the_knee_and_has_room_for_its_sequences() -> None:
    assert settled("decode").max_num_batched_tokens == 512
    assert at_knee(settled("decode"), SLOW).max_num_batched_tokens == 2 * 64
    assert at_knee(settled("decode", max_num_seqs=8), SLOW).max_num_batched_tokens == 16
    assert at_knee(settled("decode", max_num_seqs=1000), SLOW).max_num_batched_tokens == 512
    assert at_knee(settled("decode"), FAST).max_num_batched_tokens == 512


def test_a_prefill_worker_s_is_as_it_was_and_changes_with_its_role() -> None:
    prefill = at_knee(settled("prefill"), SLOW)
    assert prefill.max_num_batched_tokens == 512
    decode = config_in_role(prefill, "decode")
    assert decode.max_num_batched_tokens == 128
    assert config_in_role(decode, "prefill").max_num_batched_tokens == 512
    assert config_in_role(at_knee(settled("decode"), SLOW), "prefill").max_num_batched_tokens == 512


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_was_told_or_not_measured_stays(role: str) -> None:
    assert at_knee(settled(role), None) == settled(role)
    told = settled(role, step_tokens=300)
    assert at_knee(told, SLOW) == told
    assert dataclasses.replace(at_knee(settled(role), FAST), other_step_tokens=0) == settled(role)
