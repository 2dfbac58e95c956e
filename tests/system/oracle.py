"""The single-process engine as the judge of a distributed answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from twostep import SamplingOptions
from twostep.engine.batch import Batch, SamplingRow
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.runner.sampler import sampling_margin
from twostep.sampling_params import SamplingParams
from twostep.text.chat_template import ChatTemplate
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import Tokenizer

# A comparison ends where the oracle itself stands so close to another token.
NEAR_TIE = 1e-4
NUM_BLOCKS = 256
BLOCK_SIZE = 16


class Oracle:
    """Answers in float32, one request at a time, in one process."""

    def __init__(self, model_dir: Path, *, quantization: str = "none") -> None:
        self._runner = ModelRunner(model_dir, dtype="float32", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, quantization=quantization)
        self._engine = Engine(self._runner, EngineConfig(max_num_batched_tokens=512, enable_prefix_caching=False))
        self._card = ModelCard.load(model_dir)
        self._tokenizer = Tokenizer.load(model_dir)
        self._template = ChatTemplate.of(self._card)
        self._asked = 0

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def chat_ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(self._template.render([{"role": "user", "content": text}]), add_special_tokens=False)

    def answer(self, token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        self._asked += 1
        prompt = self._prompt(token_ids)
        request = EngineRequest(
            seq_id=f"oracle-{self._asked}",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=params,
            eos_token_ids=frozenset(self._card.eos_token_ids),
        )
        return [token.token_id for token in generate(self._engine, [request])[0]]

    def compare(self, token_ids: Sequence[int], options: SamplingOptions, got: Sequence[int]) -> bool:
        """Fails if `got` is not the oracle's answer. True: they are equal up to a place where the oracle's own choice hangs on less
        than NEAR_TIE, and the comparison ended there."""
        # Unset options take the neutral value here, as the test's model directory says nothing else.
        biases = tuple(sorted(options.get("logit_bias", {}).items()))
        params = SamplingParams(**{**options, "logit_bias": biases})  # type: ignore[arg-type]
        expected = self.answer(token_ids, params)
        for n, (want, have) in enumerate(zip(expected, got, strict=False)):
            if want != have:
                margin = self._margin(token_ids, expected[:n], params)
                assert margin < NEAR_TIE, (
                    f"token {n} is {have}, the oracle says {want} with a margin of {margin} (prompt of {len(token_ids)})"
                )
                return True
        assert len(got) == len(expected)
        return False

    def _prompt(self, token_ids: Sequence[int]) -> list[int]:
        """What a router makes of given ids."""
        start = self._card.decoder_start_token_id
        return [*token_ids, *(() if start is None else (start,))]

    def _margin(self, token_ids: Sequence[int], output: Sequence[int], params: SamplingParams) -> float:
        prompt = self._prompt(token_ids)
        ids = [*prompt, *output]
        num_tokens, num_blocks = len(ids), -(-len(ids) // BLOCK_SIZE)
        row = SamplingRow(params=params, position=len(output), history=ids, num_prompt_tokens=len(prompt), stop_ids=frozenset())
        batch = Batch(
            token_ids=np.asarray(ids, dtype=np.int64),
            positions=np.arange(num_tokens, dtype=np.int64),
            query_start=np.asarray([0, num_tokens], dtype=np.int32),
            seq_lens=np.asarray([num_tokens], dtype=np.int32),
            block_tables=np.arange(num_blocks, dtype=np.int32)[None, None],
            slots=np.arange(num_tokens, dtype=np.int64)[None],
            sample_rows=np.asarray([num_tokens - 1], dtype=np.int64),
            sampling=[row],
            num_encoded=np.asarray([len(prompt) - 1], dtype=np.int32) if self._runner.kv_shape.has_encoder else None,
        )
        return sampling_margin(self._runner.forward(batch)[0], row)
