"""Are there too few prefill workers or too few decode workers? What is still to be done of either work, in seconds, by the workers' curves.

    prefill_s   prompts that are there and not computed, as long as the workers' steps would take for them
    decode_s    sequences that are there, each with half an answer to come (a whole one if it has not begun), at the rate of a full batch:
                a worker that decodes one sequence is not busy for as long as that takes, it has room for others beside it;
                and, of decode workers that compute prompts for nobody else, those prompts

A worker that does both adds to both, whatever it is for. What waits in the router counts twice: its prompt is to be computed and its
answer to be decoded. For the ratio, seconds are per worker that is for that work: it is 1 where the roles are in proportion to the work,
above 1 where prefill workers are short, and below 1 where decode workers are. In an overload it tends to the ratio of work in the
workload itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostep.cluster.prediction import ANSWER_TOKENS, Candidate, Snapshot, fallback_curve, mean_load, prompt_s
from twostep.step_curve import StepCurve

# Less than that is nothing: means over the last seconds fade, and never quite end.
_LEAST_S = 1e-3
_MOST = 1000.0
# Before the first request.
_PROMPT_TOKENS = 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequests:
    """Requests that no worker has yet, and how long prompts and answers are on average. 0: not known."""

    num_requests: int = 0
    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """Seconds of work per worker that is for it, and how many those are, one at least."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_prefill: int = 1
    num_decode: int = 1

    @property
    def ratio(self) -> float | None:
        """prefill_s / decode_s, 1000 at most; None: there is no work on either side."""
        if not self.prefill_s and not self.decode_s:
            return None
        return min(_MOST, self.prefill_s / max(_LEAST_S, self.decode_s))


def role_load(snapshot: Snapshot, waiting: WaitingRequests = WaitingRequests()) -> RoleLoad:
    """Returns the work left of either role, in seconds. Workers that take no new work count with what they have, and not among those who
    share it. Prompts that wait are nobody's where no worker computes prompts for others: decode workers compute them then."""
    curve = fallback_curve((*snapshot.prefill, *snapshot.decode))
    prompt, answer = waiting.prompt_tokens or _PROMPT_TOKENS, waiting.answer_tokens or float(ANSWER_TOKENS)
    prefill_s = sum(_prompts_s(c, curve, prompt) for c in snapshot.prefill)
    decode_s = sum(_answers_s(c, curve, prompt, answer) for c in snapshot.decode)
    decode_s += sum(_prompts_s(c, curve, prompt) for c in snapshot.decode if not c.record.hands_over)
    for_prompts, for_answers = _open(snapshot.prefill), _open(snapshot.decode)
    if waiting.num_requests:
        tokens = waiting.num_requests * prompt
        if for_prompts:
            prefill_s += _mean([_computing_s(c, curve, tokens, prompt) for c in for_prompts])
        elif for_answers:
            decode_s += _mean([_computing_s(c, curve, tokens, prompt) for c in for_answers])
        if for_answers:
            decode_s += _mean([waiting.num_requests * answer * _token_s(c, curve, prompt + answer / 2) for c in for_answers])
    num = [max(1, sum(c.record.role == role for c in side)) for role, side in (("prefill", for_prompts), ("decode", for_answers))]
    prefill_s, decode_s = (work if work >= _LEAST_S else 0.0 for work in (prefill_s / num[0], decode_s / num[1]))
    return RoleLoad(prefill_s=prefill_s, decode_s=decode_s, num_prefill=num[0], num_decode=num[1])


def _open(side: Sequence[Candidate]) -> Sequence[Candidate]:
    return [c for c in side if c.record.ready and not c.record.draining]


def _prompts_s(candidate: Candidate, fallback: StepCurve, prompt_tokens: float) -> float:
    mean = mean_load(candidate, int(prompt_tokens))
    # Prompts come and go between two heartbeats; of its own ones the router knows better.
    return _computing_s(candidate, fallback, max(mean.queued_tokens, mean.own_queued_tokens), prompt_tokens)


def _answers_s(candidate: Candidate, fallback: StepCurve, prompt_tokens: float, answer_tokens: float) -> float:
    load, mean = candidate.record.load, mean_load(candidate, int(prompt_tokens))
    reserved = min(mean.num_seqs, load.num_reserved)
    begun = mean.num_seqs - reserved
    known = load.num_running and load.num_context_tokens
    context = load.num_context_tokens / load.num_running if known else prompt_tokens + answer_tokens / 2
    return (begun / 2 + reserved) * answer_tokens * _token_s(candidate, fallback, context)


def _computing_s(candidate: Candidate, fallback: StepCurve, num_tokens: float, prompt_tokens: float) -> float:
    """Returns the seconds that a worker takes for so many tokens, in prompts of that length. The mean of a queue that is mostly empty is
    part of a prompt, and costs that part."""
    record, tokens = candidate.record, max(num_tokens, prompt_tokens)
    seconds = prompt_s(record.curve or fallback, tokens, tokens * prompt_tokens / 2, record.step_tokens)[0]
    return seconds * num_tokens / tokens


def _token_s(candidate: Candidate, fallback: StepCurve, context: float) -> float:
    """Returns a token's part, in seconds, of a step of as many sequences as the worker has room for, with so many tokens each."""
    record = candidate.record
    held = record.num_blocks / record.layout.blocks_of(max(1.0, context))
    seqs = max(1, min(record.max_num_seqs, int(held)))
    return (record.curve or fallback).decode_step_s(seqs, int(seqs * context)) / seqs


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
