"""Layers whose memory of a sequence is a state of fixed size: the gated delta rule itself, and a whole model with such layers."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from forward_helpers import reference_logits, save_model
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.types import EngineRequest
from twostep.errors import SetupError
from twostep.model.families.registry import parse_config
from twostep.model.kernels.gated_delta import delta_chunks, delta_step
from twostep.model.runner.model_runner import ModelRunner, kv_shape
from twostep.sampling_params import SamplingParams

TOLERANCE = 1e-4


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = []
    for q, k, v, g, b in zip(query, key, value, log_decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        held = (k[:, None] @ state)[:, 0]
        state = state + k[:, :, None] * ((v - held) * b[:, None])[:, None]
        outputs.append((q[:, None] @ state)[:, 0])
    return torch.stack(outputs), state


@given(
    tokens=st.integers(1, 150),
    heads=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    cut=st.integers(0, 150),
    strength=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 1 << 16),
)
def test_chunks_and_steps_are_the_rule(tokens: int, heads: int, sizes: tuple[int, int], cut: int, strength: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = random(tokens, heads, sizes[0]), torch.nn.functional.normalize(random(tokens, heads, sizes[0]), dim=-1)
    value, log_decay = random(tokens, heads, sizes[1]), -random(tokens, heads).abs() * strength
    beta, state = random(tokens, heads).sigmoid(), random(heads, *sizes)
    inputs = (query, key, value, log_decay, beta)
    want, want_state = by_definition(*inputs, state)
    # In two calls, the first of which leaves its state to the second.
    cut = min(cut, tokens)
    first, middle = delta_chunks(*(x[:cut] for x in inputs), state) if cut else (want[:0], state)
    rest, last = delta_chunks(*(x[cut:] for x in inputs), middle) if cut < tokens else (want[:0], middle)
    torch.testing.assert_close(torch.cat((first, rest)), want)
    torch.testing.assert_close(last, want_state)
    # Two sequences at once, one token each.
    out, states = delta_step(*(x[:1].repeat(2, *[1] * (x.dim() - 1)) for x in inputs), torch.stack((state, want_state)))
    for i, before in enumerate((state, want_state)):
        one, after = by_definition(*(x[:1] for x in inputs), before)
        torch.testing.assert_close(out[i], one[0])
        torch.testing.assert_close(states[i], after)


@pytest.mark.parametrize(("num_blocks", "budget", "block_size"), [(300, 512, 4), (300, 37, 4), (80, 50, 4), (24, 23, 16)])
def test_answers_are_those_of_transformers(num_blocks: int, budget: int, block_size: int, tmp_path: Path) -> None:
    """Prompts in chunks beside others that decode; of the small pools some give way and come back."""
    oracle = save_model("qwen3-next", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=num_blocks, block_size=block_size)
    # Whose blocks these were may have left anything there.
    runner.kv_cache.tensor.fill_(torch.nan)
    engine = Engine(runner, EngineConfig(max_num_batched_tokens=budget, max_num_seqs=4, hash_unit=block_size))
    generator = torch.Generator().manual_seed(budget)
    prompts = {f"r{n}": torch.randint(211, (n,), generator=generator).tolist() for n in (1, 2, 40, 65, 130)}
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=40, temperature=0.0)
        engine.submit(EngineRequest(seq_id=name, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params, prefix_key=b"k"))
    answers = defaultdict[str, list[int]](list)
    while sum(map(len, answers.values())) < 40 * len(prompts):
        output = engine.step()
        assert not output.failures
        engine.check_integrity()
        for token in output.tokens:
            answers[token.seq_id].append(token.token_id)
    assert (engine.stats().num_preemptions > 0) == (num_blocks < 300)
    for name, prompt in prompts.items():
        logits = reference_logits(oracle, [*prompt, *answers[name]])[len(prompt) - 1 : -1]
        lost = logits.max(-1).values - logits.gather(1, torch.tensor(answers[name])[:, None])[:, 0]
        assert float(lost.max()) < TOLERANCE


@pytest.mark.parametrize(("num_blocks", "look_ahead"), [(400, False), (400, True), (90, True)])
def test_answers_are_the_same_after_prefixes_that_were_found(num_blocks: int, look_ahead: bool, tmp_path: Path) -> None:
    """Prompts that part after 50 tokens, several at once, and then the next turn of each; of the small pool states are evicted."""
    save_model("qwen3-next", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=num_blocks, block_size=4)
    generator = torch.Generator().manual_seed(1)

    def words(count: int) -> list[int]:
        return torch.randint(211, (count,), generator=generator).tolist()

    shared, ends, more = words(50), [words(count) for count in (3, 9, 14, 20)], [words(count) for count in (5, 1, 8, 2)]

    def answers(*, caching: bool) -> tuple[list[list[int]], int]:
        runner.kv_cache.tensor.fill_(torch.nan)
        engine = Engine(
            runner,
            EngineConfig(max_num_batched_tokens=64, max_num_seqs=3, hash_unit=8, look_ahead=look_ahead, enable_prefix_caching=caching),
        )
        turns: list[list[int]] = []
        for prompts in ([[*shared, *end] for end in ends], more):
            before, told = list(turns), defaultdict[str, list[int]](list)
            for i, own in enumerate(prompts):
                prompt = [*shared, *ends[i], *before[i], *own] if before else own
                params = SamplingParams(max_tokens=21, temperature=0.0)
                engine.submit(
                    EngineRequest(
                        seq_id=f"{len(before)} {i}", token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params, prefix_key=b"k"
                    )
                )
            while engine.wait_for_work(0.0):
                output = engine.step()
                assert not output.failures
                engine.check_integrity()
                for token in output.tokens:
                    told[token.seq_id].append(token.token_id)
            turns += [told[f"{len(before)} {i}"] for i in range(len(prompts))]
        return turns, engine.stats().num_hit_tokens

    found, num_hits = answers(caching=True)
    assert found == answers(caching=False)[0]
    assert num_hits >= (4 * 60 if num_blocks == 400 else 1)


def test_blocks_too_small_for_columns_are_refused_with_larger_ones(tmp_path: Path) -> None:
    """Keys of 16 bytes for eight columns of numbers of four."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 8}
    save_model("qwen3-next", tmp_path, **heads, partial_rotary_factor=1.0)
    config = parse_config(tmp_path)
    with pytest.raises(SetupError, match="--block-size that is a multiple of 8"):
        kv_shape(config, "float32", 9, 1)
    assert kv_shape(config, "float32", 9, 8).num_state_blocks


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention", "full_attention", "mamba", "full_attention"]}, "layer_types"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ],
)
def test_what_contradicts_itself_is_refused_by_its_key(changes: dict[str, object], named: str, tmp_path: Path) -> None:
    save_model("qwen3-next", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(SetupError, match=named):
        parse_config(tmp_path)
