"""A hand-over of latent KV (one vector of a token and layer, keys and values both) between workers of a real model, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tiny_models import save_tiny_model
from worker_harness import routed, started

from kv_transfer.layout_conversion import unpack
from twostep.engine.batch import Batch, LayerRange
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.worker.model import layout_of

BLOCK_SIZE, NUM_LAYERS, LATENT, ROPE = 8, 3, 24, 8
NUM_PROMPT = 61


class Watched(ModelRunner):
    """Remembers what was last written into each block from outside."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.written: dict[int, npt.NDArray[np.uint8]] = {}

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        columns = slice(None) if layers is None else self.kv_shape.bytes_of(layers)
        for block, row in zip(block_ids, data, strict=True):
            self.written.setdefault(block, np.zeros(self.kv_shape.block_bytes, np.uint8))[columns] = row
        super().write_blocks(block_ids, data, layers)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("latent"), "deepseek_v2", kv_lora_rank=LATENT, qk_rope_head_dim=ROPE)


def runner_of(directory: Path, kind: type[ModelRunner] = ModelRunner, **options: Any) -> Any:
    return kind(directory, **{"num_blocks": 64, "block_size": BLOCK_SIZE} | options)


def kept_by(runner: ModelRunner, prompt: list[int]) -> npt.NDArray[np.uint8]:
    """What the prompt alone leaves in an unused pool: blocks in order."""
    size, count = runner.kv_shape.block_size, len(prompt)
    blocks = np.arange(-(-count // size), dtype=np.int32)
    batch = Batch(
        token_ids=np.array(prompt),
        positions=np.arange(count),
        query_start=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_tables=blocks[None, None],
        slots=np.arange(count)[None],
        sample_rows=np.zeros(0, np.int64),
        sampling=(),
    )
    runner.run(batch)
    out = np.empty((len(blocks), runner.kv_shape.block_bytes), np.uint8)
    runner.read_blocks(blocks.tolist(), out)
    return out


def tokens_of(blocks: npt.NDArray[np.uint8], runner: ModelRunner) -> list[bytes]:
    """All that each token of the prompt keeps, numbers and scales, of all layers."""
    vectors = unpack(blocks, layout_of(runner.kv_shape, "m"))
    places = [divmod(token, runner.kv_shape.block_size) for token in range(NUM_PROMPT)]
    scales = vectors.scales
    return [
        vectors.values[block, ..., slot, :].tobytes() + (b"" if scales is None else scales[block, ..., slot].tobytes())
        for block, slot in places
    ]


@pytest.mark.parametrize("quantization", ["exact", "int8"])
@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 2 * BLOCK_SIZE])
async def test_every_byte_arrives_and_the_tokens_go_on(redis_url: str, directory: Path, quantization: str, block_size: int) -> None:
    """Also into blocks of another size, for which they are cut anew on the way."""
    rng = random.Random(7)
    prompt = [rng.randrange(3, 500) for _ in range(NUM_PROMPT)]
    source = runner_of(directory, kv_cache_dtype=quantization)
    target, oracle = (runner_of(directory, Watched, kv_cache_dtype=quantization, block_size=block_size) for _ in range(2))
    options = {"hash_unit": 2 * BLOCK_SIZE}
    workers = {"prefill_runner": source, "decode_runner": target, "prefill_options": options, "decode_options": options}
    async with started(redis_url, **workers) as pair, routed(pair) as router:
        answer = await router.generate("r", prompt, 12)
        await pair.settled()
    assert answer.failed is None
    assert answer.committed is not None
    vector = (LATENT + ROPE) * 4 if quantization == "exact" else LATENT + ROPE + 2
    assert answer.committed.bytes == -(-NUM_PROMPT // BLOCK_SIZE) * BLOCK_SIZE * NUM_LAYERS * vector
    # An unused pool gives its blocks away in order.
    arrived = np.stack([target.written[block] for block in sorted(target.written)])
    assert tokens_of(arrived, target) == tokens_of(kept_by(oracle, prompt), oracle)
    engine = Engine(oracle, EngineConfig(max_num_batched_tokens=512, enable_prefix_caching=False))
    request = EngineRequest(
        seq_id="o",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=12, temperature=0.0),
        eos_token_ids=frozenset(),
        prefix_key=b"k",
    )
    assert answer.tokens == [token.token_id for token in generate(engine, [request])[0]]
