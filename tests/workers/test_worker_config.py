"""A worker's flags, secret and model, and how it refuses to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefill_worker.__main__ import main
from twostep.worker.config import parse_config
from twostep.worker.model import load_model, settle


def test_defaults_by_role() -> None:
    prefill, decode = (parse_config(role, ["--runner", "fake"]) for role in ("prefill", "decode"))
    assert (prefill.port, decode.port) == (50061, 50071)
    assert prefill.served_model_name == "fake"


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "70000"],
        ["--block-size", "0"],
        ["--lease-ttl", "0"],
        ["--drain-timeout", "nan"],
        ["--kv-transfer", "pigeon"],
        ["--kv-transfer", ""],
        ["--kv-transfer", "ray,"],
        ["--kv-transfer", "ray,ray"],
        ["--kv-transfer", "auto,ray"],
        ["--kv-transfer", "none,ray"],
        ["--kv-transfer", "none"],
        ["--kv-wire", "gzip"],
        ["--max-num-seqs", "x"],
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--runner", "fake"], "--secret-file"),
        (["--model", "/nonexistent"], "/nonexistent"),
        (["--runner", "fake", "--block-size", "24"], "hash_unit"),
        (["--runner", "fake", "--kv-transfer", "local"], "--kv-transfer"),
        (["--runner", "fake", "--block-size", "2", "--kv-wire", "int8"], "--kv-wire"),
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
    assert main([*flags, *secret, "--port", "0", "--redis-url", redis_url]) == 2
    assert message in caplog.text


@pytest.mark.parametrize(("role", "step_tokens"), [("prefill", 8192), ("decode", 2048)])
def test_how_much_a_step_takes_follows_from_the_device_unless_told(
    role: str, step_tokens: int, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model", str(tiny_llama_dir)]
    here = settle(parse_config(role, [*flags, "--device", "cpu"]))
    assert (here.max_num_batched_tokens, here.max_num_seqs) == (512, 64)
    monkeypatch.setattr("twostep.model.runner.device.choose_device", lambda name: ("cuda:3", "pretended"))
    there = settle(parse_config(role, flags))
    assert (there.device, there.max_num_batched_tokens, there.max_num_seqs) == ("cuda:3", step_tokens, 256)
    assert settle(there) == there
    told = settle(parse_config(role, [*flags, "--max-num-seqs", "7", "--max-num-batched-tokens", "100"]))
    assert (told.max_num_batched_tokens, told.max_num_seqs) == (100, 7)
    fake = settle(parse_config(role, ["--runner", "fake"]))
    assert (fake.device, fake.max_num_batched_tokens) == ("auto", 512)


@pytest.mark.parametrize(("native", "taken"), [(True, "auto"), (False, "float32")])
def test_a_cpu_without_bfloat16_takes_float32(native: bool, taken: str, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.model.runner.device.cpu_computes_bfloat16", lambda: native)
    flags = ["--model", str(tiny_llama_dir), "--device", "cpu"]
    assert settle(parse_config("decode", flags)).dtype == taken
    assert settle(parse_config("decode", [*flags, "--dtype", "bfloat16"])).dtype == "bfloat16", "as told"


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
