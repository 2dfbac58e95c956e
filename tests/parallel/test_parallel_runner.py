"""Two ranks on the CPU against one: logits, tokens through the engine, blocks; and what happens when a rank dies or hangs."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forward_helpers import VOCAB, make_batch, of_pool, save_model, scattered_sequences
from grammar_cases import save_tokenizer
from safetensors.torch import load_file, save_file

from twostep.engine.batch import LayerRange, PooledRows, Runner, ScoredRows
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.grammar import GrammarCompiler
from twostep.engine.types import EngineRequest
from twostep.errors import NonFiniteLogits, SetupError, Unavailable
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.runner.parallel_runner import ParallelRunner
from twostep.sampling_params import Grammar, GrammarKind, SamplingParams

BLOCK = 4
OPTIONS: dict[str, Any] = {"num_blocks": 96, "block_size": BLOCK, "num_threads": 1}
WAIT_S = 60.0
# GQA with o and MLP biases; KV heads replicated, tied, q/k/v biases; norms of heads; the other skeleton; norms on both sides; norms of
# whole queries, and a KV head that both ranks have; layers inside larger ones, in one turn, in many, and turned; parallel ones; latents;
# experts; states. The vocabulary is odd.
FAMILIES = ["llama-biases", "qwen2", "olmo2", "falcon", "deepseek-v2-moe", "gpt-oss", "qwen3-next"]
SELDOM = ["qwen3", "opt", "gemma2", "phi3-longrope", "gpt-neox", "gpt2", "falcon-old", "mixtral", "qwen2-moe", "deepseek-v3-moe"]

pytestmark = pytest.mark.system


@contextmanager
def several(directory: Path, **options: Any) -> Iterator[ParallelRunner]:
    runner = ParallelRunner(directory, **(OPTIONS | {"size": 2, "step_timeout_s": 60.0} | options))
    try:
        yield runner
    finally:
        runner.close()


def recorded(runner: ModelRunner) -> list[torch.Tensor]:
    """The logits of its steps, from now on."""
    seen: list[torch.Tensor] = []
    steps = runner._steps  # logits do not leave a step in any other way
    compute = steps.forward

    def watched(*given: Any) -> torch.Tensor:
        logits = compute(*given)
        seen.append(logits.clone())
        return logits

    steps.forward = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(FAMILIES[0], marks=pytest.mark.smoke),
        *FAMILIES[1:],
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SELDOM),
    ],
)
def test_two_ranks_are_one(family: str, tmp_path: Path) -> None:
    """Logits and KV of chunked prompts and decodes, then tokens through the engine with prefixes reused and blocks handed over."""
    save_model(family, tmp_path, **({"num_key_value_heads": 1} if family == "olmo2" else {}))
    one = ModelRunner(tmp_path, **OPTIONS)
    with several(tmp_path) as two:
        assert two.kv_shape == one.kv_shape
        assert (two.vocab_size, two.max_model_len) == (one.vocab_size, one.max_model_len)
        compare_steps(one, two)
        compare_engines(one, two, seed=len(family), tokenizer_file=save_tokenizer(tmp_path))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_that_share_a_kv_head_have_states_of_their_own(size: int, tmp_path: Path) -> None:
    """In parts of the same block, which are handed over together."""
    heads = {
        "num_key_value_heads": size // 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 8,
        "num_attention_heads": 8,
    }
    save_model("qwen3-next", tmp_path, **heads, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    one = ModelRunner(tmp_path, **OPTIONS)
    with several(tmp_path, size=size) as ranks:
        assert ranks.kv_shape == one.kv_shape
        compare_steps(one, ranks)
        (request,) = requests(size, 1)
        config = EngineConfig(hash_unit=BLOCK)
        (want,) = generate(Engine(one, config), [request])
        for giver, taker in ((one, ranks), (ranks, one)):
            assert handed_over(giver, taker, request) == [token.token_id for token in want]


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "gpt-oss"])
def test_ranks_may_hold_whole_experts(family: str, tmp_path: Path) -> None:
    """An odd number of them; beside a shared one that is cut."""
    save_model(family, tmp_path)
    one = ModelRunner(tmp_path, **OPTIONS)
    with several(tmp_path, enable_expert_parallel=True) as two:
        compare_steps(one, two)


def test_a_model_without_experts_has_none_to_spread(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(SetupError, match="enable-expert-parallel"), several(tmp_path, enable_expert_parallel=True):
        pass


def test_two_ranks_see_that_a_head_is_not_the_embedding(tmp_path: Path) -> None:
    """config.json says that it is; each rank has to come to the same conclusion."""
    save_model("llama-tied", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].flip(0)}, file, metadata={"format": "pt"})
    one = ModelRunner(tmp_path, **OPTIONS)
    assert not one.config.tie_word_embeddings
    with several(tmp_path) as two:
        compare_steps(one, two)


def test_two_ranks_have_the_kv_scales_of_their_own_heads(tmp_path: Path) -> None:
    """Those of one head cut off nearly all of it."""
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights, scales = load_file(tmp_path / "model.safetensors"), torch.tensor([1e-4, 0.02]).view(2, 1, 1)
    weights |= {f"model.layers.{i}.self_attn.{kind}_scale": scales.clone() for i in range(3) for kind in "kv"}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    one = ModelRunner(tmp_path, **OPTIONS)
    with several(tmp_path) as two:
        logits = recorded(one), recorded(two._local)
        (sequence,) = scattered_sequences([40], BLOCK, 96, random.Random(0))
        for runner in (one, two):
            runner.run(make_batch([(sequence, 40)], BLOCK))
    torch.testing.assert_close(logits[1][0], logits[0][0], rtol=0, atol=0.02 * float(logits[0][0].abs().max()))
    weights |= {name: scales.flip(0).clone() for name in weights if name.endswith("_scale")}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    other = ModelRunner(tmp_path, **OPTIONS).forward(make_batch([(sequence, 40)], BLOCK))
    assert float((other - logits[0][0]).abs().max()) > 0.1 * float(logits[0][0].abs().max()), "else the test says nothing"


def test_two_ranks_hold_the_int4_kv_of_one(tmp_path: Path) -> None:
    """But for bytes that a sum in another order turns to their neighbours; what one computed, two go on from."""
    save_model("llama", tmp_path, head_dim=32)
    one = ModelRunner(tmp_path, kv_cache_dtype="int4", **OPTIONS)
    with several(tmp_path, kv_cache_dtype="int4") as two:
        logits = recorded(one), recorded(two._local)
        (sequence,) = scattered_sequences([41], BLOCK, 96, random.Random(0))
        for runner in (one, two):
            runner.run(make_batch([(sequence, 40)], BLOCK))
        theirs = read(one, sequence.blocks)
        assert (read(two, sequence.blocks) == theirs).mean() > 0.99
        two.write_blocks(sequence.blocks, theirs)
        assert np.array_equal(read(two, sequence.blocks), theirs)
        sequence.num_computed = 40
        for runner in (one, two):
            runner.run(make_batch([(sequence, 1)], BLOCK))
    torch.testing.assert_close(logits[1][-1], logits[0][-1], rtol=0, atol=1e-3)


def test_two_ranks_have_states_beside_the_scales_of_quantized_kv(tmp_path: Path) -> None:
    """Which no state lies in; what one computed, two go on from."""
    save_model("qwen3-next", tmp_path)
    one = ModelRunner(tmp_path, kv_cache_dtype="int8", **OPTIONS)
    num_states = one.kv_shape.num_state_blocks
    with several(tmp_path, kv_cache_dtype="int8") as two:
        assert two.kv_shape == one.kv_shape
        logits = recorded(one), recorded(two._local)
        (sequence,) = scattered_sequences([41], BLOCK, 96, random.Random(0), num_state_blocks=num_states)
        one.run(make_batch([(sequence, 40)], BLOCK))
        blocks = [*sequence.blocks, *sequence.state_blocks]
        two.write_blocks(blocks, read(one, blocks))
        sequence.num_computed = 40
        for runner in (one, two):
            runner.run(make_batch([(sequence, 1)], BLOCK))
    torch.testing.assert_close(logits[1][-1], logits[0][-1], rtol=0, atol=1e-3)


def compare_steps(one: ModelRunner, two: ParallelRunner) -> None:
    logits = recorded(one), recorded(two._local)
    sequences = scattered_sequences([37, 11, 1], BLOCK, 96, random.Random(0), **of_pool(one.kv_shape))
    for every_row, counts in ((True, [20, 7, 0]), (False, [5, 0, 0]), (True, [12, 4, 1])):
        work = [(sequence, count) for sequence, count in zip(sequences, counts, strict=True) if count]
        for sequence, _ in work:  # it goes on in other blocks, as where a state is left to a prefix
            sequence.state_blocks, sequence.spare_state_blocks = sequence.spare_state_blocks, sequence.state_blocks
        batch = make_batch(work, BLOCK, every_row=every_row)
        if not every_row:  # in the middle of a prompt nothing is sampled
            batch = replace(batch, sample_rows=batch.sample_rows[:0], sampling=())
        batch = replace(batch, scored=ScoredRows(np.arange(0, len(batch.token_ids), 2), batch.token_ids[::2].copy(), 2))
        batch = replace(batch, pooled=PooledRows(np.arange(len(batch.token_ids)), np.array([1, len(batch.token_ids) - 1])))
        scores, pooled = [], []
        for runner in (one, two):
            sampled = runner.run(batch)
            assert len(sampled.token_ids) == len(batch.sample_rows)
            scores.append(sampled.scores)
            pooled.append(sampled.pooled)
        assert pooled[1] == pytest.approx(pooled[0], abs=1e-4)
        assert scores[1][:, :4] == pytest.approx(scores[0][:, :4], abs=1e-4)
        for sequence, count in work:
            sequence.num_computed += count
            sequence.state_source = sequence.state_blocks
    for want, got in zip(*logits, strict=True):
        assert got.shape == want.shape
        assert got.shape[1] == VOCAB
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    used = [block for sequence in sequences for blocks in (*sequence.groups, sequence.state_blocks) for block in blocks]
    torch.testing.assert_close(read(two, used).view(np.float32), read(one, used).view(np.float32), rtol=0, atol=1e-4)
    data = np.random.default_rng(0).integers(0, 256, (96, two.kv_shape.block_bytes), dtype=np.uint8)
    order = np.random.default_rng(1).permutation(96).tolist()
    two.write_blocks(order, data)
    assert np.array_equal(read(two, order), data)
    last = LayerRange(two.kv_shape.num_layers - 1, 1)
    part, columns = np.empty((96, two.kv_shape.layer_bytes), np.uint8), two.kv_shape.bytes_of(last)
    two.read_blocks(order, part, last)
    assert np.array_equal(part, data[:, columns])
    data[:, columns] = part = part[::-1].copy()
    two.write_blocks(order, part, last)
    assert np.array_equal(read(two, order), data)
    zeros = np.zeros_like(data)
    for runner in (one, two):
        runner.write_blocks(order, zeros)


def read(runner: Runner, blocks: Sequence[int]) -> np.ndarray:
    out = np.empty((len(blocks), runner.kv_shape.block_bytes), np.uint8)
    runner.read_blocks(blocks, out)
    return out


def requests(seed: int, count: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(30)]
    return [
        EngineRequest(
            seq_id=f"s{i}",
            token_ids=(prompt := shared[: rng.randrange(4, 30)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(
                max_tokens=rng.randrange(2, 9),
                temperature=rng.choice([0.0, 0.9]),
                top_p=0.8,
                repetition_penalty=1.1,
                seed=rng.randrange(99),
            ),
            prefix_key=b"tenant",
        )
        for i in range(count)
    ]


def compare_engines(one: ModelRunner, two: ParallelRunner, seed: int, tokenizer_file: Path) -> None:
    work = requests(seed, 7)
    # Rank 0 alone knows of masks.
    digits = GrammarCompiler(tokenizer_file.parent, vocab_size=VOCAB, eos_token_ids=frozenset()).compile(
        Grammar(GrammarKind.REGEX, "[0-9]{3,9}")
    )
    for i, request in enumerate(work[:2]):
        params = replace(request.sampling, grammar=digits.grammar, stop_token_ids=(1,))
        work = [*work, replace(request, seq_id=f"held{i}", sampling=params, grammar=digits)]
    answers = []
    for runner, budget, look_ahead in ((one, 200, False), (two, 7, True)):
        engine = Engine(runner, EngineConfig(max_num_batched_tokens=budget, max_num_seqs=4, hash_unit=BLOCK, look_ahead=look_ahead))
        answers.append([[token.token_id for token in tokens] for tokens in generate(engine, work)])
    assert answers[0] == answers[1]
    for held in answers[0][-2:]:
        digits.after([token for token in held if token > 2])  # raises if they are no beginning of a sentence
    for giver, taker in ((one, two), (two, one)):
        assert handed_over(giver, taker, work[0]) == answers[0][0]


def handed_over(giver: Runner, taker: Runner, request: EngineRequest) -> list[int]:
    """Tokens of a request that is prefilled on one runner and decoded on the other, its blocks moved as bytes."""
    config = EngineConfig(hash_unit=BLOCK)
    prefill, decode = Engine(giver, config), Engine(taker, config)
    prefill.submit(request, hold=True)
    first = list[int]()
    while not first:  # a state is left at a boundary, where a step ends
        first = [token.token_id for token in prefill.step().tokens]
    data = read(giver, prefill.block_ids(request.seq_id))
    reservation = decode.reserve(request)
    taker.write_blocks(reservation.block_ids[: len(data)], data)
    decode.commit(request.seq_id, first)
    tokens = list(first)
    while output := decode.step().tokens:
        tokens += [token.token_id for token in output]
    return tokens


def test_what_cannot_be_cut_is_refused_before_anything_starts(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(SetupError, match="num_attention_heads"):
        ParallelRunner(tmp_path, size=4, **OPTIONS)


def test_an_error_of_loading_is_raised_and_leaves_no_process(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(SetupError, match="max_model_len"):
        ParallelRunner(tmp_path, size=2, max_model_len=1 << 20, **OPTIONS)
    assert not [thread for thread in threading.enumerate() if thread.name == "ranks"]


def test_a_row_of_nan_ends_its_own_request_and_no_rank(tmp_path: Path) -> None:
    broken = 7
    save_model("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][broken] = torch.nan
    weights["lm_head.weight"][broken] = 0.0  # no answer comes upon it by itself
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    good, poison = (
        EngineRequest(seq_id=str(prompt), token_ids=prompt, num_prompt_tokens=len(prompt), sampling=sampling)
        for prompt in ([1, 2, 3], [4, broken, 5])
    )
    config = EngineConfig(max_num_batched_tokens=16, max_num_seqs=8, hash_unit=16, look_ahead=True)
    (want,) = generate(Engine(ModelRunner(tmp_path, **OPTIONS), config), [good])
    with several(tmp_path) as runner:
        engine = Engine(runner, config)
        for _ in range(4):
            with pytest.raises(NonFiniteLogits):
                generate(engine, [poison, good])
        assert runner.failure is None
        (got,) = generate(engine, [good])
    assert [token.token_id for token in got] == [token.token_id for token in want]


def test_a_rank_that_dies_is_told_at_once_and_nothing_is_served_any_more(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with several(tmp_path) as runner:
        told = threading.Event()
        errors: list[Exception] = []

        def on_failure(error: Exception) -> None:
            errors.append(error)
            told.set()

        runner.watch(on_failure)
        runner._ranks._processes[0].kill()
        assert told.wait(WAIT_S)
        assert "rank 1 was ended by SIGKILL (signal 9)" in str(errors[0])
        sequence = scattered_sequences([3], BLOCK, 96, random.Random(0))[0]
        with pytest.raises(Unavailable, match="rank 1"):
            runner.run(make_batch([(sequence, 3)], BLOCK))
        with pytest.raises(Unavailable, match="rank 1"):
            read(runner, [0])
        again: list[Exception] = []
        runner.watch(again.append)
        assert again == errors
    assert len(errors) == 1


def test_a_rank_that_hangs_is_found_by_its_deadline(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with several(tmp_path) as runner:
        # Not for the start, which it bounds as well.
        runner._step_timeout_s = 1.0
        told = threading.Event()
        runner.watch(lambda error: told.set())
        process = runner._ranks._processes[0]
        os.kill(process.pid, signal.SIGSTOP)
        sequence = scattered_sequences([3], BLOCK, 96, random.Random(0))[0]
        # The watch ends the other rank, and with it the exchange that waits for it.
        with pytest.raises((Unavailable, RuntimeError)):
            runner.run(make_batch([(sequence, 3)], BLOCK))
        assert told.wait(WAIT_S)
        assert isinstance(runner.failure, Unavailable)
        assert process.wait(WAIT_S) == -signal.SIGKILL


_OWNER = """
import sys, time
from twostep.model.runner.parallel_runner import ParallelRunner
runner = ParallelRunner(sys.argv[1], size=2, num_blocks=8, block_size=4, num_threads=1)
print(runner._ranks._processes[0].pid, flush=True)
time.sleep(600)
"""


def test_ranks_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    owner = subprocess.Popen([sys.executable, "-P", "-c", _OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner, owner.stdout:
        pid = int(owner.stdout.readline())
        rank = os.pidfd_open(pid)
        owner.kill()
        owner.wait()
        ended = select.poll()
        ended.register(rank, select.POLLIN)
        assert ended.poll(WAIT_S * 1000), "the rank outlives its parent"
        os.close(rank)
