"""Bounds of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from twostep.errors import SetupError
from twostep.settings.speculative import SpeculativeConfig
from twostep.settings.worker import MAX_BLOCKS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`max_num_batched_tokens` is the fixed token budget of a step (Dynamic SplitFuse, DeepSpeed-FastGen section 3.2: long prompts are
    split to fit it, short ones fused into it). Since every sequence in a step takes at least one of these tokens, no more run than that,
    whatever `max_num_seqs` says.

    `max_num_seqs` bounds the sequences of a step, those reserved included. Batch sequences that are passed over for others take no seat
    from them, so up to as many more may own blocks.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    # Prompts in the queue; urgent ones are refused for urgent ones only.
    max_waiting: int = 256
    enable_prefix_caching: bool = True
    # Whether to launch a step while the one before it is in flight; None: where the runner gains by it.
    look_ahead: bool | None = None
    # How much host memory the prefixes may take that the pool gives up (host_tier.py); 0: they are gone then.
    host_cache_bytes: int = 0
    # Share of the pool that can be given out at any time without losing what is worth keeping in the host.
    host_ahead_share: float = 0.125
    # Hash unit of the deployment (tokens), a multiple of the block size: boundaries at which cached prefixes are announced.
    hash_unit: int = 64
    # Longest that a step with prompts and urgent decodes may take by the step curve, in seconds; 0: as the decodes' own targets say.
    max_step_s: float = 0.0
    # A prompt that the time bound leaves nothing gets so many tokens a step all the same.
    min_chunk_tokens: int = 32
    # How tokens are drafted; None: they are not.
    speculative: SpeculativeConfig | None = None
    # So long a wait makes a sequence one class more urgent.
    ageing_s: float = 30.0

    @property
    def prompt_room(self) -> int:
        """Returns how many tokens of one prompt a step has room for, beside all others that may decode."""
        return prompt_room(self.max_num_batched_tokens, self.max_num_seqs)

    def check(self, block_size: int) -> None:
        """Raises SetupError for bounds that make no sense together."""
        if min(self.max_num_batched_tokens, self.max_num_seqs, self.max_waiting, self.min_chunk_tokens) < 1:
            raise SetupError("max_num_batched_tokens, max_num_seqs, max_waiting and min_chunk_tokens must each be at least 1")
        if self.hash_unit < 1 or self.hash_unit % block_size:
            raise SetupError(f"hash_unit {self.hash_unit} is no multiple of the block size {block_size}; change either")
        if not self.max_step_s >= 0:
            raise SetupError(f"max_step_s is {self.max_step_s}; give seconds, or 0 for no bound")
        if not self.ageing_s > 0:
            raise SetupError(f"ageing_s is {self.ageing_s}; give the seconds of waiting that make a sequence one class more urgent")


def prompt_room(max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """See EngineConfig.prompt_room."""
    return max_num_batched_tokens - (min(max_num_seqs, max_num_batched_tokens) - 1)


def check_pool(num_blocks: int, block_size: int, max_model_len: int = 0) -> None:
    """Raises SetupError for a KV pool that no engine should have. `max_model_len`: what was asked for; 0: nothing."""
    if num_blocks < 1:
        raise SetupError("the KV cache holds no block; raise --kv-cache-memory-bytes, or lower --block-size")
    if num_blocks > MAX_BLOCKS:
        raise SetupError(
            f"a KV cache of {num_blocks} blocks of {block_size} tokens is more than can be kept account of, {MAX_BLOCKS} blocks; raise "
            "--block-size, or lower --kv-cache-memory-bytes"
        )
    if max_model_len > num_blocks * block_size:
        raise SetupError(
            f"--max-model-len {max_model_len} is more than the KV cache holds, {num_blocks} blocks of {block_size} tokens: no request "
            "could be so long; raise --kv-cache-memory-bytes, or lower --max-model-len"
        )
