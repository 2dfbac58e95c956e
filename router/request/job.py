"""A request as the router passes it around."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.request.targets import NO_TARGETS, Targets
from twostep.pooling import Pooling, PoolingParams
from twostep.request_class import RequestClass
from twostep.sampling_params import SamplingParams

Metadata = tuple[tuple[str, str], ...]

# Of the time that the first token was promised within, what may have passed when one that was kept is sent.
_FIRST_TOKEN_WITHIN = 0.95


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestJob:
    """A validated request. `deadline` is in time.monotonic() seconds; `metadata` goes along with every call to a worker. `resumed`: tokens
    of the answer that the client has already. Without `migrate`, nothing is begun again once the client has been sent tokens. `targets`
    are what the client was promised, the first token counted from `arrived`. `expected_tokens`: how many the answer is thought to have.
    `prompt_only`: it has none; the one that workers sample all the same is dropped. `pooling`: it is one for an embedding, without tokens;
    None: it is not. `num_added`: as of Prompt."""

    request_id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    deadline: float
    tenant: str = ""
    cache_salt: str = ""
    resumed: Sequence[int] = ()
    migrate: bool = True
    prompt_only: bool = False
    pooling: PoolingParams | None = None
    metadata: Metadata = ()
    request_class: RequestClass = RequestClass.STANDARD
    targets: Targets = NO_TARGETS
    arrived: float = field(default_factory=time.monotonic)
    expected_tokens: int = 1
    num_added: int = 0

    @property
    def computes_all(self) -> bool:
        """Returns whether all of the prompt is computed, whoever has a part of it."""
        pools_all = self.pooling is not None and self.pooling.kind is Pooling.MEAN
        return pools_all or self.sampling.prompt_logprobs is not None

    def first_token_may_wait_s(self) -> float:
        """Returns how long it may be kept from the client for the sake of the gap behind it: no longer than that may be, nor than its own
        target allows. 0: no gap was promised."""
        targets = self.targets
        if targets.gap_s is None or targets.ttft_s is None:
            return targets.gap_s or 0.0
        return max(0.0, min(targets.gap_s, _FIRST_TOKEN_WITHIN * targets.ttft_s - (time.monotonic() - self.arrived)))

    def remaining_s(self) -> float:
        return max(0.001, self.deadline - time.monotonic())
