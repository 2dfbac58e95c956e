"""The random worlds, where the decode engine begins before it is known whether what was handed over is the right KV: its tokens are
withheld until that is confirmed. Where it was not, the sequence is cancelled, and no other one has ever seen its KV."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_helpers import assert_idle
from test_engine_random import Attempt, World

from twostep.engine.engine import Engine
from twostep.engine.types import StepOutput, TokenOutput


class AheadWorld(World):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        # Tokens of those not confirmed yet, and whether their KV is the right one.
        self.withheld: dict[str, list[TokenOutput]] = {}
        self.right: dict[str, bool] = {}
        self.confirmed: list[TokenOutput] = []
        self.num_confirmed = self.num_undone = self.num_ended_before = 0
        self.preempted: set[str] = set()

    def hand_over(self, attempt: Attempt, last: bool) -> None:
        if last:
            super().hand_over(attempt, last)
            return
        seq_id, reservation, rng = attempt.request.seq_id, attempt.reservation, self.rng
        assert reservation is not None
        skip = reservation.num_cached_tokens // self.block_size
        source = self.prefill.block_ids(seq_id)[skip:]
        data = np.empty((len(source), self.prefill.runner.kv_shape.block_bytes), np.uint8)
        self.prefill.runner.read_blocks(source, data)
        right = rng.random() < 0.7 or not len(source)
        if not right:
            # Blocks that were given to another prompt while they were read.
            data.view(np.int32)[:] += 1
        self.decode.runner.write_blocks(reservation.block_ids[skip:], data)
        self.decode.commit(seq_id, attempt.got, confirmed=False)
        self.withheld[seq_id], self.right[seq_id] = [], right
        assert self.prefill.release(seq_id)

    def resolve(self, seq_id: str) -> None:
        withheld, attempt = self.withheld.pop(seq_id), self.attempts[seq_id]
        ended = bool(withheld) and withheld[-1].finish_reason is not None
        self.num_ended_before += ended
        if self.right[seq_id]:
            self.decode.confirm(seq_id)
            self.confirmed += withheld
            self.num_confirmed += 1
        else:
            assert self.decode.cancel(seq_id) != ended
            attempt.over = "cancelled"
            self.num_undone += 1

    def cancel(self, attempt: Attempt) -> None:
        seq_id = attempt.request.seq_id
        if any(token.seq_id == seq_id for token in self.confirmed):
            return  # it is about to be told
        if (withheld := self.withheld.pop(seq_id, None)) is None:
            super().cancel(attempt)
            return
        attempt.over = "cancelled"
        assert self.decode.cancel(seq_id) != (bool(withheld) and withheld[-1].finish_reason is not None)

    def chaos(self) -> None:
        super().chaos()
        for seq_id in list(self.withheld):
            if self.rng.random() < 0.05:
                self.resolve(seq_id)

    def step(self, engine: Engine) -> bool:
        if self.runners[0].during is None:  # the end
            for seq_id in list(self.withheld):
                self.resolve(seq_id)
        return super().step(engine)

    def told(self, output: StepOutput) -> StepOutput:
        """Of a step of the decode engine."""
        tokens: list[TokenOutput] = []
        for token in output.tokens:
            self.withheld.get(token.seq_id, tokens).append(token)
        self.preempted |= self.withheld.keys() & self.decode._scheduler._preempted.keys()
        failed = {failure.seq_id for failure in output.failures}
        for seq_id in failed:
            self.withheld.pop(seq_id, None)
        # Who was confirmed during this very step, and failed in it, is told of the failure alone.
        before = [token for token in self.confirmed if token.seq_id not in failed]
        self.confirmed = []
        return replace(output, tokens=[*before, *tokens])


def make_world(seed: int, monkeypatch: pytest.MonkeyPatch) -> AheadWorld:
    world = AheadWorld(seed)
    step = world.decode.step
    monkeypatch.setattr(world.decode, "step", lambda: world.told(step()))
    return world


@pytest.mark.parametrize("seed", range(300, 316))
def test_nobody_sees_what_is_not_confirmed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(seed, monkeypatch)
    world.run(250)
    assert not [a.request.seq_id for a in world.attempts.values() if not a.over], "everybody is answered"
    for attempt in world.attempts.values():
        if attempt.over == "finished":
            assert attempt.got == attempt.answer
    assert_idle(world.prefill)
    assert_idle(world.decode)


def test_the_worlds_visit_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    confirmed = undone = ended = preempted = reused = 0
    for seed in range(400, 412):
        world = make_world(seed, monkeypatch)
        world.run(250)
        confirmed += world.num_confirmed
        undone += world.num_undone
        ended += world.num_ended_before
        preempted += len(world.preempted)
        reused += world.decode.stats().num_hit_tokens
    assert min(confirmed, undone, ended, reused) >= 10, (confirmed, undone, ended, reused)
    assert preempted
