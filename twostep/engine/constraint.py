"""A sequence's grammar in the engine: the mask of its next token, and the thread that makes masks.

    step n samples a token ─ settle ─▶ advance ─ another thread: grammar, mask ─▶ ready ─▶ the sequence is planned again

A mask needs the token before it, so that the step after n, which is planned while n runs, is one without the sequence: on a GPU it takes
part in every other step. Nobody waits for it, and a step without such sequences knows nothing of all this.

Which tokens may come: those that go on in the grammar, but for stop tokens; where the answer may end, the stop tokens too, unless
`min_tokens` or `ignore_eos` (of the model's own end-of-sequence tokens) still asks for more; where nothing else can follow, all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostep.engine.grammar import GrammarState, LiveGrammar, Step, advance_all, make_bits
from twostep.errors import InvalidRequest
from twostep.sampling_params import SamplingParams

log = logging.getLogger(__name__)

# Sequences of two steps take turns: the masks of one are made while the other's are.
_THREADS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Stops:
    """A sequence's stop tokens, int32 [words]: all of them, and those that may come wherever the answer may end, from `min_tokens` on."""

    every: npt.NDArray[np.int32]
    asked: npt.NDArray[np.int32]
    min_tokens: int


def next_mask(step: Step, stops: Stops, position: int) -> npt.NDArray[np.int32] | None:
    """Which tokens may stand at `position` of the answer, int32 [words]; None: none may. A pure function."""
    mask = step.bits & ~stops.every
    if step.complete:
        if position >= stops.min_tokens:
            mask |= stops.asked
        if not mask.any():
            return stops.every if stops.every.any() else None
    return mask if mask.any() else None


class Constraint:
    """Of one sequence. The engine's lock guards it, but for `live`, which is its thread's while `mask` is None."""

    def __init__(self, state: GrammarState, params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        """`state`: after the tokens generated before. Raises InvalidRequest where no token could end the answer, or none can follow."""
        words = len(state.step.bits)
        asked = frozenset(params.stop_token_ids) | (frozenset[int]() if params.ignore_eos else eos_token_ids)
        every = eos_token_ids | asked
        if not every:
            raise InvalidRequest("the model has no end-of-sequence token that could end an answer in a grammar; give stop_token_ids")
        self._stops = Stops(make_bits(words, every), make_bits(words, asked), params.min_tokens)
        self._state = state
        self._live: LiveGrammar | None = None
        # Of the token to be sampled next; None: it is being made, or a step has it.
        self.mask = next_mask(state.step, self._stops, len(state.tokens))
        if self.mask is None:
            raise InvalidRequest(f"grammar: {dead_end()}")

    @property
    def live(self) -> LiveGrammar:
        """Where the sequence's grammar is. The state that others share stays as it is."""
        if self._live is None:
            self._live = LiveGrammar(self._state)
        return self._live

    @property
    def num_tokens(self) -> int:
        """Of the answer, as far as it has been followed."""
        return len(self._state.tokens if self._live is None else self._live.tokens)

    def take(self) -> npt.NDArray[np.int32]:
        """For the step that samples the next token."""
        mask, self.mask = self.mask, None
        assert mask is not None, "who has no mask is not planned"
        return mask

    def mask_after(self, step: Step) -> npt.NDArray[np.int32] | None:
        return next_mask(step, self._stops, len(self.live.tokens))


def dead_end() -> str:
    return "none of the model's tokens can follow in the answer's grammar, once stop_token_ids are left out; change one or the other"


@dataclass(frozen=True, slots=True, eq=False)
class Advanced:
    """What came of an advance: a mask, or why there is none."""

    mask: npt.NDArray[np.int32] | None
    failure: str = ""


class MaskMaker:
    """Makes the masks of an engine's constrained sequences, in threads that there are from the first one on."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def advance(self, work: Sequence[tuple[Constraint, Sequence[int]]], on_ready: Callable[[Sequence[Advanced]], None]) -> None:
        """Of constraints without a mask, after these tokens. `on_ready` is called once, on another thread, with one result for each."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="grammar")
        self._threads.submit(_advance, work, on_ready)


def _advance(work: Sequence[tuple[Constraint, Sequence[int]]], on_ready: Callable[[Sequence[Advanced]], None]) -> None:
    counts = [constraint.num_tokens for constraint, _ in work]
    try:
        steps = advance_all([(constraint.live, tokens) for constraint, tokens in work])
        results = [_result(constraint, step) for (constraint, _), step in zip(work, steps, strict=True)]
    except Exception:
        log.exception("the masks of %d sequences could not be made side by side; each is made by itself", len(work))
        results = [_advance_alone(constraint, count, tokens) for (constraint, tokens), count in zip(work, counts, strict=True)]
    on_ready(results)


def _advance_alone(constraint: Constraint, count: int, tokens: Sequence[int]) -> Advanced:
    """After the first `count` tokens and these, whatever became of an attempt to advance it with others."""
    try:
        live = constraint.live
        live.tokens[count:] = tokens
        return _result(constraint, live.again())
    except Exception as error:
        # Whatever it was, this sequence cannot go on, and nobody may be kept waiting.
        log.exception("a mask could not be made")
        return Advanced(None, f"the answer's grammar failed: {type(error).__name__}")


def _result(constraint: Constraint, step: Step) -> Advanced:
    if step.failure:
        return Advanced(None, f"the answer's grammar cannot be followed any further: {step.failure}; make it simpler")
    mask = constraint.mask_after(step)
    return Advanced(mask, "" if mask is not None else dead_end())
