"""Captured steps give the CPU's logits, whatever they are padded to, and choose the one that shares prefixes where it pays. Without a GPU a
replay runs the step again."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from kernel_pools import DEVICE

from twostep.engine.batch import RowsBehind
from twostep.model.families.decoder import Decoder
from twostep.model.families.registry import build_model
from twostep.model.kernels import shared_prefix
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.loading.weights import load_weights
from twostep.model.runner import step_graphs
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.runner.step_graphs import StepGraphs
from twostep.model.step.graph_ladder import StepShape, ladder, mixed_ladder, sharing_ladder
from twostep.model.step.kv_cache import KvCache

sys.path.insert(0, str(Path(__file__).parents[1] / "models_forward"))
from forward_helpers import make_batch, of_pool, save_model, scattered_sequences

NUM_BLOCKS, BLOCK_SIZE = 120, 16

# Nothing attends for rows of padding: what the memory held before is multiplied.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@contextmanager
def graphs_of(
    model: Decoder, cache: KvCache, ops: TritonOps, sizes: list[int], mixed: Sequence[StepShape] = (), **options: Any
) -> Iterator[StepGraphs]:
    if DEVICE == "cuda":
        yield StepGraphs(model, cache, ops, sizes, mixed=mixed, **options)
        return
    with mock.patch("twostep.model.runner.step_graphs.torch.cuda"):
        graphs = StepGraphs(model, cache, ops, sizes, mixed=mixed, **options)
    for captured in [*graphs._graphs.values(), *graphs._sharing.values(), *graphs._mixed.values()]:
        captured.graph = mock.Mock(replay=mock.Mock(side_effect=lambda c=captured: c.logits.copy_(c.step())))
    yield graphs


def without_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """They only take time where nothing is captured; a capture must not compile or load anything."""
    if DEVICE != "cuda":
        monkeypatch.setattr(step_graphs, "_WARM_UPS", 0)


def test_a_step_is_replayed_with_and_without_shared_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has layers with and without windows, in groups of their own."""
    without_warm_ups(monkeypatch)
    monkeypatch.setattr(shared_prefix, "_PASS_BYTES", 0.0)
    monkeypatch.setattr(shared_prefix, "_CACHED_READ", 1.0)
    save_model("qwen3-windows", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    runner._cache.tensor.normal_(generator=torch.Generator().manual_seed(3))
    ops = TritonOps(DEVICE)
    model = build_model(runner.config, torch.float32, ops, DEVICE)
    load_weights(model, tmp_path)
    cache = KvCache(runner.kv_shape, DEVICE)
    cache.tensor.copy_(runner._cache.tensor)
    sequences = scattered_sequences([150, 133, 140], BLOCK_SIZE, NUM_BLOCKS, random.Random(3), **of_pool(cache.shape))
    for sequence in sequences:
        sequence.num_computed = len(sequence.tokens) - 2
    with torch.inference_mode(), graphs_of(model, cache, ops, [4]) as graphs:
        shared = graphs._sharing[4].shared
        assert shared is not None
        for common in (0, 8):
            for sequence in sequences[1:]:
                sequence.blocks[:common] = sequences[0].blocks[:common]
            batch = make_batch([(s, 1) for s in sequences], BLOCK_SIZE)
            assert (shared.listing(batch.block_tables[0], batch.seq_lens) is not None) == bool(common)
            shared.listed.fill_(0)
            got = graphs.logits(batch)
            assert got is not None
            assert bool(shared.listed.any()) == bool(common)
            torch.testing.assert_close(got.cpu(), runner.forward(batch), rtol=0, atol=1e-4)
            for sequence in sequences:
                sequence.num_computed += 1


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-windows",
        pytest.param("deepseek-v2", marks=pytest.mark.system),
        pytest.param("opt", marks=pytest.mark.exhaustive),
    ],
)
def test_a_mixed_step_is_replayed_whatever_it_is_padded_to(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_warm_ups(monkeypatch)
    save_model(family, tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    ops = TritonOps(DEVICE)
    model = build_model(runner.config, torch.float32, ops, DEVICE)
    load_weights(model, tmp_path)
    cache = KvCache(runner.kv_shape, DEVICE)
    sequences = scattered_sequences([70, 33, 18, 5], BLOCK_SIZE, NUM_BLOCKS, random.Random(1), **of_pool(cache.shape))
    shapes = [StepShape(16, 0, 4), StepShape(48, 0, 4), StepShape(48, 4, 4), StepShape(80, 2, 4)]
    # How many tokens of each sequence, and by which graph: prompts alone, and beside decodes.
    steps: list[tuple[list[int], StepShape]] = [
        ([30, 9, 0, 0], shapes[1]),
        ([1, 1, 10, 4], shapes[2]),
        ([1, 20, 0, 1], shapes[2]),
        ([1, 0, 8, 0], shapes[2]),
        ([15, 0, 0, 0], shapes[0]),
        ([22, 0, 0, 0], shapes[1]),
    ]
    with torch.inference_mode(), graphs_of(model, cache, ops, [2], shapes) as graphs:
        used = []
        replay = graphs._replay

        def noted(captured: Any, *rest: Any) -> Any:
            used.append(captured.shape)
            return replay(captured, *rest)

        monkeypatch.setattr(graphs, "_replay", noted)
        for counts, shape in steps:
            work = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
            batch = make_batch(work, BLOCK_SIZE, every_row=False)
            ops.progress.begin()
            got = graphs.logits(batch)
            assert used.pop() == shape
            assert got is not None
            torch.testing.assert_close(got.cpu(), runner.forward(batch), rtol=0, atol=1e-4)
            assert ops.tokens[: len(got)].tolist() == got.argmax(-1).tolist()
            # Every layer of this step, and no other step, is done.
            ops.progress.mark(runner.config.num_layers, lambda: pytest.fail("the step did not say so")).wait()
            for sequence, count in work:
                sequence.num_computed += count
        too_many = scattered_sequences([9, 9, 9, 9, 9], BLOCK_SIZE, NUM_BLOCKS, random.Random(2), **of_pool(cache.shape))
        assert graphs.logits(make_batch([(s, 3) for s in too_many], BLOCK_SIZE)) is None


def test_steps_of_layers_with_states_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of decodes and mixed ones, both with places that are empty; whose blocks the states have now left anything there."""
    without_warm_ups(monkeypatch)
    kinds = ["linear_attention", "full_attention"]
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    save_model("qwen3-next", tmp_path, num_hidden_layers=2, layer_types=kinds, mlp_only_layers=[1], **heads)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    ops = TritonOps(DEVICE)
    model = build_model(runner.config, torch.float32, ops, DEVICE)
    load_weights(model, tmp_path)
    cache = KvCache(runner.kv_shape, DEVICE)
    for pool in (cache, runner.kv_cache):
        pool.tensor.fill_(1e30)
    num_states = runner.kv_shape.num_state_blocks
    sequences = scattered_sequences([40, 20, 6], BLOCK_SIZE, NUM_BLOCKS - 1, random.Random(1), num_state_blocks=num_states)
    untouched = list(range(NUM_BLOCKS))
    for sequence in sequences:
        untouched = [block for block in untouched if block not in (*sequence.blocks, *sequence.state_blocks)]
    with torch.inference_mode(), graphs_of(model, cache, ops, [4], [StepShape(32, 2, 3), StepShape(32, 0, 3)]) as graphs:
        for counts in ([20, 3, 0], [1, 9, 1], [1, 1, 1], [0, 1, 0]):
            work = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
            batch = make_batch(work, BLOCK_SIZE, every_row=False)
            got = graphs.logits(batch)
            assert got is not None
            torch.testing.assert_close(got.cpu(), runner.forward(batch), rtol=0, atol=1e-4)
            for sequence, count in work:
                sequence.num_computed += count
    assert bool((cache.tensor[untouched] == 1e30).all())


@pytest.mark.system
def test_a_mixed_step_over_quantized_kv_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_warm_ups(monkeypatch)
    save_model("qwen2", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kv_cache_dtype="int8")
    ops = TritonOps(DEVICE)
    model = build_model(runner.config, torch.float32, ops, DEVICE)
    load_weights(model, tmp_path)
    replayed, launched = KvCache(runner.kv_shape, DEVICE), KvCache(runner.kv_shape, DEVICE)
    sequences = scattered_sequences([40, 20, 6], BLOCK_SIZE, NUM_BLOCKS, random.Random(1))
    with torch.inference_mode(), graphs_of(model, replayed, ops, [1], [StepShape(32, 2, 2)]) as graphs:
        for counts in ([9, 5, 0], [1, 4, 3]):
            work = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
            batch = make_batch(work, BLOCK_SIZE, every_row=False)
            got = graphs.logits(batch)
            assert got is not None
            torch.testing.assert_close(got, model.forward(batch, launched), rtol=0, atol=1e-4)
            assert torch.equal(replayed.tensor, launched.tensor)
            for sequence, count in work:
                sequence.num_computed += count


def test_tokens_are_carried_into_a_mixed_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_warm_ups(monkeypatch)
    save_model("llama", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    ops = TritonOps(DEVICE)
    model = build_model(runner.config, torch.float32, ops, DEVICE)
    load_weights(model, tmp_path)
    cache = KvCache(runner.kv_shape, DEVICE)
    first, second = scattered_sequences([20, 20], BLOCK_SIZE, NUM_BLOCKS, random.Random(4))
    with torch.inference_mode(), graphs_of(model, cache, ops, [1], [StepShape(32, 2, 2)]) as graphs:
        begun = make_batch([(first, 19)], BLOCK_SIZE, every_row=False)
        assert graphs.logits(begun) is not None
        runner.forward(begun)
        first.num_computed, token = 19, int(ops.tokens[0])
        batch = make_batch([(first, 1), (second, 11)], BLOCK_SIZE, every_row=False)
        carried = np.full(12, -1, np.int32)
        carried[0] = 0
        got = graphs.logits(replace(batch, carried=carried))
        assert got is not None
        torch.testing.assert_close(got.cpu(), runner.forward(replace(batch, carried=carried).with_carried([token])), rtol=0, atol=1e-4)


def test_rows_go_on_behind_drafts_in_a_captured_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of decodes alone, and one with a prompt."""
    without_warm_ups(monkeypatch)
    save_model("llama", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    ops = TritonOps(DEVICE)
    model = build_model(runner.config, torch.float32, ops, DEVICE)
    load_weights(model, tmp_path)
    cache = KvCache(runner.kv_shape, DEVICE)
    first, second = scattered_sequences([20, 20], BLOCK_SIZE, NUM_BLOCKS, random.Random(4))
    sampled = [4, 5, 6, 9]
    with torch.inference_mode(), graphs_of(model, cache, ops, [2], [StepShape(32, 2, 2)]) as graphs:
        begun = make_batch([(first, 19)], BLOCK_SIZE, every_row=False)
        assert graphs.logits(begun) is not None
        runner.forward(begun)
        # The token before it is known, and one of two drafts is what was sampled: across a block's end.
        first.num_computed = 15
        places = np.arange(15, 18)
        behind = RowsBehind.of(
            np.array([0]),
            np.array([1]),
            np.array([[5, 4]]),
            np.array([[-1, -1, -1]]),
            np.array([[first.blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]]),
        )
        for others in ([], [(second, 11)]):
            batch = replace(make_batch([(first, 1), *others], BLOCK_SIZE, every_row=False), behind=behind)
            tables = np.zeros((1, len(batch.seq_lens), 2), np.int32)
            tables[:, :, : batch.block_tables.shape[2]] = batch.block_tables
            tables[0, 0] = first.blocks[:2]
            batch = replace(batch, block_tables=tables)
            ops.tokens[: len(sampled)] = torch.tensor(sampled)
            got = graphs.logits(batch)
            assert got is not None
            known = batch.with_carried(sampled)
            assert (int(known.token_ids[0]), int(known.positions[0]), int(known.seq_lens[0])) == (6, 16, 17)
            torch.testing.assert_close(got.cpu(), runner.forward(known), rtol=0, atol=1e-4)


class FailingModel:
    """A model whose steps fail from one of them on, if they have so many rows."""

    def __init__(self, model: Decoder, told: list[str]) -> None:
        self._model = model
        self._told = told
        self.fails: tuple[int, int] | None = None  # rows, and how many steps of them go well

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def compute(self, plan: Any) -> torch.Tensor:
        rows = len(plan.token_ids)
        if self.fails is not None and self.fails == (rows, self._told.count(f"{rows} rows")):
            raise RuntimeError("no memory on this card")
        self._told.append(f"{rows} rows")
        logits: torch.Tensor = self._model.compute(plan)
        return logits


@pytest.fixture
def failing(tmp_path: Path) -> tuple[FailingModel, list[str], KvCache, TritonOps]:
    save_model("llama", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    ops = TritonOps(DEVICE)
    model = build_model(runner.config, torch.float32, ops, DEVICE)
    load_weights(model, tmp_path)
    told: list[str] = []
    return FailingModel(model, told), told, KvCache(runner.kv_shape, DEVICE), ops


SMALL = [StepShape(6, 0, 1), StepShape(4, 0, 1)]


def test_ranks_exchange_in_warm_ups_that_come_before_all_captures(failing: Any) -> None:
    model, told, cache, ops = failing
    with torch.inference_mode():
        noted = {"captured_one": lambda done, total: told.append(f"{done} of {total}"), "meet": lambda: told.append("met")}
        with graphs_of(model, cache, ops, [2], SMALL, **noted) as graphs:
            assert graphs.num_mixed == 2
    steps = ["6 rows", "4 rows", "2 rows"]
    assert told == [*steps, "met", "6 rows", "1 of 3", "4 rows", "2 of 3", "2 rows", "3 of 3"]


@pytest.mark.parametrize("alone", [True, False])
def test_a_warm_up_that_fails_ends_a_rank_and_costs_one_by_itself_its_mixed_steps(failing: Any, alone: bool) -> None:
    """Others wait inside the step that failed: they must not be left there for the next one."""
    model, _, cache, ops = failing
    model.fails = (4, 0)
    with torch.inference_mode():
        if alone:
            with graphs_of(model, cache, ops, [2], SMALL) as graphs:
                assert graphs.num_mixed == 0
            return
        met: list[int] = []
        with pytest.raises(RuntimeError, match="no memory"), graphs_of(model, cache, ops, [2], SMALL, meet=lambda: met.append(1)):
            pass
        assert not met


def test_a_rank_that_cannot_capture_mixed_steps_says_so_and_goes_on(failing: Any) -> None:
    model, told, cache, ops = failing
    model.fails = (4, 1)
    with torch.inference_mode(), graphs_of(model, cache, ops, [2], SMALL, meet=lambda: told.append("met")) as graphs:
        assert graphs.num_mixed == 0
        sequence = scattered_sequences([5], BLOCK_SIZE, NUM_BLOCKS, random.Random(0))[0]
        assert graphs.logits(make_batch([(sequence, 4)], BLOCK_SIZE, every_row=False)) is None
        sequence.num_computed = 4
        assert graphs.logits(make_batch([(sequence, 1)], BLOCK_SIZE)) is not None


@pytest.mark.parametrize(("has_experts", "most"), [(False, 1024), (True, 2048)])
def test_the_ladder_of_mixed_steps_wastes_little(*, has_experts: bool, most: int) -> None:
    shapes = mixed_ladder(2048, 256, has_experts=has_experts)
    assert all(shape.decodes <= shape.rows for shape in shapes)
    assert max(shape.rows for shape in shapes if shape.decodes) == most
    for rows in range(17, most + 1):
        for decodes in (0, 1, 7, 60, 200):
            if decodes >= rows:
                continue
            shape = min(s for s in shapes if s.holds(rows=rows, decodes=decodes, chunks=1))
            assert shape.rows - rows < max(64, rows / 3, shape.decodes - decodes + 1)


def test_the_trial_of_sharing_is_of_attention_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that rounding chooses would make other logits."""
    without_warm_ups(monkeypatch)
    monkeypatch.setattr(step_graphs, "_TRIAL_KEYS", 256)
    monkeypatch.setattr(shared_prefix, "_PASS_BYTES", 0.0)
    monkeypatch.setattr(shared_prefix, "_CACHED_READ", 1.0)
    save_model("qwen2-moe", tmp_path)
    config = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    ops = TritonOps(DEVICE)
    model = build_model(config.config, torch.float32, ops, DEVICE)
    load_weights(model, tmp_path)
    cache = KvCache(config.kv_shape, DEVICE)
    with torch.inference_mode(), graphs_of(model, cache, ops, [4]) as graphs:
        monkeypatch.setattr(model, "compute", lambda plan: pytest.fail("a step is computed"))
        assert graphs.try_sharing() == ""
        assert list(graphs._sharing) == [4]
        shared = graphs._sharing[4].shared
        assert shared is not None
        assert bool(shared.listed.any())


@pytest.mark.system
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_sharing_proves_itself_or_is_off(kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_warm_ups(monkeypatch)
    monkeypatch.setattr(step_graphs, "_TRIAL_KEYS", 256)
    monkeypatch.setattr(shared_prefix, "_PASS_BYTES", 0.0)
    monkeypatch.setattr(shared_prefix, "_CACHED_READ", 1.0)
    save_model("llama", tmp_path)
    config = ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kv_cache_dtype=kv_cache_dtype)
    ops = TritonOps(DEVICE)
    model = build_model(config.config, torch.float32, ops, DEVICE)
    load_weights(model, tmp_path)
    torch.manual_seed(0)
    cache = KvCache(config.kv_shape, DEVICE)
    with torch.inference_mode(), graphs_of(model, cache, ops, [4]) as graphs:
        assert graphs.try_sharing() == ""
        assert list(graphs._sharing) == [4]
        assert not cache.tensor.any(), "the pool is left as it was"
        pack = shared_prefix.pack

        def forgets_a_member(*args: Any) -> Any:
            listed = pack(*args)
            listed[: shared_prefix.OWN_COLUMNS] = 0  # as if the first sequence had nothing but its own part
            listed[0] = 256
            return listed

        monkeypatch.setattr("twostep.model.kernels.triton_shared_prefix.pack", forgets_a_member)
        assert "differ" in graphs.try_sharing()
        assert graphs._sharing == {}
        assert graphs.try_sharing() == ""
    with monkeypatch.context() as broken, torch.inference_mode():
        broken.setattr("twostep.model.kernels.triton_ops.SharedPrefix", mock.Mock(side_effect=RuntimeError("no room on this card")))
        with graphs_of(model, cache, ops, [4]) as graphs:
            assert "no room on this card" in graphs.try_sharing()
            assert (graphs._sharing, list(graphs._graphs)) == ({}, [4])
    with torch.inference_mode(), graphs_of(model, cache, ops, [4]) as graphs:
        graphs._max_model_len = 257
        batch = graphs._worth_sharing(graphs._sharing[4])
        assert batch is not None
        assert batch.positions.max() < 257
    small = KvCache(replace(config.kv_shape, num_blocks=4), DEVICE)
    with torch.inference_mode(), graphs_of(model, small, ops, [4]) as graphs:
        assert graphs.try_sharing() == ""
        assert graphs._sharing == {}


def test_every_second_size_has_a_step_that_shares() -> None:
    assert sharing_ladder([1, 2, 4]) == [4]
    assert sharing_ladder([1]) == []
    sizes = sharing_ladder(ladder(256))
    assert sizes[0] == 4
    assert sizes[-1] == 256
    assert set(sizes) < set(ladder(256))
