"""How much of a GPU's memory the KV pool may take: what is left is measured, as the largest step runs once on a pool of one block.

1. before the weights are loaded      free memory: what other processes leave
2. weights are there                  one small step compiles kernels and lets libraries take what they keep
3. the largest step                   its peak, as torch's allocator reserves it; with an encoder, the largest of three steps' peaks:
                                      attention of one long prompt, or of one long answer, may take more than many short ones
4. num_blocks_within

    total of the card
    |-- others --|-- own: weights, context, libraries --|-- KV pool --|-- graphs --|-- largest step --|-- left alone --|
                 |<----------------- utilization * total ---------------------------------------------->|

"Others" are processes that were there before; what they hold is no part of the share, but it cannot be used either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from twostep.engine.batch import Batch, KvShape, SamplingRow
from twostep.errors import SetupError
from twostep.process.startup import Progress
from twostep.sampling_params import SamplingParams
from twostep.settings.worker import MAX_BLOCKS

log = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizing:
    """Asks for as many blocks as fit a share of the device's memory, beside steps of up to so many tokens and sequences; and beside a draft
    model that is loaded later, which takes `draft_bytes`, and as many for each block."""

    utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int
    draft_bytes: int = 0
    draft_block_bytes: int = 0


def free_memory(device: torch.device, sizing: PoolSizing) -> int:
    """Returns the free bytes before anything is loaded; warns if they are fewer than the share asked for."""
    free, total = torch.cuda.mem_get_info(device)
    if warning := shortage_at_start(total=total, free=free, utilization=sizing.utilization, device=str(device)):
        log.warning(warning)
    return int(free)


def measured_blocks(
    step: Callable[[Batch], object],
    shape: KvShape,
    sizing: PoolSizing,
    *,
    beside_block: int = 0,
    device: torch.device,
    free_at_start: int,
    graphs: int,
    vocab_size: int,
    max_model_len: int,
    progress: Progress,
) -> int:
    """Returns the blocks of a pool like `shape`, which is that of the pool `step` runs on now, of at least one block. `beside_block`: bytes
    that each takes besides; `graphs`: bytes that captured graphs will take. Raises SetupError."""
    trial = partial(_trial_batch, shape=shape, vocab_size=vocab_size, max_model_len=max_model_len)
    most = sizing.max_num_batched_tokens
    largest = [trial(most, sizing.max_num_seqs)]
    if shape.has_encoder:
        # One prompt, and an answer that is computed again behind the smallest prompt.
        longest = min(most, max_model_len)
        largest += [trial(longest, 1), trial(longest, 1, num_encoded=min(1, longest - 1))]

    progress.phase("kernels")
    for num_tokens in (1, min(8, most)):
        step(trial(num_tokens, 1))
    progress.phase("profile")
    try:
        peak = _peak_bytes(step, largest, device)
    except torch.OutOfMemoryError as error:
        raise SetupError(
            f"a step of {most} tokens does not fit the memory of {device} beside the weights; lower "
            f"--max-num-batched-tokens or --max-num-seqs, or end the other processes there: {error}"
        ) from error
    free, total = torch.cuda.mem_get_info(device)
    profile = MemoryProfile(
        total=int(total), free_at_start=free_at_start, free=int(free), step=peak, graphs=graphs, draft=sizing.draft_bytes
    )
    # A pool that cannot hold one full step is of no use.
    least = -(-min(max_model_len, most) // shape.block_size) * shape.num_groups
    num_blocks = num_blocks_within(
        profile, sizing.utilization, block_bytes=shape.block_bytes + beside_block, least_blocks=least, device=str(device)
    )
    if num_blocks > MAX_BLOCKS:
        log.warning(
            "the KV pool is cut to %d blocks of %d tokens; more of the memory is used with a larger --block-size",
            MAX_BLOCKS,
            shape.block_size,
        )
        num_blocks = MAX_BLOCKS
    _log_shares(profile, num_blocks, shape, sizing, device=device, max_model_len=max_model_len)
    return num_blocks


def _trial_batch(
    num_tokens: int, num_seqs: int, num_encoded: int | None = None, *, shape: KvShape, vocab_size: int, max_model_len: int
) -> Batch:
    """Returns `widest_batch` for all groups of layers of the pool. `num_encoded`: of each sequence, where the model has an encoder."""
    widest = widest_batch(
        num_tokens,
        num_seqs,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
    )
    tables, slots = shape.in_groups(widest.block_tables[0]), shape.in_groups(widest.slots[0])
    states = shape.trial_states(len(widest.seq_lens))
    encoded = None if num_encoded is None else np.full(len(widest.seq_lens), num_encoded, np.int32)
    return replace(widest, block_tables=tables, slots=slots, state_sources=states, state_tables=states, num_encoded=encoded)


def _peak_bytes(step: Callable[[Batch], object], largest: Sequence[Batch], device: torch.device) -> int:
    """Returns how many bytes more torch's allocator reserves while the most demanding of these steps runs."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    for batch in largest:
        step(batch)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # else the next one's peak would have what this one left
    return torch.cuda.max_memory_reserved(device) - before


def _log_shares(
    profile: MemoryProfile, num_blocks: int, shape: KvShape, sizing: PoolSizing, *, device: torch.device, max_model_len: int
) -> None:
    log.info(
        "memory of %s: %.2f GiB, of which others hold %.2f, weights and libraries %.2f, largest step %.2f, graphs about %.2f, KV pool %.2f",
        device,
        *(x / GIB for x in (profile.total, profile.others, profile.own, profile.step, profile.graphs, num_blocks * shape.block_bytes)),
    )
    if sizing.draft_bytes:
        kv_bytes = num_blocks * sizing.draft_block_bytes
        log.info("what drafts takes about %.2f GiB more, and %.2f beside the pool", profile.draft / GIB, kv_bytes / GIB)
    num_tokens = num_blocks // shape.num_groups * shape.block_size
    if num_tokens < max_model_len:
        log.warning(
            "the KV pool holds %d tokens, less than the context of %d: longer requests are refused",
            num_tokens,
            max_model_len,
        )


def widest_batch(num_tokens: int, num_seqs: int, *, vocab_size: int, max_model_len: int, block_size: int, num_blocks: int) -> Batch:
    """Returns a prefill step of `num_tokens` in up to `num_seqs` prompts, all of them sampled in the dearest way. It wants no more blocks
    than there are: what is read and written does not matter. Of one group of layers."""
    num_seqs = min(num_seqs, num_tokens)
    counts = np.full(num_seqs, num_tokens // num_seqs, np.int64)
    counts[: num_tokens % num_seqs] += 1
    counts = np.minimum(counts, max_model_len)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1], counts).astype(np.int64)
    width = -(-int(counts.max()) // block_size)
    tables = np.arange(num_seqs * width, dtype=np.int32).reshape(num_seqs, width) % num_blocks
    rows = np.repeat(np.arange(num_seqs), counts)
    tokens = positions % vocab_size
    params = SamplingParams(max_tokens=1, temperature=1.0, top_k=0, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=1)
    return Batch(
        token_ids=tokens,
        positions=positions,
        query_start=query_start,
        seq_lens=counts.astype(np.int32),
        block_tables=tables[None],
        slots=tables[None, rows, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        sample_rows=query_start[1:].astype(np.int64) - 1,
        sampling=[
            SamplingRow(params=params, position=0, history=tokens[:count].tolist(), num_prompt_tokens=int(count), stop_ids=frozenset())
            for count in counts
        ],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes of one device. `free_at_start` was measured before the weights were loaded, `free` after, with nothing cached. The largest
    step takes `step` on top while it runs, the captured graphs keep `graphs`."""

    total: int
    free_at_start: int
    free: int
    step: int
    graphs: int = 0
    draft: int = 0  # of a draft model, but for its KV

    @property
    def own(self) -> int:
        """Bytes that this process holds for good. Never negative: others may have left meanwhile."""
        return max(0, self.free_at_start - self.free)

    @property
    def others(self) -> int:
        return self.total - self.free_at_start

    def pool_bytes(self, utilization: float) -> int:
        """Room for the pool, so that this process takes at most `utilization` of the card and nothing that others hold. Negative: so
        much is missing even for an empty one."""
        return min(int(self.total * utilization) - self.own, self.free) - self.step - self.graphs - self.draft


def num_blocks_within(profile: MemoryProfile, utilization: float, *, block_bytes: int, least_blocks: int, device: str) -> int:
    """Returns how many blocks fit. Raises SetupError if fewer than `least_blocks` do, with what is missing and what to change."""
    room = profile.pool_bytes(utilization)
    least = least_blocks * block_bytes
    if room >= least:
        return room // block_bytes
    needed = profile.own + profile.step + profile.graphs + profile.draft + least
    # In hundredths, as people give it, and with a byte for rounding.
    enough = -(-100 * (needed + 1) // profile.total) / 100
    parts = (
        f"weights and libraries {_gib(profile.own)}, the largest step {_gib(profile.step)}, graphs {_gib(profile.graphs)}, "
        f"{f'a draft model {_gib(profile.draft)}, ' if profile.draft else ''}"
        f"at least {_gib(least)} of KV ({least_blocks} blocks)"
    )
    smaller = "lower --max-num-batched-tokens or --max-num-seqs, or take a smaller model or another --dtype"
    if enough <= 1.0 and needed - profile.own <= profile.free:
        what = f"give --gpu-memory-utilization {enough:.2f} or more; or {smaller}"
    elif profile.others >= least - room:
        what = f"other processes hold {_gib(profile.others)} of it: end them or choose another --device; or {smaller}"
    else:
        what = smaller
    raise SetupError(
        f"{_gib(least - room)} of memory are missing on {device}: {parts} do not fit --gpu-memory-utilization {utilization:g} "
        f"of {_gib(profile.total)}; {what}"
    )


def shortage_at_start(*, total: int, free: int, utilization: float, device: str) -> str:
    """Says what an operator should know before anything is loaded; empty if the share is free."""
    wanted = int(total * utilization)
    if free >= wanted:
        return ""
    return (
        f"{_gib(total - free)} of the {_gib(total)} of {device} are in use already, by other processes or this one's own context: "
        f"{_gib(free)} are left where --gpu-memory-utilization {utilization:g} asks for {_gib(wanted)}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
