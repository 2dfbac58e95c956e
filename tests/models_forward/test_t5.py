"""A model with an encoder: logits equal transformers', whatever the block size and the batch mix; tokens are the likeliest through two
engines, handed over, preempted and drafted; what it cannot do is refused by name."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forward_helpers import Sequence_, make_batch, scattered_sequences
from t5_models import KINDS, START, VOCAB, reference_logits, save_t5

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.errors import InvalidRequest, SetupError
from twostep.lab.bench.roofline import ModelShape
from twostep.lab.plan.model import read_model, worker_memory
from twostep.model.families.registry import parse_config
from twostep.model.families.sharding import shard_of
from twostep.model.kernels import torch_encoder
from twostep.model.loading.weights import check_weights
from twostep.model.runner.model_runner import ModelRunner, kv_shape
from twostep.pooling import Pooling
from twostep.request_class import RequestClass
from twostep.sampling_params import SamplingParams
from twostep.settings.speculative import SpeculativeConfig
from twostep.step_curve import StepCurve

TOLERANCE = 1e-4
# Of float32 sums in another order; logits are some units apart.
TIE = 1e-3
NUM_BLOCKS = 200
BLOCK, NUM_TOKENS = 4, 200


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp(request.param)
    return save_t5(request.param, directory), directory


def advance(runner: ModelRunner, work: list[tuple[Sequence_, int]], num_prompt: dict[int, int]) -> None:
    """The next tokens of each sequence; keeps the logits of those that the decoder reads."""
    batch = make_batch(work, runner.kv_shape.block_size, every_row=False)
    firsts, rows, places = batch.query_start, list[int](), list[tuple[Sequence_, int]]()
    for i, (sequence, count) in enumerate(work):
        start = sequence.num_computed
        decoded = range(max(start, num_prompt[id(sequence)] - 1), start + count)
        rows += [int(firsts[i]) + place - start for place in decoded]
        places += [(sequence, place) for place in decoded]
        sequence.num_computed += count
    encoded = np.array([num_prompt[id(sequence)] - 1 for sequence, _ in work], np.int32)
    batch = replace(batch, num_encoded=encoded, sample_rows=np.array(rows), sampling=[batch.sampling[0]] * len(rows))
    for (sequence, place), row in zip(places, runner.forward(batch), strict=True):
        sequence.logits[place] = row


@pytest.mark.parametrize(("block_size", "seed"), [(4, 0), (16, 1)])
def test_prompts_and_answers_in_any_company(model: tuple[Any, Path], block_size: int, seed: int) -> None:
    """Answers are computed one by one, and in part, as after a preemption, with the prompt."""
    oracle, directory = model
    rng = random.Random(seed)
    runner = ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=block_size)
    # Whose blocks these were may have had KV that is not finite.
    runner.kv_cache.tensor.fill_(torch.nan)
    prompts = [2, 3, 17, 40, 90, 150]
    answers = [rng.choice([1, 6, 30]) for _ in prompts]
    sequences = scattered_sequences([p + a for p, a in zip(prompts, answers, strict=True)], block_size, NUM_BLOCKS, rng)
    num_prompt = {id(sequence): count for sequence, count in zip(sequences, prompts, strict=True)}
    for sequence in sequences:
        sequence.tokens[num_prompt[id(sequence)] - 1] = START
    while open_ := [s for s in sequences if s.num_computed < len(s.tokens)]:
        rng.shuffle(open_)
        work = []
        for sequence in open_[: rng.randint(1, 6)]:
            least = 1 if sequence.num_computed else num_prompt[id(sequence)]
            work.append((sequence, min(least + rng.choice([0, 0, 1, 7]), len(sequence.tokens) - sequence.num_computed)))
        advance(runner, work, num_prompt)
    for sequence, length in zip(sequences, prompts, strict=True):
        want = reference_logits(oracle, sequence.tokens[:length], sequence.tokens[length:])
        got = torch.stack([sequence.logits[place] for place in range(length - 1, len(sequence.tokens))])
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_biases_are_made_for_a_few_queries_at_once(model: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one long prompt, and of an answer that is computed again: all of them would be quadratic in the length."""
    oracle, directory = model
    runner = ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=4)
    sizes, attend = list[int](), torch.nn.functional.scaled_dot_product_attention

    def attend_and_note(*args: torch.Tensor, attn_mask: torch.Tensor, scale: float) -> torch.Tensor:
        sizes.append(attn_mask.nbytes)
        return attend(*args, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(torch_encoder, "TILE_BYTES", 1 << 15)
    for num_prompt, num_answer in [(150, 1), (3, 140), (90, 60)]:
        (sequence,) = scattered_sequences([num_prompt + num_answer], 4, NUM_BLOCKS, random.Random(num_prompt))
        sequence.tokens[num_prompt - 1] = START
        with monkeypatch.context() as patched:
            patched.setattr("torch.nn.functional.scaled_dot_product_attention", attend_and_note)
            advance(runner, [(sequence, len(sequence.tokens))], {id(sequence): num_prompt})
        want = reference_logits(oracle, sequence.tokens[:num_prompt], sequence.tokens[num_prompt:])
        got = torch.stack([sequence.logits[place] for place in range(num_prompt - 1, len(sequence.tokens))])
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    assert max(sizes) <= torch_encoder.TILE_BYTES


def request(name: str, prompt: list[int], **sampling: Any) -> EngineRequest:
    params = SamplingParams(**({"max_tokens": NUM_TOKENS, "temperature": 0.0} | sampling))
    return EngineRequest(seq_id=name, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params, prefix_key=b"tenant")


def prompts(*lengths: int) -> dict[str, list[int]]:
    rng = random.Random(3)
    return {f"s{i}": [*(rng.randrange(VOCAB) for _ in range(length - 1)), START] for i, length in enumerate(lengths)}


def check_likeliest(oracle: Any, asked: Mapping[str, list[int]], answers: Mapping[str, list[int]]) -> None:
    for name, prompt in asked.items():
        assert len(answers[name]) == NUM_TOKENS
        logits = reference_logits(oracle, prompt, answers[name])[:-1]
        chosen = logits.gather(1, torch.tensor(answers[name])[:, None])[:, 0]
        assert bool((chosen >= logits.amax(-1) - TIE).all())


def test_tokens_handed_over_and_preempted_are_the_likeliest(model: tuple[Any, Path]) -> None:
    """The first step of a sequence that gave way has its prompt whole, and later ones the rest of its answer, in parts."""
    oracle, directory = model
    prefill_runner, decode_runner = (ModelRunner(directory, num_blocks=number, block_size=BLOCK, num_threads=1) for number in (64, 130))
    bounds: dict[str, Any] = {"max_num_seqs": 4, "hash_unit": BLOCK}
    prefill = Engine(prefill_runner, EngineConfig(max_num_batched_tokens=53, **bounds))
    decode = Engine(decode_runner, EngineConfig(max_num_batched_tokens=60, **bounds))
    asked, answers = prompts(5, 31, 50), dict[str, list[int]]()
    for name, prompt in asked.items():
        prefill.submit(request(name, prompt), hold=True)
    while len(answers) < len(asked):
        for token in prefill.step().tokens:
            answers[token.seq_id] = [token.token_id]
    assert prefill.steps == 2, "two of them fit one step"
    for name, prompt in asked.items():
        blocks = prefill.block_ids(name)
        data = np.empty((len(blocks), prefill_runner.kv_shape.block_bytes), np.uint8)
        prefill_runner.read_blocks(blocks, data)
        decode_runner.write_blocks(decode.reserve(request(name, prompt)).block_ids[: len(blocks)], data)
        decode.commit(name, answers[name])
        prefill.release(name)
    while decode.wait_for_work(0.0):
        for token in decode.step().tokens:
            answers[token.seq_id].append(token.token_id)
        decode.check_integrity()
    assert decode.stats().num_preemptions
    assert not decode.stats().num_cached_blocks
    check_likeliest(oracle, asked, answers)


def test_drafted_tokens_are_the_likeliest(model: tuple[Any, Path]) -> None:
    oracle, directory = model
    runner = ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)
    engine = Engine(runner, EngineConfig(max_num_batched_tokens=80, max_num_seqs=20, speculative=config))
    asked = prompts(7, 40)
    given = generate(engine, [request(name, prompt) for name, prompt in asked.items()])
    check_likeliest(oracle, asked, {name: [token.token_id for token in answer] for name, answer in zip(asked, given, strict=True)})
    assert sum(engine.stats().num_drafted)


@pytest.mark.parametrize("drafted", [False, True])
def test_answers_are_the_same_in_any_company(model: tuple[Any, Path], drafted: bool) -> None:
    """Of every class, promised or not, begun elsewhere or not, with too few blocks for all, planned ahead or drafted."""
    small, large = (ModelRunner(model[1], num_blocks=number, block_size=BLOCK, num_threads=1) for number in (60, 600))
    rng = random.Random(drafted)
    asked = []
    for name, prompt in prompts(*(rng.randrange(2, 50) for _ in range(14))).items():
        prior = [rng.randrange(2, VOCAB) for _ in range(rng.choice([0, 0, 3, 40]))]
        temperature, seed, max_tokens = rng.choice([0.0, 0.7]), rng.randrange(99), len(prior) + rng.randrange(1, 60)
        one = request(name, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
        rank, tpot_s = rng.choice(list(RequestClass)), rng.choice([None, 0.01])
        asked.append(replace(one, token_ids=[*prompt, *prior], request_class=rank, tpot_s=tpot_s))
    speculative = SpeculativeConfig(method="ngram", prompt_lookup_min=1) if drafted else None
    bounds = EngineConfig(max_num_batched_tokens=60, max_num_seqs=8, speculative=speculative, look_ahead=not drafted)
    engine = Engine(small, bounds, clock=itertools.count(0.0, 1e-3).__next__)
    engine.set_curve(StepCurve(fixed_s=1e-3, per_row_s=1e-4))
    got = generate(engine, asked)
    engine.check_integrity()
    assert engine.stats().num_preemptions
    want = generate(Engine(large, EngineConfig(max_num_batched_tokens=2000, max_num_seqs=50)), asked)
    assert [[token.token_id for token in answer] for answer in got] == [[token.token_id for token in answer] for answer in want]


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_fewer_bits(model: tuple[Any, Path], options: dict[str, Any]) -> None:
    _, directory = model
    asked = prompts(20, 60)
    exact, lossy = (ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=16, **extra) for extra in ({}, options))
    answers = []
    for runner in (exact, lossy):
        engine = Engine(runner, EngineConfig())
        given = generate(engine, [request(name, prompt, max_tokens=1, logprobs=0) for name, prompt in asked.items()])
        answers.append([answer[0].logprob for answer in given])
    assert np.abs(np.subtract(*answers)).max() < 0.5


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_planned_sizes(model: tuple[Any, Path], quantization: str, tmp_path: Path) -> None:
    oracle, directory = model
    shutil.copy(directory / "config.json", tmp_path)
    whole, bare = (read_model(each, quantization=quantization) for each in (directory, tmp_path))
    shape = kv_shape(parse_config(directory), "float32", 1, 16)
    assert whole.kv_token_bytes == bare.kv_token_bytes == shape.block_bytes // 16
    # transformers saves an output layer of its own, and says that it is the embedding.
    head = VOCAB * 48 * 4 if oracle.lm_head.weight is not oracle.shared.weight and quantization == "none" else 0
    assert bare.weight_bytes + head == pytest.approx(whole.weight_bytes, rel=0.04)
    with pytest.raises(SetupError, match="--tensor-parallel-size 1"):
        worker_memory(whole, 1 << 40, tensor_parallel_size=5)


def test_requests_that_it_cannot_serve(model: tuple[Any, Path]) -> None:
    config = EngineConfig(max_num_batched_tokens=40, max_num_seqs=8)
    engine = Engine(ModelRunner(model[1], num_blocks=NUM_BLOCKS, block_size=BLOCK), config)
    longest = [5] * 32 + [START]
    assert len(longest) == config.prompt_room, "as workers tell routers"
    engine.submit(request("longest", longest))
    cases = {
        "--max-num-batched-tokens": request("longer", [5, *longest]),
        "encoder's tokens": request("one", [START]),
        "prompt_logprobs": request("scored", longest, prompt_logprobs=1),
        "embeddings": replace(request("pooled", longest), pooling=Pooling.LAST),
    }
    for told, case in cases.items():
        for take in (engine.submit, engine.reserve):
            with pytest.raises(InvalidRequest, match=told):
                take(case)


def test_setups_that_it_cannot_serve(model: tuple[Any, Path], tmp_path: Path) -> None:
    _, directory = model
    runner = ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    with pytest.raises(SetupError, match="--max-num-batched-tokens 8 with --max-num-seqs 8"):
        Engine(runner, EngineConfig(max_num_batched_tokens=8, max_num_seqs=8))
    with pytest.raises(SetupError, match="float16"):
        ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=BLOCK, dtype="float16")
    with pytest.raises(SetupError, match="--tensor-parallel-size 1"):
        shard_of(parse_config(directory), 0, 5)
    with pytest.raises(SetupError, match="encoder"):
        ModelShape.of(parse_config(directory), runner.kv_shape, "float32")
    config = json.loads((directory / "config.json").read_text())
    cases = [
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj"),
        ({"dense_act_fn": "tanh"}, "dense_act_fn"),
        ({"is_gated_act": None}, "is_gated_act"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets"),
        ({"relative_attention_max_distance": 5}, "relative_attention_max_distance"),
        ({"num_decoder_layers": "two"}, "num_decoder_layers"),
        ({"d_kv": 0}, "d_kv"),
        ({"rope_theta": 1e4}, "rope_theta"),
    ]
    for changes, key in cases:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(SetupError, match=key):
            parse_config(tmp_path)
    save_t5("t5", tmp_path)
    for changes, name in (({"num_layers": 4}, "encoder.block.3"), ({"num_layers": 2, "num_decoder_layers": 3}, "encoder.block.2")):
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(SetupError, match=name):
            check_weights(tmp_path)
