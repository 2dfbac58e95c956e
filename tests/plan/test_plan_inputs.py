"""Tests of a plan's inputs: workloads, targets, models, memory, presets, curves."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.cluster.records import LayoutRecord, WorkerRecord
from twostep.errors import InvalidRequest, SetupError
from twostep.lab.bench.serve.lengths import SHAREGPT_PROMPT, Normal, Uniform
from twostep.lab.bench.shapes import LLAMA_8B, LLAMA_70B
from twostep.lab.plan import machine
from twostep.lab.plan.goodput import simulate
from twostep.lab.plan.machine import load_preset, machine_of, machine_of_preset, machine_of_workers, preset_names
from twostep.lab.plan.model import GIB, model_of, parse_bytes, read_model, worker_memory
from twostep.lab.plan.workload import parse_workload
from twostep.lab.simulator.cluster import SimulatedDeployment
from twostep.lab.simulator.cluster import SimulatedRequest as Request
from twostep.lab.simulator.engine import EngineSpec
from twostep.step_curve import StepCurve, StepWorkload

CURVE = StepCurve(fixed_s=0.005, per_row_s=1e-4)
PRESETS = Path(machine.__file__).parent / "presets"


def test_workloads() -> None:
    parsed = parse_workload("prompts=2600+-30%, outputs=90..166, cached=0.5, burstiness=0.25")
    assert (parsed.prompts, parsed.outputs) == (Uniform(1820, 3380), Uniform(90, 166))
    assert (parsed.cached, parsed.burstiness) == (0.5, 0.25)
    assert parse_workload("prompts=2600±30%,outputs=7").prompts == Uniform(1820, 3380)
    assert parse_workload("prompts=2600~30%,outputs=7").prompts == Normal(2600, 0.3)
    assert parse_workload("prompts=sharegpt,outputs=7") == replace(
        parse_workload("prompts=1,outputs=7"), prompts=SHAREGPT_PROMPT, text="prompts=sharegpt,outputs=7"
    )
    assert all(r.num_cached == r.num_prompt // 2 for r in parsed.sample(50))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompts=5", "outputs"),
        ("prompts=5,outputs=hot", "outputs=hot"),
        ("prompts=5,outputs=0", None),
        ("prompts=9..5,outputs=1", None),
        ("prompts=5,outputs=1,cached=2", "cached=2"),
        ("prompts=5,outputs=1,burstiness=0", "burstiness=0"),
        ("prompts=5,outputs=1,color=red", "color=red"),
        ("prompts=5,prompts=6,outputs=1", "prompts=6"),
    ],
)
def test_wrong_workloads(text: str, message: str | None) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_workload(text)


@given(st.floats(0.5, 50), st.integers(0, 9))
def test_another_rate_has_the_same_requests_nearer_to_each_other(rate: float, seed: int) -> None:
    workload = parse_workload("prompts=10..500,outputs=1..50")
    slow, fast = workload.requests(rate, 20 / rate, seed=seed), workload.requests(2 * rate, 20 / rate, seed=seed)
    assert len(fast) >= len(slow)
    for a, b in zip(slow, fast, strict=False):
        assert b == replace(a, arrival_s=b.arrival_s)
        assert b.arrival_s == pytest.approx(a.arrival_s / 2)


def test_kv_of_a_token_is_the_formula(tmp_path: Path) -> None:
    model = model_of(LLAMA_8B, tmp_path)
    assert model.kv_token_bytes == 2 * 32 * 8 * 128 * 2 == 131072
    assert model.formula == "2 · layers · kv_heads · head_dim · bytes = 2 · 32 · 8 · 128 · 2 = 131,072 bytes"
    assert model.weight_bytes == pytest.approx(8.03e9 * 2, rel=0.001)
    large = model_of(LLAMA_70B, tmp_path)
    assert large.kv_token_bytes == 2 * 80 * 8 * 128 * 2
    assert large.weight_bytes == pytest.approx(70.55e9 * 2, rel=0.001)
    quantized = model_of(LLAMA_8B, tmp_path, kv_cache_dtype="int8")
    assert quantized.kv_token_bytes == 2 * 32 * 8 * (128 + 2)
    assert quantized.formula.endswith("= 2 · 32 · 8 · (128 · 1 + 2) = 66,560 bytes")
    assert model_of(LLAMA_8B, tmp_path, kv_cache_dtype="int4").formula.endswith("= 2 · 32 · 8 · (128 · 0.5 + 18) = 41,984 bytes")
    with pytest.raises(SetupError, match="head size 80"):
        model_of(LLAMA_8B | {"head_dim": 80}, tmp_path, kv_cache_dtype="int4")
    scheme = {"num_bits": 8, "type": "float"}
    asks = LLAMA_8B | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": scheme}}
    assert model_of(asks, tmp_path).kv_token_bytes == quantized.kv_token_bytes
    assert model_of(asks, tmp_path, kv_cache_dtype="exact").kv_token_bytes == model.kv_token_bytes


def test_quantized_weights_are_counted_in_their_bits(tmp_path: Path) -> None:
    """The shape alone says it: layers and their scales, and the embedding as it is; of int4 the output layer has 8 bits."""
    embedding, layers = 128256 * 4096, 6.98e9
    per_row = 4 * 32 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert model_of(LLAMA_8B, tmp_path, quantization="fp8").weight_bytes == pytest.approx(layers + per_row + 4 * embedding, rel=0.001)
    int4 = model_of(LLAMA_8B, tmp_path, quantization="int4").weight_bytes
    assert int4 == pytest.approx(layers * (0.5 + 4 / 128) + embedding * 3, rel=0.001)
    (tmp_path / "gptq").mkdir()
    stored = LLAMA_8B | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}}
    gptq = model_of(stored, tmp_path / "gptq").weight_bytes
    assert gptq == pytest.approx(layers * (0.5 + 4 / 128) + 4 * embedding, rel=0.001)
    with pytest.raises(SetupError, match="--quantization int8"):
        model_of(stored, tmp_path / "gptq", quantization="int8")


def test_experts_are_counted(tmp_path: Path) -> None:
    """Qwen3-30B-A3B, by its model card 30.5 billion weights; a token goes to 3.3 billion of them."""
    keys = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": []}
    config = LLAMA_8B | keys | experts | {"vocab_size": 151936, "intermediate_size": 6144, "tie_word_embeddings": False}
    model = model_of(config, tmp_path)
    assert model.weight_bytes == pytest.approx(30.53e9 * 2, rel=0.001)
    assert model.cut_beside_heads(whole_experts=False) == {
        "intermediate_size": 0,
        "shared_expert_intermediate_size": 0,
        "moe_intermediate_size": 768,
    }
    assert model_of(config, tmp_path, quantization="int4").weight_bytes < model.weight_bytes / 3
    one_dense = model_of(config | {"mlp_only_layers": [5]}, tmp_path)
    assert model.weight_bytes - one_dense.weight_bytes == 2 * 2048 * (128 * 3 * 768 + 128 - 3 * 6144)


def test_experts_alone_may_be_quantized(tmp_path: Path) -> None:
    """gpt-oss-20b, by its model card 20.9 billion weights, most of them in 4 bits: 12.8 GiB."""
    keys = {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24}
    experts = {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088}
    config = LLAMA_8B | keys | experts | {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    in_experts = 24 * 32 * 3 * 2880 * 2880
    others = 24 * (2880 * 64 * (64 + 8 + 8 + 64) + 32 * 2880) + 2 * 201088 * 2880
    # Scales are float32 in memory.
    assert model_of(config, tmp_path).weight_bytes == others * 2 + in_experts // 2 + in_experts // 32 * 4
    assert in_experts + others == pytest.approx(20.9e9, rel=0.005)


def test_an_opt_is_tied_where_it_does_not_say_so(tmp_path: Path) -> None:
    opt = {key: value for key, value in LLAMA_8B.items() if key not in ("intermediate_size", "tie_word_embeddings")} | {"ffn_dim": 128}
    opt |= {"model_type": "opt"}
    embedding = LLAMA_8B["vocab_size"] * LLAMA_8B["hidden_size"] * 2
    untied = model_of(opt | {"tie_word_embeddings": False}, tmp_path).weight_bytes
    assert model_of(opt, tmp_path).weight_bytes == untied - embedding


def test_kv_of_a_token_is_what_the_engine_allocates(tmp_path: Path) -> None:
    batch = pytest.importorskip("twostep.engine.batch")
    for quantization in ("none", "int8", "fp8", "int4"):
        model = model_of(LLAMA_8B, tmp_path, kv_cache_dtype="auto" if quantization == "none" else quantization)
        shape = batch.KvShape(
            num_blocks=1, block_size=16, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", quantization=quantization
        )
        assert shape.block_bytes == 16 * model.kv_token_bytes


# deepseek-ai/DeepSeek-V2-Lite's attention, with one of its layers' MLPs.
DEEPSEEK = {
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "vocab_size": 102400,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def test_a_token_of_latent_attention_is_one_vector_a_layer(tmp_path: Path) -> None:
    model = model_of(DEEPSEEK, tmp_path)
    assert model.kv_token_bytes == 27 * 576 * 2
    assert "27 · 576 · 2" in model.formula
    assert model_of(DEEPSEEK, tmp_path, kv_cache_dtype="fp8").kv_token_bytes == 27 * (576 + 2)
    attention = 2048 * (16 * 192 + 576) + 512 * 16 * 256 + 16 * 128 * 2048
    assert model.weight_bytes == 2 * (27 * (attention + 3 * 2048 * 10944) + 2 * 102400 * 2048)
    compressed = model_of(DEEPSEEK | {"q_lora_rank": 1536}, tmp_path)
    assert compressed.weight_bytes - model.weight_bytes == 2 * 27 * (1536 * (2048 + 16 * 192) - 2048 * 16 * 192)
    # Every rank holds the whole of it.
    assert worker_memory(model, 80 * GIB, tensor_parallel_size=4).kv_token_bytes == model.kv_token_bytes


# Qwen/Qwen3-Next-80B-A3B-Instruct's layers.
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "vocab_size": 151936,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}


def test_states_of_sequences_are_counted_in_blocks(tmp_path: Path) -> None:
    """Each of 36 layers has 32 matrices of 128 x 128 in float32 and three inputs of 8192 channels; a block of 16 tokens has 12 layers."""
    model = model_of(QWEN3_NEXT, tmp_path)
    assert model.kv_token_bytes == 2 * 12 * 2 * 256 * 2
    assert model.state_bytes == 4 * 32 * 128 * 128 + 2 * 3 * 8192
    assert model.num_state_blocks(16) == 36 * 6
    assert model.num_state_blocks(64) == 36 * 2
    assert model_of(QWEN3_NEXT, tmp_path, kv_cache_dtype="fp8").num_state_blocks(16) == 36 * 11
    assert model_of(LLAMA_8B, tmp_path).num_state_blocks(16) == 0
    machine = machine_of(load_preset("h200-llama-3.1-8b"), model, worker_memory(model, 141 * GIB))
    assert machine.base.decode.num_state_blocks == 216
    assert machine.base.hand_over.state_bytes == 216 * 16 * model.kv_token_bytes
    assert model.cut_beside_heads(whole_experts=True)["linear_num_key_heads"] == 16
    # Each of four has a block of one of the two KV heads, and as many of them for a state.
    quarter = worker_memory(model, 141 * GIB, tensor_parallel_size=4)
    assert quarter.kv_token_bytes == model.kv_token_bytes // 2
    assert machine_of(load_preset("h200-llama-3.1-8b"), model, quarter).base.decode.num_state_blocks == 216


def test_curves_of_another_model_are_told(tmp_path: Path) -> None:
    preset = load_preset("h200-llama-3.1-8b")

    def curves_of(config: dict[str, object], **formats: str) -> str:
        model = model_of(config, tmp_path, **formats)
        return machine_of(preset, model, worker_memory(model, 1000 * GIB)).curves_of

    assert curves_of(LLAMA_8B) == ""
    assert curves_of(LLAMA_8B | {"vocab_size": LLAMA_8B["vocab_size"] + 64}) == ""
    for other in (LLAMA_70B, QWEN3_NEXT, DEEPSEEK):
        assert curves_of(other) == "llama-3.1-8b"
    assert curves_of(LLAMA_8B, quantization="int4") == "llama-3.1-8b"
    assert machine_of_preset("h200-llama-3.1-8b").curves_of == ""


def test_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(SetupError):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(SetupError, match="num_attention_heads"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    header = json.dumps({"x.weight": {"dtype": "BF16", "shape": [500], "data_offsets": [0, 1000]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(1000))
    assert read_model(tmp_path).weight_bytes == 1000
    assert read_model(tmp_path, dtype="float32").weight_bytes == 2000


def test_memory_of_an_h200_is_what_was_measured_on_one() -> None:
    """benchmarks/RESULTS.md: 55,298 blocks of 16 tokens, 108.0 GiB."""
    preset = load_preset("h200-llama-3.1-8b")
    assert preset.model is not None
    memory = worker_memory(preset.model, preset.gpu_memory_bytes, runtime_bytes=preset.runtime_bytes)
    assert memory.num_blocks == pytest.approx(55_298, rel=0.005)
    with pytest.raises(SetupError, match=r"15\.0 GiB"):
        worker_memory(preset.model, 16 * GIB)
    halves = worker_memory(preset.model, 24 * GIB, tensor_parallel_size=2)
    assert halves.kv_token_bytes == 65536


@pytest.mark.parametrize(("text", "amount"), [("141GiB", 141 * GIB), ("80GB", 80 * 10**9), ("24e9", 24 * 10**9), ("1.5 TiB", 1536 * GIB)])
def test_sizes(text: str, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize("text", ["", "much", "-3GB", "0", "3 parsecs", "1e400"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_bytes(text)


@pytest.mark.parametrize("name", preset_names())
def test_presets_say_what_was_measured(name: str) -> None:
    base = load_preset(name).base
    assert base.prefill is not None
    measured = json.loads((PRESETS / f"{name}.json").read_text())["measured"]
    assert len(measured) >= 8
    curves = {"prefill": base.prefill.curve, "decode": base.decode.curve, "mixed": base.decode.mixed}
    for step in measured:
        curve = curves[step["role"]]
        assert curve is not None
        work = StepWorkload(**{k: step[k] for k in ("prompt_tokens", "pairs", "decodes", "context")})
        assert curve.step_s(work) * 1e3 == pytest.approx(step["ms"], rel=0.08), step
        assert step["source"]


def test_a_preset_of_curves_alone(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    other = replace(CURVE, knee=9.0)
    path.write_text(json.dumps({"prefill": asdict(CURVE), "decode": asdict(other)}))
    base = load_preset(str(path)).base
    assert base.prefill is not None
    assert (base.prefill.curve, base.decode.curve, base.decode.mixed) == (CURVE, other, None)
    sound = {"fixed_s": 1, "per_row_s": 1}
    for wrong, message in (
        ({"prefill": sound}, "decode"),
        ({"prefill": sound, "decode": {"fixed_s": -1, "per_row_s": 1}}, "fixed_s"),
        ({"prefill": sound, "decode": sound | {"hue": 2}}, "fixed_s"),
        ({"prefill": sound, "decode": {"fixed_s": 0, "per_row_s": 0}}, "fixed_s"),
        ([1], "list"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(SetupError, match=message):
            load_preset(str(path))
    path.write_text("{")
    with pytest.raises(SetupError):
        load_preset(str(path))
    with pytest.raises(SetupError, match="h200-llama"):
        load_preset("abacus")


def worker_record(role: str, **changes: object) -> WorkerRecord:
    layout = LayoutRecord(model_fingerprint="f", dtype="bfloat16", block_size=16, num_layers=32, num_kv_heads=8, head_dim=128)
    record = WorkerRecord(
        worker_id=f"{role}-1",
        role=role,
        address="127.0.0.1:1",
        epoch=1,
        model="m",
        layout=layout,
        hash_unit=64,
        secret_check="",
        num_blocks=1000,
        max_num_seqs=32,
        max_model_len=8192,
        curve=CURVE,
        step_tokens=777,
    )
    return replace(record, **changes)


def test_running_workers_are_planned_with_what_they_publish() -> None:
    preset = load_preset("h200-llama-3.1-8b")
    records = [
        worker_record("decode", curve=replace(CURVE, knee=5.0)),
        worker_record("prefill"),
        worker_record("prefill", worker_id="a", curve=None),
    ]
    base = machine_of_workers(records, preset).base
    assert base.prefill is not None
    assert (base.prefill.curve, base.decode.curve.knee, base.decode.mixed) == (CURVE, 5.0, None)
    assert (base.decode.step_tokens, base.decode.num_blocks, base.decode.max_num_seqs) == (777, 1000, 32)
    assert base.hand_over.kv_token_bytes == 131072
    assert base.hand_over.state_bytes == 0
    layout = replace(records[0].layout, num_state_blocks=9)
    stateful = machine_of_workers([replace(record, layout=layout) for record in records], preset).base
    assert stateful.decode.num_state_blocks == 9
    assert stateful.hand_over.state_bytes == 9 * 16 * 131072
    with pytest.raises(SetupError, match="decode"):
        machine_of_workers([worker_record("prefill"), worker_record("decode", ready=False)], preset)


def test_a_machine_of_a_preset() -> None:
    base = machine_of_preset("h200-llama-3.1-8b").base
    latency = simulate(base, [Request(arrival_s=0, num_prompt=2600, num_output=2)]).served[0].token_times[0]
    assert latency == pytest.approx(base.edge_s + 0.0583, abs=0.002)


def test_one_curve_gone_wrong_does_not_stand_for_its_role() -> None:
    """Three sound workers, and one whose calibration found no fixed part, before and after them in the alphabet."""
    preset = load_preset("h200-llama-3.1-8b")
    wrong = replace(CURVE, fixed_s=0.0, per_sequence_s=3e-4, per_context_s=4.5e-7)
    for name in ("decode-0", "decode-9"):
        records = [worker_record("decode", worker_id=f"decode-{i}", step_tokens=2048) for i in (1, 2, 3)]
        records.append(worker_record("decode", worker_id=name, curve=wrong, step_tokens=512))
        decode = machine_of_workers(records, preset).base.decode
        assert (decode.curve, decode.step_tokens) == (CURVE, 2048)


def test_workers_that_compute_prompts_launch_as_early_as_prefill_workers() -> None:
    early, late = EngineSpec(curve=CURVE, ahead_s=0.024), EngineSpec(curve=CURVE, ahead_s=0.003)
    deployment = SimulatedDeployment(num_prefill=3, num_decode=1, prefill=early, decode=late)
    assert deployment.spec_of("decode") == late
    assert deployment.sized(0, 4).spec_of("decode") == early
    assert deployment.sized(0, 4).sized(3, 1).spec_of("decode") == late
