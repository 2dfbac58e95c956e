"""The router's span of a request, and the parts of it, by what was recorded: nothing is traced while tokens flow.

The names of attributes are OpenTelemetry's (semantic conventions for generative AI, of 2025); those that it has no word for begin with
`twostep.`. Prompts, answers, stop strings and keys are none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from router.request.job import Job
from router.request.report import Report
from twostep.process.tracing import Attributes, Span
from twostep.rpc.v1 import inference_pb2

PROVIDER = "twostep"
# By OpenTelemetry's conventions for servers of RPC: whatever else a request ends with is its client's doing.
_OUR_FAULT = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})


@dataclass(frozen=True, slots=True)
class Part:
    """A child of the request's span; instants in monotonic seconds."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)


def operation_of(request: inference_pb2.GenerateRequest) -> str:
    """gen_ai.operation.name."""
    return "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"


def parts_of(report: Report, ended_at: float) -> Iterator[Part]:
    """One after the other:

    route       arrival until workers accepted it: prompt, admission, room, placement, reservation
    queue       in the worker that computes the prompt
    prefill     until the first token is here
    hand_over   of a prompt computed elsewhere: until the decode worker has its KV
    decode      until the last token is here

    The way to the first token is that of the attempt that gave it, what follows that of the last one.
    """
    transfer = report.transfer
    placed: Attributes = {"twostep.prefill_worker": transfer.prefill_worker, "twostep.decode_worker": transfer.decode_worker}
    first = report.first_token_at
    if first is None:
        # What it waited for in vain.
        yield Part("route", report.started, ended_at, placed if report.placed else {})
        return
    accepted = min(first, report.started + report.route_s)
    begun = min(first, accepted + report.queue_s)
    yield Part("route", report.started, accepted, placed)
    yield Part("queue", accepted, begun)
    yield Part("prefill", begun, first, {"twostep.prompt_tokens": report.num_prompt_tokens, "twostep.cached_tokens": report.cached_tokens})
    committed = report.committed_at
    if committed is None:
        return
    start = max(first, committed)
    if transfer.transport not in ("", "none"):
        moved: Attributes = {
            "twostep.transport": transfer.transport,
            "twostep.bytes": transfer.bytes,
            "twostep.chunks": transfer.chunks,
            "twostep.blocks_moved": transfer.blocks_moved,
            "twostep.blocks_reused": transfer.blocks_reused,
            "twostep.publish_s": report.publish_s,
            "twostep.fetch_s": report.fetch_s,
        }
        yield Part("hand_over", first, start, moved)
    if report.last_decode_at is not None:
        yield Part("decode", start, max(start, report.last_decode_at))


def asked(job: Job) -> Attributes:
    """Of the request."""
    sampling = job.sampling
    found: dict[str, str | int | float | bool] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
        "twostep.request_class": job.request_class.name.lower(),
    }
    if job.ttft_s is not None:
        found["twostep.target_ttft_s"] = job.ttft_s
    if job.tpot_s is not None:
        found["twostep.target_tpot_s"] = job.tpot_s
    return found


def told(span: Span, report: Report, *, num_tokens: int, num_reasoning_tokens: int, tpot_s: float | None, ended_at: float) -> None:
    """Of the answer, as far as it came."""
    found: dict[str, str | int | float | bool] = {
        "gen_ai.usage.input_tokens": report.num_prompt_tokens,
        "gen_ai.usage.output_tokens": num_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        "gen_ai.server.request.duration": ended_at - report.started,
        "twostep.attempts": report.attempts,
    }
    if num_reasoning_tokens:
        found["gen_ai.usage.reasoning.output_tokens"] = num_reasoning_tokens
    if report.first_token_at is not None:
        found["gen_ai.server.time_to_first_token"] = report.first_token_at - report.started
    if report.visible_at is not None:
        found["gen_ai.response.time_to_first_chunk"] = report.visible_at - report.started
    if tpot_s is not None:
        found["gen_ai.server.time_per_output_token"] = tpot_s
    span.set(found)
    for at, prefill_worker, decode_worker in report.begun:
        span.event("attempt", at, {"twostep.prefill_worker": prefill_worker, "twostep.decode_worker": decode_worker})
    for part in parts_of(report, ended_at):
        span.child(part.name, part.start, part.end, part.attributes)


def ended(span: Span, status: str, finish_reason: str) -> None:
    """`status`: a gRPC status code's name."""
    if finish_reason:
        span.set({"gen_ai.response.finish_reasons": (finish_reason,)})
    span.set({"rpc.response.status_code": status} | ({} if status == "OK" else {"error.type": status}))
    # Only the code: messages quote what clients send.
    span.end(failure=status if status in _OUR_FAULT else "")
