"""A head's rounds on a GPU: each is one graph, whose tokens and states stay on the device for the next.

    host     batches of all rounds ─one copy→ ─ replay ─ replay ─ replay ─ wait ─▶ tokens of all rounds
    device                               inputs ─▶ carry ─ head ─ pick ─▶ tokens, hidden ─┐
                                                     └────────────────────────────────────┘

Of rows that are drawn, the sampler draws between two replays, with the noise that the model's own rows will be drawn with. Penalties look
at the tokens that are known and the one drafted last.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from twostep.engine.batch import Batch
from twostep.model.heads.head import DraftHead
from twostep.model.heads.tap import HeadTap
from twostep.model.kernels.step_inputs import StepInputs
from twostep.model.kernels.torch_attention import slots_before
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.kernels.triton_tokens import carry_tokens, pick_greedy
from twostep.model.runner.captured_step import CapturedStep
from twostep.model.runner.device_sampler import DeviceSampler
from twostep.model.runner.head_rounds import asks_for_tokens, plan_of
from twostep.model.step.graph_ladder import StepShape, ladder
from twostep.model.step.kv_cache import KvCache

log = logging.getLogger(__name__)

_WARM_UPS = 1


class DeviceRounds:
    """The Rounds of one model and pool, on the current device and stream; on a CPU, kernels are interpreted."""

    def __init__(self, tap: HeadTap, cache: KvCache, ops: TritonOps, *, max_rows: int, most_tokens: int, max_model_len: int) -> None:
        """`max_rows`: rows up to which rounds are captured, of as many tokens as `most_tokens`; 0: none is."""
        self._head = head = tap.head
        self._tap = tap
        self._cache = cache.with_scratch()
        self._ops = ops
        self._block_size = cache.shape.block_size
        device = cache.tensor.device
        num_own = head.vocab_size if head.target_ids is None else len(head.target_ids)
        self._own = DeviceSampler(ops.upload, ops.tokens, num_own)
        self._whole = self._own if head.target_ids is None else DeviceSampler(ops.upload, ops.tokens, head.vocab_size)
        self._hidden = torch.zeros(max(1, max_rows), head.state_size, dtype=cache.dtype, device=device)
        num_blocks = -(-max_model_len // self._block_size) + -(-most_tokens // self._block_size)
        self._tables = torch.zeros(max(1, max_rows), num_blocks, dtype=torch.int32, device=device)
        self._sizes = ladder(max_rows) if max_rows else []
        # By size, and the round's number where that matters.
        self._captured: dict[tuple[int, int], _CapturedRound] = {}
        with torch.inference_mode():
            self._own.warm_up(cache.dtype)
            try:
                self._capture(range(most_tokens if head.counts_rounds else 1))
            except Exception as error:  # noqa: BLE001 - whatever a compiler or driver raises: this card does without
                log.warning("the head's rounds are launched kernel by kernel: %s: %s", type(error).__name__, str(error)[:200])
                self._captured = {}

    def _capture(self, numbers: Sequence[int]) -> None:
        warming = torch.cuda.Stream(self._cache.tensor.device) if self._sizes else None
        pool: Any = None
        # The largest first: the others fit into its memory.
        for size in reversed(self._sizes):
            for number in numbers:
                step = _CapturedRound(self._tap, self._cache, self._ops, size, number, self._tables[:size], self._hidden[:size])
                assert warming is not None
                step.warm_up(warming, _WARM_UPS)
                step.capture(pool)
                pool = step.graph.pool()
                self._captured[size, number] = step

    @property
    def count(self) -> int:
        return len(self._captured)

    def close(self) -> None:
        self._captured = {}

    def run(self, batches: Sequence[Batch]) -> Sequence[Sequence[int]]:
        device = self._cache.tensor.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            drafted = self._replayed(batches) if self._captured else self._launched(batches)
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        return [tokens.tolist() for tokens in drafted]

    def _replayed(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        drafted = []
        steps = [self._captured_for(len(batch.seq_lens), number) for number, batch in enumerate(batches)]
        packed = [step.inputs.packed(batch, len(batch.seq_lens), 0) for step, batch in zip(steps, batches, strict=True)]
        with self._ops.upload.ahead((*packed, batches[0].block_tables[0])) as (*sent, tables):
            num_rows, width = tables.shape
            self._tables[:num_rows, :width].copy_(tables)
            for step, inputs, batch in zip(steps, sent, batches, strict=True):
                step.inputs.memory.copy_(inputs)
                step.graph.replay()
                drafted.append(self._chosen(step.logits[: len(batch.seq_lens)], batch))
        return drafted

    def _captured_for(self, num_rows: int, number: int) -> _CapturedRound:
        size = next(size for size in self._sizes if size >= num_rows)
        return self._captured[size, number if self._head.counts_rounds else 0]

    def _launched(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        drafted, ops = [], self._ops
        (before,) = ops.upload.send((slots_before(batches[0], self._block_size),))
        states = self._tap.by_slot.index_select(0, before)
        for number, batch in enumerate(batches):
            plan = plan_of(self._head, batch, self._cache, ops)
            token_ids = ops.tokens[: len(batch.seq_lens)] if plan is None else plan.token_ids
            states, logits = self._head.step(plan, token_ids, states[: len(batch.seq_lens)], number)
            pick(self._head, logits, ops.tokens[: len(logits)])
            drafted.append(self._chosen(logits, batch))
        return drafted

    def _chosen(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Leaves the round's tokens where the next one carries them from, and returns them on the host, there when the device is."""
        rows, tokens = batch.sampling, self._ops.tokens[: len(batch.sampling)]
        if any(map(asks_for_tokens, rows)):
            self._whole.sample(self._head.whole_logits(logits), batch)
        elif not all(row.params.greedy for row in rows):
            # All other tokens have no share, and in their order noise falls on the same ones.
            self._own.sample(logits, batch)
            name(self._head, tokens)
        host = torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        return host.copy_(tokens, non_blocking=True)


class _CapturedRound(CapturedStep):
    def __init__(
        self,
        tap: HeadTap,
        cache: KvCache,
        ops: TritonOps,
        size: int,
        number: int,
        tables: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        super().__init__()
        head = tap.head
        shape, device = StepShape(size, size), cache.tensor.device
        # Kept: the graph reads and writes their memory at every replay.
        if head.attention is None:
            self.inputs, self._plan = StepInputs(shape, 1, device, placed=cache.shape.block_size), None
        else:
            spec = replace(head.attention, placed=True)
            self.inputs = ops.captured_inputs(shape, cache, spec)
            self._plan = ops.plan_captured(self.inputs, [tables], cache, spec)
        self._head = head
        self._by_slot = tap.by_slot
        self._tokens = ops.tokens[:size]
        self._all_tokens = ops.tokens
        self._number = number
        self._hidden = hidden

    def step(self) -> torch.Tensor:
        inputs = self.inputs
        token_ids, carried = inputs.tensor("token_ids"), inputs.tensor("carried")
        carry_tokens(token_ids, carried, self._all_tokens)
        first = carried < 0
        # What later rounds go on from is in no slot of the pool: the token before may lie in a scratch block.
        left = self._by_slot.index_select(0, torch.where(first, inputs.tensor("before"), 0))
        states = torch.where(first.unsqueeze(1), left, self._hidden)
        hidden, logits = self._head.step(self._plan, token_ids, states, self._number)
        self._hidden.copy_(hidden)
        pick(self._head, logits, self._tokens)
        return logits


def pick(head: DraftHead, logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Writes the model's token of each row's largest logit."""
    pick_greedy(logits, tokens)
    name(head, tokens)


def name(head: DraftHead, tokens: torch.Tensor) -> None:
    """Writes the model's tokens in place of the head's."""
    if head.target_ids is not None:
        tokens.copy_(head.target_ids.index_select(0, tokens.clamp(min=0)))
