"""One step's output as bytes, for the worker's other process: a head, columns of its tokens, and what few sequences have.

    head      step, workload, times, counts
    tokens    n x ( u32 handle | i32 token | i32 position | u8 finish ), column by column: 13 bytes a token
    rest      logprobs, progress, failures, scores, packed (plain.py); empty where there are none

A handle is the number that the edge gave to a sequence; what has none any more was cancelled, and is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from twostep.engine.batch import TopToken
from twostep.engine.types import (
    FailureKind,
    FinishReason,
    LayerProgress,
    PrefillProgress,
    PromptScores,
    SequenceFailure,
    StepOutput,
    TokenOutput,
)
from twostep.step_curve import StepWorkload
from twostep.worker.plain import known, pack, unpack

known(FailureKind, LayerProgress, PrefillProgress, PromptScores, SequenceFailure, TopToken)

_HEAD = struct.Struct("<QIdIQdddBI")
_FINISH = (None, FinishReason.STOP, FinishReason.LENGTH)
_FINISH_CODE = {reason: code for code, reason in enumerate(_FINISH)}


def encode(output: StepOutput, handles: Mapping[str, int]) -> bytes:
    """`handles` by the engine's names."""
    work = output.workload
    tokens = [token for token in output.tokens if token.seq_id in handles]
    head = _HEAD.pack(
        output.step,
        work.prompt_tokens,
        work.pairs,
        work.decodes,
        work.context,
        output.duration_s,
        output.ended_at,
        output.launch_s,
        output.timed,
        len(tokens),
    )
    columns = (
        np.array([handles[token.seq_id] for token in tokens], np.uint32),
        np.array([token.token_id for token in tokens], np.int32),
        np.array([token.position for token in tokens], np.int32),
        np.array([_FINISH_CODE[token.finish_reason] for token in tokens], np.uint8),
    )
    logprobs = [(i, token.logprob, token.top_logprobs) for i, token in enumerate(tokens) if token.logprob is not None]
    few = [each for kind in (output.progress, output.failures, output.scores) for each in kind if each.seq_id in handles]
    rest = b""
    if logprobs or few:
        indices, values, tops = zip(*logprobs, strict=True) if logprobs else ((), (), ())
        rest = pack(indices, values, tops, [handles[each.seq_id] for each in few], few)
    return b"".join((head, *(column.tobytes() for column in columns), rest))


def decode(record: bytes, names: Mapping[int, str]) -> StepOutput:
    """`names` by handle: sequences that are not in it are left out."""
    *values, timed, num_tokens = _HEAD.unpack_from(record)
    step, prompt_tokens, pairs, decodes, context, duration_s, ended_at, launch_s = values
    at, columns = _HEAD.size, []
    for kind in (np.uint32, np.int32, np.int32, np.uint8):
        column = np.frombuffer(record, kind, num_tokens, at)
        at += column.nbytes
        columns.append(column.tolist())
    tokens = [
        TokenOutput(seq_id=names.get(handle, ""), token_id=token, position=position, finish_reason=_FINISH[finish])
        for handle, token, position, finish in zip(*columns, strict=True)
    ]
    progress: list[PrefillProgress] = []
    failures: list[SequenceFailure] = []
    scores: list[PromptScores] = []
    if at < len(record):
        indices, logprobs, tops, handles, few = unpack(memoryview(record)[at:])
        for i, logprob, top in zip(indices, logprobs, tops, strict=True):
            tokens[i] = replace(tokens[i], logprob=logprob, top_logprobs=top)
        for handle, each in zip(handles, few, strict=True):
            if handle not in names:
                continue
            match each:
                case PrefillProgress():
                    progress.append(each)
                case SequenceFailure():
                    failures.append(each)
                case _:
                    scores.append(each)
    return StepOutput(
        step=step,
        tokens=[token for token in tokens if token.seq_id],
        progress=progress,
        failures=failures,
        scores=scores,
        workload=StepWorkload(prompt_tokens=prompt_tokens, pairs=pairs, decodes=decodes, context=context),
        duration_s=duration_s,
        ended_at=ended_at,
        timed=bool(timed),
        launch_s=launch_s,
    )
