"""What is simulated: which workers there are, and how KV travels between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from twostep.lab.plan.virtual_sequence import EngineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """From a prompt's last step to its sequence's place in the decode worker's next one: `latency_s`, and what the step did not hide of
    the bytes at `bytes_per_s`, one hand-over after the other into each decode worker. `hidden` is the share of the bytes that travels
    while the prompt is still being computed."""

    latency_s: float = 0.003
    bytes_per_s: float = 50e9
    kv_token_bytes: float = 0.0
    hidden: float = 0.0

    def exposed_s(self, num_tokens: int) -> float:
        """Time on the link after the prompt's last step."""
        return num_tokens * self.kv_token_bytes * (1 - self.hidden) / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """`num_prefill` prefill and `num_decode` decode workers; without prefill workers the decode workers compute prompts themselves, in
    chunks of what their step budget leaves (`twostep up --aggregated`). `edge_s` is what router, network and both workers' edges add to
    each request's first token."""

    num_prefill: int
    num_decode: int
    decode: EngineSpec
    prefill: EngineSpec | None = None
    hand_over: HandOver = field(default_factory=HandOver)
    edge_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.num_prefill >= 0
        assert self.num_decode >= 1
        assert self.num_prefill == 0 or self.prefill is not None

    @property
    def aggregated(self) -> bool:
        return self.num_prefill == 0

    @property
    def decode_spec(self) -> EngineSpec:
        """Of the decode workers as they are deployed: those that compute prompts launch steps as early as prefill workers do, since
        launching one with prompts takes as long there."""
        if self.prefill is None or not self.aggregated:
            return self.decode
        return replace(self.decode, ahead_s=self.prefill.ahead_s)

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def name(self) -> str:
        if self.aggregated:
            return f"{self.num_decode} aggregated, budget {self.decode.step_tokens}"
        return f"{self.num_prefill} prefill + {self.num_decode} decode"

    def sized(self, num_prefill: int, num_decode: int) -> Deployment:
        return replace(self, num_prefill=num_prefill, num_decode=num_decode)
