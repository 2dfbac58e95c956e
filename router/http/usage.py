"""The ends of answers as OpenAI and vLLM write them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from twostep.rpc.v1 import inference_pb2 as pb

_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_CONTENT_FILTER: "content_filter"}


def finish_of(end: pb.End) -> str:
    return _FINISH.get(end.finish_reason, "stop")


def was_cut(end: pb.End) -> bool:
    """The model did not end the answer itself: it was too long, was held back, or hit something that the client asked to stop at."""
    return finish_of(end) != "stop" or bool(end.stop_reason)


def stop_reason_of(end: pb.End, stop_strings: Sequence[str]) -> str | int | None:
    """The stop string, or the id of the stop token, that was asked for by name and ended the answer."""
    reason = end.stop_reason
    if not reason:
        return None
    return reason if reason in stop_strings else int(reason)


def usage_of(prompt_tokens: int, completion_tokens: int, *, cached_tokens: int = 0, reasoning_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def total_usage(prompts: Sequence[Sequence[pb.Usage]]) -> dict[str, Any]:
    """Of several answers to each of several prompts: a prompt counts once, with what of it was cached for its first answer."""
    return usage_of(
        sum(answers[0].prompt_tokens for answers in prompts),
        sum(answer.completion_tokens for answers in prompts for answer in answers),
        cached_tokens=sum(answers[0].cached_tokens for answers in prompts),
        reasoning_tokens=sum(answer.reasoning_tokens for answers in prompts for answer in answers),
    )


def phases_of(end: pb.End) -> dict[str, Any]:
    """`twostep` in an answer: seconds of each phase, how the KV cache travelled, and how often the request was begun."""
    return {"phases": _fields(end.phases), "transfer": _fields(end.transfer), "attempts": end.attempts}


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
