"""Hand-overs of models some of whose layers have windows: of these layers only what is in reach is sent, whatever the layouts and forms.
The fake model's next token depends on every block that is in reach of any group of layers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from one_sided import OneSidedHub
from worker_harness import BLOCK, VOCAB, make_runner, one_sided_transports, prompt_of, routed, started

from kv_transfer.layout_conversion import Assembler, all_layers, block_bytes
from twostep.cluster.records import LayoutRecord
from twostep.engine.fake import FakeRunner, fake_next_token

WINDOW = 21
GROUPS = [(1, 1), (2, 1), (3, 2)]


def runner_of(groups: tuple[int, int], block_size: int = BLOCK) -> FakeRunner:
    num_groups, num_windowed = groups
    sizes = {"num_blocks": 256 * num_groups, "num_layers": 3, "num_kv_heads": 2, "head_dim": 16}
    return make_runner(block_size=block_size, window=WINDOW, num_groups=num_groups, num_windowed=num_windowed, **sizes)


def answer_to(prompt: list[int], count: int, groups: tuple[int, int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_next_token(tokens, VOCAB, WINDOW, num_groups=groups[0], num_windowed=groups[1]))
    return tokens[len(prompt) :]


def options_of(prefill: int = BLOCK, decode: int = BLOCK, **both: Any) -> dict[str, Any]:
    return {
        "prefill_options": {"hash_unit": 16, "block_size": prefill, "max_num_batched_tokens": 24} | both,
        "decode_options": {"hash_unit": 16, "block_size": decode} | both,
    }


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("prefill", "decode"), [(4, 4), (4, 8), (8, 4), (2, 16)])
@pytest.mark.parametrize("wire", ["raw", "zstd"])
async def test_what_is_in_reach_is_handed_over(redis_url: str, groups: tuple[int, int], prefill: int, decode: int, wire: str) -> None:
    runners = {"prefill_runner": runner_of(groups, prefill), "decode_runner": runner_of(groups, decode)}
    async with started(redis_url, **options_of(prefill, decode, kv_wire=wire), **runners) as pair, routed(pair) as router:
        prompts = [prompt_of(length, seed=length) for length in (1, 3, 16, 37, 64, 83, 200)]
        answers = await asyncio.gather(*(router.generate(f"r{i}", prompt, 30) for i, prompt in enumerate(prompts)))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.failed is None, answer.failed
            assert answer.tokens == answer_to(prompt, 30, groups)
        assert answers[-1].committed is not None
        shape = runners["prefill_runner"].kv_shape
        most = shape.order(200).count * shape.block_bytes
        assert answers[-1].committed.bytes == most if wire == "raw" else 0 < answers[-1].committed.bytes < most
        # What the decode worker holds is not moved again, as long as it is in reach.
        for number, prompt in enumerate(prompts):
            longer = prompt + prompt_of(11, seed=99)
            answer = await router.generate(f"s{number}", longer, 6)
            assert answer.failed is None, answer.failed
            assert answer.tokens == answer_to(longer, 6, groups)
            assert answer.num_decode_cached == len(prompt) // decode * decode


@pytest.mark.usefixtures("patient_paths")
@pytest.mark.parametrize("groups", GROUPS)
async def test_what_reads_the_pool_itself_reads_what_is_in_reach(redis_url: str, groups: tuple[int, int]) -> None:
    make = one_sided_transports(OneSidedHub())
    runners = {"prefill_runner": runner_of(groups), "decode_runner": runner_of(groups)}
    async with started(redis_url, make_transports=make, **options_of(), **runners) as pair, routed(pair) as router:
        for number, length in enumerate((150, 30, 90)):
            answer = await router.generate(f"r{number}", prompt_of(length, seed=number), 20)
            assert answer.failed is None, answer.failed
            assert answer.tokens == answer_to(prompt_of(length, seed=number), 20, groups)


async def test_other_groups_are_refused(redis_url: str) -> None:
    runners = {"prefill_runner": runner_of((2, 1)), "decode_runner": runner_of((3, 2))}
    async with started(redis_url, **options_of(), **runners) as pair, routed(pair) as router:
        call, _ = await router.begin("r", prompt_of(20), 4)
        failed = (await router.event("failed")).failed
        assert (failed.code, failed.retryable) == ("FAILED_PRECONDITION", False)
        assert "num_groups" in failed.message
        call.cancel()


def test_layers_with_windows_are_not_waited_for_where_nobody_sees_them() -> None:
    source = LayoutRecord(
        model_fingerprint="m",
        dtype="float32",
        block_size=4,
        num_layers=1,
        num_kv_heads=1,
        head_dim=3,
        num_groups=2,
        num_windowed=1,
        reach=5,
    )
    target = all_layers(source)
    assembler = Assembler(target, first_block=0, num_tokens=10, num_unseen=6, num_unwindowed=1)
    data = np.arange(2 * block_bytes(source), dtype=np.uint8).reshape(2, -1)
    # The first block has come once the layer without a window has; of the second, tokens 6 and 7 are seen.
    done = assembler.add(target, 0, data, first_layer=0, num_layers=1)
    assert [block.index for block in done] == [0]
    assert np.array_equal(done[0].data[: block_bytes(source)], data[0])
    done = assembler.add(target, 1, data[:1], first_layer=1, num_layers=1)
    assert [block.index for block in done] == [1]
    assert np.array_equal(done[0].data, np.concatenate((data[1], data[0])))
