"""Requests in, tokens out, in one call: the oracle that the distributed system is compared with, and the benchmarks' loop."""

from __future__ import annotations

from collections.abc import Sequence

from twostep.engine.engine import Engine
from twostep.engine.types import EngineRequest, FailureKind, TokenOutput
from twostep.errors import InternalError, ResourceExhausted

# Longer than a mask may take to be made.
_MASK_S = 60.0


def generate(engine: Engine, requests: Sequence[EngineRequest]) -> list[list[TokenOutput]]:
    """Runs all requests to their ends on the calling thread, which must be the only one to step this engine, and returns each one's
    tokens in order. More requests than the engine's queue takes are fed as it drains.

    Raises InvalidRequest (nothing of it is left running; also where an answer cannot go on in its grammar), NonFiniteLogits, InternalError
    if the runner fails or nothing can go on."""
    outputs: dict[str, list[TokenOutput]] = {request.seq_id: [] for request in requests}
    unfinished = set(outputs)
    pending = list(reversed(requests))
    try:
        while unfinished:
            while pending:
                try:
                    engine.submit(pending[-1])
                except ResourceExhausted:
                    break
                pending.pop()
            step = engine.step()
            for token in step.tokens:
                if token.seq_id in unfinished:
                    outputs[token.seq_id].append(token)
                    if token.finish_reason is not None:
                        unfinished.discard(token.seq_id)
            if step.failures:
                failure = step.failures[0]
                raise InternalError(failure.message) if failure.kind is FailureKind.STEP else failure.as_error()
            if not step.num_prefill_tokens + step.num_decode_tokens:
                if engine.wait_for_work(_MASK_S if engine.makes_masks else 0.0):
                    continue
                raise InternalError("nothing can be stepped: held or reserved sequences leave no room; release them first")
    finally:
        for seq_id in unfinished:
            engine.cancel(seq_id)
        engine.settle_launched()
    return [outputs[request.seq_id] for request in requests]
