"""One step's work as flat arrays: what a scheduler plans and a runner executes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from twostep.block_order import BlockOrder
from twostep.quantized_vector import number_bytes, vector_bytes
from twostep.sampling_params import SamplingParams

Number = TypeVar("Number", bound=np.generic)

# Tokens in a word of a mask.
WORD = 32

# Sampled where a row's logits give no token: their largest is not finite, or any is NaN. The other rows are as they would be without it.
NO_TOKEN = -1


def num_words(vocab_size: int) -> int:
    """Returns the words of one row's mask."""
    return -(-vocab_size // WORD)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some rows of a step may become: bits, made on the host, applied where the logits are. Rows that are not named may become
    any token. twostep/model/kernels/triton_tokens.py does on a GPU what `allowed` does here.

    rows  int64 [C], ascending, of the step's sampled rows
    bits  int32 [C, num_words(vocab_size)], at least one set in each: bits[i, t // 32] >> (t % 32) & 1 allows row rows[i] token t
    """

    rows: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]

    @classmethod
    def of(cls, masks: Sequence[tuple[int, npt.NDArray[np.int32]]]) -> TokenMasks:
        """Returns the masks of (row, its bits [num_words]), at least one."""
        return cls(np.array([row for row, _ in masks], np.int64), np.stack([bits for _, bits in masks]))

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Returns [C, vocab_size]."""
        return np.unpackbits(self.bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)


# Nobody changes one. A frozen one takes three times as long to make, and a step makes hundreds.
@dataclass(slots=True)
class SamplingRow:
    """One row to sample. `history` is prompt and output so far, looked at only for penalties and only by `launch`, without the token
    before it where that is carried (see Batch); `position` is that of the token to be sampled among the generated ones (it and the seed
    make the noise). `stop_ids` must not be sampled while `position < min_tokens`. `seq_id` is the same in all steps of a sequence, so
    that a device may keep what it has counted of the history; empty: nothing is kept."""

    params: SamplingParams
    position: int
    history: Sequence[int]
    num_prompt_tokens: int
    stop_ids: frozenset[int]
    seq_id: str = ""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of a step's tokens whose logits say how likely the prompt's next token was, and which were the likeliest.

    rows     int64 [N], of the batch's T
    targets  int64 [N], the tokens that follow
    num_top  how many of the likeliest are wanted
    """

    rows: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    num_top: int


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows of a step's tokens whose hidden states after the last norm are added up, to one vector for each of P prompts.

    rows    int64 [N], of the batch's T
    counts  int64 [P], of so many rows, one after the other, each vector is made; at least 1 each, N in all
    """

    rows: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowsBehind:
    """Rows of decodes whose sequences have drafts in the step launched just before. How many of those are accepted is known when that step
    has ended: as many as are, from the first on, what was sampled. The batch says where the rows are if none is; for each that is
    accepted, a row's position and sequence length are one more. twostep/model/kernels/triton_tokens.py does on a GPU what
    `Batch.with_carried` does here.

    table       int32 [N, 2 + D + 2 * (D + 1)], of at most D drafts, in columns:

      rows      [N]         of the batch's T, ascending; each is the only token of the sequence of the same number, and is sampled
      firsts    [N]         of the rows that the step before sampled, the first one of the sequence
      drafted   [N, D]      the tokens drafted there, -1 behind the last
      tokens    [N, D + 1]  by how many are accepted, the row's token; -1: what was sampled after those
      slots     [N, D + 1]  by how many are accepted, where the token's KV goes
    """

    table: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls,
        rows: npt.NDArray[np.integer],
        firsts: npt.NDArray[np.integer],
        drafted: npt.NDArray[np.integer],
        tokens: npt.NDArray[np.integer],
        slots: npt.NDArray[np.integer],
    ) -> RowsBehind:
        assert slots.max() < 2**31
        return cls(np.concatenate((rows[:, None], firsts[:, None], drafted, tokens, slots), 1).astype(np.int32))

    @property
    def most_drafts(self) -> int:
        """Returns D."""
        width: int = self.table.shape[1]
        return (width - 4) // 3

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        return self.table[:, 0]

    @property
    def num_before(self) -> int:
        """Returns how many rows of the step before it looks at, from the first one on."""
        return int(self.table[:, 1].max()) + self.most_drafts + 1

    def take(self, sampled: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns of each row how many drafts were accepted, its token and its slot, [N] each. `sampled`: by the step before."""
        most, firsts = self.most_drafts, self.table[:, 1]
        ends = np.minimum(firsts[:, None] + np.arange(most), len(sampled) - 1)
        drafted = self.table[:, 2 : 2 + most]
        accepted = np.logical_and.accumulate((sampled[ends] == drafted) & (drafted >= 0), axis=1).sum(axis=1)
        here = np.arange(len(firsts))
        tokens = self.table[here, 2 + most + accepted].astype(np.int64)
        tokens = np.where(tokens < 0, np.maximum(sampled[firsts + accepted], 0), tokens)
        return accepted, tokens, self.table[here, 3 + 2 * most + accepted].astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """T tokens of S sequences, prompt chunks and decode tokens alike, in one flat row each.

    token_ids      int64 [T]
    positions      int64 [T]      place of the token in its sequence, from 0
    query_start    int32 [S + 1]  tokens query_start[s] .. query_start[s+1] belong to sequence s
    seq_lens       int32 [S]      KV length after this step (last position + 1)
    block_tables   int32 [G, S, B]  blocks of each sequence in order, for each group of layers (KvShape); what follows those of its seq_len,
                   and what lies before a group's reach, is any block's number
    slots          int64 [G, T]   where the token's KV goes: block * block_size + slot in block
    sample_rows    int64 [R]      rows (of T) whose logits are needed: the last token of each sequence that is complete
    sampling       R SamplingRows, aligned with sample_rows
    carried        int32 [T]      r >= 0: the token is what row r of the step launched just before samples, and token_ids says nothing;
                                  -1: token_ids has it. None: none is carried
    masks          which tokens the rows of constrained sequences may become; None: there are none. Nothing is carried to such a row
    mark_layers    after how many layers the step is to be marked (see InFlight.layer_marks), ascending
    scored         prompt tokens whose log probabilities are wanted; None: there are none
    state_sources  int32 [S, KvShape.num_state_blocks]: where each sequence's state lies before the step. It begins with the sequence's
                   position 0, whatever the blocks hold. None: the model has no state
    state_tables   int32 [S, KvShape.num_state_blocks]: where it lies afterwards: in the same blocks, or in others that the step does not
                   read; those of `state_sources` then stay as they are
    pooled         prompt tokens whose hidden states are wanted; None: there are none
    behind         rows that go on behind drafts of the step launched just before: where they are is said as if none of those were
                   accepted, and token_ids says nothing. Nothing else is carried to them. None: there are none
    num_encoded    int32 [S], of a model with an encoder: how many of each sequence's first tokens that reads, all of them in the step that
                   begins the sequence, which has at least one more. None: the model has none, or the step is a trial, where all that lies
                   before a chunk is taken for it, or at the beginning all but the last token
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    sample_rows: npt.NDArray[np.int64]
    sampling: Sequence[SamplingRow]
    carried: npt.NDArray[np.int32] | None = None
    masks: TokenMasks | None = None
    mark_layers: Sequence[int] = ()
    scored: ScoredRows | None = None
    state_sources: npt.NDArray[np.int32] | None = None
    state_tables: npt.NDArray[np.int32] | None = None
    pooled: PooledRows | None = None
    behind: RowsBehind | None = None
    num_encoded: npt.NDArray[np.int32] | None = None

    @property
    def num_before(self) -> int:
        """Returns of how many rows, from the first one on, that the step before sampled it takes the tokens."""
        carried = 0 if self.carried is None else int(self.carried.max()) + 1
        return carried if self.behind is None else max(carried, self.behind.num_before)

    def with_carried(self, token_ids: Sequence[int]) -> Batch:
        """Returns the same batch with nothing carried; `token_ids` are those the step before sampled. For runners that have them on the
        host. A row that carries NO_TOKEN is over, and goes on with token 0 in this last step."""
        if self.behind is not None:
            return self._moved_on(self.behind, token_ids).with_carried(token_ids)
        if self.carried is None:
            return self
        known = self.token_ids.copy()
        here = np.flatnonzero(self.carried >= 0)
        known[here] = np.maximum(np.asarray(token_ids, np.int64)[self.carried[here]], 0)
        rows = list(self.sampling)
        for i, row in enumerate(self.sample_rows.tolist()):
            if self.carried[row] >= 0:
                rows[i] = replace(rows[i], history=[*rows[i].history, int(known[row])])
        return replace(self, token_ids=known, sampling=rows, carried=None)

    def _moved_on(self, behind: RowsBehind, sampled: Sequence[int]) -> Batch:
        accepted, tokens, places = behind.take(np.asarray(sampled, np.int64))
        here = behind.rows
        token_ids, positions, slots = self.token_ids.copy(), self.positions.copy(), self.slots.copy()
        seq_lens = self.seq_lens.copy()
        token_ids[here], slots[0, here] = tokens, places
        positions[here] += accepted
        seq_lens[here] += accepted.astype(np.int32)
        rows = list(self.sampling)
        for i, count in zip(np.searchsorted(self.sample_rows, here).tolist() if rows else (), accepted.tolist(), strict=False):
            rows[i] = replace(rows[i], position=rows[i].position + count)
        return replace(self, token_ids=token_ids, positions=positions, slots=slots, seq_lens=seq_lens, sampling=rows, behind=None)


@dataclass(frozen=True, slots=True)
class TopToken:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """R sampled tokens, aligned with Batch.sample_rows, NO_TOKEN where there is none. Logprobs are the model's own, before penalties,
    grammars and temperature; None where the row did not ask, anything where it has no token.

    scores  float64 [N, 2 + 2 * num_top], of Batch.scored: each target's logprob and its rank (1: none is likelier), the likeliest tokens'
            logprobs and their ids, best first; None: none were wanted
    pooled  float32 [P, hidden_size], of Batch.pooled; None: none were wanted
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    top_logprobs: Sequence[tuple[TopToken, ...]]
    # When the host saw that the device was done, before it made anything of what it found, in monotonic seconds; None: just now.
    ready_at: float | None = field(default=None, compare=False)
    scores: npt.NDArray[np.float64] | None = field(default=None, compare=False)
    pooled: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    # Of a mixture of experts, now and then: how many times the mean its busiest expert has had since the last time.
    expert_imbalance: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers [first, first + num_layers) of a model."""

    first: int
    num_layers: int

    @property
    def stop(self) -> int:
        return self.first + self.num_layers

    def covers(self, num_layers: int) -> bool:
        """Returns whether it is all of so many."""
        return self.first == 0 and self.num_layers == num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Shape of the pool's one tensor, [block, layer, plane, kv_head, slot, head_dim], and of its bytes. Layers are those of a block."""

    num_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32" | "bfloat16" | "float16": the model's, whatever its KV is stored as
    quantization: str = "none"  # "none" | "fp8" | "int8" | "int4" (twostep/model/step/kv_quantization.py)
    num_planes: int = 2  # 2: keys, then values; 1: keys alone, whose first numbers are the values (latent attention)
    # Blocks that a sequence takes beside those of its tokens: what layers without KV remember of it, of a size that does not grow.
    num_state_blocks: int = 0
    # The model's layers with KV lie in so many groups of `num_layers`: a block is of the layers of one, and a sequence has blocks of each.
    # The last `num_windowed` groups are of layers with windows: the token at position p reads no block of theirs that lies wholly before
    # p + 1 - reach. The others read all.
    num_groups: int = 1
    num_windowed: int = 0
    reach: int = 0
    # A sequence's prompt without its last token is an encoder's: what is kept of these tokens are keys and values made of what that gave,
    # each of which depends on all of them. So they are computed in one step, and shared with no other sequence.
    has_encoder: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and planes, scales included."""
        vectors = self.num_layers * self.vectors * self.block_size
        if self.quantization != "none":
            return vectors * vector_bytes(self.head_dim, self.quantization)
        return vectors * self.head_dim * (4 if self.dtype == "float32" else 2)

    @property
    def num_full(self) -> int:
        """Groups of layers that read all of a sequence: the first ones."""
        return self.num_groups - self.num_windowed

    def order(self, num_tokens: int) -> BlockOrder:
        """Returns how the blocks of so many tokens are handed over."""
        return BlockOrder(
            num_tokens=num_tokens,
            block_size=self.block_size,
            num_full=self.num_full,
            num_windowed=self.num_windowed,
            reach=self.reach,
            num_state_blocks=self.num_state_blocks,
        )

    def in_groups(self, each: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Returns block tables, or slots, of a trial step, the same for each group. Layers of one take the places of those of another,
        which have been read by then where the step computes its sequences from their beginnings."""
        return np.repeat(each[None], self.num_groups, 0)

    @property
    def vectors(self) -> int:
        """Vectors of `head_dim` numbers that a token takes in a layer."""
        return self.num_planes * self.num_kv_heads

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.block_bytes // self.num_layers

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane of one layer of a block, without scales: those of all planes lie one after the other, before any scales."""
        if self.quantization != "none":
            return self.num_kv_heads * self.block_size * number_bytes(self.head_dim, self.quantization)
        return self.layer_bytes // self.num_planes

    def state_blocks_each(self, num_bytes: int, num_columns: int) -> int:
        """Returns how many blocks a layer takes that keeps `num_bytes` of a sequence in each of so many columns, into which every plane is
        cut (twostep/model/step/state_columns.py)."""
        return -(-num_bytes * num_columns // (self.num_layers * self.num_planes * self.plane_bytes))

    def trial_states(self, num_seqs: int) -> npt.NDArray[np.int32] | None:
        """Returns the state tables of a step of so many sequences that nobody owns: the pool's last blocks, some of them more than once
        where there are too few. None without a state."""
        if not self.num_state_blocks:
            return None
        blocks = self.num_blocks - 1 - np.arange(num_seqs * self.num_state_blocks) % self.num_blocks
        return blocks.astype(np.int32).reshape(num_seqs, -1)

    def bytes_of(self, layers: LayerRange) -> slice:
        """Returns where the layers lie in a block's bytes. Raises ValueError if there are no such layers."""
        if not 0 <= layers.first < layers.stop <= self.num_layers:
            raise ValueError(f"layers {layers.first} + {layers.num_layers} are not among {self.num_layers}")
        return slice(layers.first * self.layer_bytes, layers.stop * self.layer_bytes)


class LayerMark(Protocol):
    """A place in a launched step: the KV of layers [0, num_layers) of all its tokens is in the pool, and does not change any more."""

    @property
    def num_layers(self) -> int: ...

    def wait(self) -> None:
        """Blocks until the device is there, from any thread, without burning a core. Raises what the device failed with."""
        ...


class InFlight(Protocol):
    """A launched step."""

    @property
    def layer_marks(self) -> Sequence[LayerMark]:
        """One after each of the batch's `mark_layers` that the device can mark, in order; may be none."""
        ...

    def result(self) -> Sampled:
        """Waits until the step is done: its KV is in the pool and its tokens are here. Called once, in the order of the launches. Raises
        whatever the device failed with; later steps that carry nothing from this one are not spoiled by it."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """An InFlight of a runner that computes in `launch`."""

    sampled: Sampled
    layer_marks: Sequence[LayerMark] = ()

    def result(self) -> Sampled:
        return self.sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedSteps:
    """Says what of a runner's steps was captured as CUDA graphs: how many, up to how many rows those with prompts are, whatever decodes
    beside them, and the device memory that all of them took."""

    count: int = 0
    most_prompt_rows: int = 0
    num_bytes: int = 0


class Runner(Protocol):
    """Executes batches on one device, in the order launched. Not thread-safe but for read_blocks and write_blocks, which any thread may
    call for blocks, or layers of blocks, that no launched step writes any more."""

    @property
    def kv_shape(self) -> KvShape: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def generates(self) -> bool:
        """Returns whether the model has an output layer. Without one its hidden states can be pooled, and what is sampled means nothing."""
        ...

    @property
    def reads_shared_once(self) -> bool:
        """Returns whether a step reads KV that several of its rows see once for all of them, as rows of one sequence's drafts do."""
        ...

    @property
    def overlaps(self) -> bool:
        """Returns whether `launch` returns before the device is done, so that planning a step while another one runs gains time."""
        ...

    @property
    def marks_layers(self) -> bool:
        """Returns whether steps of prompts tell how many of their layers are done (see InFlight.layer_marks)."""
        ...

    def launch(self, batch: Batch) -> InFlight:
        """Queues a step that writes the KV of all T tokens and samples R of them. At most one other step has been launched and not
        collected; it is the one that carried tokens come from. The arrays of `batch` are not looked at after the step's result, nor
        histories after the return. If this raises, nothing was launched, and the next step carries nothing from it."""
        ...

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        """Copies whole blocks, or some layers of them, out, in the order given. `out` is uint8 [len(block_ids), block_bytes] or
        [len(block_ids), layers.num_layers * layer_bytes], contiguous."""
        ...

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        """Does the inverse of read_blocks, with data of the same shape."""
        ...

    def new_host_blocks(self, count: int) -> npt.NDArray[np.uint8]:
        """Returns uint8 [count, block_bytes] of undefined content, in the memory that read_blocks and write_blocks copy to and from
        fastest."""
        ...

    def pin_host(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Makes memory that exists, such as a mapping shared with another process, as fast to copy to and from as that of
        `new_host_blocks`. The function returned undoes it; call it before the memory is unmapped, when no copy is under way. Raises
        RuntimeError where the device does not take it: copies work all the same."""
        ...
