"""Each step of the model leaves something for a head, as a part of the step: captured with it, nothing is launched beside.

    residuals ─ LayerStates ─┐
    last norm ───────────────┴─ head.state ─▶ by slot ─ of the tokens before ─ head.write ─▶ the pool's last layer

States lie by slot as KV does: chunks of a prompt, preemption, shared prefixes and drafts that were not accepted need nothing of their
own. What lies in a slot may be another sequence's, of a block that came by hand-over or from the host: then one key, or one proposal, is
worse. An answer is not, for a draft is kept only if it is what is sampled.
"""

from __future__ import annotations

import logging

import torch

from twostep.model.families.layer_states import LayerStates
from twostep.model.heads.head import DraftHead
from twostep.model.kernels.ops import AttentionPlan
from twostep.model.step.kv_cache import KvCache

log = logging.getLogger(__name__)


class HeadTap:
    """A StepTap. `by_slot` [slots of the pool and one more, state_size]: the last is where rows of padding go."""

    def __init__(self, head: DraftHead, cache: KvCache) -> None:
        shape = cache.shape
        self.reads = head.reads
        self.failed = False
        self.by_slot = torch.zeros(shape.num_blocks * shape.block_size + 1, head.state_size, dtype=cache.dtype, device=cache.tensor.device)
        self.head = head
        self._states = LayerStates(head.layers)

    def enter(self, layer: int, residual: torch.Tensor) -> None:
        self._states.enter(layer, residual)

    def leave(self, plan: AttentionPlan, last: torch.Tensor | None, rows: torch.Tensor | None) -> None:
        if self.failed:
            return
        try:
            self._leave(plan, self._states.joined() if last is None else last, rows)
        except Exception:
            # The step goes on without.
            log.exception("the head took nothing of a step, and drafts nothing any more until the worker is restarted")
            self.failed = True

    def _leave(self, plan: AttentionPlan, seen: torch.Tensor, rows: torch.Tensor | None) -> None:
        slots, before = plan.places
        if rows is not None:
            slots = slots.index_select(0, rows)
        # A negative slot is the last row.
        self.by_slot.index_copy_(0, slots.long().remainder(len(self.by_slot)), self.head.state(seen))
        if self.head.attention is not None:
            self.head.write(plan, plan.token_ids, self.by_slot.index_select(0, before))
