"""Models with windows in all layers or in some: blocks behind a window are others' while a sequence goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forward_helpers import VOCAB, reference_logits, save_model

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.layer_groups import layer_groups
from twostep.sampling_params import SamplingParams
from twostep.settings.speculative import SpeculativeConfig


def request_of(seq_id: str, tokens: list[int], most: int, **more: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True, **more)
    return EngineRequest(
        seq_id=seq_id, token_ids=tokens, num_prompt_tokens=len(tokens), sampling=sampling, eos_token_ids=frozenset(), prefix_key=b"a key"
    )


def prompt_of(count: int, seed: int) -> list[int]:
    return [(7 * place + place * place // (seed + 3) + seed) % VOCAB for place in range(count)]


def check(oracle: Any, request: EngineRequest, answer: list[int]) -> None:
    """Each token is the one that transformers would choose, up to the order of sums."""
    assert len(answer) == request.sampling.max_tokens
    tokens = [*request.token_ids, *answer]
    logits = reference_logits(oracle, tokens)[len(request.token_ids) - 1 : -1]
    chosen = logits.gather(1, logits.new_tensor(answer).long()[:, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < 1e-4


def test_answers_are_the_reference_s_while_others_take_what_is_left(tmp_path: Path) -> None:
    oracle = save_model("mistral", tmp_path, sliding_window=21)
    runner = ModelRunner(tmp_path, num_blocks=55, block_size=8)
    requests = [request_of(str(i), [(7 * place + i) % VOCAB for place in range(200)], 80) for i in range(2)]
    # Each has 35 blocks in the end, of which 21 are in reach.
    engine = Engine(runner, EngineConfig(max_num_batched_tokens=64, hash_unit=8))
    for request, answer in zip(requests, generate(engine, requests), strict=True):
        check(oracle, request, [token.token_id for token in answer])
    assert not engine.stats().num_preemptions
    engine.check_integrity()


# Of 512 tokens of context; a window's reach is 128 tokens more.
MIXED = ["gemma2", "gemma3", "gpt-oss", "qwen3-windows"]


@pytest.fixture(scope="module", params=MIXED)
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    return save_model(request.param, directory), directory


def blocks_of(engine: Engine) -> int:
    stats = engine.stats()
    return stats.num_blocks - stats.num_available_blocks


def test_a_sequence_keeps_what_is_in_reach_of_layers_with_windows(mixed: tuple[Any, Path]) -> None:
    """A prompt many windows long, in chunks: what it owns then, and with all layers in one group."""
    oracle, directory = mixed
    request = request_of("r", prompt_of(400, 1), 30)
    owned = []
    for one_group in (False, True):
        runner = ModelRunner(directory, num_blocks=200, block_size=8, one_group=one_group)
        engine = Engine(runner, EngineConfig(max_num_batched_tokens=64, hash_unit=8))
        engine.submit(request)
        answer: list[int] = []
        most = 0
        while engine.wait_for_work(0.0):
            answer += [token.token_id for token in engine.step().tokens]
            most = max(most, blocks_of(engine) if answer else 0)
        check(oracle, request, answer)
        owned.append(most * runner.kv_shape.num_layers)
        shape = runner.kv_shape
    # Three layers of 54 blocks; of the two with windows about 149 tokens are in reach, so at most 22 blocks.
    reach = max(oracle.config.sliding_window, 1) + 128
    assert owned[1] == 3 * 54
    assert owned[0] <= 54 + 2 * (reach // 8 + 3)
    assert shape.num_groups == 1


def test_answers_are_the_reference_s_whatever_becomes_of_blocks(mixed: tuple[Any, Path]) -> None:
    """Long prompts beside each other, in a pool in which some give way, of which some are found again, with drafts."""
    oracle, directory = mixed
    runner = ModelRunner(directory, num_blocks=150, block_size=8)
    config = EngineConfig(max_num_batched_tokens=48, hash_unit=8, look_ahead=True, speculative=SpeculativeConfig(method="ngram"))
    engine = Engine(runner, config)
    base = prompt_of(320, 2)
    turns = [
        [request_of("a", base, 10), request_of("b", prompt_of(250, 3), 10), request_of("c", [5, 6, 7] * 60, 20)],
        [request_of("d", base + prompt_of(20, 4), 5)],
        # What was found ends where a window was left behind, and further ahead.
        [request_of("e", base[:100], 5), request_of("f", base[:312], 5)],
        # In the end more than there is room for.
        [request_of(f"g{i}", prompt_of(20, 10 + i), 85) for i in range(6)],
    ]
    for requests in turns:
        for request, answer in zip(requests, generate(engine, requests), strict=True):
            check(oracle, request, [token.token_id for token in answer])
        engine.check_integrity()
    stats = engine.stats()
    assert stats.num_hit_tokens >= 100
    assert sum(stats.num_drafted)
    assert stats.num_preemptions


def test_what_is_in_reach_is_enough_to_go_on_elsewhere(mixed: tuple[Any, Path]) -> None:
    oracle, directory = mixed
    source, target = (
        Engine(ModelRunner(directory, num_blocks=200, block_size=8), EngineConfig(max_num_batched_tokens=64, hash_unit=8)) for _ in range(2)
    )
    shape = source.runner.kv_shape
    request = request_of("r", prompt_of(405, 5), 25)
    reservation = target.reserve(request)
    source.submit(request, hold=True)
    while not (first := [token.token_id for token in source.step().tokens]):
        pass
    blocks = source.block_ids("r")
    # All 51 columns of the layer without a window.
    assert len(blocks) == len(reservation.block_ids) == shape.order(405).count == 51 + 2 * (51 - (406 - shape.reach) // 8)
    data = np.empty((len(blocks), shape.block_bytes), np.uint8)
    source.runner.read_blocks(blocks, data)
    target.runner.write_blocks(reservation.block_ids, data)
    source.release("r")
    target.commit("r", first)
    answer = list(first)
    while target.wait_for_work(0.0):
        answer += [token.token_id for token in target.step().tokens]
    check(oracle, request, answer)


@pytest.mark.parametrize(
    ("family", "changes", "groups"),
    [
        ("mistral", {"sliding_window": 21}, (3, 1, 1)),
        # A context that ends within reach.
        ("mistral", {"sliding_window": 21, "max_position_embeddings": 140}, (3, 1, 0)),
        ("llama", {}, (3, 1, 0)),
        ("qwen3-windows", {}, (1, 3, 2)),
        ("gpt-oss", {"num_hidden_layers": 4}, (2, 2, 1)),
        (
            "gemma3",
            {"num_hidden_layers": 8, "layer_types": [*["sliding_attention"] * 5, "full_attention", *["sliding_attention"] * 2]},
            (1, 8, 7),
        ),
    ],
)
def test_layers_are_in_groups(family: str, changes: dict[str, Any], groups: tuple[int, int, int], tmp_path: Path) -> None:
    if family == "gpt-oss":
        changes = changes | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    save_model(family, tmp_path, **changes)
    shape = ModelRunner(tmp_path, num_blocks=2, block_size=8).kv_shape
    assert (shape.num_layers, shape.num_groups, shape.num_windowed) == groups
    assert bool(shape.reach) == bool(shape.num_windowed)
    one = ModelRunner(tmp_path, num_blocks=2, block_size=8, one_group=True).kv_shape
    assert one.num_groups == 1


@pytest.mark.parametrize(
    ("full", "windowed", "expected"),
    [
        (12, 12, (12, 1, 1)),  # gpt-oss-20b
        (4, 22, (4, 1, 6)),  # Gemma 3 1B
        (8, 40, (8, 1, 5)),  # 12B
        (10, 52, (10, 1, 6)),  # 27B
        (21, 21, (21, 1, 1)),  # Gemma 2 9B
        (21, 7, (7, 3, 1)),
        (30, 0, (30, 1, 0)),
        (0, 30, (30, 0, 1)),
        (59, 1, (60, 1, 0)),  # nothing to gain
    ],
)
def test_groups_of_many_layers(full: int, windowed: int, expected: tuple[int, int, int]) -> None:
    groups = layer_groups([0] * full + [512] * windowed)
    assert (groups.num_layers, groups.num_full, groups.num_windowed) == expected
