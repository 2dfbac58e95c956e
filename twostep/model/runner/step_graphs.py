"""Steps as CUDA graphs: captured once for each of a ladder of shapes, replayed with other inputs.

    decodes   batch of 13 ─pad→ 16 rows ─one copy→ inputs ─replay→ logits [16, V] ─cut→ [13, V]
    mixed     13 decodes, chunks of 100 and 7 tokens ─pad→ 128 rows, 32 decodes, 16 chunks ─one copy→ inputs ─replay→ logits [48, V]
                                                    tokens of the step before ─┘      └─ the largest logit's tokens

A launch costs the host more than many of a step's kernels take on the device; a replay launches all of them at once. Inputs keep their
addresses (step_inputs.py): lengths, blocks, slots and what the chunks are is read on the device. How many of a mixed step's rows are
decodes is not fixed, only how many may be.

The graphs take turns in one memory, their logits too: those of a step are there until the next replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from twostep.engine.batch import Batch
from twostep.model.families.decoder import Decoder
from twostep.model.kernels.step_inputs import slots_of
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.kernels.triton_prefill import num_leading_decodes
from twostep.model.kernels.triton_shared_prefix import serves_shared
from twostep.model.kernels.triton_tokens import carry_tokens, go_on, pick_greedy
from twostep.model.runner.captured_step import CapturedStep
from twostep.model.step.graph_ladder import StepShape, sharing_ladder
from twostep.model.step.kv_cache import KvCache

log = logging.getLogger(__name__)

_WARM_UPS = 1
# Of the trial: a prefix that is worth sharing, and what the order of sums and the rounding of weights to 16 bits may change in what one
# layer's attention gives a sequence.
_TRIAL_KEYS = 4096
_TRIAL_DIFFERENCE = 3e-2


class StepGraphs:
    """The captured steps of one model and pool, on the current device."""

    def __init__(
        self,
        model: Decoder,
        cache: KvCache,
        ops: TritonOps,
        sizes: Sequence[int],
        captured_one: Callable[[int, int], object] = lambda done, total: None,
        *,
        mixed: Sequence[StepShape] = (),
        meet: Callable[[], object] | None = None,
    ) -> None:
        """Captures one graph per size of a step of decodes, and per shape of a `mixed` one: takes some hundredths of a second each, and
        memory for the largest step once. `captured_one` is called with how many of how many are there. Where mixed steps cannot be
        captured, or over a pool whose chunks no captured kernel attends, they are launched kernel by kernel, and the log says so. There are
        more graphs, of steps that read shared prefixes once; where these cannot be captured, `try_sharing` says why.

        `meet`: this is one of several ranks, which exchange while they warm up and not while they capture, and waits for all others to
        have warmed up. A warm-up that fails is raised then, since the others wait inside it; what one rank could not capture, all of them
        have to do without (`without_mixed`), and no prefixes are shared."""
        assert cache.shape.num_blocks * cache.shape.block_size < 2**31
        self._sizes = sorted(sizes)
        self._cache = cache
        self._ops = ops
        self._max_model_len = model.config.max_model_len
        self._attention = model.attention
        if cache.shape.block_size % 16:
            mixed = ()
        blocks = -(-self._max_model_len // cache.shape.block_size)
        most_seqs = max([self._sizes[-1], *(shape.num_seqs for shape in mixed)])
        # Of each group of layers.
        self._tables = [
            torch.zeros(most_seqs, blocks, dtype=torch.int32, device=cache.tensor.device) for _ in range(cache.shape.num_groups)
        ]
        state_blocks = cache.shape.num_state_blocks
        # Batch.state_sources and .state_tables, where the model has states.
        self._states = [
            torch.zeros(most_seqs, state_blocks, dtype=torch.int32, device=cache.tensor.device) for _ in range(2 * bool(state_blocks))
        ]
        # Equal blocks in one group say nothing of another.
        shareable = serves_shared(cache.shape, num_heads=model.config.num_heads, windows=model.config.windows) and cache.shape.num_full == 1
        sharing = sharing_ladder(self._sizes) if shareable and meet is None else []
        self._pool: Any = None
        self._num_done, self._total = 0, len(self._sizes) + len(sharing) + len(mixed)
        self._captured_one = captured_one
        self._warming = torch.cuda.Stream(cache.tensor.device)
        # The largest first: the others fit into its memory.
        self._mixed: dict[StepShape, _Captured] = {}
        trouble: Exception | None = None
        prepared: list[_Captured] = []
        try:
            prepared = self._prepare_mixed(model, sorted(mixed, reverse=True))
        except Exception as error:  # whatever a compiler or driver raises: this card does without
            if meet is not None:
                raise
            trouble = error
        decodes = [self._prepare(model, StepShape(size, size)) for size in reversed(self._sizes)]
        if meet is not None:
            meet()
        try:
            for step in prepared:
                self._mixed[step.shape] = self._capture(step)
        except Exception as error:  # noqa: BLE001 - as above
            trouble = error
        if trouble is not None:
            log.warning("steps with prompts are launched kernel by kernel: %s: %s", type(trouble).__name__, str(trouble)[:200])
            self._mixed = {}
        self._shapes = sorted(self._mixed)
        self._graphs = {step.shape.decodes: self._capture(step) for step in decodes}
        self._sharing: dict[int, _Captured] = {}
        self._sharing_trouble = ""
        try:
            for size in reversed(sharing):
                self._sharing[size] = self._capture(self._prepare(model, StepShape(size, size), sharing=True))
        except Exception as error:  # noqa: BLE001 - as above
            self._sharing_trouble = f"{type(error).__name__}: {str(error)[:200]}"
            self._sharing = {}

    def _prepare_mixed(self, model: Decoder, shapes: Sequence[StepShape]) -> list[_Captured]:
        rows_seen, seqs_seen, prepared = set[int](), set[int](), list[_Captured]()
        for shape in shapes:
            seen = shape.rows in rows_seen and shape.num_seqs in seqs_seen
            rows_seen.add(shape.rows)
            seqs_seen.add(shape.num_seqs)
            prepared.append(self._prepare(model, shape, warm_ups=0 if seen else _WARM_UPS))
        return prepared

    def _prepare(self, model: Decoder, shape: StepShape, *, sharing: bool = False, warm_ups: int | None = None) -> _Captured:
        tables, states = ([each[: shape.num_seqs] for each in some] for some in (self._tables, self._states))
        step = _Captured(model, self._cache, self._ops, shape, tables, states, sharing=sharing)
        step.warm_up(self._warming, _WARM_UPS if warm_ups is None else warm_ups)
        return step

    def _capture(self, step: _Captured) -> _Captured:
        step.capture(self._pool)
        self._pool = step.graph.pool()
        self._num_done += 1
        self._captured_one(self._num_done, self._total)
        return step

    @property
    def count(self) -> int:
        return len(self._graphs) + len(self._sharing) + len(self._mixed)

    @property
    def num_mixed(self) -> int:
        return len(self._mixed)

    @property
    def shares_prefixes(self) -> bool:
        """Returns whether steps of decodes read prefixes that several rows share once."""
        return bool(self._sharing)

    @property
    def most_prompt_rows(self) -> int:
        """Rows up to which steps with prompts are captured, whatever decodes beside them; 0: none is."""
        return max((shape.rows for shape in self._mixed if shape.decodes), default=0)

    def without_mixed(self) -> None:
        """Drops the mixed steps' graphs, where other ranks have not captured the same."""
        self._mixed, self._shapes = {}, []

    def try_sharing(self) -> str:
        """Attends as the largest step that shares prefixes does, and as the one that does not, over random KV; to be called while the pool
        is empty. Attention alone, of one layer: in the logits of a whole step, rounding shows as much as a fault where it chooses other
        experts. Empty, or what is wrong: nothing is shared from now on, as in a pool that is too small for a prefix worth sharing."""
        if not self._sharing:
            return self._sharing_trouble
        size = max(self._sharing)
        sharing, alone = self._sharing[size], self._graphs[size]
        batch = self._worth_sharing(sharing)
        if batch is None or sharing.shared is None:
            self._sharing = {}
            return ""
        used = int(batch.block_tables.max()) + 1
        self._cache.fill_random(used)
        shape, num_heads = self._cache.shape, self._attention.num_heads
        width = (num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        qkv = torch.randn(size, width, device=self._cache.tensor.device).to(self._cache.dtype)
        layer = self._attention.windows.index(0)
        want = self._attended(alone, batch, (), layer, qkv)
        got = self._attended(sharing, batch, (sharing.shared.listing(batch.block_tables[0], batch.seq_lens),), layer, qkv)
        self._cache.tensor[:used].zero_()
        # Of the sequence that differs most.
        difference = float(((got - want).norm(dim=1) / want.norm(dim=1)).max())
        if difference < _TRIAL_DIFFERENCE:
            return ""
        self._sharing = {}
        return f"attention differs by {difference:.1e} from that without"

    def _attended(self, captured: _Captured, batch: Batch, listing: Sequence[Any], layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Returns what attention of this batch's decodes gives, float32 [size, num_heads * head_dim]."""
        self._send(captured, batch, len(batch.seq_lens), listing)
        captured.plan.refresh()
        return captured.plan.attend(layer, qkv).float()

    def _worth_sharing(self, captured: _Captured) -> Batch | None:
        """A batch of one prefix, as long as the pool allows."""
        shape, size = self._cache.shape, captured.shape.decodes
        num_shared = min(_TRIAL_KEYS // shape.block_size, self._tables[0].shape[1] - 1, shape.num_blocks - size)
        if num_shared < 1 or captured.shared is None:
            return None
        tables = np.empty((size, num_shared + 1), np.int32)
        tables[:, :-1] = np.arange(num_shared)
        tables[:, -1] = num_shared + np.arange(size)
        lengths = num_shared * shape.block_size + 1 + np.arange(size, dtype=np.int32) % shape.block_size
        lengths = np.minimum(lengths, np.int32(self._max_model_len))
        if captured.shared.listing(tables, lengths) is None:
            return None
        return Batch(
            token_ids=np.arange(size, dtype=np.int64),
            positions=lengths.astype(np.int64) - 1,
            query_start=np.arange(size + 1, dtype=np.int32),
            seq_lens=lengths,
            block_tables=shape.in_groups(tables),
            slots=shape.in_groups(np.full(size, -1, np.int64)),
            sample_rows=np.arange(size),
            sampling=(),
        )

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """Logits [R, vocab_size] of the batch's sample rows, valid until the next call. The greedy choice of each is in TritonOps.tokens
        then. None: no graph serves this batch."""
        num_seqs = len(batch.seq_lens)
        if num_seqs == len(batch.token_ids) == len(batch.sample_rows) and num_seqs <= self._sizes[-1]:
            captured, listing = self._graphs[next(size for size in self._sizes if size >= num_seqs)], None
            sharing = self._sharing.get(min((size for size in self._sharing if size >= num_seqs), default=0))
            if sharing is not None and sharing.shared is not None:
                # The group of the layers that read all.
                listing = sharing.shared.listing(batch.block_tables[0], batch.seq_lens)
                captured = captured if listing is None else sharing
            return self._replay(captured, batch, num_seqs, () if listing is None else (listing,))
        num_decodes = num_leading_decodes(np.diff(batch.query_start).tolist(), self._cache.shape.block_size)
        wanted = {"rows": len(batch.token_ids), "decodes": num_decodes, "chunks": num_seqs - num_decodes}
        shape = next((shape for shape in self._shapes if shape.holds(**wanted)), None)
        return None if shape is None else self._replay(self._mixed[shape], batch, num_decodes, ())

    def _replay(self, captured: _Captured, batch: Batch, num_decodes: int, listing: Sequence[Any]) -> torch.Tensor:
        self._send(captured, batch, num_decodes, listing)
        captured.graph.replay()
        return captured.logits[: len(batch.sample_rows)]

    def _send(self, captured: _Captured, batch: Batch, num_decodes: int, listing: Sequence[Any]) -> None:
        """Puts a batch where the captured step reads it."""
        packed = captured.inputs.packed(batch, num_decodes, self._ops.progress.number)
        num_decode_places = captured.shape.decodes
        # Without tables of states (a trial) its rows are padding to those layers.
        states = () if batch.state_sources is None or batch.state_tables is None else (batch.state_sources, batch.state_tables)
        behind = () if batch.behind is None else (batch.behind.table,)
        with self._ops.upload.ahead((packed, *behind, *listing, *batch.block_tables, *states)) as (inputs, *sent):
            captured.inputs.memory.copy_(inputs)
            if behind:
                token_ids, positions, slots, lens = map(captured.inputs.tensor, ("token_ids", "positions", slots_of(0), "seq_lens"))
                go_on(sent.pop(0), self._ops.tokens, token_ids, positions, slots, lens, self._ops.accepted)
            if captured.shared is not None:
                captured.shared.listed.copy_(sent[0])
            for kept, tables in zip((*self._tables, *self._states), sent[len(listing) :], strict=False):
                num_seqs, width = tables.shape
                if num_decodes:
                    kept[:num_decodes, :width].copy_(tables[:num_decodes])
                if num_decodes < num_seqs:
                    kept[num_decode_places : num_decode_places + num_seqs - num_decodes, :width].copy_(tables[num_decodes:])


class _Captured(CapturedStep):
    """A step of the model."""

    def __init__(
        self,
        model: Decoder,
        cache: KvCache,
        ops: TritonOps,
        shape: StepShape,
        tables: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        *,
        sharing: bool,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.inputs = ops.captured_inputs(shape, cache, model.attention)
        self._model = model
        self._tokens = ops.tokens
        # Kept: the graph reads and writes its buffers at every replay, and they are not of the graph's own memory.
        self.plan = ops.plan_captured(self.inputs, tables, cache, model.attention, states=states, sharing=sharing)
        self.shared = self.plan.shared

    def step(self) -> torch.Tensor:
        carry_tokens(self.inputs.tensor("token_ids"), self.inputs.tensor("carried"), self._tokens)
        logits = self._model.compute(self.plan)
        pick_greedy(logits, self._tokens[: len(logits)])
        return logits
