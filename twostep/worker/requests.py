"""Protobuf to engine requests and sampled tokens to protobuf: the service edge of both workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from twostep.cluster.records import LayoutRecord
from twostep.engine.types import EngineRequest, FinishReason, PromptScores, TokenOutput
from twostep.errors import InvalidRequest
from twostep.keys.secret import DeploymentSecret
from twostep.pooling import Pooling
from twostep.prefix import derive_key
from twostep.rpc.convert import class_from_proto, sampling_from_proto
from twostep.rpc.v1 import decode_pb2, inference_pb2, prefill_pb2

# Log probabilities of one message: 8 KiB.
_MAX_SCORES = 1024
# A client's 128, and what a router adds to make the name unique.
MAX_ID_CHARS = 160
# Longer prompts are taken in a thread, so many tokens at a time: these take a fraction of a millisecond, 128 Ki of them some, for which
# nobody's stream is to wait.
_MAX_INLINE_TOKENS = 8192

_FINISH = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def attempt_id(request_id: str, attempt: int) -> str:
    """Returns the engine's name for one attempt of a request. Raises InvalidRequest."""
    if not 1 <= len(request_id) <= MAX_ID_CHARS:
        raise InvalidRequest(f"request_id has {len(request_id)} characters; give 1 to {MAX_ID_CHARS}")
    if attempt < 1:
        raise InvalidRequest("attempt is 0; attempts count from 1")
    return f"{request_id}/{attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReader:
    """Makes engine requests; what only the engine can judge (vocabulary, context, pool, grammars) is left to it."""

    secret: DeploymentSecret = field(repr=False)
    layout: LayoutRecord
    eos_token_ids: frozenset[int]

    async def read(self, proto: prefill_pb2.PrefillRequest | decode_pb2.ReserveRequest, *, pooling: Pooling | None = None) -> EngineRequest:
        """Returns the engine's request, at once but for a long prompt. Raises InvalidRequest naming the field."""
        if not proto.token_ids:
            raise InvalidRequest("token_ids is empty; give the prompt's tokens")
        seq_id, sampling = attempt_id(proto.request_id, proto.attempt), sampling_from_proto(proto.sampling)
        # The mean is over tokens that are all computed: nothing is looked up for it, or hashed.
        prefix_key = (
            b""
            if pooling is Pooling.MEAN
            else derive_key(
                self.secret,
                tenant=proto.tenant,
                salt=proto.cache_salt,
                model_fingerprint=self.layout.model_fingerprint,
                dtype=self.layout.dtype,
                quantization=self.layout.quantization,
            )
        )
        # A slice is a list, made in half the time that going through the field takes.
        long = len(proto.token_ids) > _MAX_INLINE_TOKENS
        token_ids = await asyncio.to_thread(_taken, proto.token_ids) if long else tuple(proto.token_ids[:])
        return EngineRequest(
            seq_id=seq_id,
            token_ids=token_ids,
            num_prompt_tokens=proto.num_prompt_tokens,
            sampling=sampling,
            eos_token_ids=self.eos_token_ids,
            request_class=class_from_proto(proto.request_class),
            tpot_s=_promised_s(proto, "tpot_ms"),
            gap_s=_promised_s(proto, "gap_ms"),
            prefix_key=prefix_key,
            pooling=pooling,
        )


def _promised_s(proto: prefill_pb2.PrefillRequest | decode_pb2.ReserveRequest, field: Literal["tpot_ms", "gap_ms"]) -> float | None:
    """Returns what a decode worker is to keep; None: nothing was promised. Raises InvalidRequest."""
    if not isinstance(proto, decode_pb2.ReserveRequest) or not proto.HasField(field):
        return None
    milliseconds: float = getattr(proto, field)
    if not milliseconds > 0:
        raise InvalidRequest(f"{field} is {milliseconds}; give the milliseconds that may pass between tokens, or leave it unset")
    return milliseconds / 1e3


def _taken(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Runs in a thread. Piece by piece, because the interpreter changes threads between calls, not within one."""
    taken: list[int] = []
    for start in range(0, len(token_ids), _MAX_INLINE_TOKENS):
        taken += token_ids[start : start + _MAX_INLINE_TOKENS]
    return tuple(taken)


def scores_to_proto(scores: PromptScores) -> list[inference_pb2.PromptLogprobs]:
    """Returns log probabilities of a prompt in parts, of which a message may hold a thousand."""
    num_top = scores.values.shape[1] // 2 - 1
    rows = max(1, _MAX_SCORES // (1 + num_top))
    return [_scores_part(scores.first + at, scores.values[at : at + rows], num_top) for at in range(0, len(scores.values), rows)]


def _scores_part(position: int, values: npt.NDArray[np.float64], num_top: int) -> inference_pb2.PromptLogprobs:
    return inference_pb2.PromptLogprobs(
        position=position,
        logprobs=values[:, 0].tolist(),
        ranks=values[:, 1].astype(np.int64).tolist(),
        num_top=num_top,
        top_logprobs=values[:, 2 : 2 + num_top].reshape(-1).tolist(),
        top_token_ids=values[:, 2 + num_top :].astype(np.int64).reshape(-1).tolist(),
    )


def token_to_proto(token: TokenOutput) -> prefill_pb2.Token:
    proto = prefill_pb2.Token()
    fill_token(proto, token)
    return proto


def fill_token(proto: prefill_pb2.Token, token: TokenOutput) -> None:
    """Writes a token into an empty message, which may be part of a message: for every token of every step, a copy is much of the work."""
    proto.token_id, proto.position = token.token_id, token.position
    if token.finish_reason is not None:
        proto.finish_reason = _FINISH[token.finish_reason]
    if token.logprob is not None:
        proto.logprobs.logprob = token.logprob
        for top in token.top_logprobs:
            proto.logprobs.top.add(token_id=top.token_id, logprob=top.logprob)
