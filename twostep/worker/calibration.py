"""A worker measures how long its steps take, before it serves: a small grid of prompts' chunks and decode batches on its own runner.

    prompts   16, 64, 256 ... tokens up to the step's budget, and one more chunk behind a long prefix
    decodes   1, 4, 16, 64 ... sequences up to the worker's bound, with short and with long contexts
    both      a chunk beside 8, 64 and 128 decodes: what is promised to those is kept by what such steps take

Two sizes of either kind are measured whatever they take; of the others, the cheapest first, and none of which what came before says
that it would not be over in time: a slow machine measures a coarser grid.
Steps go to the runner itself. The engine, its counters, its pool's books and its prefixes know nothing of them; what is left is numbers
in blocks that are free, which whoever takes a block writes over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from twostep.engine.batch import Batch, Runner, SamplingRow
from twostep.engine.fake import FakeRunner
from twostep.errors import SetupError
from twostep.sampling_params import SamplingParams
from twostep.step_curve import StepCurve, StepWorkload, chunk_pairs
from twostep.worker.curve_fit import StepSample, fit_curve

log = logging.getLogger(__name__)

DEFAULT_BUDGET_S = 1.5
# The first run of a size may touch memory for the first time; of the others, the quickest is the least disturbed.
_REPEATS = 2
# A runner that overlaps steps is timed over so many of them, one behind the other, as it is served; long ones need not be repeated.
_PIPELINED, _LONG_STEP_S = 4, 0.02
_LONG_CONTEXTS = (512, 4096)
_MIXED_SEQS = (1, 2, 3, 5, 16, 17, 64, 65, 256)
# Those that are timed: decodes, and the tokens of the chunk beside them.
_TIMED_MIXED, _TIMED_CHUNK = (8, 64, 128), 192
# By so much steps with both may change what the curve says of others, and take longer than it says.
_BENT, _MISSED = 0.1, 0.3
# Ends of prompts: chunks so short are attended by kernels of their own, one for each power of two of rows.
_SHORT_CHUNKS = (2, 6, 12, 24)
_SHORT_CONTEXT = 64
# Without a small and a larger step of either kind there is no curve.
_NEEDED_PROMPTS, _NEEDED_SEQS = (16, 128), (1, 8)
_NEEDED = len(_NEEDED_PROMPTS) + len(_NEEDED_SEQS)
# Python's part of a step of the fake runner, which takes no time by itself.
_FAKE_STEP_S, _FAKE_ROW_S = 1e-4, 1e-6
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepProbe:
    """A step to measure: `counts[i]` tokens behind `starts[i]` others, of as many sequences. Those with one token decode."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def work(self) -> StepWorkload:
        sequences = list(zip(self.starts, self.counts, strict=True))
        contexts = [start + 1 for start, count in sequences if count == 1]
        chunks = [(start, count) for start, count in sequences if count > 1]
        return StepWorkload(
            prompt_tokens=sum(count for _, count in chunks),
            pairs=sum(chunk_pairs(count, start) for start, count in chunks),
            decodes=len(contexts),
            context=sum(contexts),
        )

    def num_blocks(self, block_size: int) -> int:
        return sum(-(-length // block_size) for length in self.lengths)

    @property
    def lengths(self) -> list[int]:
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    def fits(self, runner: Runner) -> bool:
        """Returns whether context and pool have room for it, each block owned by one sequence."""
        shape = runner.kv_shape
        num_blocks = self.num_blocks(shape.block_size) + len(self.counts) * shape.num_state_blocks
        return max(self.lengths) < runner.max_model_len and num_blocks <= shape.num_blocks


def calibrate(
    runner: Runner,
    *,
    step_tokens: int,
    max_num_seqs: int,
    captured_rows: int = 0,
    budget_s: float = DEFAULT_BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> StepCurve:
    """Returns the cost curve of the runner's steps. Takes about `budget_s`, and what a GPU needs to build kernels that it lacks; call it
    before anything else is launched, on a thread that may launch. `captured_rows`: steps with prompts of up to so many rows are captured,
    and build no kernels. The fake runner's curve is known. Raises what the device fails with, and SetupError if the pool holds no step at
    all."""
    if isinstance(runner, FakeRunner):
        return StepCurve(fixed_s=max(runner.step_s, _FAKE_STEP_S), per_row_s=max(runner.per_token_s, _FAKE_ROW_S))
    begun = clock()
    if runner.overlaps:
        for probe in (*short_probes(runner, step_tokens), *mixed_probes(runner, step_tokens, max_num_seqs, captured_rows)):
            if sum(probe.counts) <= captured_rows:
                continue
            batch = _batch(runner, probe)
            runner.launch(batch).result()
            # As it is served: what the step before sampled is this one's input, and prompts that are handed over are marked.
            carried = np.full(len(batch.token_ids), -1, np.int32)
            carried[batch.query_start[:-1]] = np.arange(len(batch.seq_lens), dtype=np.int32)
            runner.launch(replace(batch, carried=carried, mark_layers=(runner.kv_shape.num_layers,))).result()
    spent = 0.0
    samples: list[StepSample] = []
    for probe in probes(runner, step_tokens, max_num_seqs):
        left = budget_s - spent
        if len(samples) >= _NEEDED and _expected_s(samples, probe) * (1 + _REPEATS) > left:
            continue
        batch = _batch(runner, probe)
        if runner.overlaps:
            # A GPU's first step of a size may have to build its kernels, for seconds: whoever comes first is spared that.
            runner.launch(batch).result()
        since = clock()
        samples.append(StepSample(probe.work, _measure(runner, batch, clock, left)))
        spent += clock() - since
    if not samples:
        raise SetupError("the KV pool holds no step that could be measured; give it more blocks (--num-blocks), or --no-calibrate")
    curve = _curve_of(samples)
    log.info(
        "%d steps measured in %.2f s: %.2f ms, %.1f us a token beyond %d, decoding %.1f us a sequence and %.3f us a token of its context",
        len(samples),
        clock() - begun,
        curve.fixed_s * 1e3,
        curve.per_row_s * 1e6,
        curve.knee,
        curve.per_sequence_s * 1e6,
        curve.per_context_s * 1e6,
    )
    return curve


def probes(runner: Runner, step_tokens: int, max_num_seqs: int) -> Iterator[StepProbe]:
    """Yields the steps to measure that fit: first those that are needed, then the others, the cheap ones first."""
    shape = runner.kv_shape
    longest = max(1, min(step_tokens, runner.max_model_len - 1, shape.num_blocks * shape.block_size))
    chunk = min(256, longest)
    needed = [StepProbe((0,), (min(size, longest),)) for size in _NEEDED_PROMPTS]
    needed += [_decodes(min(count, max_num_seqs), _SHORT_CONTEXT) for count in _NEEDED_SEQS]
    wanted = [StepProbe((0,), (min(size, longest),)) for size in (64, 256, 1024, 4096, longest // 2, longest) if size]
    wanted += [StepProbe((context,), (chunk,)) for context in _LONG_CONTEXTS]
    wanted += [
        _decodes(min(count, max_num_seqs), context)
        for count in (1, 4, 16, 64, max_num_seqs)
        for context in (_SHORT_CONTEXT, *_LONG_CONTEXTS)
    ]
    for count in _TIMED_MIXED:
        beside = min(count, max_num_seqs - 1)
        if beside > 0 and (size := min(_TIMED_CHUNK, longest - beside)) > 1:
            wanted.append(_mixed(beside, _LONG_CONTEXTS[0], size))
    wanted.sort(key=lambda probe: probe.work.prompt_tokens + 4 * len(probe.counts))
    yield from (probe for probe in dict.fromkeys((*needed, *wanted)) if probe.fits(runner))


def mixed_probes(runner: Runner, step_tokens: int, max_num_seqs: int, captured_rows: int = 0) -> Iterator[StepProbe]:
    """Yields steps of a prompt's chunk beside decodes: few and many, and the numbers that Triton compiles for apart (1, multiples of 16).
    Their kernels are others than those of either alone, and building one takes seconds, which the first such step would hold everybody up
    for. The chunks are short, or such that the steps are just too large to be captured: one each, since they take long."""
    for i, count in enumerate(sorted({min(count, max_num_seqs - 1, step_tokens - 2) for count in _MIXED_SEQS})):
        sizes = (captured_rows + (16 if i % 2 else 1),) if captured_rows else (*_SHORT_CHUNKS, _SHORT_CONTEXT)
        chunks = {min(chunk, max(2, step_tokens - count)) for chunk in sizes} if count > 0 else ()
        for chunk in sorted(chunks):
            probe = _mixed(count, _SHORT_CONTEXT, chunk)
            if probe.fits(runner):
                yield probe


def short_probes(runner: Runner, step_tokens: int) -> Iterator[StepProbe]:
    """Yields steps of a short chunk alone, at the beginning of a prompt and behind others."""
    for count in sorted({min(count, step_tokens) for count in _SHORT_CHUNKS}):
        for start in (0, _SHORT_CONTEXT):
            probe = StepProbe((start,), (count,))
            if probe.fits(runner):
                yield probe


def _decodes(num_seqs: int, context: int) -> StepProbe:
    return StepProbe((context - 1,) * num_seqs, (1,) * num_seqs)


def _mixed(num_seqs: int, context: int, chunk: int) -> StepProbe:
    return StepProbe((context - 1,) * num_seqs + (0,), (1,) * num_seqs + (chunk,))


def _curve_of(samples: Sequence[StepSample]) -> StepCurve:
    """Fits all samples; or, where no one curve has steps with both and the others, the others alone: then the former take what their
    launches do, kernel by kernel, and the shortest is what any takes at least."""
    mixed = [sample for sample in samples if sample.work.prompt_tokens and sample.work.decodes]
    parts = [sample for sample in samples if not (sample.work.prompt_tokens and sample.work.decodes)]
    curve = _with_a_price(fit_curve(parts or mixed), samples)
    if not (parts and mixed):
        return curve
    joint = _with_a_price(fit_curve(samples), samples)
    bent = max(abs(joint.step_s(sample.work) / curve.step_s(sample.work) - 1.0) for sample in parts)
    missed = max(sample.seconds / joint.step_s(sample.work) - 1.0 for sample in mixed)
    return joint if bent <= _BENT and missed <= _MISSED else replace(curve, mixed_s=min(sample.seconds for sample in mixed))


def _with_a_price(curve: StepCurve, samples: Sequence[StepSample]) -> StepCurve:
    """Returns the curve with a price of prompts: where noise hides what one costs, it costs what the largest one measured took: prompts are
    never free."""
    if curve.per_row_s:
        return curve
    largest = max(samples, key=lambda sample: sample.work.prompt_tokens + sample.work.decodes)
    return replace(curve, per_row_s=largest.seconds / (largest.work.prompt_tokens + largest.work.decodes), knee=0.0)


def _expected_s(samples: Sequence[StepSample], probe: StepProbe) -> float:
    """Returns how long a step is expected to take, in seconds, in proportion to the largest step so far that is no larger: an estimate from
    above, since part of every step is fixed."""
    rows = sum(probe.counts)
    known = [(s.work.prompt_tokens + s.work.decodes, s.seconds) for s in samples]
    nearest = max((k for k in known if k[0] <= rows), default=known[0])
    return nearest[1] * max(1.0, rows / nearest[0])


def _measure(runner: Runner, batch: Batch, clock: Callable[[], float], left_s: float) -> float:
    """Returns the seconds of such a step; of one alone, where more would take longer than there is time."""
    first = _timed(runner, batch, clock)
    if (1 + _REPEATS) * first > left_s:
        return first
    if not runner.overlaps:
        return min(_timed(runner, batch, clock) for _ in range(_REPEATS))
    # A pause of the host makes no step a long one.
    alone = min(first, _timed(runner, batch, clock))
    # Two are in flight at any time, as when they are served: what is timed is how long the device takes from one's end to the next one's.
    num_steps = _PIPELINED if alone < _LONG_STEP_S else 1
    flying = [runner.launch(batch), runner.launch(batch)]
    flying.pop(0).result()
    begun = clock()
    for _ in range(num_steps - 1):
        flying.append(runner.launch(batch))
        flying.pop(0).result()
    flying.pop(0).result()
    # Host and device work at the same time, which at best halves what a step takes alone. Less than that, and the host came late to see
    # the first one's end: one sample near 0 would outweigh all others in a fit of relative errors.
    return max(alone / 2, (clock() - begun) / num_steps)


def _timed(runner: Runner, batch: Batch, clock: Callable[[], float]) -> float:
    begun = clock()
    runner.launch(batch).result()
    return max(1e-9, clock() - begun)


def _batch(runner: Runner, probe: StepProbe) -> Batch:
    size = runner.kv_shape.block_size
    starts, counts = np.array(probe.starts, np.int64), np.array(probe.counts, np.int64)
    seq_lens = starts + counts
    num_blocks = -(-seq_lens // size)
    tables = np.zeros((len(counts), int(num_blocks.max())), np.int32)
    first = 0
    for table, count in zip(tables, num_blocks.tolist(), strict=True):
        table[:count] = np.arange(first, first + count)
        first += count
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(int(query_start[-1])) - np.repeat(query_start[:-1], counts).astype(np.int64) + starts[rows]
    shape = runner.kv_shape
    return Batch(
        token_ids=positions % runner.vocab_size,
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens.astype(np.int32),
        block_tables=shape.in_groups(tables),
        slots=shape.in_groups(tables[rows, positions // size].astype(np.int64) * size + positions % size),
        sample_rows=query_start[1:].astype(np.int64) - 1,
        sampling=[SamplingRow(params=_PARAMS, position=0, history=[0], num_prompt_tokens=1, stop_ids=frozenset()) for _ in probe.counts],
        state_sources=runner.kv_shape.trial_states(len(probe.counts)),
        state_tables=runner.kv_shape.trial_states(len(probe.counts)),
    )
