"""The plain values the SDK takes and returns. No protobuf in sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

FinishReason = Literal["stop", "length"]
Compression = Literal["none", "gzip"]
RequestClass = Literal["interactive", "standard", "batch"]


class SamplingOptions(TypedDict, total=False):
    """What may be asked of the sampler. An option left out takes the model's own default, else the neutral value."""

    max_tokens: int
    """Tokens to generate at most."""
    temperature: float
    """0 is greedy."""
    top_k: int
    """0 is off."""
    top_p: float
    min_p: float
    seed: int
    """Repeats an answer: the noise depends on seed and position alone."""
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    stop: str | Sequence[str]
    """The answer ends before the first of these."""
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int
    """0: of each token; n: also of the n likeliest at each position."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; a mapping with the same two keys does as well."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own distribution, before penalties, temperature and cuts."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of an answer. Text may lag behind the ids: half a character or a possible stop string is held back."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """As long as token_ids if logprobs were asked for, else empty."""
    position: int = 0
    """Index of the first of token_ids in the answer, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV the prefill worker took from its prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Where the time went, in seconds, as the servers measured it."""

    route_s: float
    queue_s: float
    prefill_s: float
    publish_s: float
    fetch_s: float
    first_decode_s: float
    decode_s: float
    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How the KV cache travelled. All empty if the prefill worker's first token ended the answer."""

    transport: str
    """"none": the decode worker computed the prompt itself, and `prefill_worker` is empty."""
    bytes: int
    chunks: int
    blocks_moved: int
    blocks_reused: int
    """Blocks that the decode worker already held."""
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str
    """The stop string or stop token's id that ended the answer, if one asked for by name did."""
    usage: Usage
    phases: Phases
    transfer: Transfer
    attempts: int
    request_id: str
    resumes: int = 0
    """How often the stream broke and went on; phases, transfer and attempts are those of its last part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that is served, and by how many workers right now."""

    name: str
    max_model_len: int
    fingerprint: str
    prefill_workers: int
    decode_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A text or a conversation as the model sees it."""

    token_ids: tuple[int, ...]
    max_model_len: int

    def __len__(self) -> int:
        return len(self.token_ids)
