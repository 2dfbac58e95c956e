"""Hand-overs whose KV is encoded on its way, or lies in another number format or in blocks of another size on the other side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from one_sided import ArrayStore, OneSidedHub
from tiny_models import save_tiny_model
from worker_harness import (
    BLOCK,
    expected,
    local_transport,
    make_runner,
    one_sided_transport,
    one_sided_transports,
    prompt_of,
    routed,
    started,
)

from kv_transfer import wire_encoding
from kv_transfer.checksums import checksum
from kv_transfer.conversion import BlockTarget, Conversion, ConversionPlan
from kv_transfer.encoder import WireEncoder
from kv_transfer.layout_conversion import Assembler, block_bytes
from kv_transfer.local.transport import LocalHub, LocalTransport
from kv_transfer.transport import ChunkInfo
from kv_transfer.transports import Transports
from prefill_worker.publisher import Publisher
from twostep.cluster.records import LayoutRecord
from twostep.errors import Incompatible, InvalidRequest, SetupError
from twostep.model.runner.model_runner import ModelRunner
from twostep.rpc.v1 import kv_pb2
from twostep.worker.edge import EdgeParts
from twostep.worker.model import layout_of

Blocks = npt.NDArray[np.uint8]

LENGTH = 37
LAYOUT = LayoutRecord(model_fingerprint="m", dtype="float32", block_size=4, num_layers=2, num_kv_heads=1, head_dim=8)


def wires(prefill: str, decode: str = "raw", **prefill_options: Any) -> dict[str, Any]:
    return {"prefill_options": {"kv_wire": prefill} | prefill_options, "decode_options": {"kv_wire": decode}}


# ---- encoded, with a fake model: a wrong byte gives a wrong token ---------------------------------------------------------------


@pytest.mark.parametrize("decode_block", [BLOCK, 8])
async def test_zstd_moves_the_same_bytes_in_fewer(redis_url: str, decode_block: int) -> None:
    shape = {"num_layers": 6, "num_kv_heads": 2, "head_dim": 16}
    options = wires("zstd", chunk_bytes=4096, max_num_batched_tokens=256)
    options["decode_options"] |= {"block_size": decode_block}
    runners = {
        "prefill_runner": make_runner(marks_layers=True, step_s=0.02, **shape),
        "decode_runner": make_runner(block_size=decode_block, **shape),
    }
    async with started(redis_url, **options, **runners) as pair, routed(pair) as router:
        prompt = prompt_of(150)
        answer = await router.generate("r", prompt, 5)
        assert answer.tokens == expected(prompt, 5)
        assert answer.committed is not None
        raw = -(-len(prompt) // BLOCK) * runners["prefill_runner"].kv_shape.block_bytes
        assert 0 < answer.committed.bytes < raw / 3
        # The blocks came as they were sent: prefixes are kept.
        longer = prompt + prompt_of(11, seed=9)
        again = await router.generate("s", longer, 5)
        assert again.tokens == expected(longer, 5)
        assert again.num_decode_cached == len(prompt) // decode_block * decode_block


@pytest.mark.parametrize(("prefill", "decode"), [("raw", "int8"), ("int8", "fp8")])
async def test_lossy_forms_travel_only_where_both_sides_say_so(redis_url: str, prefill: str, decode: str) -> None:
    async with started(redis_url, **wires(prefill, decode)) as pair, routed(pair) as router:
        answer = await router.generate("r", prompt_of(30), 4)
        answer.check(prompt_of(30), 4)
        assert answer.committed is not None
        assert answer.committed.bytes == 8 * pair.prefill_runner.kv_shape.block_bytes
        assert (await router.generate("s", prompt_of(30), 4)).num_decode_cached == 28


@pytest.mark.usefixtures("patient_paths")
async def test_what_reads_the_pool_itself_reads_it_as_it_is(redis_url: str) -> None:
    make = one_sided_transports(OneSidedHub())
    async with started(redis_url, make_transports=make, **wires("zstd", "zstd")) as pair, routed(pair) as router:
        answer = await router.generate("r", prompt_of(30), 4)
        answer.check(prompt_of(30), 4)
        assert answer.committed is not None
        assert answer.committed.bytes == 8 * pair.prefill_runner.kv_shape.block_bytes


async def test_the_first_watch_decides_the_form(redis_url: str) -> None:
    async with started(redis_url, **wires("zstd")) as pair, routed(pair) as router:
        await router.reserve("r", prompt_of(30), 3)
        call = router.run("r", prompt_of(30), 3)
        ticket = (await call.read()).accepted.ticket
        manifest = (await pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket, wire=["zstd"])).read()).manifest
        assert manifest.wire == "zstd"
        with pytest.raises(grpc.aio.AioRpcError):
            await pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket)).read()
        call.cancel()
        await router.cancel("r")


# ---- real models ------------------------------------------------------------------------------------------------------------------


def runner_of(directory: Path, options: dict[str, Any]) -> ModelRunner:
    return ModelRunner(directory, **({"num_blocks": 64, "block_size": BLOCK, "max_model_len": 128, "num_threads": 1} | options))


Convert = Callable[[Blocks, LayoutRecord, LayoutRecord], Blocks]


def by_assembler(blocks: Blocks, source: LayoutRecord, target: LayoutRecord) -> Blocks:
    done = Assembler(target, first_block=0, num_tokens=LENGTH).add(source, 0, blocks)
    return np.stack([block.data for block in sorted(done, key=lambda block: block.index)])


def by_wire(encoding: str) -> Convert:
    def convert(blocks: Blocks, source: LayoutRecord, target: LayoutRecord) -> Blocks:
        assert source == target
        return wire_encoding.decode(encoding, wire_encoding.encode(encoding, blocks, source), len(blocks), source)

    return convert


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, Convert]] = {
    "bfloat16 to float32": ({"dtype": "bfloat16"}, {}, "zstd", by_assembler),
    "float32 to int8 of another cut": ({}, {"kv_cache_dtype": "int8", "block_size": 8}, "raw", by_assembler),
    "int4 to int8 of another cut": ({"kv_cache_dtype": "int4"}, {"kv_cache_dtype": "int8", "block_size": 8}, "zstd", by_assembler),
    "int8 to fp8": ({"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, "raw", by_assembler),
    "fp8 on the wire": ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}, "fp8", by_wire("fp8")),
}


@pytest.mark.parametrize("case", CASES)
async def test_decode_goes_on_from_converted_kv_and_shares_none_of_it(
    redis_url: str, tiny_llama_dir: Path, tmp_path: Path, case: str
) -> None:
    there, here, wire, convert = CASES[case]
    directory = save_tiny_model(tmp_path, head_dim=32) if "int4" in case else tiny_llama_dir
    prefill, decode = runner_of(directory, there), runner_of(directory, here)
    read: list[Blocks] = []
    written: dict[int, Blocks] = {}
    read_blocks, write_blocks = prefill.read_blocks, decode.write_blocks

    def reading(block_ids: Sequence[int], out: Blocks, layers: Any = None) -> None:
        read_blocks(block_ids, out, layers)
        read.append(out.copy())

    def writing(block_ids: Sequence[int], data: Blocks, layers: Any = None) -> None:
        assert layers is None
        written.update(zip(block_ids, data.copy(), strict=True))
        write_blocks(block_ids, data, layers)

    runners: Any = {"prefill_runner": prefill, "decode_runner": decode}
    prefill.read_blocks, decode.write_blocks = reading, writing  # type: ignore[method-assign]
    options = wires(wire, wire, chunk_bytes=1 << 30)
    options["prefill_options"] |= {"block_size": prefill.kv_shape.block_size}
    options["decode_options"] |= {"block_size": decode.kv_shape.block_size}
    async with started(redis_url, **options, **runners) as pair, routed(pair) as router:
        for name in ("r", "s"):
            read.clear()
            written.clear()
            answer = await router.generate(name, prompt_of(LENGTH), 10)
            assert (answer.failed, len(answer.tokens)) == (None, 10)
            # The source's prefixes are exact and stay so; nothing of what came here, nor of what followed it, may be found.
            assert answer.num_decode_cached == 0
            assert answer.first is not None
            assert (answer.first.cached_tokens > 0) == (name == "s")
            assert (await pair.both())[1].num_cached_blocks == 0
            (blocks,) = read
            want = convert(blocks, *(layout_of(runner.kv_shape, "fake") for runner in (prefill, decode)))
            assert sorted(map(bytes, written.values())) == sorted(map(bytes, want))


async def test_what_is_exact_here_is_kept_beside_what_is_not(redis_url: str, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that exact KV left is used; what is put behind it, rounded, is not found by the next one."""
    prompt, longer = prompt_of(LENGTH), prompt_of(LENGTH) + prompt_of(20, seed=5)
    runners: Any = {"prefill_runner": runner_of(tiny_llama_dir, {}), "decode_runner": runner_of(tiny_llama_dir, {})}
    async with started(redis_url, **wires("int8", "int8"), **runners) as pair, routed(pair) as router:
        with monkeypatch.context() as patched:
            choose = Publisher.choose
            patched.setattr(Publisher, "choose", lambda *asked: (choose(*asked)[0], "raw"))
            await router.generate("exact", prompt, 2)
        for name in ("r", "s"):
            assert (await router.generate(name, longer, 4)).num_decode_cached == LENGTH // BLOCK * BLOCK


# ---- what is refused --------------------------------------------------------------------------------------------------------------


class _OneChunk(LocalTransport):
    """Every chunk is these bytes."""

    data: Blocks

    async def fetch_bytes(self, endpoint: str, lease_id: str, chunk: ChunkInfo, *, deadline: float) -> Blocks:
        return self.data


def conversion(
    target: LayoutRecord, data: Blocks, *, wire: str = "raw", num_tokens: int = 8
) -> tuple[Callable[..., Awaitable[float]], ChunkInfo, ArrayStore]:
    store = ArrayStore(np.full((4, block_bytes(target)), 7, np.uint8), target.num_layers)
    transport = _OneChunk(store, block_bytes(target), LocalHub(), worker_id="w")
    transport.data = data
    num_blocks = -(-num_tokens // target.block_size)
    where = BlockTarget(
        block_ids=[2, 1][:num_blocks], num_cached_blocks=0, num_blocks=num_blocks, num_tokens=num_tokens, num_cached_tokens=0
    )
    chunk = ChunkInfo(index=0, first_block=0, num_blocks=-(-num_tokens // LAYOUT.block_size), num_bytes=data.size, checksum=checksum(data))
    plan = ConversionPlan(number=1, source=LAYOUT, ours=target, target=where, wire=wire)
    plan.check(transport)
    return partial(Conversion(plan, store).fetch, transport, "", ""), chunk, store


def other(**fields: Any) -> LayoutRecord:
    return LayoutRecord(**{name: fields.get(name, getattr(LAYOUT, name)) for name in LayoutRecord.__dataclass_fields__})


async def test_numbers_that_float16_has_not_are_refused() -> None:
    numbers = np.zeros(2 * block_bytes(LAYOUT) // 4, np.float32)
    for value, fits in ((60000.0, True), (-70000.0, False)):
        numbers[5] = value
        converting, chunk, store = conversion(other(dtype="float16"), numbers.view(np.uint8))
        if fits:
            await converting(chunk, deadline=0.0)
            assert store.blocks[2].view(np.float16)[5] == value
        else:
            with pytest.raises(Incompatible, match="another --dtype"):
                await converting(chunk, deadline=0.0)
            assert (store.blocks == 7).all()


async def test_chunks_of_another_size_are_refused() -> None:
    size = 2 * block_bytes(LAYOUT)
    for wire, num_bytes in (("raw", size - 1), ("raw", size + 1), ("zstd", size + 1), ("int8", size + 1)):
        converting, chunk, store = conversion(LAYOUT, np.zeros(num_bytes, np.uint8), wire=wire)
        with pytest.raises(InvalidRequest):
            await converting(chunk, deadline=0.0)
        assert (store.blocks == 7).all()


def test_a_worker_does_not_start_with_a_form_that_its_blocks_cannot_have() -> None:
    store = ArrayStore(np.zeros((1, 8), np.uint8))
    for layout, wire, why in ((other(quantization="fp8"), "int8", "raw or zstd"), (other(block_size=6), "fp8", "--block-size")):
        with pytest.raises(SetupError, match=why):
            WireEncoder(store, layout, wire)
    WireEncoder(store, other(quantization="fp8"), "zstd")


def test_what_a_source_cannot_have_sent_is_incompatible() -> None:
    for layout, wire in ((other(num_layers=3), "raw"), (other(tp_size=2), "raw"), (LAYOUT, "gzip")):
        with pytest.raises(Incompatible):
            conversion(layout, np.zeros(8, np.uint8), wire=wire)


# ---- pools that are cut into blocks of different sizes ----------------------------------------------------------------------

SHAPE = {"num_layers": 6, "num_kv_heads": 2}
UNIT = {"hash_unit": 16}


def runners(prefill: int, decode: int, **prefill_options: Any) -> dict[str, Any]:
    return {
        "prefill_runner": make_runner(block_size=prefill, **SHAPE, **prefill_options),
        "decode_runner": make_runner(block_size=decode, **SHAPE),
        "prefill_options": UNIT | {"block_size": prefill, "max_num_batched_tokens": 24},
        "decode_options": UNIT | {"block_size": decode},
    }


@pytest.mark.parametrize(("prefill", "decode"), [(4, 8), (8, 4), (2, 16)])
async def test_tokens_are_right_and_prefixes_are_kept(redis_url: str, prefill: int, decode: int) -> None:
    async with started(redis_url, **runners(prefill, decode)) as pair, routed(pair) as router:
        prompts = [prompt_of(length, seed=length) for length in (1, 3, 16, 37, 64, 83)]
        answers = await asyncio.gather(*(router.generate(f"r{i}", prompt, 6) for i, prompt in enumerate(prompts)))
        for prompt, answer in zip(prompts, answers, strict=True):
            answer.check(prompt, 6)
        # Longer than before: what the decode worker holds is not moved again, and its last block may begin in the middle of the source's.
        for number, prompt in enumerate(prompts):
            longer = prompt + prompt_of(11, seed=99)
            answer = await router.generate(f"s{number}", longer, 6)
            answer.check(longer, 6)
            assert answer.num_decode_cached == len(prompt) // decode * decode


async def test_what_reads_the_pool_itself_is_not_offered(redis_url: str) -> None:
    local_hub, hub = LocalHub(), OneSidedHub()

    def make(parts: EdgeParts) -> Transports:
        return Transports([one_sided_transport(parts, hub), local_transport(parts, local_hub, 1 << 20)])

    async with started(redis_url, make_transports=make, **runners(8, 4)) as pair, routed(pair) as router:
        for number in range(2):
            answer = await router.generate(f"r{number}", prompt_of(40, seed=number), 4)
            answer.check(prompt_of(40, seed=number), 4)
            assert answer.committed is not None
            assert answer.committed.transport == "local"


@pytest.mark.parametrize("differing", [{"num_layers": 4}, {"num_kv_heads": 1}, {"head_dim": 8}])
async def test_what_cannot_be_converted_is_refused_with_the_reason(redis_url: str, differing: dict[str, Any]) -> None:
    options = runners(8, 8)
    options["decode_runner"] = make_runner(**({"block_size": 8} | SHAPE | differing))
    async with started(redis_url, **options) as pair, routed(pair) as router:
        call, _ = await router.begin("r", prompt_of(20), 4)
        failed = (await router.event("failed")).failed
        assert (failed.code, failed.retryable) == ("FAILED_PRECONDITION", False)
        name = next(iter(differing))
        assert {"num_kv_heads": "KV heads"}.get(name, name) in failed.message
        call.cancel()
