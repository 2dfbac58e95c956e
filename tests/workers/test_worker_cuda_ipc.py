"""Hand-overs by the cuda_ipc transport between two workers with a real model: on a CPU its kernels run in Triton's interpreter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from worker_harness import BLOCK, prompt_of, routed, started

from kv_transfer.cuda_ipc.transport import CudaIpcTransport, IpcProbeSize
from kv_transfer.transports import Transports
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.model.kernels.triton_pull import PullShape
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.worker.edge import EdgeParts

pytestmark = [pytest.mark.usefixtures("patient_paths"), pytest.mark.system]
MAX_TOKENS = 5


def runner_of(directory: Path) -> ModelRunner:
    return ModelRunner(directory, num_blocks=64, block_size=BLOCK, max_model_len=128, num_threads=1)


def tokens_of(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What one engine generates by itself."""
    work = [
        EngineRequest(
            seq_id=f"r{i}",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
            eos_token_ids=frozenset(),
        )
        for i, prompt in enumerate(prompts)
    ]
    engine = Engine(runner_of(directory), EngineConfig(max_num_batched_tokens=64, max_num_seqs=4, hash_unit=2 * BLOCK))
    return [[token.token_id for token in tokens] for tokens in generate(engine, work)]


def transports_of(parts: EdgeParts) -> Transports:
    runner: Any = parts.model.runner
    shape = PullShape(num_programs=2, tile_words=512, num_warps=1)
    probe_size = IpcProbeSize(num_bytes=1 << 14, piece_bytes=1 << 12)
    return Transports([CudaIpcTransport(runner.kv_cache, serves=parts.config.role == "prefill", shape=shape, probe_size=probe_size)])


async def test_the_second_worker_goes_on_where_the_first_stopped(redis_url: str, tiny_llama_dir: Path) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((40, 17, 61))]
    want = await asyncio.to_thread(tokens_of, tiny_llama_dir, prompts)
    runners: Any = {"prefill_runner": runner_of(tiny_llama_dir), "decode_runner": runner_of(tiny_llama_dir)}
    async with started(redis_url, make_transports=transports_of, floors={}, **runners) as pair, routed(pair) as router:
        answers = await asyncio.gather(*(router.generate(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(prompts)))
        assert [answer.tokens for answer in answers] == want
        assert {answer.committed.transport for answer in answers if answer.committed} == {"cuda_ipc"}
        await pair.settled()
