"""A head's rounds by the device's kernels, launched one by one and captured, against the CPU's: through Triton's interpreter, where a
replay runs the round again."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from unittest import mock

import pytest
import torch
from heard_proposals import listen
from kernel_pools import DEVICE

from twostep.engine.batch import SamplingRow
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.model.families.registry import build_model
from twostep.model.heads.source import HeadSource
from twostep.model.heads.tap import HeadTap
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.loading.weights import load_weights
from twostep.model.runner import head_graphs, step_graphs
from twostep.model.runner.device_steps import DeviceSteps
from twostep.model.runner.head_graphs import DeviceRounds
from twostep.model.runner.head_rounds import DraftRow, HeadRounds, num_scratch_blocks
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.runner.step_graphs import StepGraphs
from twostep.model.step.graph_ladder import StepShape
from twostep.model.step.kv_cache import KvCache
from twostep.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "heads"))
from head_cases import asked_requests, drafting, head_case

NUM_BLOCKS, BLOCK_SIZE, MOST, MOST_SEQS = 40, 16, 3, 9

GREEDY = SamplingRow(
    params=SamplingParams(max_tokens=1, temperature=0.0), position=0, history=(), num_prompt_tokens=0, stop_ids=frozenset()
)

# Nothing attends for rows of padding: what the memory held before is multiplied.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@contextmanager
def no_capture() -> Iterator[None]:
    if DEVICE == "cuda":
        yield
        return
    with mock.patch("twostep.model.runner.step_graphs.torch.cuda"):
        yield


class DeviceRunner(ModelRunner):
    """A ModelRunner with a head as it is on a GPU, wherever the kernels run here."""

    def __init__(self, directory: Path, source: HeadSource, *, captured: bool) -> None:
        super().__init__(directory, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype="float32", head=source)
        ops = TritonOps(DEVICE)
        self._model = model = build_model(self.config, torch.float32, ops, DEVICE)
        load_weights(model, directory)
        head = source.load(model, self.config, ops, DEVICE)
        model.attention = replace(model.attention, placed=True)
        self._head = head
        cache = KvCache(self.kv_shape, DEVICE, num_scratch=num_scratch_blocks(BLOCK_SIZE, MOST_SEQS, MOST) if source.num_layers else 0)
        tap = self._set_cache(cache)
        assert isinstance(tap, HeadTap)
        steps = None
        with no_capture(), torch.inference_mode():
            if captured:
                steps = StepGraphs(model, cache, ops, [MOST_SEQS], mixed=[StepShape(16, 0, 3), StepShape(16, 9, 3)])
            rounds = DeviceRounds(
                tap,
                cache,
                ops,
                max_rows=MOST_SEQS if captured else 0,
                most_tokens=min(MOST, head.most_tokens),
                max_model_len=self.max_model_len,
            )
        if steps is not None and DEVICE != "cuda":
            for step in [*steps._graphs.values(), *steps._mixed.values(), *rounds._captured.values()]:
                step.graph = mock.Mock(replay=mock.Mock(side_effect=lambda step=step: step.logits.copy_(step.step())))
        assert bool(rounds.count) == captured
        self._steps = DeviceSteps(model, cache, ops, steps)
        self.head = HeadRounds(head, cache, rounds, max_num_seqs=MOST_SEQS, most_tokens=MOST)


def few_requests() -> list[EngineRequest]:
    """One greedy, one drawn, one with a bias."""
    return [replace(each, sampling=replace(each.sampling, max_tokens=4)) for each in itemgetter(0, 1, 4)(asked_requests())]


def proposals(runner: ModelRunner, source: HeadSource) -> tuple[dict[tuple[str, int], Sequence[int]], list[list[int]]]:
    """Returns what is proposed, by sequence and how many of its tokens were known; and the answers."""
    requests = few_requests()
    engine, proposer = drafting(runner, source, max_num_batched_tokens=16, max_num_seqs=MOST_SEQS)
    told = listen(proposer, MOST)
    answers = [[token.token_id for token in answer] for answer in generate(engine, requests)]
    assert not proposer.failed
    return {(each.sequence.seq_id, len(tokens)): proposed for each, tokens, proposed in told}, answers


@pytest.mark.parametrize(
    ("method", "captured"),
    [
        ("eagle3", True),
        pytest.param("medusa", True, marks=pytest.mark.system),
        pytest.param("mtp", True, marks=pytest.mark.exhaustive),
        *(pytest.param(method, False, marks=pytest.mark.exhaustive) for method in ("eagle3", "mtp", "medusa")),
    ],
)
def test_proposals_are_the_cpu_s(method: str, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cuda":
        # They only take time where nothing is captured.
        monkeypatch.setattr(step_graphs, "_WARM_UPS", 0)
        monkeypatch.setattr(head_graphs, "_WARM_UPS", 0)
    case = head_case(method, tmp_path, MOST, dense=True)
    pool = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "dtype": "float32"}
    bounds = EngineConfig(max_num_batched_tokens=16, max_num_seqs=MOST_SEQS, hash_unit=16)
    requests = few_requests()
    plain = generate(Engine(ModelRunner(case.model_dir, **pool), bounds), requests)
    want, _ = proposals(ModelRunner(case.model_dir, **pool, head=case.source), case.source)
    runner = DeviceRunner(case.model_dir, case.source, captured=captured)
    got, answers = proposals(runner, case.source)
    assert answers == [[token.token_id for token in answer] for answer in plain]
    # How many are wanted differs with the steps that are planned.
    both = {each: list(zip(got[each], want[each], strict=False)) for each in got.keys() & want.keys()}
    assert {seq_id for seq_id, _ in both} == {"r0", "r1", "r4"}
    assert all(ours == theirs for pairs in both.values() for ours, theirs in pairs)
    assert max(map(len, both.values())) > 1
    # What is drafted behind the last block of a sequence is in no slot of the pool.
    (drafted,) = runner.head.draft([DraftRow(5, BLOCK_SIZE, [3], [GREEDY] * runner.head.most_tokens)])
    assert len(drafted) == runner.head.most_tokens
