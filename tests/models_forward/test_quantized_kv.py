"""Quantized KV: error bounds of a vector, blocks that move with their scales, and what a model's logits and tokens make of it."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from forward_helpers import VOCAB, Sequence_, make_batch, scattered_sequences
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model, save_tokenizer

from twostep.checkpoint.agreement import check_formats
from twostep.engine.batch import KvShape
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.errors import SetupError
from twostep.keys.secret import DeploymentSecret
from twostep.model.families.registry import parse_config
from twostep.model.runner.model_runner import ModelRunner, num_blocks_for
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.kv_quantization import LEAST_SCALE, dequantize, quantize, static_scales
from twostep.prefix import derive_key
from twostep.sampling_params import SamplingParams
from twostep.settings.worker import WorkerSettings
from twostep.worker.config import WorkerConfig
from twostep.worker.model import layout_of, load_model

FORMATS = ["fp8", "int8", "int4"]
NUM_BLOCKS = 40
# Largest error of a number against its own magnitude, and against the largest of its vector. e4m3: half a step of 8 to a factor of
# two, half a step of 2**-9 of 448 below the normal numbers. int8: half a step, of a scale that was rounded up by 2**-7 at most.
BOUNDS = {"fp8": (2**-4, 2**-10 / 448 * 1.01), "int8": (0.0, 0.5 / 127 * 1.01)}


@given(
    quantization=st.sampled_from(["fp8", "int8"]),
    size=st.integers(1, 40),
    exponents=st.tuples(st.floats(-15, 15), st.floats(0, 4)),
    seed=st.integers(0, 2**16),
)
def test_no_number_is_further_off_than_half_a_step(quantization: str, size: int, exponents: tuple[float, float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(3, size, generator=generator) * exponents[1] + exponents[0]
    x = torch.randn(3, size, generator=generator) * torch.exp(spread)
    values, scales = quantize(x, quantization)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.uint8, torch.bfloat16, (3,))
    error = (dequantize(values, scales, quantization) - x).abs()
    own, largest = BOUNDS[quantization]
    assert bool((error <= own * x.abs() + largest * x.abs().amax(1, keepdim=True) + LEAST_SCALE * 448).all())


@given(
    groups=st.sampled_from([2, 4, 6]),
    exponents=st.tuples(st.floats(-15, 15), st.floats(0, 4)),
    shift=st.floats(-3, 3),
    seed=st.integers(0, 2**16),
)
def test_int4_is_off_by_half_a_step_of_its_group(groups: int, exponents: tuple[float, float], shift: float, seed: int) -> None:
    """A step is a fifteenth of what the group spans. Its offset is rounded by half of int8's step at most, the step by a sixteenth of that,
    which counts fifteen times."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, groups, 16, generator=generator) + shift
    x *= torch.exp(torch.randn(3, groups, 1, generator=generator) * exponents[1] + exponents[0])
    values, scales = quantize(x.flatten(1), "int4")
    assert (values.dtype, values.shape, scales.dtype, scales.shape) == (torch.uint8, (3, groups * 10), torch.bfloat16, (3,))
    error = (dequantize(values, scales, "int4").view_as(x) - x).abs()
    spans = x.amax(2, keepdim=True) - x.amin(2, keepdim=True)
    of_int8 = x.abs().amax((1, 2), keepdim=True) / 127 * 1.01 + LEAST_SCALE
    assert bool((error <= spans / 30 * 1.01 + of_int8 * (0.5 + 15 / 16)).all())


@pytest.mark.parametrize("quantization", FORMATS)
def test_what_is_no_number_stays_in_its_vector_and_shows(quantization: str) -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [1.0, torch.inf, 2.0], [1.0, -torch.nan, 2.0], [0.0, -0.0, 0.0]]).repeat_interleave(32, 1)
    values, scales = quantize(x, quantization)
    assert not dequantize(values, torch.ones(4), quantization).isnan().any()
    got = dequantize(values, scales, quantization)
    assert got[0].isfinite().all()
    assert got[1].isnan().any()
    assert got[2].isnan().all()
    assert not got[3].any()


def model(directory: Path) -> None:
    """A llama whose attention is neither flat nor all on one token."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.02,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().save_pretrained(directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    model(made)
    return made


def runner(directory: Path, quantization: str = "auto", *, block_size: int = 16, dtype: str = "float32") -> ModelRunner:
    return ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=block_size, dtype=dtype, kv_cache_dtype=quantization)


def logits(runner: ModelRunner, chunks: list[int], block_size: int) -> torch.Tensor:
    """Logits of every position of two sequences; `chunks` cuts the first, the second comes a token at a time beside it, then whole."""
    sequences = scattered_sequences([sum(chunks), 60], block_size, NUM_BLOCKS, random.Random(1))
    rows: list[dict[int, torch.Tensor]] = [{}, {}]
    for step, count in enumerate(chunks):
        counts = (count, 60 - step if step == len(chunks) - 1 else 1)
        out = runner.forward(make_batch(list(zip(sequences, counts, strict=True)), block_size))
        row = 0
        for sequence, found, number in zip(sequences, rows, counts, strict=True):
            for _ in range(number):
                found[sequence.num_computed] = out[row]
                sequence.num_computed += 1
                row += 1
    return torch.stack([found[position] for found in rows for position in sorted(found)]).float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", FORMATS)
def test_logits_stay_near_those_of_exact_kv(directory: Path, quantization: str, dtype: str) -> None:
    exact = logits(runner(directory), [150], 16)
    lossy = logits(runner(directory, quantization, dtype=dtype), [150], 16)
    error = float((lossy - exact).norm() / exact.norm())
    assert 1e-4 < error < (0.1 if quantization == "int4" else 2e-2), error


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("quantization", FORMATS)
def test_chunks_change_nothing(directory: Path, quantization: str, block_size: int) -> None:
    """Beyond a rounding that falls the other way: every token attends to quantized KV, its own chunk's too."""
    whole = logits(runner(directory, quantization, block_size=block_size), [90], block_size)
    for chunks in ([33, 1, 40, 16], [1, 89]):
        cut = logits(runner(directory, quantization, block_size=block_size), chunks, block_size)
        assert float((cut - whole).norm() / whole.norm()) < 1e-3
        best, second = whole.topk(2, 1).values.T
        assert torch.equal(cut.argmax(1)[best - second > 0.01], whole.argmax(1)[best - second > 0.01])


@pytest.mark.parametrize("quantization", FORMATS)
def test_moved_blocks_decode_bit_identically(directory: Path, quantization: str) -> None:
    source, target = runner(directory, quantization), runner(directory, quantization)
    (sequence,) = scattered_sequences([50], 16, NUM_BLOCKS, random.Random(3))
    source.run(make_batch([(sequence, 49)], 16))
    sequence.num_computed = 49
    data = np.empty((len(sequence.blocks), source.kv_shape.block_bytes), np.uint8)
    source.read_blocks(sequence.blocks, data)
    elsewhere = sequence.blocks[::-1]
    target.write_blocks(elsewhere, data)
    back = np.empty_like(data)
    target.read_blocks(elsewhere, back)
    assert np.array_equal(back, data)
    want = source.forward(make_batch([(sequence, 1)], 16))
    moved = Sequence_(sequence.tokens, elsewhere, num_computed=49)
    assert torch.equal(target.forward(make_batch([(moved, 1)], 16)), want)


def answers(made: ModelRunner, prompts: list[list[int]], budget: int) -> list[list[int]]:
    """Greedy tokens; the prompts one after the other, so that later ones find the prefixes of earlier ones."""
    engine = Engine(made, EngineConfig(max_num_batched_tokens=budget, hash_unit=16))
    found = []
    for i, prompt in enumerate(prompts):
        request = EngineRequest(
            seq_id=str(i),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=6, temperature=0.0),
            eos_token_ids=frozenset(),
            prefix_key=b"k",
        )
        found.append([token.token_id for token in generate(engine, [request])[0]])
    return found


@pytest.mark.parametrize("quantization", FORMATS)
def test_tokens_are_the_same_in_chunks_and_behind_cached_prefixes(directory: Path, quantization: str) -> None:
    rng = random.Random(44)  # one with no near ties: the two best logits are 0.017 apart everywhere
    first = [rng.randrange(VOCAB) for _ in range(70)]
    prompts = [first, first[:50] + [rng.randrange(VOCAB) for _ in range(9)], first]
    whole = [answers(runner(directory, quantization), [prompt], 512)[0] for prompt in prompts]
    assert answers(runner(directory, quantization), prompts, 13) == whole


@given(
    quantization=st.sampled_from(FORMATS),
    heads=st.integers(1, 3),
    half=st.integers(1, 9),
    block_size=st.sampled_from([4, 12, 16]),
    seed=st.integers(0, 2**16),
)
def test_slots_hold_what_was_written_and_no_other_byte_changes(
    quantization: str, heads: int, half: int, block_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    half = 16 * (1 + half % 3) if quantization == "int4" else half
    shape = KvShape(
        num_blocks=5,
        block_size=block_size,
        num_layers=3,
        num_kv_heads=heads,
        head_dim=2 * half,
        dtype="float32",
        quantization=quantization,
    )
    cache = KvCache(shape)
    assert cache.tensor[0].numel() == shape.block_bytes
    cache.tensor.copy_(torch.randint(0, 0x70, cache.tensor.shape, dtype=torch.uint8))
    before = cache.numbers(1, torch.arange(5)), cache.tensor.clone()
    slots = torch.randperm(5 * block_size)[:7]
    block, slot = slots // block_size, slots % block_size
    index = ((block[:, None] * 3 * 2 * heads + torch.arange(2 * heads)) * block_size + slot[:, None]).reshape(-1)
    vectors = torch.randn(7, 2, heads, 2 * half)
    cache.write_rows(1, index, vectors.view(-1, 2 * half))
    after = cache.numbers(1, torch.arange(5))
    stored = dequantize(*quantize(vectors, quantization), quantization)
    assert torch.equal(after[block, :, :, slot], stored)
    after[block, :, :, slot] = before[0][block, :, :, slot]
    assert torch.equal(after, before[0])
    assert torch.equal(cache.tensor[:, [0, 2]], before[1][:, [0, 2]])
    # As attention reads them: keys of some heads, then values.
    chosen = torch.tensor([3 * 6 * heads + heads - 1, 0])
    rows = cache.read_rows(1, torch.cat((chosen, chosen + heads))).view(2, 2, block_size, 2 * half)
    now = cache.numbers(1, torch.tensor([3, 0]))
    assert torch.equal(rows[:, 0], now[0, :, heads - 1])
    assert torch.equal(rows[:, 1], now[1, :, 0])


def test_a_quantized_pool_holds_twice_the_blocks_or_three_times(directory: Path) -> None:
    config = parse_config(directory)
    counts = {name: num_blocks_for(config, "bfloat16", 16, 1 << 24, name) for name in ("auto", *FORMATS)}
    # head_dim 32: 64 bytes a vector; or 32 and a scale of 2; or 16, the same, and 2 for each of two groups.
    assert counts["fp8"] == counts["int8"] == (1 << 24) // (2 * 2 * 2 * 16 * 34)
    assert counts["int4"] == (1 << 24) // (2 * 2 * 2 * 16 * 22)
    assert counts["auto"] == (1 << 24) // (2 * 2 * 2 * 16 * 64)


def test_lossy_kv_shares_neither_prefixes_nor_pairs(directory: Path) -> None:
    layouts = {name: layout_of(runner(directory, name).kv_shape, "m") for name in ("auto", *FORMATS)}
    assert [layout.quantization for layout in layouts.values()] == ["none", *FORMATS]
    assert len(set(layouts.values())) == 4
    keys = {
        derive_key(DeploymentSecret(b"s"), tenant="t", salt="", model_fingerprint="m", dtype=layout.dtype, quantization=layout.quantization)
        for layout in layouts.values()
    }
    assert len(keys) == 4


@pytest.mark.parametrize(("quantization", "block_size", "say"), [("fp8", 6, "--block-size 16"), ("int2", 16, "auto, fp8 or int8")])
def test_what_cannot_be_stored_says_what_to_give(directory: Path, quantization: str, block_size: int, say: str) -> None:
    with pytest.raises(SetupError, match=say):
        runner(directory, quantization, block_size=block_size)


def test_int4_says_what_models_it_is_not_for(tmp_path: Path) -> None:
    for kind, say in (("llama", "head size 16 of int4 KV is no multiple of 32"), ("deepseek_v2", "latent attention")):
        made = save_tiny_model(tmp_path / kind, kind)
        with pytest.raises(SetupError, match=say):
            check_formats(made, WorkerSettings(kv_cache_dtype="int4"))
        with pytest.raises(SetupError, match=say):
            runner(made, "int4")


SCALES = torch.tensor([[0.013, 0.011], [2.0**-7, 0.3]])


@pytest.fixture
def with_scales(directory: Path, tmp_path: Path) -> Path:
    """The model as llm-compressor saves it where KV alone is quantized: scales of two layers, of which the first may cut something off."""
    made = tmp_path / "scaled"
    shutil.copytree(directory, made)
    config = json.loads((made / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": scheme,
    }
    (made / "config.json").write_text(json.dumps(config))
    change(
        made, {f"model.layers.{i}.self_attn.{kind}_scale": SCALES[i, j : j + 1].clone() for i in range(2) for j, kind in enumerate("kv")}
    )
    return made


def change(model_dir: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """None: the tensor goes."""
    stored = load_file(model_dir / "model.safetensors") | tensors
    save_file(
        {name: tensor for name, tensor in stored.items() if tensor is not None}, model_dir / "model.safetensors", metadata={"format": "pt"}
    )


@given(peak=st.floats(0.01, 100), static=st.floats(0.001, 1), seed=st.integers(0, 2**16))
def test_a_given_scale_is_kept_and_what_is_beyond_it_is_cut(peak: float, static: float, seed: int) -> None:
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed)) * peak
    scale = static_scales(torch.tensor(static))
    assert static <= float(scale) <= static * (1 + 2**-7)
    values, scales = quantize(x, "fp8", scale)
    assert bool((scales.float() == scale).all())
    want = x.clamp(-448 * scale, 448 * scale)
    error = (dequantize(values, scales, "fp8") - want).abs()
    assert bool((error <= 2**-4 * want.abs() + 2**-10 * scale * 1.01).all())


def test_the_checkpoints_scales_are_used(with_scales: Path, directory: Path) -> None:
    exact = logits(runner(directory), [60], 16)
    for asked in ("auto", "fp8"):
        scaled = runner(with_scales, asked)
        assert scaled.kv_shape.quantization == "fp8"
        error = float((logits(scaled, [60], 16) - exact).norm() / exact.norm())
        assert 1e-4 < error < 0.1
        assert scaled.kv_cache.quantized is not None
        for layer in range(2):
            written = scaled.kv_cache.quantized.scales[:, layer].flatten(0, 2)
            assert torch.equal(written[written[:, 0] != 0].unique(dim=0), static_scales(SCALES[layer : layer + 1]).bfloat16())
    assert torch.equal(logits(runner(with_scales, "exact"), [60], 16), exact)
    assert runner(with_scales, "int8").kv_shape.quantization == "int8"


@pytest.mark.parametrize(
    "value",
    [
        None,
        torch.zeros(1),
        torch.tensor([torch.inf]),
        torch.tensor([torch.nan]),
        -torch.ones(1),
        torch.ones(2),
        torch.ones(1, dtype=torch.int32),
    ],
    ids=str,
)
def test_scales_that_cannot_be_are_refused_by_name(with_scales: Path, value: torch.Tensor | None) -> None:
    name = "model.layers.1.self_attn.v_scale"
    change(with_scales, {name: value})
    with pytest.raises(SetupError) as caught:
        runner(with_scales)
    assert name in caught.value.message
    assert runner(with_scales, "exact").kv_shape.quantization == "none"


def test_scales_of_projections_are_modelopts(with_scales: Path) -> None:
    names = {f"model.layers.{i}.self_attn.{kind}": SCALES[i, j].clone() for i in range(2) for j, kind in enumerate("kv")}
    change(
        with_scales, {f"{name}_scale": None for name in names} | {f"{name}_proj.{name[-1]}_scale": value for name, value in names.items()}
    )
    quantized = runner(with_scales).kv_cache.quantized
    assert quantized is not None
    assert quantized.static is not None
    assert torch.equal(quantized.static, static_scales(SCALES).repeat_interleave(2, 1))
    change(with_scales, {"model.layers.0.self_attn.k_scale": torch.ones(1)})
    with pytest.raises(SetupError):
        runner(with_scales)


def test_each_head_may_have_scales_of_its_own(with_scales: Path) -> None:
    """As compressed-tensors' strategy `attn_head` stores them."""
    path = with_scales / "config.json"
    path.write_text(path.read_text().replace('"strategy": "tensor"', '"strategy": "attn_head"'))
    by_head = SCALES[..., None] * torch.tensor([1.0, 1.7])
    change(
        with_scales,
        {f"model.layers.{i}.self_attn.{kind}_scale": by_head[i, j].view(2, 1, 1).clone() for i in range(2) for j, kind in enumerate("kv")},
    )
    scaled = runner(with_scales)
    logits(scaled, [60], 16)
    assert scaled.kv_cache.quantized is not None
    for layer in range(2):
        for head in range(2):
            written = scaled.kv_cache.quantized.scales[:, layer, head].flatten(0, 1)
            assert torch.equal(written[written[:, 0] != 0].unique(dim=0), static_scales(by_head[layer, None, :, head]).bfloat16())
    name = "model.layers.1.self_attn.v_scale"
    for wrong in (torch.ones(1), torch.ones(3, 1, 1), torch.tensor([1.0, 0.0]).view(2, 1, 1)):
        change(with_scales, {name: wrong})
        with pytest.raises(SetupError, match=name):
            runner(with_scales)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_weights_beside_them_may_be_quantized_at_the_load(with_scales: Path, directory: Path, quantization: str) -> None:
    def of(model_dir: Path, kv: str) -> torch.Tensor:
        made = ModelRunner(model_dir, num_blocks=NUM_BLOCKS, block_size=16, kv_cache_dtype=kv, dtype="float32", quantization=quantization)
        return logits(made, [60], 16)

    assert torch.equal(of(with_scales, "exact"), of(directory, "exact"))
    assert 1e-4 < float((of(with_scales, "auto") - of(directory, "exact")).norm() / of(directory, "exact").norm()) < 0.1


@pytest.mark.parametrize("wire", ["int8", "fp8"])
def test_kv_that_the_checkpoint_wants_quantized_is_not_quantized_again_on_its_way(with_scales: Path, wire: str) -> None:
    save_tokenizer(with_scales)  # part of a fingerprint
    config = WorkerConfig(role="prefill", model=str(with_scales), device="cpu", kv_wire=wire, num_blocks=8, calibrate=False)
    with pytest.raises(SetupError) as caught:
        load_model(config)
    assert f"--kv-wire {wire}" in caught.value.message
    exact = load_model(replace(config, kv_cache_dtype="exact"))
    assert exact.layout.quantization == "none"
