"""Long prompts are read and prepared beside the event loop, and are the same requests as short ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner
from twostep.engine.types import EngineRequest
from twostep.keys.secret import DeploymentSecret
from twostep.prefix import prefix_hashes
from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2
from twostep.sampling_params import SamplingParams
from twostep.worker import preparation, requests
from twostep.worker.model import ServedModel, layout_of
from twostep.worker.preparation import Preparation
from twostep.worker.requests import RequestReader

INLINE = preparation._MAX_INLINE_TOKENS
MORE = requests._MAX_INLINE_TOKENS
BLOCK_SIZE = 16
VOCAB = 500
Prepare = Callable[[EngineRequest], Awaitable[EngineRequest]]


@pytest.fixture
async def reader() -> RequestReader:
    return RequestReader(
        secret=DeploymentSecret(b"sixteen bytes or more"), layout=layout_of(make_runner().kv_shape, "fake"), eos_token_ids=frozenset()
    )


@pytest.fixture
def prepared() -> Iterator[Prepare]:
    runner = make_runner()
    model = ServedModel(name="m", runner=runner, layout=layout_of(runner.kv_shape, "fake"), eos_token_ids=frozenset())
    made = Preparation(model.grammar_compiler(), BLOCK_SIZE)
    yield made.of
    made.close()


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


@pytest.mark.parametrize("num_tokens", [INLINE, INLINE + 1, MORE, 3 * MORE + 5])
async def test_a_prompt_is_the_same_however_it_was_read(reader: RequestReader, prepared: Prepare, num_tokens: int) -> None:
    proto = reserve(num_tokens)
    request = await prepared(await reader.read(proto))
    assert request.token_ids == tuple(proto.token_ids)
    assert (request.hasher is not None) == (num_tokens > INLINE)
    engine = make_engine()
    engine.reserve(request)
    engine.commit(request.seq_id, [1])
    engine.cancel(request.seq_id)
    assert set(engine.cached_prefixes()) == set(prefix_hashes(request.prefix_key, request.token_ids, BLOCK_SIZE))
    again = engine.reserve(await prepared(await reader.read(reserve(num_tokens, "again"))))
    assert again.num_cached_tokens == num_tokens // BLOCK_SIZE * BLOCK_SIZE


async def test_others_go_on_while_a_long_prompt_is_read(reader: RequestReader, prepared: Prepare) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(others())
    await asyncio.sleep(0)
    before = turns
    await prepared(await reader.read(reserve(1 << 18)))
    during = turns - before
    other.cancel()
    assert during > 2, "read at once, it would have had one turn at most"
