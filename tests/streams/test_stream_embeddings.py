"""Embeddings of a real model, from the client to the worker that computes them and back: they are transformers' hidden states."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
from bare_deployment import MAX_MODEL_LEN
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from whole_system import BLOCK, until, whole_system

from twostep import AsyncClient
from twostep.engine.fake import FakeRunner
from twostep.errors import InvalidRequest
from twostep.model.runner.model_runner import ModelRunner
from twostep.text.model_card import ModelCard

# The longest is computed in several steps.
TEXTS = ["the capital of France is Paris", "seven eight nine", "one two three four five six seven " * 60]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("embedding") / "m", "qwen3", is_matryoshka=True)


class Oracle:
    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def states(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            found: npt.NDArray[np.float32] = self._model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states[-1][0].numpy()
            return found


def unit(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return vector / np.linalg.norm(vector)


async def test_vectors_are_transformers_beside_answers(model_dir: Path, tmp_path: Path) -> None:
    oracle = Oracle(model_dir)
    make_runner = partial(ModelRunner, model_dir, num_blocks=512, block_size=BLOCK)
    ids = [oracle.ids(text) for text in TEXTS]
    want = [unit(oracle.states(each)[-1]) for each in ids]
    async with whole_system(model_dir, tmp_path, make_runner=make_runner, port=0) as system:
        url = f"http://127.0.0.1:{system.routers[0].http_port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=120) as http, AsyncClient(system.target()) as client:
            answers = [client.generate(text, max_tokens=60, temperature=0.0, ignore_eos=True) for text in TEXTS]
            # OpenAI's client asks for base64, and the second time for what is cached by then.
            for given in (TEXTS, ids, TEXTS):
                told = await http.embeddings.create(model="m", input=given)
                assert [each.index for each in told.data] == [0, 1, 2]
                np.testing.assert_allclose([each.embedding for each in told.data], want, atol=1e-4)
                assert told.usage.prompt_tokens == told.usage.total_tokens == sum(map(len, ids))
            one = await http.embeddings.create(model="m", input=TEXTS[0], encoding_format="float", dimensions=10)
            np.testing.assert_allclose(one.data[0].embedding, unit(oracle.states(ids[0])[-1][:10]), atol=1e-4)
            plain = await client.embed([TEXTS[1], ids[0]], normalize=False)
            np.testing.assert_allclose(plain.vectors, [oracle.states(each)[-1] for each in (ids[1], ids[0])], atol=1e-4)
            assert plain.usage.prompt_tokens == len(ids[0]) + len(ids[1])
            cut = await client.embed([TEXTS[2], ids[2]], truncate_prompt_tokens=20)
            np.testing.assert_allclose(cut.vectors, [unit(oracle.states(each)[-1]) for each in (ids[2][:20], ids[2][-20:])], atol=1e-4)
            assert (await client.embed(TEXTS[2])).usage.cached_tokens > 0
            assert [len((await answer.result()).token_ids) for answer in answers] == [60, 60, 60]
            with pytest.raises(openai.BadRequestError) as refused:
                await http.embeddings.create(model="m", input=[[5] * 2049])
            assert refused.value.code == "context_length_exceeded"
            # What fills the context leaves room for no answer, and needs none.
            assert len((await http.embeddings.create(model="m", input=[5] * 2048)).data) == 1
        await system.settled()


async def test_a_model_without_an_output_layer_gives_the_mean_and_no_answer(model_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mean"
    shutil.copytree(model_dir, directory)
    kinds = ("Transformer", "Pooling")
    modules = [{"idx": i, "path": ("", "1_Pooling")[i], "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}')
    weights = load_file(directory / "model.safetensors")
    assert weights.pop("lm_head.weight").any()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    oracle = Oracle(model_dir)
    make_runner = partial(ModelRunner, directory, num_blocks=512, block_size=BLOCK)
    async with whole_system(directory, tmp_path, make_runner=make_runner) as system, AsyncClient(system.target()) as client:
        for _ in range(2):
            found = await client.embed(TEXTS)
            assert found.usage.cached_tokens == 0
            np.testing.assert_allclose(found.vectors, [oracle.states(oracle.ids(text)).mean(0) for text in TEXTS], atol=1e-4)
        with pytest.raises(InvalidRequest):
            await client.generate(TEXTS[0], max_tokens=4).result()
        await system.settled()


async def test_a_client_that_leaves_leaves_nothing(fake_model_dir: Path, tmp_path: Path) -> None:
    """While a step computes its inputs, and others wait for theirs."""
    vocab_size, go_on = ModelCard.load(fake_model_dir).vocab_size, threading.Event()

    def make_runner() -> FakeRunner:
        held = {"step_s": 1.0, "sleep": lambda _: go_on.wait(60.0)}
        return FakeRunner(num_blocks=1024, block_size=BLOCK, vocab_size=vocab_size, max_model_len=MAX_MODEL_LEN, **held)

    async with whole_system(fake_model_dir, tmp_path, make_runner=make_runner) as system, AsyncClient(system.target()) as client:
        assert system.prefill is not None
        call, engine = asyncio.create_task(client.embed([[5] * 900, [6] * 900])), system.prefill.engine
        await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 2, "both are there")
        call.cancel()
        await until(lambda: not engine.stats().num_waiting, "what has not begun is gone at once")
        go_on.set()
        await system.settled()
        assert len((await client.embed([[5] * 900])).vectors) == 1
