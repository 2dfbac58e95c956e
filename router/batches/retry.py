"""Which failures of a request a batch tries again, and when. Pure."""

from __future__ import annotations

from router.request.targets import Expired
from twostep.errors import DataLoss, DeadlineExceeded, Incompatible, InternalError, ResourceExhausted, TwostepError, Unavailable

_FIRST_S = 0.5
_LONGEST_S = 30.0
# Of what need not get better.
MAX_FAILURES = 3
# A request whose workers are lost each time may be why.
MAX_LOSSES = 8


def retry_s(error: Exception, num_before: int, draw: float) -> float | None:
    """Seconds until the next try, after `num_before` failed ones and this one; None: the error is the answer. `draw` is in 0 to 1. Having
    no room is not the request's fault, and waited out however long it takes."""
    wait_s = min(_LONGEST_S, _FIRST_S * 2.0 ** min(num_before, 16)) * (0.5 + draw / 2)
    if isinstance(error, ResourceExhausted):
        return max(wait_s, (error.retry_after_s or 0.0) * (1.0 + draw / 4))
    if isinstance(error, Expired):
        return wait_s
    if isinstance(error, Unavailable):
        return wait_s if num_before + 1 < MAX_LOSSES else None
    if isinstance(error, (DeadlineExceeded, Incompatible, DataLoss, InternalError)) or not isinstance(error, TwostepError):
        return wait_s if num_before + 1 < MAX_FAILURES else None
    return None
