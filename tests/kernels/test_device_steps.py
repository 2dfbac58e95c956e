"""An engine over the device's steps and sampler, planning ahead, against the CPU's runner: through Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_pools import DEVICE
from t5_models import VOCAB, save_t5

from twostep.engine.batch import Batch, InFlight
from twostep.engine.draft_model import DraftModel
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.proposer import Proposer
from twostep.engine.types import EngineRequest, StepOutput, TokenOutput
from twostep.model.families.registry import build_model
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.loading.weights import load_weights
from twostep.model.runner.device_steps import DeviceSteps
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.kv_cache import KvCache
from twostep.pooling import Pooling
from twostep.sampling_params import SamplingParams
from twostep.settings.speculative import SpeculativeConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "models_forward"))
from forward_helpers import save_model

NUM_BLOCKS, BLOCK_SIZE = 24, 16


class DeviceRunner(ModelRunner):
    """A ModelRunner as it is on a GPU, wherever the kernels run here."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype="float32")
        ops = TritonOps(DEVICE)
        model = build_model(self.config, torch.float32, ops, DEVICE)
        load_weights(model, directory)
        self._cache = KvCache(self.kv_shape, DEVICE)
        self._steps = DeviceSteps(model, self._cache, ops, None)
        self.num_carried = self.num_behind = 0

    def launch(self, batch: Batch) -> InFlight:
        self.num_carried += batch.carried is not None
        self.num_behind += batch.behind is not None
        return super().launch(batch)


def requests(seed: int, vocab_size: int) -> list[EngineRequest]:
    rng = np.random.default_rng(seed)
    kinds = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": 11},
        {"temperature": 0.7, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "min_tokens": 4, "seed": 3, "logprobs": 0},
        {"temperature": 0.0, "presence_penalty": 1.0, "prompt_logprobs": 3},
        {"temperature": 0.9, "seed": 5, "logit_bias": ((4, 6.5), (9, -100.0), (vocab_size - 1, 5.0)), "prompt_logprobs": 0},
    ]
    return [
        EngineRequest(
            seq_id=f"r{i}",
            token_ids=rng.integers(3, vocab_size, 3 + 4 * i).tolist(),
            num_prompt_tokens=3 + 4 * i,
            sampling=SamplingParams(max_tokens=5, **kind),
            eos_token_ids=frozenset(range(0, vocab_size, 9)),
        )
        for i, kind in enumerate(kinds)
    ]


def answers(engine: Engine, work: Sequence[EngineRequest]) -> tuple[list[list[TokenOutput]], dict[str, list[object]]]:
    """Returns each one's tokens, and what its prompt's log probabilities are by name."""
    scores: dict[str, list[object]] = {}
    step = engine.step

    def told() -> StepOutput:
        output = step()
        for each in output.scores:
            scores.setdefault(each.seq_id, []).append(each.values)
        return output

    engine.step = told  # type: ignore[method-assign]
    return generate(engine, work), scores


def stream(tokens: Sequence[TokenOutput]) -> list[tuple[int, int, object]]:
    return [(token.token_id, token.position, token.finish_reason) for token in tokens]


def test_the_engine_s_tokens_are_the_cpu_s(tmp_path: Path) -> None:
    save_model("llama", tmp_path, num_hidden_layers=2)
    device = DeviceRunner(tmp_path)
    assert device.overlaps
    # A budget that splits prompts, so that chunks and decodes mix.
    bounds = EngineConfig(max_num_batched_tokens=16, max_num_seqs=4, hash_unit=16)
    work = requests(1, device.vocab_size)
    got, got_scores = answers(Engine(device, bounds), work)
    cpu = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype="float32")
    want, want_scores = answers(Engine(cpu, bounds), work)
    assert set(got_scores) == {"r3", "r4"}
    for name, rows in want_scores.items():
        assert np.concatenate(got_scores[name]) == pytest.approx(np.concatenate(rows), abs=1e-3)
    assert [stream(tokens) for tokens in got] == [stream(tokens) for tokens in want]
    for i in (0, 2):
        for left, right in zip(got[i], want[i], strict=True):
            assert left.logprob == pytest.approx(right.logprob, abs=1e-3)
            assert [top.token_id for top in left.top_logprobs] == [top.token_id for top in right.top_logprobs]
    assert device.num_carried >= 4


def test_the_engine_s_tokens_are_the_cpu_s_with_an_encoder(tmp_path: Path) -> None:
    """Whose steps the host waits for, one by one."""
    save_t5("t5-v1.1", tmp_path)
    device, cpu = DeviceRunner(tmp_path), ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype="float32")
    assert not device.overlaps
    assert not device.marks_layers
    bounds = EngineConfig(max_num_batched_tokens=26, max_num_seqs=4, hash_unit=16)
    work = [replace(each, sampling=replace(each.sampling, prompt_logprobs=None)) for each in requests(1, VOCAB)]
    got, want = (generate(Engine(runner, bounds), work) for runner in (device, cpu))
    assert [stream(tokens) for tokens in got] == [stream(tokens) for tokens in want]
    assert not device.num_carried


def test_drafts_change_no_token(tmp_path: Path) -> None:
    """Several rows of a sequence are sampled in one step, penalized ones among them, beside chunks of prompts."""
    save_model("llama", tmp_path, num_hidden_layers=2)
    device = DeviceRunner(tmp_path)
    bounds = EngineConfig(max_num_batched_tokens=16, max_num_seqs=4, hash_unit=16)
    work = requests(1, device.vocab_size)
    want, _ = answers(Engine(device, bounds), work)
    known = {
        request.seq_id: [*request.token_ids, *(token.token_id for token in tokens)] for request, tokens in zip(work, want, strict=True)
    }
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    engine = Engine(device, replace(bounds, speculative=config), proposer=HalfRight(known))
    got, _ = answers(engine, work)
    assert [stream(tokens) for tokens in got] == [stream(tokens) for tokens in want]
    stats = engine.stats()
    assert 0 < sum(stats.num_accepted) < sum(stats.num_drafted)


def test_a_draft_model_on_the_same_device_says_what_is_drawn(tmp_path: Path) -> None:
    """Its rounds take turns with the steps of the served model, which it is itself."""
    save_model("llama", tmp_path, num_hidden_layers=2)
    served, draft = DeviceRunner(tmp_path), DeviceRunner(tmp_path)
    bounds = EngineConfig(max_num_batched_tokens=16, max_num_seqs=9, hash_unit=16)
    work = requests(1, served.vocab_size)[:3]
    want, _ = answers(Engine(served, bounds), work)
    config = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=2)
    engine = Engine(served, replace(bounds, speculative=config), proposer=DraftModel(draft, max_num_seqs=9))
    got, _ = answers(engine, work)
    assert [stream(tokens) for tokens in got] == [stream(tokens) for tokens in want]
    stats = engine.stats()
    assert sum(stats.num_accepted) > 2
    assert not stats.drafting_failed


def test_drafts_behind_drafts_change_no_token(tmp_path: Path) -> None:
    """The device finds out what of the step in flight is accepted: which tokens come next, where they stand, and the noise that they
    are drawn with."""
    save_model("llama", tmp_path, num_hidden_layers=2)
    device = DeviceRunner(tmp_path)
    bounds = EngineConfig(max_num_batched_tokens=40, max_num_seqs=30, hash_unit=16)
    work = [
        replace(each, sampling=replace(each.sampling, max_tokens=18, ignore_eos=True))
        for each in requests(2, device.vocab_size)
        if not each.sampling.has_penalties
    ]
    want, _ = answers(Engine(device, bounds), work)
    known = {
        request.seq_id: [*request.token_ids, *(token.token_id for token in tokens)] for request, tokens in zip(work, want, strict=True)
    }
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    engine = Engine(device, replace(bounds, speculative=config), proposer=HalfRight(known, every=5))
    device.num_carried = 0
    got, _ = answers(engine, work)
    assert [stream(tokens) for tokens in got] == [stream(tokens) for tokens in want]
    stats = engine.stats()
    assert 0 < sum(stats.num_accepted) < sum(stats.num_drafted)
    assert device.num_behind >= 3, (device.num_behind, device.num_carried)


class HalfRight(Proposer):
    """A Proposer that knows the answers, and is wrong at every so many positions."""

    def __init__(self, known: dict[str, list[int]], every: int = 3) -> None:
        self._known = known
        self._every = every

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        answer = self._known[seq_id]
        there = enumerate(answer[len(tokens) : len(tokens) + most], len(tokens))
        return [token if at % self._every else abs(token - 1) for at, token in there]

    def forget(self, seq_id: str) -> None:
        pass


def test_vectors_beside_the_engine_s_tokens_are_the_cpu_s(tmp_path: Path) -> None:
    """The readout is of prompts that chunks cut, while others decode tokens that are carried on the device."""
    save_model("llama", tmp_path, num_hidden_layers=2)
    device = DeviceRunner(tmp_path)
    cpu = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype="float32")
    rng = np.random.default_rng(4)
    prompts = [(kind, rng.integers(3, device.vocab_size, length).tolist()) for kind, length in ((Pooling.LAST, 9), (Pooling.MEAN, 23))]
    one = SamplingParams(max_tokens=1, temperature=0.0)
    pooled = [
        EngineRequest(seq_id=kind.value, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=one, pooling=kind)
        for kind, prompt in prompts
    ]
    found = []
    for runner in (device, cpu):
        engine = Engine(runner, EngineConfig(max_num_batched_tokens=16, max_num_seqs=4, hash_unit=16))
        vectors: dict[str, object] = {}
        tokens = []
        for request in [*requests(1, device.vocab_size)[:1], *pooled]:
            engine.submit(request)
        while len(vectors) < len(pooled) or engine.stats().num_running:
            output = engine.step()
            assert not output.failures
            tokens += list(output.tokens)
            vectors |= {each.seq_id: each.vector for each in output.pooled}
        engine.settle_launched()
        found.append((vectors, sorted((token.seq_id, token.position, token.token_id) for token in tokens)))
    (got, got_tokens), (want, want_tokens) = found
    assert got_tokens == want_tokens
    assert {name: pytest.approx(vector, abs=1e-3) for name, vector in want.items()} == got
    assert device.num_carried
