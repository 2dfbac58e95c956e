"""Going on with an answer whose stream broke: tokens that its client has, as if they had just come."""

from __future__ import annotations

from collections.abc import Sequence, Set

from twostep.errors import InvalidRequest
from twostep.rpc.v1 import inference_pb2, prefill_pb2
from twostep.sampling_params import SamplingParams


def resumed_tokens(
    token_ids: Sequence[int], sampling: SamplingParams, *, eos_token_ids: Set[int], vocab_size: int
) -> list[prefill_pb2.Token]:
    """Positions count from 0; the last one has a finish reason if it ends the answer. Raises InvalidRequest for ids that cannot be the
    beginning of an answer to this request."""
    if len(token_ids) > sampling.max_tokens:
        raise InvalidRequest(
            f"resume_token_ids has {len(token_ids)} tokens and max_tokens, which counts them, is {sampling.max_tokens}; "
            "resume with the parameters of the first request"
        )
    # An answer in a grammar ends where nothing can follow, whatever was asked for.
    held = sampling.grammar is not None
    stops = frozenset(sampling.stop_token_ids) | (frozenset[int]() if sampling.ignore_eos and not held else eos_token_ids)
    tokens: list[prefill_pb2.Token] = []
    for position, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"resume_token_ids[{position}] is {token_id}; the vocabulary of this model has ids from 0 to {vocab_size - 1}"
            )
        last = position + 1 == len(token_ids)
        token = prefill_pb2.Token(token_id=token_id, position=position)
        if token_id in stops and (position >= sampling.min_tokens or held):
            if not last:
                raise InvalidRequest(
                    f"resume_token_ids[{position}] is {token_id}, which ends the answer, and others follow; "
                    "resume with the parameters of the first request"
                )
            token.finish_reason = inference_pb2.FINISH_REASON_STOP
        elif position + 1 >= sampling.max_tokens:
            token.finish_reason = inference_pb2.FINISH_REASON_LENGTH
        tokens.append(token)
    return tokens
