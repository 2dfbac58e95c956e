"""Whether a row without a token is its request's fault or the worker's.

    a row has no token ─▶ its failure is kept back ─▶ the next steps compute the probes too ─┬─ one has a token: the request's fault
                                                                                            └─ none has: the worker is sick

The probes are prompts of one token each, from different parts of the vocabulary, which no client chooses. So whatever clients send, and
however often, a worker whose model computes anything at all passes; only what all prompts share (layers, output head, device) fails all
of them. A count of failed requests would let one client end workers, or would have to know which requests are related.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from twostep.engine.batch import NO_TOKEN, Batch, Runner, SamplingRow
from twostep.engine.step_work import StepResult
from twostep.engine.types import EngineRequest, FailureKind, SequenceFailure, StepTokens
from twostep.request_class import RequestClass
from twostep.sampling_params import SamplingParams

# More than one, since any may meet the very token whose embedding is broken.
_NUM_PROBES = 3
_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)

SICK = "the model gives no token for any prompt, not even for the worker's own probes: its weights or its device are damaged"


def probe_tokens(vocab_size: int) -> Sequence[int]:
    """Returns the one token of each probe."""
    return sorted({vocab_size * (2 * i + 1) // (2 * _NUM_PROBES) for i in range(_NUM_PROBES)})


def gives_tokens(runner: Runner) -> bool:
    """Returns whether the model has a token after any probe. Computed at once, in blocks that have no owner yet."""
    shape = runner.kv_shape
    tokens = probe_tokens(runner.vocab_size)[: shape.num_blocks]
    count = len(tokens)
    batch = Batch(
        token_ids=np.array(tokens, np.int64),
        positions=np.zeros(count, np.int64),
        query_start=np.arange(count + 1, dtype=np.int32),
        seq_lens=np.ones(count, np.int32),
        block_tables=shape.in_groups(np.arange(count, dtype=np.int32)[:, None]),
        slots=shape.in_groups(np.arange(count, dtype=np.int64) * shape.block_size),
        sample_rows=np.arange(count),
        sampling=[
            SamplingRow(params=_SAMPLING, position=0, history=(token,), num_prompt_tokens=1, stop_ids=frozenset()) for token in tokens
        ],
        state_sources=shape.trial_states(count),
        state_tables=shape.trial_states(count),
    )
    return any(token != NO_TOKEN for token in runner.launch(batch).result().token_ids)


class SelfTest:
    """Not thread-safe: the engine's lock guards it."""

    def __init__(self, vocab_size: int) -> None:
        # Requests' names end in the number of an attempt, so that these are no request's.
        self._probes = {f"self-test {token}": token for token in probe_tokens(vocab_size)}
        self._running: set[str] = set()
        # What the probes that have ended came to; None: a token. A step that failed says nothing of them.
        self._outcomes: set[FailureKind | None] = set()
        self._suspects: list[SequenceFailure] = []
        # Nothing this worker computes can be trusted any more.
        self.sick = False

    def settle(self, result: StepResult) -> tuple[StepResult, Sequence[EngineRequest]]:
        """Returns what a step came to, as it is to be reported, and the probes that are to be computed from now on."""
        running = self._running
        if not running and not result.failures:
            return result, ()
        ended: dict[str, FailureKind | None] = {token.seq_id: None for token in result.tokens if token.seq_id in running}
        ended |= {failure.seq_id: failure.kind for failure in result.failures if failure.seq_id in running}
        others = [failure for failure in result.failures if failure.seq_id not in running]
        failures = [failure for failure in others if failure.kind is not FailureKind.NO_TOKEN]
        self._suspects += [failure for failure in others if failure.kind is FailureKind.NO_TOKEN]
        tokens = StepTokens.of(token for token in result.tokens if token.seq_id not in running)
        progress = [progress for progress in result.progress if progress.seq_id not in running]
        probes: Sequence[EngineRequest] = ()
        if running:
            self._outcomes |= set(ended.values())
            self._running = running - ended.keys()
            self.sick = self.sick or (not self._running and self._outcomes == {FailureKind.NO_TOKEN})
        elif self._suspects and not self.sick:
            self._running, self._outcomes = set(self._probes), set()
            probes = [_request(seq_id, token) for seq_id, token in self._probes.items()]
        if not self._running:
            failures += self._judged()
        return replace(result, tokens=tokens, progress=progress, failures=failures), probes

    def forget(self, seq_id: str) -> bool:
        """Drops a failure that is kept back, as its request is cancelled. False: there is none."""
        kept = [failure for failure in self._suspects if failure.seq_id != seq_id]
        found = len(kept) < len(self._suspects)
        self._suspects = kept
        return found

    def _judged(self) -> Sequence[SequenceFailure]:
        """Returns what was kept back, as it turned out."""
        suspects, self._suspects = self._suspects, []
        if self.sick:
            return [replace(failure, message=SICK, kind=FailureKind.STEP) for failure in suspects]
        if None not in self._outcomes:
            return [replace(failure, kind=FailureKind.STEP) for failure in suspects]
        return suspects


def _request(seq_id: str, token: int) -> EngineRequest:
    return EngineRequest(
        seq_id=seq_id,
        token_ids=(token,),
        num_prompt_tokens=1,
        sampling=_SAMPLING,
        request_class=RequestClass.INTERACTIVE,
    )
