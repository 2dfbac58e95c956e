"""Which part of a model each of several ranks holds (tensor parallelism: Shoeybi et al., Megatron-LM, 2019, section 3).

    q, k, v, gate, up, fc1     rows     rank r holds its heads, its part of the MLP: nothing to exchange
    o, down, fc2               columns  a rank's result is one of `size` terms of a sum; their bias is rank 0's
    gated delta nets           rows by key head, with all that is theirs; the result by columns, a term of a sum
    experts                    cut as MLPs are, or whole ones on each rank: either way its result is a term of the same sum
    lm_head                    rows     a rank has the logits of its part of the vocabulary; a tied one is those rows of the embedding
    embedding, norms, routers  whole on every rank

A family says how each of its weights is cut where it places it (`Cut`, modules.py). Fewer KV heads than ranks: each head is on
size / num_kv_heads ranks, beside the query heads that read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from twostep.checkpoint.parts import check_parts
from twostep.errors import SetupError
from twostep.model.families.config import GatedDeltaConfig, ModelConfig
from twostep.model.families.modules import Cut, Place, Places
from twostep.model.step.state_columns import StateColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRange:
    """[start, stop) of something that counts `whole`."""

    start: int
    stop: int
    whole: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def times(self, unit: int) -> ShardRange:
        return ShardRange(start=self.start * unit, stop=self.stop * unit, whole=self.whole * unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Rank `rank`'s part of a model of `config`. Made by `shard_of`."""

    config: ModelConfig
    rank: int
    size: int

    @property
    def local(self) -> ModelConfig:
        """The shape of this rank's layers. The vocabulary stays whole: embeddings are looked up everywhere."""
        experts = self.config.experts
        if experts is not None:
            experts = replace(
                experts,
                intermediate_size=experts.intermediate_size // (1 if experts.whole else self.size),
                shared_size=experts.shared_size // self.size,
                part=(self.rank, self.size) if experts.whole else (0, 1),
            )
        return replace(
            self.config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=self.config.intermediate_size // self.size,
            experts=experts,
            gated_delta=self._gated_delta,
        )

    @property
    def _gated_delta(self) -> GatedDeltaConfig | None:
        """With this rank's key heads, and their columns of the blocks that it holds."""
        whole, heads = self.config.gated_delta, self.kv_heads
        if whole is None:
            return None
        num_own, count = whole.columns.count // self.size, whole.columns.count
        columns = StateColumns(
            count=count * len(heads) // heads.whole, first=self.rank * num_own - count * heads.start // heads.whole, num_own=num_own
        )
        num_key_heads, num_value_heads = (count // self.size for count in (whole.num_key_heads, whole.num_value_heads))
        return replace(whole, num_key_heads=num_key_heads, num_value_heads=num_value_heads, columns=columns)

    @property
    def heads(self) -> ShardRange:
        return self._part(self.config.num_heads)

    @property
    def kv_heads(self) -> ShardRange:
        count = self.config.num_kv_heads
        if count >= self.size:
            return self._part(count)
        start = self.rank * count // self.size
        return ShardRange(start=start, stop=start + 1, whole=count)

    @property
    def owns_kv(self) -> bool:
        """Returns whether this is the first of the ranks that hold these KV heads."""
        return self.rank == 0 or shard_of(self.config, self.rank - 1, self.size).kv_heads != self.kv_heads

    @property
    def vocabulary(self) -> ShardRange:
        """Rows of the output layer. The last ranks may have fewer, or none."""
        whole = self.config.vocab_size
        each = -(-whole // self.size)
        return ShardRange(start=min(whole, self.rank * each), stop=min(whole, (self.rank + 1) * each), whole=whole)

    def places(self, places: Places) -> Places:
        """Returns where the checkpoint's tensors go, from the `places()` of a model of `local` shape: each takes this rank's part of a
        whole one. A bias that is another rank's becomes zero and takes nothing."""
        return {name: self._place(place) for name, place in places.items()}

    def _place(self, place: Place) -> Place:
        if place.cut is Cut.WHOLE:
            return place
        from_columns = place.cut in (Cut.FROM_HEADS, Cut.FROM_FEATURES)
        if not from_columns:
            part = self._range(place.cut, len(place.tensor))
            return replace(place, shape=(part.whole, *place.shape[1:]), start=(part.start, *place.start[1:]))
        if place.tensor.dim() == 2:
            part = self._range(place.cut, place.tensor.shape[1])
            return replace(place, shape=(place.shape[0], part.whole), start=(0, part.start))
        if self.rank == 0:
            return place
        place.tensor.zero_()
        return replace(place, tensor=place.tensor[:0])

    def _range(self, cut: Cut, size: int) -> ShardRange:
        """Which rows or columns this rank's `size` of them are. What is cut by heads has as many for each; MLPs of one model may be of
        several widths."""
        if cut is Cut.VOCABULARY:
            part = self.vocabulary
        elif cut in (Cut.HEADS, Cut.FROM_HEADS):
            part = self.heads.times(size // len(self.heads))
        elif cut is Cut.KV_HEADS:
            part = self.kv_heads.times(size // len(self.kv_heads))
        else:
            return ShardRange(start=self.rank * size, stop=(self.rank + 1) * size, whole=self.size * size)
        assert len(part) == size
        return part

    def _part(self, whole: int) -> ShardRange:
        each = whole // self.size
        return ShardRange(start=self.rank * each, stop=(self.rank + 1) * each, whole=whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A shard, and how a step's logits of its part of the vocabulary [R, n] become those of the whole [R, vocab_size]."""

    shard: Shard
    gather: Callable[[torch.Tensor], torch.Tensor]


def shard_of(config: ModelConfig, rank: int, size: int) -> Shard:
    """Raises SetupError, saying which sizes would do, if the model cannot be cut into `size` equal parts."""
    if config.encoder is not None and size > 1:
        raise SetupError(f"{config.architecture} cannot be cut into parts: give --tensor-parallel-size 1, or more workers")
    linear = {} if config.gated_delta is None else {"linear_num_key_heads": config.gated_delta.num_key_heads}
    check_parts(size, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, **linear, **_cut_in_mlps(config))
    assert 0 <= rank < size
    return Shard(config=config, rank=rank, size=size)


def _cut_in_mlps(config: ModelConfig) -> dict[str, int]:
    """Arguments of check_parts, by config.json's names."""
    experts = config.experts
    if experts is None:
        return {"intermediate_size": config.intermediate_size}
    cut = {
        "shared_expert_intermediate_size": experts.shared_size,
        "intermediate_size": 0 if all(experts.layers) else config.intermediate_size,
    }
    if experts.whole:
        return cut | {"num_experts": experts.router.num_experts}
    return cut | {"moe_intermediate_size": experts.intermediate_size}


def with_whole_experts(config: ModelConfig) -> ModelConfig:
    """Returns `config` with whole experts on each rank (--enable-expert-parallel). Raises SetupError."""
    if config.experts is None:
        raise SetupError(f"--enable-expert-parallel is for mixtures of experts, and {config.architecture} has none: leave it out")
    return replace(config, experts=replace(config.experts, whole=True))
