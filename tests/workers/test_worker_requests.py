"""Long prompts are read and hashed beside the event loop, and are the same requests as short ones."""

from __future__ import annotations

import asyncio

import pytest

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner
from twostep.errors import ResourceExhausted
from twostep.prefix import prefix_hashes
from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2
from twostep.sampling_params import SamplingParams
from twostep.worker import requests
from twostep.worker.model import ServedModel, layout_of
from twostep.worker.requests import Grammars, RequestReader

INLINE = requests._MAX_INLINE_TOKENS
BLOCK_SIZE = 16
VOCAB = 500


@pytest.fixture
async def reader() -> RequestReader:
    runner = make_runner()
    model = ServedModel(name="m", runner=runner, layout=layout_of(runner.kv_shape, "fake"), eos_token_ids=frozenset())
    grammars = Grammars(model.grammar_compiler())
    return RequestReader(secret=b"sixteen bytes or more", layout=model.layout, eos_token_ids=frozenset(), grammars=grammars)


def reserve(num_tokens: int, request_id: str = "r") -> decode_pb2.ReserveRequest:
    token_ids = [(7 * i) % VOCAB for i in range(num_tokens)]
    return decode_pb2.ReserveRequest(
        request_id=request_id,
        attempt=1,
        token_ids=token_ids,
        num_prompt_tokens=num_tokens,
        sampling=sampling_to_proto(SamplingParams(max_tokens=4)),
        tenant="t",
    )


def make_runner(num_blocks: int = 2048) -> FakeRunner:
    return FakeRunner(num_blocks=num_blocks, block_size=BLOCK_SIZE, vocab_size=VOCAB, max_model_len=1 << 20)


def make_engine(num_blocks: int = 2048) -> Engine:
    return Engine(
        make_runner(num_blocks), EngineConfig(max_num_batched_tokens=1 << 16, max_num_seqs=8, max_waiting=8, hash_unit=BLOCK_SIZE)
    )


@pytest.mark.parametrize("num_tokens", [INLINE, INLINE + 1, 2 * INLINE, 3 * INLINE + 5])
async def test_a_prompt_is_the_same_however_it_was_read(reader: RequestReader, num_tokens: int) -> None:
    proto = reserve(num_tokens)
    request = await reader.read(proto)
    assert request.token_ids == tuple(proto.token_ids)
    assert (request.hasher is not None) == (num_tokens > INLINE)
    engine = make_engine()
    engine.reserve(request)
    engine.commit(request.seq_id, [1])
    engine.cancel(request.seq_id)
    assert set(engine.cached_prefixes()) == set(prefix_hashes(request.prefix_key, request.token_ids, BLOCK_SIZE))
    again = engine.reserve(await reader.read(reserve(num_tokens, "again")))
    assert again.num_cached_tokens == num_tokens // BLOCK_SIZE * BLOCK_SIZE


async def test_a_request_that_finds_no_room_is_tried_again_as_it_is(reader: RequestReader) -> None:
    engine = make_engine(num_blocks=INLINE // BLOCK_SIZE + 8)
    in_the_way, request = await reader.read(reserve(200, "other")), await reader.read(reserve(INLINE + 1))
    engine.reserve(in_the_way)
    with pytest.raises(ResourceExhausted):
        engine.reserve(request)
    engine.cancel(in_the_way.seq_id)
    engine.reserve(request)
    engine.commit(request.seq_id, [1])
    engine.cancel(request.seq_id)
    assert set(engine.cached_prefixes()) == set(prefix_hashes(request.prefix_key, request.token_ids, BLOCK_SIZE))


async def test_others_go_on_while_a_long_prompt_is_read(reader: RequestReader) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(others())
    await asyncio.sleep(0)
    before = turns
    await reader.read(reserve(1 << 18))
    during = turns - before
    other.cancel()
    assert during > 2, "read at once, it would have had one turn at most"
