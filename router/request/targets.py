"""A request's targets, and whether they can be kept: decided before anything is asked of a worker, by pure functions.

A request with targets is refused as soon as they cannot be met any more: what it has waited, what it would still wait in the router's
queue, and what placement predicts on the workers, add up to more than its time to the first token; or a token would take longer than its
time per token, or than its longest gap. Batch requests are not refused for that: they wait. Nor is an answer that has begun: its client
holds a part of it.

The refusal says after how long to come again: by then what is too much should be gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from router.placing.placement import Placement
from twostep.errors import DeadlineExceeded, InvalidRequest, ResourceExhausted
from twostep.request_class import MAX_TARGET_MS, RequestClass
from twostep.rpc.convert import class_from_proto
from twostep.rpc.v1 import inference_pb2

# A front that knows who its callers are names the tenant here, and drops what they say themselves.
TENANT_HEADER = "x-twostep-tenant"
_MAX_TENANT_CHARS = 128

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0


class Reason(StrEnum):
    """Why a request got no worker."""

    BOUNDED = "bounded"
    TARGET_TTFT = "target_ttft"
    TARGET_TPOT = "target_tpot"
    TARGET_GAP = "target_gap"
    DEADLINE = "deadline"
    QUOTA = "quota"


class Refused(ResourceExhausted):
    """No room, or none in time: nothing was asked of any worker. A `retry_after_s` of None: it would be so at any time."""

    def __init__(self, reason: Reason, message: str, *, retry_after_s: float | None) -> None:
        super().__init__(message, retry_after_s=retry_after_s, hopeless=retry_after_s is None)
        self.reason = reason


class Expired(DeadlineExceeded):
    """Its time was up while it waited: nothing was asked of any worker."""

    reason = Reason.DEADLINE


def retry_after(seconds: float) -> float:
    """Bounds how long a client is asked to wait: not so little that it comes for nothing, not so much that it finds everything idle."""
    return min(_MAX_RETRY_S, max(_MIN_RETRY_S, seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Holds what a request was promised, in seconds; None: as soon as can be."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    gap_s: float | None = None

    @classmethod
    def of(cls, request: inference_pb2.GenerateRequest) -> Targets:
        """Raises InvalidRequest."""
        return cls(
            ttft_s=_seconds("ttft_ms", request.ttft_ms) if request.HasField("ttft_ms") else None,
            tpot_s=_seconds("tpot_ms", request.tpot_ms) if request.HasField("tpot_ms") else None,
            gap_s=_seconds("gap_ms", request.gap_ms) if request.HasField("gap_ms") else None,
        )

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None or self.gap_s is not None

    def missed(self, ttft_s: float | None, tpot_s: float | None, gap_s: float) -> frozenset[Reason]:
        """Returns the targets that an answer did not keep. A `ttft_s` of None: no token came; a `tpot_s` of None: there was but one.
        `gap_s`: its longest."""
        missed: set[Reason] = set()
        if self.ttft_s is not None and (ttft_s is None or ttft_s > self.ttft_s):
            missed.add(Reason.TARGET_TTFT)
        if self.tpot_s is not None and tpot_s is not None and tpot_s > self.tpot_s:
            missed.add(Reason.TARGET_TPOT)
        if self.gap_s is not None and gap_s > self.gap_s:
            missed.add(Reason.TARGET_GAP)
        return frozenset(missed)


NO_TARGETS = Targets()


def _seconds(field: str, milliseconds: float) -> float:
    if not 0 < milliseconds <= MAX_TARGET_MS:
        raise InvalidRequest(f"{field} is {milliseconds:g}; give milliseconds above 0, up to {MAX_TARGET_MS}, or leave it out")
    return milliseconds / 1e3


def class_of(request: inference_pb2.GenerateRequest) -> RequestClass:
    """Raises InvalidRequest for one that is not known here."""
    if request.request_class not in inference_pb2.RequestClass.values():
        names = ", ".join(str(known) for known in inference_pb2.RequestClass.values())
        raise InvalidRequest(f"request_class is {int(request.request_class)}; give one of {names}")
    return class_from_proto(request.request_class)


def tenant_of(request: inference_pb2.GenerateRequest, known: str | None) -> str:
    """Returns the tenant whose share the request uses: the one `known` of its caller, else its own word. Raises InvalidRequest."""
    tenant = request.tenant if known is None else known
    if len(tenant) > _MAX_TENANT_CHARS or not tenant.isprintable():
        where = "tenant" if known is None else f"the metadata {TENANT_HEADER}"
        raise InvalidRequest(f"{where} is {tenant[:_MAX_TENANT_CHARS]!r}; give at most {_MAX_TENANT_CHARS} printable characters")
    return tenant


# ---- can it be kept? --------------------------------------------------------------------------------------------------------


def refusal(targets: Targets, *, waited_s: float, queue_s: float, placed: Placement, attainable: bool) -> Refused | None:
    """Returns why a request that has waited for `waited_s` and would wait `queue_s` more must be refused; None: it need not be. Placement
    was asked about the rest of its time. `attainable`: idle workers would keep what was promised, to a request that comes to them at once;
    otherwise there is no telling when to come again."""
    if targets.tpot_s is not None and placed.predicted_tpot_s > targets.tpot_s and not placed.meets_targets:
        return Refused(
            Reason.TARGET_TPOT,
            f"a token would take {placed.predicted_tpot_s * 1e3:.1f} ms and tpot_ms is {targets.tpot_s * 1e3:g}; "
            f"{_advice('tpot_ms', attainable=attainable)}",
            retry_after_s=retry_after(placed.retry_after_s) if attainable else None,
        )
    if targets.gap_s is not None and placed.predicted_gap_s > targets.gap_s and not placed.meets_targets:
        return Refused(
            Reason.TARGET_GAP,
            f"a token would come {placed.predicted_gap_s * 1e3:.1f} ms after another and gap_ms is {targets.gap_s * 1e3:g}; "
            f"{_advice('gap_ms', attainable=attainable)}",
            retry_after_s=retry_after(placed.retry_after_s) if attainable else None,
        )
    if targets.ttft_s is None:
        return None
    ttft_s = waited_s + queue_s + placed.predicted_ttft_s
    # That the sum says so too: placement's own was of the rest of the time. Once that is up, nothing meets it, however soon it would come.
    late = (not placed.meets_targets or waited_s > targets.ttft_s) and waited_s + placed.predicted_ttft_s > targets.ttft_s
    if not late and not (queue_s > 0.0 and ttft_s > targets.ttft_s):
        return None
    # The time that it has waited counts no more the next time.
    excess_s = max(placed.predicted_ttft_s + queue_s - targets.ttft_s, placed.retry_after_s)
    return Refused(
        Reason.TARGET_TTFT,
        f"the first token would come after {ttft_s * 1e3:.0f} ms ({waited_s * 1e3:.0f} ms waited, {queue_s * 1e3:.0f} ms more in the "
        f"queue) and ttft_ms is {targets.ttft_s * 1e3:g}; {_advice('ttft_ms', attainable=attainable)}",
        retry_after_s=retry_after(excess_s) if attainable else None,
    )


def _advice(field: str, *, attainable: bool) -> str:
    return "repeat later, or allow more" if attainable else f"idle workers would not keep it either: allow more, or leave {field} out"


def out_of_time(queue_s: float) -> Refused:
    """Refuses one whose time to the first token was up before its turn came; `queue_s`: what it would have waited yet."""
    return Refused(
        Reason.TARGET_TTFT,
        "ttft_ms was up before there was room for the request; repeat later, or allow more",
        retry_after_s=retry_after(queue_s),
    )
