"""Steps on a GPU, none of which the host waits for until its result is asked for.

1. upload     the step's arrays, in one copy from pinned memory
2. forward    a captured graph (step_graphs.py), or kernel by kernel; carried tokens are filled in from the step before
3. sample     tokens and logprobs on the device (device_sampler.py)
4. copy back  into pinned memory, then an event: what `result` waits for
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from twostep.engine.batch import Batch, Sampled, SamplingRow, TopToken
from twostep.errors import InternalError
from twostep.model.families.decoder import Decoder
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.kernels.triton_progress import ProgressMark
from twostep.model.runner.device_sampler import DeviceLogprobs, DeviceSampler
from twostep.model.runner.step_graphs import StepGraphs
from twostep.model.step.expert_load import ExpertLoadMeter
from twostep.model.step.kv_cache import DTYPES, KvCache
from twostep.model.step.prompt_readout import PromptReadout


class DeviceSteps:
    """The Steps of one model and pool, on the current device and stream. On a CPU (interpreted) a step is done when it is launched."""

    overlaps = True

    def __init__(self, model: Decoder, cache: KvCache, ops: TritonOps, graphs: StepGraphs | None) -> None:
        self._model = model
        self._cache = cache
        self._graphs = graphs
        self._tokens = ops.tokens
        self._upload = ops.upload
        self._progress = ops.progress
        self._sampler = DeviceSampler(ops.upload, ops.tokens, model.config.vocab_size, ops.accepted)
        self._experts = ExpertLoadMeter(model.expert_loads)
        self._on_gpu = cache.tensor.is_cuda
        with torch.inference_mode():
            self._sampler.warm_up(DTYPES[cache.shape.dtype])
            ops.warm_up_drafts()

    @property
    def reads_shared_once(self) -> bool:
        return self._graphs is not None and self._graphs.shares_prefixes

    def sampled(self, num_rows: int) -> torch.Tensor:
        return self._tokens[:num_rows]

    def close(self) -> None:
        self._graphs = None

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = None if self._graphs is None else self._graphs.logits(batch)
        return self._model.forward(batch, self._cache) if logits is None else logits

    def launch(self, batch: Batch) -> DeviceStep:
        try:
            return self._launch(batch)
        except Exception:
            # Part of it may be queued, and its blocks are given to others next, who write to them on streams of their own.
            if self._on_gpu:
                torch.cuda.synchronize()
            raise

    def _launch(self, batch: Batch) -> DeviceStep:
        num_rows = len(batch.sampling)
        if num_rows > len(self._tokens):
            raise InternalError(f"{num_rows} rows are sampled in one step; at most {len(self._tokens)} can be")
        self._progress.begin()
        # No captured step has rows that are only read.
        reader = PromptReadout.of(batch, self._cache.tensor.device)
        logits = None if self._graphs is None or reader is not None else self._graphs.logits(batch)
        picked = logits is not None
        if logits is None:
            logits = self._model.forward(batch, self._cache, reader)
        logprobs = self._sampler.sample(logits, batch, picked=picked) if num_rows else None
        tokens = self._to_host(self._tokens[:num_rows])
        values = None if logprobs is None else self._to_host(logprobs.values)
        read = (None, None) if reader is None else (reader.scores, reader.pooled)
        scores, pooled = (None if each is None else self._to_host(each) for each in read)
        load = self._experts.due()
        counts = None if load is None else self._to_host(load)
        done = torch.cuda.Event() if self._on_gpu else None
        marks: list[ProgressMark] = []
        if done is not None:
            done.record(self._upload.current_stream())
            marks = [self._progress.mark(num_layers, done.query) for num_layers in batch.mark_layers]
        imbalance = None if counts is None else partial(self._experts.imbalance, counts)
        return DeviceStep(batch.sampling, tokens, logprobs, values, scores, pooled, done, marks, imbalance)

    def _to_host(self, values: torch.Tensor) -> torch.Tensor:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._on_gpu)
        return host.copy_(values, non_blocking=True)


class DeviceStep:
    """An InFlight of DeviceSteps."""

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        tokens: torch.Tensor,
        logprobs: DeviceLogprobs | None,
        values: torch.Tensor | None,
        scores: torch.Tensor | None,
        pooled: torch.Tensor | None,
        done: torch.cuda.Event | None,
        layer_marks: Sequence[ProgressMark],
        imbalance: Callable[[], float] | None,
    ) -> None:
        """tokens int64 [R], values (see DeviceLogprobs), scores and pooled (see Sampled), on the host, there when `done`, as is what
        `imbalance` looks at."""
        self._rows = rows
        self._tokens = tokens
        self._asking = () if logprobs is None else logprobs.rows
        self._values = values
        self._read = scores, pooled
        self._done = done
        self._imbalance = imbalance
        self.layer_marks = layer_marks

    def result(self) -> Sampled:
        if self._done is not None:
            self._done.synchronize()
        ready_at = time.monotonic()
        token_ids: list[int] = self._tokens.tolist()
        chosen: list[float | None] = [None] * len(token_ids)
        top: list[tuple[TopToken, ...]] = [()] * len(token_ids)
        for r, values in zip(self._asking, [] if self._values is None else self._values.tolist(), strict=True):
            chosen[r] = values[0]
            most = len(values) // 2
            asked = min(most, self._rows[r].params.logprobs or 0)
            top[r] = tuple(TopToken(int(values[1 + most + i]), values[1 + i]) for i in range(asked))
        scores, pooled = (None if each is None else each.numpy() for each in self._read)
        return Sampled(
            token_ids=token_ids,
            logprobs=chosen,
            top_logprobs=top,
            ready_at=ready_at,
            scores=scores,
            pooled=pooled,
            expert_imbalance=None if self._imbalance is None else self._imbalance(),
        )
