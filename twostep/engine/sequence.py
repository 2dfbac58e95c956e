"""One sequence on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from twostep.engine.grammar import Constraint
from twostep.engine.step_bound import Promise
from twostep.engine.types import EngineRequest, FinishReason
from twostep.errors import ContextExceeded, InvalidRequest
from twostep.pooling import Pooling
from twostep.prefix import PrefixHasher, token_bytes


class SequenceState(Enum):
    WAITING = "waiting"  # submitted, owns nothing
    RESERVED = "reserved"  # owns its blocks, whose content comes from elsewhere
    RUNNING = "running"  # owns its blocks, in the batch
    PREEMPTED = "preempted"  # gave way to others; owns nothing
    HELD = "held"  # prompt computed, owns its blocks, out of the batch
    ENDED = "ended"  # over; owns its blocks until the last step it is in is settled


@dataclass(slots=True)
class Priority:
    """How urgent a sequence is, so that no class starves another for good. Times in seconds, on any one clock.

        rank = class - whole spans of `ageing_s` that it has waited, in sum         0 interactive, 1 standard, 2 batch

    Waiting is time in which it could have gone on and was passed over: in the queue, after giving way, or running and left out of a step.
    Time in which it is served does not count, so an unhindered batch sequence stays one; and what it has waited is never taken back, so a
    sequence that is pushed out again and again ends up among the most urgent, where who came first goes first. After 2 * ageing_s of
    waiting, then, no later one is preferred to it. (Ageing, as in any priority scheduler: Silberschatz et al., Operating system concepts.)
    """

    request_class: int
    rank: int
    waited_s: float = 0.0
    since: float | None = None

    def pause(self, now: float) -> None:
        """Notes that it is passed over from now on, if it was not before."""
        if self.since is None:
            self.since = now

    def wait(self, now: float, ageing_s: float) -> None:
        """Brings the rank of a sequence that is passed over still up to date."""
        self.pause(now)
        assert self.since is not None
        self.rank = max(0, self.request_class - int((self.waited_s + now - self.since) / ageing_s))

    def serve(self, now: float) -> None:
        """Notes that it goes on."""
        if self.since is not None:
            self.waited_s += now - self.since
            self.since = None


@dataclass(slots=True, eq=False, kw_only=True)
class EngineSequence:
    """Tokens [0, num_computed) have their KV in the pool, those up to num_planned will have it once the launched steps are settled, and
    the rest is to be computed. A decoding sequence has exactly one token to compute: the one it sampled last, which may be in flight.

        given ───────────── sampled ─────  in flight
        0 1 2 3 4 5 6 7 8 9 10 11 12 13    14           len(tokens) = 14, num_pending = 1
        ───── num_computed = 13 ──── │
        ──────── num_planned = 14 ───── │

    Where drafts are in flight, `num_planned` and `num_pending` are as if all were accepted, until their step is settled.
    """

    request: EngineRequest
    hold: bool
    state: SequenceState
    tokens: list[int]
    # The request's token_ids as int64, so that a prompt chunk is a slice.
    given: npt.NDArray[np.int64]
    stop_ids: frozenset[int]
    # Longest the sequence can get, sampled tokens included.
    max_len: int
    # Blocks that it has then: the last token that can be sampled needs no place, and a held sequence ends with those given.
    end_blocks: int
    # None: its blocks are not shared, without a prefix key or because their KV is not what would have been computed here.
    hasher: PrefixHasher | None
    # In order, for all its tokens, those of each group of layers; more are taken as it grows, of all groups together. None: it owns none.
    blocks: list[list[int]] = field(default_factory=list)
    # Where its planned steps leave its state, where the model has one.
    state_blocks: Sequence[int] = ()
    # While a step is planned: where that finds it, if elsewhere. It owns these too, until the step does.
    state_source: Sequence[int] = ()
    # The hash at which a state is kept that it came by after what was given; None: there is none.
    state_kept: bytes | None = None
    # How many blocks of each group with windows, the first ones, it has left behind, or never had: no token to come sees them, and it owns
    # none of them.
    num_left: int = 0
    # How many tokens those have room for, and their row in the block tables; -1: it owns none.
    num_slots: int = 0
    table: int = -1
    # While waiting: the cached blocks found for it when it was last considered, of each group. They are not owned.
    matched: list[list[int]] = field(default_factory=list)
    # The same for those that follow in the host tier: their keys, of each group. None: none do.
    matched_in_host: Sequence[Sequence[bytes]] = ()
    # While waiting: tokens whose KV it would start with, and those of them that are in the pool; and more, whose KV is there without the
    # state that the model needs with it.
    num_matched: int = 0
    num_found: int = 0
    num_stateless: int = 0
    num_computed: int = 0
    num_planned: int = 0
    # Tokens that launched steps will sample, at most: of drafts, some come to nothing. The first of those of the step planned last that it
    # is in is sampled by its row `pending_row`.
    num_pending: int = 0
    pending_row: int = -1
    # What is drafted there.
    drafted: Sequence[int] = ()
    # Tokens found in the pool when it was first admitted.
    num_cached: int = 0
    num_registered: int = 0  # blocks
    # What its tokens were promised; None: nothing.
    promise: Promise | None = None
    # After how many layers of its steps somebody asks for its KV, ascending.
    mark_layers: Sequence[int] = ()
    # Its blocks are handed over while steps still write them: they are not exchanged for others of the same prefix.
    leaves_early: bool = False
    # False: its KV may yet turn out to be another's; no other sequence may use it.
    confirmed: bool = True
    # How many of its first tokens an encoder reads, all in one step, with one after them at least; None: the model has none.
    num_encoded: int | None = None
    # Given tokens whose KV was reported to be there.
    num_reported: int = 0
    # Prompt tokens after the first whose log probabilities were reported.
    num_scored: int = 0
    # Where its prompt is pooled: of how many of its first tokens launched steps have added up the hidden states, or will, and what is
    # there of the sum.
    num_pooled: int = 0
    pooled: npt.NDArray[np.float64] | None = None
    # Place in the order of arrival: of those equally urgent, the one that came later gives way.
    arrival: int = 0
    priority: Priority
    # What its tokens are held to; None: to nothing.
    constraint: Constraint | None = None
    gives_way: bool = False
    # Some of its blocks are being copied from the host tier: it is in no step.
    loading: bool = False
    # While reserved: tokens whose KV is there, where a copy from the host tier failed; what follows is to be computed. None: all will be.
    num_intact: int | None = None
    # Steps planned and not yet settled or failed that it is in; one more while blocks of it are copied from the host tier.
    num_steps: int = 0

    @property
    def seq_id(self) -> str:
        return self.request.seq_id

    @property
    def is_plannable(self) -> bool:
        return self.state is SequenceState.RUNNING and not self.gives_way and not self.loading

    @property
    def num_remaining(self) -> int:
        """Tokens to plan before the next one can be sampled."""
        return len(self.tokens) + self.num_pending - self.num_planned

    @property
    def least_chunk(self) -> int:
        """Returns how many tokens the next step of its prompt has at least."""
        return 1 if self.num_encoded is None or self.num_planned else self.num_encoded + 1

    @property
    def decodes(self) -> bool:
        """Returns whether one token is to be planned, that was sampled or is in flight."""
        num_tokens = len(self.tokens) + self.num_pending
        return num_tokens - self.num_planned == 1 and num_tokens > len(self.given)

    def begin_pace(self, now: float) -> None:
        """Notes that its last token, sampled or in flight, comes at `now`, in seconds: from there on it decodes, and what it was promised
        counts."""
        if self.promise is not None:
            self.promise.begin(now, len(self.tokens) + self.num_pending - 1, self.max_len - 1)

    @property
    def wants_scores(self) -> bool:
        """Returns whether log probabilities of its prompt are still to be computed: only tokens that are computed have logits."""
        return self.request.sampling.prompt_logprobs is not None and self.num_scored < self.request.num_prompt_tokens - 1

    @property
    def position(self) -> int:
        """Position, among the generated tokens of all attempts, of the token to be sampled next."""
        return len(self.tokens) - self.request.num_prompt_tokens

    def finish_reason(self, token_id: int, position: int) -> FinishReason | None:
        """Returns why a token sampled at `position` is the last one; None: it is not."""
        if token_id in self.stop_ids and (position >= self.request.sampling.min_tokens or self.constraint is not None):
            return FinishReason.STOP
        if self.request.num_prompt_tokens + position + 1 >= self.max_len:
            return FinishReason.LENGTH
        return None

    def block_hashes(self) -> list[bytes]:
        """Returns the hashes of all blocks that `tokens` fill; none without a prefix key."""
        if self.hasher is None:
            return []
        if self.hasher.num_tokens < len(self.tokens):
            self.hasher.extend(self.tokens[self.hasher.num_tokens :])
        return self.hasher.hashes


def make_sequence(
    request: EngineRequest,
    *,
    hold: bool,
    state: SequenceState,
    vocab_size: int,
    max_model_len: int,
    block_size: int,
    prefix_caching: bool,
    has_encoder: bool = False,
) -> EngineSequence:
    """Checks a request and hashes its blocks. With an encoder no block is hashed: what is in it depends on all of the prompt, not only on
    what comes before it. Raises InvalidRequest (ContextExceeded) with what to change."""
    params, tokens = request.sampling, list(request.token_ids)
    given = _checked_tokens(request, tokens, vocab_size=vocab_size, max_model_len=max_model_len)
    hasher = None
    # What is pooled whole is computed whole.
    if prefix_caching and not has_encoder and request.prefix_key and request.pooling is not Pooling.MEAN:
        hasher = request.hasher or PrefixHasher(request.prefix_key, block_size)
        assert hasher.unit == block_size, "blocks are what is hashed"
        hasher.extend(tokens[hasher.num_tokens :])
    constraint = None
    if request.grammar is not None:
        assert len(request.grammar.tokens) == request.num_prior_tokens, "the grammar is where the request is"
        constraint = Constraint(request.grammar, params, request.eos_token_ids)
    stop_ids = _stop_ids(request, vocab_size)
    max_len = min(request.num_prompt_tokens + params.max_tokens, max_model_len)
    return EngineSequence(
        request=request,
        hold=hold,
        state=state,
        tokens=tokens,
        given=given,
        stop_ids=stop_ids,
        max_len=max_len,
        end_blocks=-(-(len(tokens) if hold else max(len(tokens), max_len - 1)) // block_size),
        hasher=hasher,
        priority=Priority(request.request_class, request.request_class),
        num_encoded=request.num_prompt_tokens - 1 if has_encoder else None,
        constraint=constraint,
        promise=Promise(request.tpot_s or 0.0, request.gap_s or 0.0) if request.tpot_s or request.gap_s else None,
    )


def _checked_tokens(request: EngineRequest, tokens: list[int], *, vocab_size: int, max_model_len: int) -> npt.NDArray[np.int64]:
    """Returns `tokens`, those of the request, as int64 [T]. Raises InvalidRequest (ContextExceeded)."""
    if not 1 <= request.num_prompt_tokens <= len(tokens):
        raise InvalidRequest(f"the prompt has {request.num_prompt_tokens} of {len(tokens)} tokens; give at least one")
    try:
        given = np.frombuffer(token_bytes(tokens), "<u4").astype(np.int64)
    except InvalidRequest as error:
        raise InvalidRequest(f"token_ids must be from 0 to {vocab_size - 1}, the model's vocabulary: {error.message}") from error
    if given.max() >= vocab_size:
        raise InvalidRequest(f"token_ids must be from 0 to {vocab_size - 1}, the model's vocabulary; found {given.max()}")
    if len(tokens) >= max_model_len + (request.pooling is not None):
        what = f"{len(tokens)} leave no room to answer" if request.pooling is None else f"the prompt has {len(tokens)}"
        raise ContextExceeded.of(what, "shorten the prompt", max_model_len=max_model_len, prompt_tokens=len(tokens))
    if request.num_prior_tokens >= (most := request.sampling.max_tokens):
        raise InvalidRequest(f"all {most} tokens of max_tokens were generated before; there is nothing left to do")
    return given


def _stop_ids(request: EngineRequest, vocab_size: int) -> frozenset[int]:
    """Returns the tokens that end the answer. Raises InvalidRequest where `min_tokens` would leave none to sample."""
    params, constrained = request.sampling, request.grammar is not None
    ignores_eos = params.ignore_eos and not constrained
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if ignores_eos else request.eos_token_ids)
    held_back = not constrained and request.num_prior_tokens < params.min_tokens
    if held_back and len(stop_ids) >= vocab_size and stop_ids.issuperset(range(vocab_size)):
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, and each of the model's {vocab_size} tokens ends the answer; give fewer stop_token_ids, "
            "or no min_tokens"
        )
    return stop_ids
