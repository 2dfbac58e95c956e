"""One step's output as bytes, for the worker's other process: a head, columns of its tokens, and what few sequences have.

    head      step, workload, times, count
    tokens    n x ( u32 handle | i32 token | i32 position ), column by column: 12 bytes a token
    rest      last tokens, logprobs, progress, failures, scores, vectors, packed (plain.py); empty where there are none

A handle is the number that the edge gave to a sequence, from 1 on. What was cancelled has none any more: its tokens have no name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import numpy as np

from twostep.engine.batch import TopToken
from twostep.engine.types import (
    FailureKind,
    FinishReason,
    LayerProgress,
    PooledPrompt,
    PrefillProgress,
    PromptScores,
    SequenceFailure,
    StepOutput,
    StepTokens,
    TokenExtras,
)
from twostep.step_curve import StepWorkload
from twostep.worker.serialization import pack, register_types, unpack

register_types(
    FailureKind, FinishReason, LayerProgress, PooledPrompt, PrefillProgress, PromptScores, SequenceFailure, StepWorkload, TopToken
)

_HEAD = struct.Struct("<QddddBI")


def encode(output: StepOutput, handles: Mapping[str, int]) -> bytes:
    """`handles` by the engine's names."""
    tokens, work = output.tokens, output.workload
    times = output.duration_s, output.ended_at, output.launch_s
    head = _HEAD.pack(output.step, work.pairs, *times, output.timed, len(tokens))
    counts = np.array([work.prompt_tokens, work.decodes, work.context], np.int64)
    columns = (
        np.array([handles.get(seq_id, 0) for seq_id in tokens.seq_ids], np.uint32),
        np.array(tokens.token_ids, np.int32),
        np.array(tokens.positions, np.int32),
    )
    few = [each for kind in (output.progress, output.failures, output.scores, output.pooled) for each in kind if each.seq_id in handles]
    rest = b""
    if tokens.extras or few:
        extras = tokens.extras.values()
        rest = pack(
            tuple(tokens.extras),
            tuple("" if each.finish_reason is None else each.finish_reason.value for each in extras),
            tuple([] if each.logprob is None else [each.logprob] for each in extras),
            tuple(each.top_logprobs for each in extras),
            [handles[each.seq_id] for each in few],
            few,
        )
    return b"".join((head, counts.tobytes(), *(column.tobytes() for column in columns), rest))


def decode(record: bytes, names: Mapping[int, str]) -> StepOutput:
    """`names` by handle."""
    step, pairs, duration_s, ended_at, launch_s, timed, num_tokens = _HEAD.unpack_from(record)
    at = _HEAD.size
    columns: list[list[int]] = []
    for kind, count in ((np.int64, 3), (np.uint32, num_tokens), (np.int32, num_tokens), (np.int32, num_tokens)):
        column = np.frombuffer(record, kind, count, at)
        at += column.nbytes
        columns.append(column.tolist())
    (prompt_tokens, decodes, context), handles, token_ids, positions = columns
    extras: dict[int, TokenExtras] = {}
    progress: list[PrefillProgress] = []
    failures: list[SequenceFailure] = []
    scores: list[PromptScores] = []
    pooled: list[PooledPrompt] = []
    if at < len(record):
        rows, reasons, logprobs, tops, others, few = unpack(memoryview(record)[at:])
        for row, reason, logprob, top in zip(rows, reasons, logprobs, tops, strict=True):
            extras[row] = TokenExtras(FinishReason(reason) if reason else None, logprob[0] if logprob else None, top)
        for handle, each in zip(others, few, strict=True):
            if handle not in names:
                continue
            match each:
                case PrefillProgress():
                    progress.append(each)
                case SequenceFailure():
                    failures.append(each)
                case PooledPrompt():
                    pooled.append(each)
                case _:
                    scores.append(each)
    return StepOutput(
        step=step,
        tokens=StepTokens([names.get(handle, "") for handle in handles], token_ids, positions, extras),
        progress=progress,
        failures=failures,
        scores=scores,
        pooled=pooled,
        workload=StepWorkload(prompt_tokens=prompt_tokens, pairs=pairs, decodes=decodes, context=context),
        duration_s=duration_s,
        ended_at=ended_at,
        timed=bool(timed),
        launch_s=launch_s,
    )


def ended(output: StepOutput) -> Iterator[str]:
    """Yields the sequences that came to their end in this step, by their last tokens or vectors."""
    tokens = output.tokens
    yield from (tokens.seq_ids[row] for row, extras in tokens.extras.items() if extras.finish_reason is not None)
    yield from (each.seq_id for each in output.pooled)
