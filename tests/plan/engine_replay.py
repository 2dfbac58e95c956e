"""The real engines with their fake runner, on the simulation's clock: a step takes what a StepCurve says of the work that it really had.

Nothing sleeps and no thread runs, so that every time is exact and can be compared with the simulation's, token by token.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from twostep.engine.config import EngineConfig
from twostep.engine.engine import Engine
from twostep.engine.fake import FakeRunner
from twostep.engine.types import EngineRequest, StepOutput
from twostep.errors import ResourceExhausted
from twostep.lab.simulator.cluster import SimulatedDeployment
from twostep.lab.simulator.cluster import SimulatedRequest as Request
from twostep.lab.simulator.engine import EngineSpec
from twostep.sampling_params import SamplingParams


def real_engine(spec: EngineSpec, clock: Callable[[], float]) -> Engine:
    runner = FakeRunner(num_blocks=spec.num_blocks, block_size=spec.block_size, num_state_blocks=spec.num_state_blocks)
    config = EngineConfig(
        max_num_batched_tokens=spec.step_tokens,
        max_num_seqs=spec.max_num_seqs,
        max_waiting=spec.max_waiting,
        enable_prefix_caching=False,
        look_ahead=spec.look_ahead,
        hash_unit=spec.block_size,
        max_step_s=spec.max_step_s,
        min_chunk_tokens=spec.min_chunk,
    )
    engine = Engine(runner, config, clock=clock)
    engine.set_curve(spec.prompt_curve)
    return engine


class Replay:
    """Request i goes to the prefill worker i modulo their number, and likewise to a decode worker, which computes the prompts of those
    `alone` by itself."""

    def __init__(self, deployment: SimulatedDeployment, alone: Collection[int] = ()) -> None:
        self._deployment, self._alone = deployment, alone
        self._now = 0.0
        self._prefill = [_Worker(deployment.prefill, self._clock) for _ in range(deployment.num_prefill)] if deployment.prefill else []
        self._decode = [_Worker(deployment.decode, self._clock) for _ in range(deployment.num_decode)]
        self._link_free_at = [0.0] * deployment.num_decode
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._num_events = 0
        self._times: list[list[float]] = []
        self._waiting: deque[int] = deque()

    def run(self, requests: Sequence[Request]) -> list[list[float]]:
        """The times of each request's tokens."""
        self._requests = requests
        self._times = [[] for _ in requests]
        for i, request in enumerate(requests):
            self._at(request.arrival_s, self._arrive, i)
        while self._events:
            self._now, _, act, argument = heapq.heappop(self._events)
            act(self._now, argument)
        for worker in (*self._prefill, *self._decode):
            worker.engine.check_integrity()
            assert worker.engine.stats().num_available_blocks == worker.engine.stats().num_blocks
        return self._times

    @property
    def num_preemptions(self) -> int:
        return sum(worker.engine.stats().num_preemptions for worker in self._decode)

    def _clock(self) -> float:
        return self._now

    def _at(self, time: float, act: Callable[[float, Any], None], argument: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, act, argument))

    def _arrive(self, now: float, i: int) -> None:
        if self._waiting or not self._place(now, i):
            self._waiting.append(i)

    def _place(self, now: float, i: int) -> bool:
        decode = self._decode[i % len(self._decode)]
        request = _request(i, self._requests[i], decode.spec)
        if not self._prefill or i in self._alone:
            decode.engine.submit(request)
            self._wake(now, decode)
            return True
        try:
            decode.engine.reserve(request)
        except ResourceExhausted:
            return False
        prefill = self._prefill[i % len(self._prefill)]
        prefill.engine.submit(request, hold=True)
        self._wake(now, prefill)
        return True

    def _wake(self, now: float, worker: _Worker) -> None:
        if worker.stepping:
            return
        output = worker.engine.step()
        if not output.num_prefill_tokens + output.num_decode_tokens:
            return
        worker.stepping = True
        self._at(now + worker.spec.curve.step_s(output.workload), self._stepped, (worker, output))

    def _stepped(self, now: float, argument: tuple[_Worker, StepOutput]) -> None:
        worker, output = argument
        assert not output.failures
        ended = False
        for token in output.tokens:
            i = int(token.seq_id)
            self._times[i].append(now)
            if worker in self._prefill:
                self._publish(now, worker, i, token.token_id)
                ended = True
            ended |= token.finish_reason is not None
        worker.stepping = False
        self._wake(now, worker)
        while ended and self._waiting and self._place(now, self._waiting[0]):
            self._waiting.popleft()

    def _publish(self, now: float, source: _Worker, i: int, token_id: int) -> None:
        decode = i % len(self._decode)
        if self._requests[i].num_output == 1:
            source.engine.release(str(i))
            self._decode[decode].engine.cancel(str(i))
            return
        hand_over = self._deployment.hand_over
        there = max(now, self._link_free_at[decode]) + hand_over.exposed_s(self._requests[i].num_prompt)
        self._link_free_at[decode] = there
        self._at(there + hand_over.latency_s, self._commit, (source, self._decode[decode], i, token_id))

    def _commit(self, now: float, argument: tuple[_Worker, _Worker, int, int]) -> None:
        source, worker, i, token_id = argument
        source.engine.release(str(i))
        # As the router does: what the first token waits for is no gap.
        self._times[i][0] = min(now, self._times[i][0] + worker.spec.gap_s)
        # Its KV did not travel: the tokens are nonsense, their times are not.
        worker.engine.commit(str(i), [token_id])
        self._wake(now, source)
        self._wake(now, worker)


class _Worker:
    def __init__(self, spec: EngineSpec, clock: Callable[[], float]) -> None:
        self.spec = spec
        self.engine = real_engine(spec, clock)
        self.stepping = False


def _request(i: int, request: Request, spec: EngineSpec) -> EngineRequest:
    tokens = random.Random(i).choices(range(1000), k=request.num_prompt)
    return EngineRequest(
        seq_id=str(i),
        token_ids=tokens,
        num_prompt_tokens=request.num_prompt,
        sampling=SamplingParams(max_tokens=request.num_output, temperature=0.0),
        tpot_s=spec.tpot_s or None,
        gap_s=spec.gap_s or None,
    )
