"""Models all of whose layers have windows, in a pool that has no room for what their sequences leave behind."""

from __future__ import annotations

from pathlib import Path

from forward_helpers import VOCAB, reference_logits, save_model

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams


def test_answers_are_the_reference_s_while_others_take_what_is_left(tmp_path: Path) -> None:
    oracle = save_model("mistral", tmp_path, sliding_window=21)
    runner = ModelRunner(tmp_path, num_blocks=55, block_size=8)
    requests = [
        EngineRequest(
            seq_id=str(i),
            token_ids=[(7 * place + i) % VOCAB for place in range(200)],
            num_prompt_tokens=200,
            sampling=SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True),
            eos_token_ids=frozenset(),
            prefix_key=b"a tenant's key",
        )
        for i in range(2)
    ]
    # Each has 35 blocks in the end, of which 21 are in reach.
    engine = Engine(runner, EngineConfig(max_num_batched_tokens=64, hash_unit=8))
    for request, answer in zip(requests, generate(engine, requests), strict=True):
        tokens = [*request.token_ids, *(token.token_id for token in answer)]
        logits = reference_logits(oracle, tokens)[199:-1]
        chosen = logits.gather(1, logits.new_tensor(tokens[200:]).long()[:, None])[:, 0]
        assert len(answer) == 80
        assert (logits.max(1).values - chosen).max() < 1e-4
    assert not engine.stats().num_preemptions
    engine.check_integrity()


def test_a_layer_without_a_window_reads_everything(tmp_path: Path) -> None:
    for family, windows, reads_all in (("mistral", {"sliding_window": 21}, False), ("qwen3-windows", {}, True), ("llama", {}, True)):
        save_model(family, tmp_path / family, **windows)
        reach = ModelRunner(tmp_path / family, num_blocks=2, block_size=8).reach
        assert reach == 0 if reads_all else reach >= 21
