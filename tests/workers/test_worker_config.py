"""A worker's flags, secret and model; how it starts, and how it refuses to."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import save_tiny_model

from prefill_worker.__main__ import main
from twostep.checkpoint.fingerprint import dummy_fingerprint, is_same_model, model_fingerprint
from twostep.cluster.convertible import reasons_against
from twostep.errors import SetupError
from twostep.keys.secret import load_secret
from twostep.lab.bench.shapes import LLAMA_8B
from twostep.lab.plan.model import dtype_on_cpu
from twostep.model.runner.device import choose_device
from twostep.process.startup import StartUp
from twostep.worker.config import parse_config
from twostep.worker.model import load_model, resolve_config


def test_defaults_by_role() -> None:
    prefill, decode = (parse_config(role, ["--runner", "fake"]) for role in ("prefill", "decode"))
    assert (prefill.grpc_port, decode.grpc_port) == (50061, 50071)
    assert prefill.model_name == "fake"


@pytest.mark.parametrize(
    "flags",
    [
        ["--grpc-port", "70000"],
        ["--drain-timeout", "nan"],
        ["--kv-transfer", "pigeon"],
        ["--kv-transfer", "ray,ray"],
        ["--kv-transfer", "auto,ray"],
        ["--kv-transfer", "none"],
        ["--gpu-memory-utilization", "1.1"],
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config("prefill", ["--runner", "fake", *flags])
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_a_model_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config("prefill", [])
    assert "--model" in capsys.readouterr().err


def test_secrets_that_are_none_are_refused_and_white_space_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    for given_path in (None, path):
        with pytest.raises(SetupError, match="--secret-file"):
            load_secret(given_path)
    path.write_bytes(b"  short  \n")
    with pytest.raises(SetupError, match="--secret-file"):
        load_secret(path)
    path.write_bytes(b" 0123456789abcdef\n")
    assert load_secret(path).own == b"0123456789abcdef"


def test_a_real_model_and_a_fake_one_with_its_name(tiny_llama_dir: Path) -> None:
    flags = ["--model", str(tiny_llama_dir), "--kv-cache-memory-bytes", str(1 << 20), "--max-model-len", "128"]
    real, fake = (load_model(parse_config("decode", [*flags, "--runner", runner])) for runner in ("model", "fake"))
    shape = real.runner.kv_shape
    assert (1 << 20) - shape.block_bytes < shape.num_blocks * shape.block_bytes <= 1 << 20
    assert real.layout.model_fingerprint == fake.layout.model_fingerprint
    assert real.eos_token_ids == fake.eos_token_ids == frozenset({0, 2})
    assert real.runner.max_model_len == fake.runner.max_model_len == 128
    assert real.runner.vocab_size == fake.runner.vocab_size


def test_a_quantized_pool_is_in_the_layout_and_holds_more(tiny_llama_dir: Path) -> None:
    flags = ["--model", str(tiny_llama_dir), "--kv-cache-memory-bytes", str(1 << 20), "--max-model-len", "128"]
    exact, lossy = (load_model(parse_config("prefill", [*flags, "--kv-cache-dtype", kv])) for kv in ("auto", "int8"))
    assert (exact.layout.quantization, lossy.layout.quantization) == ("none", "int8")
    assert lossy.layout.dtype == exact.layout.dtype
    assert lossy.runner.kv_shape.num_blocks > 1.4 * exact.runner.kv_shape.num_blocks


def test_weights_quantized_at_the_load_are_of_the_model_but_no_peers_of_others(tiny_llama_dir: Path) -> None:
    flags = ["--model", str(tiny_llama_dir), "--kv-cache-memory-bytes", str(1 << 20), "--max-model-len", "128"]
    kinds = [load_model(parse_config("prefill", [*flags, "--quantization", kind])).layout for kind in ("none", "int8", "int4")]
    assert all(is_same_model(model_fingerprint(tiny_llama_dir), kind.model_fingerprint) for kind in kinds)
    for one, other in combinations(kinds, 2):
        assert reasons_against(one, other)


def test_a_known_architecture_by_another_name(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """The router has to be told, too."""
    directory = shutil.copytree(tiny_llama_dir, tmp_path / "another")
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"architectures": ["OursForCausalLM"], "model_type": "ours"}))
    flags = ["--model", str(directory), "--kv-cache-memory-bytes", str(1 << 20), "--max-model-len", "128"]
    with pytest.raises(SetupError, match="--architecture"):
        load_model(parse_config("decode", flags))
    with pytest.raises(SetupError, match="LlamaForCausalML"):
        load_model(parse_config("decode", [*flags, "--architecture", "LlamaForCausalML"]))
    found = load_model(parse_config("decode", [*flags, "--architecture", "LlamaForCausalLM"])).layout.model_fingerprint
    assert is_same_model(model_fingerprint(directory, "LlamaForCausalLM"), found)
    assert not is_same_model(model_fingerprint(directory), found)
    for dummy in (dummy_fingerprint(directory), dummy_fingerprint(directory, architecture="MistralForCausalLM")):
        assert not is_same_model(dummy, dummy_fingerprint(directory, "cpu-1", "LlamaForCausalLM"))


def test_workers_that_turn_keys_by_other_factors_are_no_peers(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 512}
    save_tiny_model(tmp_path, rope_parameters=rope)
    flags = ["--model", str(tmp_path), "--kv-cache-memory-bytes", str(1 << 21), "--max-model-len"]
    kinds = [load_model(parse_config("prefill", [*flags, length])).layout for length in ("512", "513", "2048")]
    assert all(is_same_model(model_fingerprint(tmp_path), kind.model_fingerprint) for kind in kinds)
    assert reasons_against(kinds[0], kinds[1])
    assert not reasons_against(kinds[1], kinds[2])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--runner", "fake"], "--secret-file"),
        (["--model", "/nonexistent"], "/nonexistent"),
        (["--runner", "fake", "--kv-transfer", "local"], "--kv-transfer"),
        (["--runner", "fake", "--tls-cert", "/no/cert.pem", "--tls-key", "/no/key.pem"], "--tls-cert"),
    ],
)
def test_a_process_that_cannot_start_says_what_to_change(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    redis_url: str,
    flags: list[str],
    message: str,
) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    secret = [] if message == "--secret-file" else ["--secret-file", str(tmp_path / "secret")]
    monkeypatch.setattr("twostep.worker.process.setup_logging", lambda **_: None)
    assert main([*flags, *secret, "--grpc-port", "0", "--redis-url", redis_url]) == 2
    assert message in caplog.text


def test_ports_of_others_are_refused_before_a_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    monkeypatch.setattr("twostep.worker.process.setup_logging", lambda **_: None)
    flags = ["--model", "/nonexistent", "--secret-file", str(tmp_path / "secret"), "--grpc-port", "0"]
    with socket.socket() as taken, socket.create_server(("127.0.0.1", 0)) as server:
        taken.bind(("127.0.0.1", 0))
        taken.connect(server.getsockname())
        health, metrics = (str(each.getsockname()[1]) for each in (server, taken))
        assert main([*flags, "--health-port", health, "--metrics-port", metrics]) == 2
    assert f"127.0.0.1:{health}" in caplog.text
    assert "--metrics-port" in caplog.text
    assert "ip_local_port_range" in caplog.text
    assert "/nonexistent" not in caplog.text


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--block-size 7", "--block-size"),
        ("--max-num-seqs 0", "--max-num-seqs"),
        ("--num-blocks 1000000000", "--num-blocks"),
        ("--gpu-memory-utilization 3", "--gpu-memory-utilization"),
        ("--lease-ttl 0.1", "--lease-ttl"),
        ("--num-blocks 8 --max-model-len 200", "--max-model-len 200 is more than the KV cache holds, --num-blocks 8 of --block-size 16"),
        ("--block-size 2 --kv-wire int8", "--kv-wire int8"),
        ("--block-size 2 --kv-cache-dtype fp8", "--kv-cache-dtype fp8"),
        ("--kv-cache-dtype fp8 --kv-wire int8", "--kv-wire raw"),
        ("--kv-wire zstd --kv-transfer nixl", "--kv-wire zstd"),
        ("--tensor-parallel-size 2", "--runner fake"),
        ("--grpc-port 6000 --metrics-port 6001", "--health-port (not given) and --metrics-port 6001 are both 6001"),
        ("--grpc-port 65534", "--metrics-port"),
        ("--tls-cert a.pem", "--tls-key (not given)"),
        ("--kv-transfer none", "--kv-transfer none"),
    ],
)
def test_flags_that_make_no_sense_are_refused_by_name(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config("prefill", ["--runner", "fake", *flags.split()])
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(("role", "step_tokens"), [("prefill", 4096), ("decode", 2048)])
def test_how_much_a_step_takes_follows_from_the_device_unless_told(
    role: str, step_tokens: int, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model", str(tiny_llama_dir)]
    here = resolve_config(parse_config(role, [*flags, "--device", "cpu"]))
    assert (here.max_num_batched_tokens, here.max_num_seqs) == (512, 64)
    monkeypatch.setattr("twostep.model.runner.device.choose_device", lambda name: ("cuda:3", "pretended"))
    there = resolve_config(parse_config(role, flags))
    assert (there.device, there.max_num_batched_tokens, there.max_num_seqs) == ("cuda:3", step_tokens, 256)
    assert resolve_config(there) == there
    told = resolve_config(parse_config(role, [*flags, "--max-num-seqs", "7", "--max-num-batched-tokens", "100"]))
    assert (told.max_num_batched_tokens, told.max_num_seqs) == (100, 7)
    fake = resolve_config(parse_config(role, ["--runner", "fake"]))
    assert (fake.device, fake.max_num_batched_tokens) == ("auto", 512)


@pytest.mark.parametrize(("native", "taken"), [(True, "auto"), (False, "float32")])
def test_a_cpu_without_bfloat16_takes_float32(native: bool, taken: str, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.model.runner.device.cpu_computes_bfloat16", lambda: native)
    flags = ["--model", str(tiny_llama_dir), "--device", "cpu"]
    assert resolve_config(parse_config("decode", flags)).dtype == taken
    assert resolve_config(parse_config("decode", [*flags, "--dtype", "bfloat16"])).dtype == "bfloat16", "as told"


def test_a_cpu_holds_small_models_in_float32(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Their best tokens lie closer together than 16 bits can tell. Larger and quantized ones stay as they are, and what was asked for."""
    model_dir = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    flags = ["--model", str(model_dir), "--device", "cpu", "--no-calibrate", "--kv-cache-memory-bytes", str(1 << 20)]
    found = {words: load_model(parse_config("decode", [*flags, *words])).layout.dtype for words in ((), ("--dtype", "bfloat16"))}
    assert found == {(): "float32", ("--dtype", "bfloat16"): "bfloat16"}
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(LLAMA_8B))
    assert [dtype_on_cpu(model_dir, "auto", kind) for kind in ("none", "int8")] == ["float32", "auto"]
    assert dtype_on_cpu(tmp_path / "large", "auto") == "auto"


def test_prompts_are_computed_on_decode_workers_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_config("decode", ["--runner", "fake"]).local_prefill
    assert not parse_config("decode", ["--runner", "fake", "--no-local-prefill"]).local_prefill
    monkeypatch.setenv("TWOSTEP_LOCAL_PREFILL", "0")
    assert not parse_config("decode", ["--runner", "fake"]).local_prefill
    assert parse_config("decode", ["--runner", "fake", "--local-prefill"]).local_prefill


def test_a_decode_worker_may_hand_nothing_over_if_it_computes_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_config("decode", ["--runner", "fake", "--kv-transfer", "none"]).kv_transfer == "none"
    with pytest.raises(SystemExit):
        parse_config("decode", ["--runner", "fake", "--kv-transfer", "none", "--no-local-prefill"])
    assert "--local-prefill" in capsys.readouterr().err


# ---- progress ---------------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


NAMES = st.sampled_from(["weights", "kernels", "graphs"])


@given(st.lists(st.tuples(NAMES, st.integers(0, 40))), st.integers(0, 40), st.booleans())
def test_every_second_is_in_exactly_one_phase(events: list[tuple[str, int]], before: int, on_terminal: bool) -> None:
    clock = Clock()
    terminal = io.StringIO() if on_terminal else None
    start = StartUp(since=clock.now, clock=clock, line=lambda text: None, terminal=terminal)
    clock.now += before
    spent = {"import": before}
    for name, seconds in events:
        start.phase(name)
        start.advance(1, 2)
        clock.now += seconds
        spent[name] = spent.get(name, 0) + seconds
    said = start.finish()
    assert said.startswith(f"ready in {before + sum(s for _, s in events)}.0 s")
    assert {name: float(s) for name, s in re.findall(r"(\w+) ([\d.]+)(?:,|$)", said.partition(":")[2])} == {
        name: float(s) for name, s in spent.items() if s
    }
    if terminal is not None and events:
        assert terminal.getvalue().endswith("\r\x1b[K"), "the bar is gone at the end"


def test_a_log_gets_a_line_now_and_then_and_a_terminal_a_bar() -> None:
    lines: list[str] = []
    clock, terminal = Clock(), io.StringIO()
    for target in (None, terminal):
        start = StartUp(since=clock.now, clock=clock, line=lines.append, terminal=target)
        start.phase("weights")
        for done in range(0, 100):
            clock.now += 0.2
            start.advance(done * 10**8, 10**10, "B")
        assert start.finish() == "ready in 20.0 s: weights 20.0 (9.9 GB, 0.5 GB/s)"
    assert lines == [f"weights: {gb} of 10.0 GB, 500.0 MB/s, {s} s left" for gb, s in (("2.4", 15), ("4.9", 10), ("7.4", 5), ("9.9", 0))]
    assert "[############............] 5.0 of 10.0 GB, 500.0 MB/s, 10 s left" in terminal.getvalue()


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device("auto")[0] == choose_device("auto:3")[0] == "cpu"
    assert choose_device("cuda:1") == ("cuda:1", "as asked for")
    with pytest.raises(SetupError, match="auto:N"):
        choose_device("auto-1")


def test_auto_is_a_gpu_where_its_kernels_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a card")
    assert [choose_device(name)[0] for name in ("auto", "auto:1", "auto:2")] == ["cuda:0", "cuda:1", "cuda:0"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    device, why = choose_device("auto")
    assert device == "cpu"
    assert "triton" in why


def test_a_model_on_a_cpu_reports_its_phases(tiny_llama_dir: Path) -> None:
    phases: list[str] = []
    amounts: list[tuple[int, int]] = []

    class Journal:
        def phase(self, name: str) -> None:
            phases.append(name)

        def advance(self, done: int, total: int, unit: str = "") -> None:
            amounts.append((done, total))

    model = load_model(parse_config("decode", ["--model", str(tiny_llama_dir), "--kv-cache-memory-bytes", str(1 << 20)]), Journal())
    assert phases == ["device", "weights", "pool", "curve"]
    assert model.runner.kv_shape.num_blocks * model.runner.kv_shape.block_bytes <= 1 << 20
