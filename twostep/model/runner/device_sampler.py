"""Sampling on the device that computed the logits: the host uploads what it knows ahead and waits for nothing.

    host     noise of (seed, position), parameters, stop ids held back, masks ─copies→ device
    device   logits ─ pick_greedy: all rows ─ biases ─ masks ─ sample_rows: who asks for more ─▶ tokens, logprobs ─one copy→ host, some time

Its oracle is twostep/model/runner/sampler.py. Penalties need what was generated so far, of which the host may not know the last token yet:
the device keeps each penalized sequence's counts itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from twostep.engine.batch import Batch, RowsBehind, SamplingRow, TokenMasks, num_words
from twostep.model.kernels.step_upload import StepUpload
from twostep.model.kernels.triton_sample import FLOATS, PROMPT_BIT, sample_rows
from twostep.model.kernels.triton_tokens import mask_rows, pick_greedy
from twostep.model.runner.sampler import MIN_TEMPERATURE, Biases, uniform
from twostep.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLogprobs:
    """Logprobs of the rows that ask for them, on the device. values float64 [A, 1 + 2 * N]: the chosen token's, the N
    best ones', their ids."""

    rows: Sequence[int]
    values: torch.Tensor


class DeviceSampler:
    """The sampler of one device and vocabulary, for one thread and stream."""

    def __init__(self, upload: StepUpload, tokens: torch.Tensor, vocab_size: int, accepted: torch.Tensor | None = None) -> None:
        """tokens    int64 [at least the most rows]: what each row of the last step sampled, NO_TOKEN where its logits are broken
        accepted  int32 [the same]: of rows behind drafts, how many of those were accepted; None: there are never any"""
        self._upload = upload
        self._tokens = tokens
        self._accepted = accepted
        self._vocab_size = vocab_size
        self._counts = TokenCounts(upload, tokens, vocab_size)
        self._asked = _Asked.of((), vocab_size)

    def sample(self, logits: torch.Tensor, batch: Batch, *, picked: bool = False) -> DeviceLogprobs | None:
        """Fills `tokens` from the batch's logits [R, V], whose rows may be changed. `picked`: pick_greedy has run."""
        rows = batch.sampling
        tokens = self._tokens[: len(rows)]
        if not picked:
            pick_greedy(logits, tokens)
        if not self._asked.serves(rows):
            self._asked = _Asked.of(rows, self._vocab_size)
        asked = self._asked
        raw = _Raw(logits, asked, self._upload) if asked.logprobs else None
        positions = np.fromiter((row.position for row in rows), np.int64, len(rows))
        held_back = asked.has_stops & (positions < asked.min_tokens)
        again = asked.drawn
        if asked.biases is not None:
            # As precise as on a CPU: rounded to the model's dtype, other tokens would be drawn.
            logits = logits.float()
            asked.biases.add_to(logits, *self._upload.send(tuple(asked.biases)))
        if batch.masks is not None:
            # A mask says which stop tokens may come; the largest of all logits is not the answer any more.
            held_back[batch.masks.rows] = False
            again = again.copy()
            again[batch.masks.rows] = True
            self._mask(logits, batch.masks)
        if held_back.any():
            self._hold_back(logits, rows, np.flatnonzero(held_back))
        chosen = np.flatnonzero(again | held_back)
        if len(chosen):
            self._draw(logits, batch, chosen, positions)
        return None if raw is None else raw.logprobs(tokens)

    def _draw(self, logits: torch.Tensor, batch: Batch, chosen: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        asked = self._asked
        slots = np.full(len(asked.drawn), -1, np.int32)
        if asked.penalized.any():
            self._counts.assign(batch, asked.penalized, slots)
        floats = np.empty((len(asked.floats) + 1, len(chosen)))
        floats[:-1] = asked.floats[:, chosen]
        floats[-1] = uniform(asked.seeds[chosen], positions[chosen])
        ints = np.stack((chosen.astype(np.int32), slots[chosen], asked.top_k[chosen]))
        sent_floats, sent_ints = self._upload.send((floats, ints))
        if batch.behind is not None:
            self._move_noise(sent_floats[-1], batch.behind, asked.seeds, chosen, positions)
        sample_rows(logits, sent_floats, sent_ints, self._counts.table, self._tokens)

    def _move_noise(
        self,
        noise: torch.Tensor,
        behind: RowsBehind,
        seeds: npt.NDArray[np.int64],
        chosen: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> None:
        """Gives rows behind drafts, of those `chosen`, the noise of the positions that they have come to. Decodes' rows are sampled first,
        in order."""
        places = np.flatnonzero(np.isin(chosen, behind.rows))
        if not len(places):
            return
        assert self._accepted is not None
        rows = chosen[places]
        moved = uniform(seeds[rows, None], positions[rows, None] + np.arange(behind.most_drafts + 1))
        sent_places, sent_rows, each = self._upload.send((places, rows, moved))
        accepted = self._accepted.index_select(0, sent_rows).long()
        noise.index_copy_(0, sent_places, each.gather(1, accepted[:, None])[:, 0])

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles what only steps with masks or biases need, for logits of this type: the first one would hold up everybody's."""
        for each in {dtype, torch.float32}:
            logits = torch.zeros(1, self._vocab_size, dtype=each, device=self._tokens.device)
            self._mask(logits, TokenMasks(np.zeros(1, np.int64), np.full((1, num_words(self._vocab_size)), -1, np.int32)))
        # A bias makes float32 of any logits. One row, several, and multiples of 16 are compiled apart.
        for num_rows in (1, 2, 16):
            ints = torch.tensor([[0] * num_rows, [-1] * num_rows, [0] * num_rows], dtype=torch.int32, device=logits.device)
            floats = torch.zeros(len(FLOATS), num_rows, dtype=torch.float64, device=logits.device)
            counts = torch.zeros(1, self._vocab_size, dtype=torch.int32, device=logits.device)
            sample_rows(logits.float(), floats, ints, counts, torch.zeros(num_rows, dtype=torch.int64, device=logits.device))

    def _mask(self, logits: torch.Tensor, masks: TokenMasks) -> None:
        rows, bits = self._upload.send((masks.rows, masks.bits))
        mask_rows(logits, rows, bits)

    def _hold_back(self, logits: torch.Tensor, rows: Sequence[SamplingRow], chosen: npt.NDArray[np.int64]) -> None:
        vocab_size = logits.shape[1]
        places = [(r, token) for r in chosen.tolist() for token in rows[r].stop_ids if 0 <= token < vocab_size]
        if places:
            at_rows, at_tokens = self._upload.send(list(np.array(places, np.int64).T))
            logits.index_put_((at_rows, at_tokens), logits.new_full((), -torch.inf))


class TokenCounts:
    """How often each token came in each penalized sequence: rows of a table on the device, given to sequences by name.

    A sequence's row is good as long as it has been counted in every step; one that comes anew, or comes back with another history than
    the one left, is counted again. The row used longest ago is taken for it.
    """

    def __init__(self, upload: StepUpload, tokens: torch.Tensor, vocab_size: int) -> None:
        self._upload = upload
        self._tokens = tokens
        # int32 [rows, V], see triton_sample.py
        self.table = torch.zeros(0, vocab_size, dtype=torch.int32, device=tokens.device)
        self._free: list[int] = []
        # By sequence, the one used last at the end: its row, and how many tokens that counts.
        self._rows: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def assign(self, batch: Batch, penalized: npt.NDArray[np.bool_], slots: npt.NDArray[np.int32]) -> None:
        """Sets `slots` of the penalized rows to rows of the table that count all tokens before the one to be sampled, and expects that one
        to be counted where it is sampled."""
        carried = None if batch.carried is None else batch.carried[batch.sample_rows]
        stale: list[int] = []
        for r in np.flatnonzero(penalized).tolist():
            row = batch.sampling[r]
            length = len(row.history) + (carried is not None and int(carried[r]) >= 0)
            name = row.seq_id or f"\0{r}"
            slot, counted = self._rows.pop(name, (-1, -1))
            self._rows[name] = (slot, length + 1)
            slots[r] = slot
            if counted != length or not row.seq_id:
                stale.append(r)
        self._find_room(batch, [r for r in stale if slots[r] < 0], slots, int(penalized.sum()))
        for r in stale:
            self._count(int(slots[r]), batch.sampling[r], -1 if carried is None else int(carried[r]))

    def _find_room(self, batch: Batch, rows: Sequence[int], slots: npt.NDArray[np.int32], num_used: int) -> None:
        """`num_used`: sequences of this step that have or get a row; they stand at the end."""
        for i, r in enumerate(rows):
            if not self._free:
                if len(self._rows) > num_used:
                    _, (slot, _) = self._rows.popitem(last=False)
                    self._free.append(slot)
                else:
                    self._grow(len(rows) - i)
            slots[r] = self._free.pop()
            name = batch.sampling[r].seq_id or f"\0{r}"
            self._rows[name] = (int(slots[r]), self._rows[name][1])

    def _grow(self, count: int) -> None:
        old = len(self.table)
        larger = self.table.new_zeros(max(2 * old, old + count), self.table.shape[1])
        larger[:old] = self.table
        self.table = larger
        self._free += range(old, len(larger))

    def _count(self, slot: int, row: SamplingRow, carried: int) -> None:
        counts = self.table[slot]
        counts.zero_()
        (history,) = self._upload.send((np.asarray(row.history, np.int64),))
        prompt, output = history[: row.num_prompt_tokens], history[row.num_prompt_tokens :]
        counts.index_fill_(0, prompt, PROMPT_BIT)
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        if carried >= 0:
            counts.index_add_(0, self._tokens[carried : carried + 1].clamp(min=0), counts.new_ones(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Holds what the rows of a step ask for: the same in the next step, unless a sequence came or went.

    floats  float64 [6, R], see FLOATS in triton_sample.py, all but the noise
    drawn   rows for which the largest logit is not the answer; logprobs: (row, how many)
    """

    params: Sequence[SamplingParams]
    stop_ids: Sequence[frozenset[int]]
    floats: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int32]
    seeds: npt.NDArray[np.int64]
    penalized: npt.NDArray[np.bool_]
    drawn: npt.NDArray[np.bool_]
    min_tokens: npt.NDArray[np.int64]
    has_stops: npt.NDArray[np.bool_]
    biases: Biases | None
    logprobs: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], vocab_size: int) -> _Asked:
        params = [row.params for row in rows]
        floats = np.array(
            [
                (
                    0.0 if p.greedy else max(p.temperature, MIN_TEMPERATURE),
                    -np.inf if np.float32(p.min_p) == 0.0 else np.log(np.float32(p.min_p)),
                    p.top_p,
                    p.repetition_penalty,
                    p.frequency_penalty,
                    p.presence_penalty,
                )
                for p in params
            ],
            np.float64,
        ).reshape(len(params), 6)
        penalized = np.array([p.has_penalties for p in params], bool)
        return cls(
            params=params,
            stop_ids=[row.stop_ids for row in rows],
            floats=np.ascontiguousarray(floats.T),
            top_k=np.array([min(p.top_k, (1 << 31) - 1) for p in params], np.int32),
            seeds=np.array([p.seed for p in params], np.int64),
            penalized=penalized,
            drawn=penalized | (floats[:, 0] > 0.0) | np.array([bool(p.logit_bias) for p in params], bool),
            min_tokens=np.array([p.min_tokens for p in params], np.int64),
            has_stops=np.array([bool(row.stop_ids) for row in rows], bool),
            biases=Biases.of(rows, vocab_size),
            logprobs=[(r, p.logprobs) for r, p in enumerate(params) if p.logprobs is not None],
        )

    def serves(self, rows: Sequence[SamplingRow]) -> bool:
        """Lists compare by identity first: cheap where it is the same sequences."""
        return self.params == [row.params for row in rows] and self.stop_ids == [row.stop_ids for row in rows]


class _Raw:
    """The model's own logits of the rows that ask for logprobs, taken before anything is held back."""

    def __init__(self, logits: torch.Tensor, asked: _Asked, upload: StepUpload) -> None:
        self._rows = [r for r, _ in asked.logprobs]
        (self._index,) = upload.send((np.array(self._rows, np.int64),))
        self._raw = logits.index_select(0, self._index).float()
        self._norm = self._raw.logsumexp(-1, keepdim=True)
        self._best = self._raw.topk(min(max(n for _, n in asked.logprobs), logits.shape[1]))

    def logprobs(self, tokens: torch.Tensor) -> DeviceLogprobs:
        chosen = self._raw.gather(1, tokens.index_select(0, self._index).clamp_(min=0)[:, None])
        values = torch.cat((chosen - self._norm, self._best.values - self._norm), 1).double()
        return DeviceLogprobs(rows=self._rows, values=torch.cat((values, self._best.indices.double()), 1))
