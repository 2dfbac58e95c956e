"""The arithmetic of tensor parallelism, without processes: parts of models and of KV blocks, batches through shared memory."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.batch import Batch, KvShape, RowsBehind
from twostep.errors import InternalError, SetupError, Unavailable
from twostep.model.families.config import ExpertsConfig, GatedDeltaConfig, ModelConfig
from twostep.model.families.gated_delta_net import columns_of
from twostep.model.families.registry import build_model
from twostep.model.families.rope import Rope
from twostep.model.families.sharding import ModelPart, shard_of
from twostep.model.kernels.experts import ExpertRouter
from twostep.model.kernels.ops import Ops
from twostep.model.parallel import channel as parallel_channel
from twostep.model.parallel.blocks import BlockParts
from twostep.model.parallel.channel import StepMemory, pack, unpack
from twostep.model.step.kv_cache import KvCache


def config_of(*, heads: int, kv_heads: int, features: int = 32, vocab: int = 37, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=24,
        intermediate_size=features,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=4,
        norm_eps=1e-5,
        rope=Rope(theta=10000.0, scaling=None),
        num_positions=0,
        windows=(0, 0),
        max_model_len=64,
        tie_word_embeddings=tied,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        dtype="float32",
    )


@st.composite
def cuts(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    size = draw(st.sampled_from([2, 3, 4, 8]))
    kv_heads = draw(st.sampled_from([size, 2 * size] + [n for n in range(1, size) if size % n == 0]))
    heads = draw(st.sampled_from([n for n in range(size, 33, size) if n % kv_heads == 0]))
    features = size * draw(st.integers(1, 5))
    config = config_of(heads=heads, kv_heads=kv_heads, features=features, vocab=draw(st.integers(1, 40)), tied=draw(st.booleans()))
    return replace(config, **draw(st.one_of(st.just({}), with_experts(size), with_states(config, size)))), size


@st.composite
def with_states(draw: st.DrawFn, config: ModelConfig, size: int) -> dict[str, Any]:
    """Changes to a config: a state in the first layer, experts and gated attention in the second."""
    experts = draw(with_experts(size))["experts"]
    num_key_heads = size * draw(st.integers(1, 3))
    delta = GatedDeltaConfig(
        layers=(True, False),
        num_key_heads=num_key_heads,
        num_value_heads=num_key_heads * draw(st.integers(1, 3)),
        key_dim=draw(st.integers(1, 5)),
        value_dim=draw(st.integers(1, 5)),
        kernel=draw(st.integers(2, 4)),
        columns=columns_of(config, num_key_heads),
    )
    same = {"mlp_bias": False, "o_bias": False, "qkv_bias": False, "experts": experts, "gated_attention": True}
    return {"architecture": "qwen3_next", "gated_delta": delta} | same


@st.composite
def with_experts(draw: st.DrawFn, size: int) -> dict[str, Any]:
    """Changes to a config: experts in the second layer, cut or whole on each rank."""
    router = ExpertRouter(num_experts=draw(st.integers(size, 9)), top_k=draw(st.integers(1, 2)))
    experts = ExpertsConfig(
        router=router,
        layers=(False, True),
        intermediate_size=size * draw(st.integers(1, 3)),
        shared_size=size * draw(st.integers(0, 2)),
        shared_gated=True,
        whole=draw(st.booleans()),
    )
    return {"architecture": "qwen2_moe", "mlp_bias": False, "o_bias": False, "experts": experts}


@given(cuts())
def test_ranks_hold_every_number_of_a_checkpoint_once_or_all_of_them_do(cut: tuple[ModelConfig, int]) -> None:
    config, size = cut
    whole = build_model(config, torch.float32, Ops()).places()
    checkpoint = {name: torch.arange(1.0, place.tensor.numel() + 1).view(place.shape) for name, place in whole.items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in checkpoint.items()}
    for rank in range(size):
        shard = shard_of(config, rank, size)
        model = build_model(shard.local, torch.float32, Ops(), "cpu", ModelPart(shard=shard, gather=lambda x: x))
        places = model.places()
        assert places.keys() == checkpoint.keys()
        for name, place in places.items():
            assert place.shape == checkpoint[name].shape
            index = tuple(slice(start, start + length) for start, length in zip(place.start, place.tensor.shape, strict=True))
            assert checkpoint[name][index].shape == place.tensor.shape
            found[name][index] += 1
    for name, count in found.items():
        kind = name.split(".")[-2]
        kind = "linear_attn.norm" if name.endswith("linear_attn.norm.weight") else kind
        if kind in (
            "embed_tokens",
            "norm",
            "input_layernorm",
            "post_attention_layernorm",
            "gate",
            "shared_expert_gate",
            "q_norm",
            "k_norm",
            "linear_attn.norm",
        ):
            assert (count == size).all(), name
        elif kind in ("k_proj", "v_proj"):
            assert (count == max(1, size // config.num_kv_heads)).all(), name
        else:
            assert (count == 1).all(), name


@given(cuts())
def test_a_rank_has_the_kv_heads_that_its_query_heads_read(cut: tuple[ModelConfig, int]) -> None:
    config, size = cut
    share = config.num_heads // config.num_kv_heads
    for rank in range(size):
        shard = shard_of(config, rank, size)
        read = {head // share for head in range(shard.heads.start, shard.heads.stop)}
        assert read == set(range(shard.kv_heads.start, shard.kv_heads.stop))
        assert shard.local.num_heads % shard.local.num_kv_heads == 0


@pytest.mark.parametrize(
    ("config", "size", "says"),
    [
        (config_of(heads=6, kv_heads=2), 4, r"num_attention_heads .* 1, 2"),
        (config_of(heads=8, kv_heads=2, features=30), 4, "intermediate_size"),
        (config_of(heads=12, kv_heads=3), 2, "num_key_value_heads"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(config: ModelConfig, size: int, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        shard_of(config, 0, size)


@given(cuts(), st.sampled_from(["none", "int8", "int4"]), st.sampled_from([1, 2]), st.integers(0, 1 << 30))
def test_blocks_are_joined_and_cut_by_heads(cut: tuple[ModelConfig, int], quantization: str, planes: int, seed: int) -> None:
    """The parts that ranks' own pools hold make the block that one pool of all heads holds, and the other way round."""
    config, size = cut
    rng = torch.Generator().manual_seed(seed)
    head_dim, planes = (32, 2) if quantization == "int4" else (4, planes)
    shape = KvShape(num_blocks=3, block_size=4, num_layers=2, num_kv_heads=config.num_kv_heads, head_dim=head_dim, dtype="float32")
    shape = replace(shape, quantization=quantization, num_planes=planes)
    vectors = [torch.randn(shape.num_blocks * shape.block_size, planes, shape.num_kv_heads, head_dim, generator=rng) for _ in range(2)]
    whole = filled(shape, vectors, slice(None))
    shards = [shard_of(config, rank, size) for rank in range(size)]
    local = replace(shape, num_kv_heads=len(shards[0].kv_heads))
    parts = BlockParts(local, config, size)
    assert parts.shape == shape
    joined = np.full_like(whole, 255)
    for rank, shard in enumerate(shards):
        part = filled(local, vectors, shard.kv_heads.slice)
        if rank in parts.owners:
            parts.join(part, rank, joined)
        cut_out = np.zeros_like(part)
        parts.cut(whole, rank, cut_out)
        assert np.array_equal(cut_out, part)
    assert np.array_equal(joined, whole)


@given(
    parts=st.sampled_from([(2, 2, 2), (2, 1, 2), (4, 2, 4), (4, 2, 12), (2, 4, 6), (4, 1, 8), (8, 2, 8)]),
    quantization=st.sampled_from(["none", "int8"]),
    share=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_states_are_joined_and_cut_as_kv_is(parts: tuple[int, int, int], quantization: str, share: int, seed: int) -> None:
    """Ranks' states of their own heads make the blocks that one pool of all heads has them in, and come out of these."""
    size, kv_heads, key_heads = parts
    sizes = {"num_key_heads": key_heads, "num_value_heads": share * key_heads, "key_dim": 3, "value_dim": 5, "kernel": 3}
    base = config_of(heads=24 if key_heads == 12 else 8, kv_heads=kv_heads)
    count = columns_of(base, key_heads).count
    assert count % size == 0
    config = replace(base, gated_delta=GatedDeltaConfig(**sizes, layers=(True, True, False), columns=columns_of(base, key_heads)))
    shape = KvShape(
        num_blocks=20, block_size=4, num_layers=1, num_kv_heads=kv_heads, head_dim=24, dtype="float32", quantization=quantization
    )
    d = config.gated_delta
    assert d is not None
    num_bytes = d.column_bytes(4)
    each = shape.state_blocks_each(num_bytes, count)
    shape = replace(shape, num_state_blocks=2 * each, num_blocks=5 * each)
    rng = np.random.default_rng(seed)
    tables = torch.from_numpy(rng.permutation(shape.num_blocks)[: 4 * each].reshape(2, -1))
    wanted = [torch.from_numpy(rng.integers(0, 256, (2, key_heads, d.head_bytes(4)), np.uint8)) for _ in range(2)]
    whole = KvCache(shape)
    for layer, states in enumerate(wanted):
        whole.write_states(tables, layer, d.columns, states.view(2, count, -1))
    order = list(range(shape.num_blocks))
    blocks = np.empty((shape.num_blocks, shape.block_bytes), np.uint8)
    whole.read_blocks(order, blocks)
    joined = np.zeros_like(blocks)
    for rank in range(size):
        shard = shard_of(config, rank, size)
        local = shard.local.gated_delta
        assert local is not None
        pool = KvCache(replace(shape, num_kv_heads=len(shard.kv_heads)))
        assert pool.shape.state_blocks_each(local.column_bytes(4), local.columns.count) == each
        mover = BlockParts(pool.shape, config, size)
        part = np.empty((shape.num_blocks, pool.shape.block_bytes), np.uint8)
        own = slice(rank * key_heads // size, (rank + 1) * key_heads // size)
        for layer, states in enumerate(wanted):
            pool.write_states(tables, layer, local.columns, states[:, own].reshape(2, local.columns.num_own, -1))
        pool.read_blocks(order, part)
        if rank in mover.owners:
            mover.join(part, rank, joined)
        mover.cut(blocks, rank, part)
        pool.write_blocks(order, part)
        for layer, states in enumerate(wanted):
            assert torch.equal(
                pool.read_states(tables, layer, local.columns, local.column_bytes(4)).view_as(states[:, own]), states[:, own]
            )
    assert np.array_equal(joined, blocks)


def filled(shape: KvShape, vectors: list[torch.Tensor], heads: slice) -> np.ndarray:
    """The bytes of a pool that holds these heads of each layer's vectors [token, plane, head, head_dim], tokens in order of slots."""
    cache = KvCache(shape)
    for layer, of_layer in enumerate(vectors):
        block, slot = np.divmod(np.arange(len(of_layer)), shape.block_size)
        plane, head = np.arange(shape.num_planes)[:, None], np.arange(shape.num_kv_heads)
        row = (block[:, None, None] * shape.num_layers * shape.num_planes + plane) * shape.num_kv_heads + head
        index = torch.from_numpy((row * shape.block_size + slot[:, None, None]).ravel())
        cache.write_rows(layer, index, of_layer[:, :, heads].reshape(-1, shape.head_dim))
    out = np.empty((shape.num_blocks, shape.block_bytes), np.uint8)
    cache.read_blocks(list(range(shape.num_blocks)), out)
    return out


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    num_groups, num_seqs, num_tokens = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 40))
    width, num_rows, num_states = draw(st.integers(1, 9)), draw(st.integers(0, 5)), draw(st.integers(0, 3))
    carried = rng.integers(-1, 5, num_tokens).astype(np.int32) if draw(st.booleans()) else None
    return Batch(
        token_ids=rng.integers(0, 1 << 40, num_tokens),
        positions=rng.integers(0, 1 << 40, num_tokens),
        query_start=rng.integers(0, 1 << 30, num_seqs + 1).astype(np.int32),
        seq_lens=rng.integers(0, 1 << 30, num_seqs).astype(np.int32),
        block_tables=rng.integers(0, 1 << 30, (num_groups, num_seqs, width)).astype(np.int32),
        slots=rng.integers(-1, 1 << 40, (num_groups, num_tokens)),
        sample_rows=rng.integers(0, 1 << 40, num_rows),
        sampling=(),
        carried=carried,
        behind=RowsBehind(rng.integers(-1, 1 << 30, (num_tokens, 4 + 3 * width)).astype(np.int32)) if draw(st.booleans()) else None,
        state_sources=rng.integers(0, 1 << 30, (num_seqs, num_states)).astype(np.int32) if num_states else None,
        state_tables=rng.integers(0, 1 << 30, (num_seqs, num_states)).astype(np.int32) if num_states else None,
    )


@pytest.fixture(scope="module")
def memory() -> StepMemory:
    file = StepMemory.make_file()
    shared = StepMemory(file, 3)
    os.close(file)
    return shared


def never() -> None:
    raise AssertionError("waited")


@given(st.lists(batches(), min_size=1, max_size=6))
def test_batches_pass_through_shared_memory(memory: StepMemory, sent: list[Batch]) -> None:
    states = ("state_sources", "state_tables")
    for number, batch in enumerate(sent, 1):
        for rank in (1, 2):
            memory.set_done(rank, number - 1)
        command = unpack(pack(memory.put(number, batch, never, 0.0)))
        assert command.number == number
        got = memory.get(command)
        for name in ("token_ids", "positions", "query_start", "seq_lens", "block_tables", "slots", "sample_rows", "carried", *states):
            a, b = getattr(batch, name), getattr(got, name)
            assert (a is None) == (b is None), name
            if a is not None:
                assert a.dtype == b.dtype, name
                assert np.array_equal(a, b), name
        assert (batch.behind is None) == (got.behind is None)
        if batch.behind is not None and got.behind is not None:
            assert np.array_equal(batch.behind.table, got.behind.table)
    for rank in (1, 2):
        memory.set_done(rank, 0)


def test_a_slot_is_not_written_before_every_rank_is_done_with_it(memory: StepMemory) -> None:
    batch = small_batch()
    memory.set_done(1, 4)
    memory.set_done(2, 0)
    asked = []
    with pytest.raises(Unavailable):
        memory.put(5, batch, lambda: asked.append(1), time.monotonic() - 1.0)
    assert asked, "a failure must be seen while waiting"
    memory.set_done(2, 1)
    assert memory.put(5, batch, never, 0.0).number == 5
    for rank in (1, 2):
        memory.set_done(rank, 0)


def test_a_step_larger_than_its_slot_is_refused(memory: StepMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_channel, "_SLOT_BYTES", 300)
    with pytest.raises(InternalError, match="max-num-batched-tokens"):
        memory.put(1, small_batch(), never, 0.0)


def small_batch() -> Batch:
    zeros = np.zeros(4, np.int64)
    return Batch(
        token_ids=zeros,
        positions=zeros,
        query_start=np.array([0, 4], np.int32),
        seq_lens=np.array([4], np.int32),
        block_tables=np.zeros((1, 1, 1), np.int32),
        slots=zeros[None],
        sample_rows=zeros[:1],
        sampling=(),
    )
