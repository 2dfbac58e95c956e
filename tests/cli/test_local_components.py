"""Tests of what `twostep up` starts, of what each process is told, and of what makes no system."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from local_plans import planned, told

from router.config import RouterConfig
from twostep.errors import SetupError, WrongSettings
from twostep.local.ports import free_ports
from twostep.settings.reading import read_settings
from twostep.settings.up import ALL
from twostep.worker.config import WorkerConfig


def test_workers_that_do_everything_and_no_ray(tiny_llama_dir: Path) -> None:
    started = planned(told("up", "--aggregated", "--decode", "2", "--model", str(tiny_llama_dir), "--port", "0"))
    assert set(started.components) == {"redis", "router", "decode-0", "decode-1"}
    for name in ("decode-0", "decode-1"):
        assert started.flag(name, "--kv-transfer") == "none"
        assert "--local-prefill" in started.components[name].argv
        assert started.flag(name, "--ray-address") is None


def test_with_prefill_workers(tiny_llama_dir: Path) -> None:
    started = planned(told("up", "--model", str(tiny_llama_dir), "--port", "0"))
    assert set(started.components) == {"redis", "ray", "router", "prefill-0", "decode-0"}
    assert all("--local-prefill" in started.components[name].argv for name in ("decode-0", "prefill-0")), "either may change its role"
    apart = planned(told("up", "--no-local-prefill", "--prefill", "2", "--model", str(tiny_llama_dir), "--port", "0"))
    assert "--no-local-prefill" in apart.components["decode-0"].argv
    assert "prefill-1" in apart.components


def test_port_is_http_and_grpc_stands_beside_it(tiny_llama_dir: Path) -> None:
    http, grpc = free_ports(2)
    started = planned(told("up", "--model", str(tiny_llama_dir), "--port", str(http), "--grpc-port", str(grpc)))
    assert (started.plan.http_port, started.plan.grpc_port) == (http, grpc)
    assert (started.flag("router", "--port"), started.flag("router", "--grpc-port")) == (str(http), str(grpc))
    assert (told("up", "--port", str(http)).wanted_grpc_port, told("up", "--port", "0").wanted_grpc_port) == (50051, 0)


def test_serve_is_up_with_the_model_as_vllm_takes_it(tiny_llama_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("t")
    words = ("--port", "0", "--served-model-name", "a", "b", "--chat-template", str(template))
    options = told("serve", str(tiny_llama_dir), *words)
    assert options == told("up", "--model", str(tiny_llama_dir), *words)
    router = planned(options).components["router"]
    config = read_settings(RouterConfig, router.argv[4:], prog="router", description="", environ=router.env)
    assert (config.served_model_name, config.chat_template) == (("a", "b"), template)


def test_a_demo_shows_the_hand_over_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_PORT", "1234")
    assert (told("demo").worker.local_prefill, told("demo").port) == (False, 0)
    aggregated = told("demo", "--aggregated")
    assert (aggregated.worker.local_prefill, aggregated.num_prefill, aggregated.decode) == (True, 0, 1)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--aggregated --prefill 1", "--prefill 1"),
        ("--aggregated --decode 0", "--decode"),
        ("--aggregated --no-local-prefill", "--no-local-prefill"),
        ("--aggregated --kv-transfer ray", "--kv-transfer"),
        ("--aggregated --ray-address here:1", "--ray-address"),
        ("--prefill 0", "--aggregated"),
        ("--kv-transfer none", "--aggregated"),
        ("--prefill 100 --decode 100", "128"),
        ("--reasoning-parser o1", "--reasoning-parser"),
        ("--tool-call-parser jamba", "--tool-call-parser"),
        ("--block-size 7", "--block-size"),
        ("--port 50051", "--grpc-port 50051 .its default. and --port 50051"),
        ("--object-store-bytes 1", "--ray-store-bytes"),
        ("--ray-store-bytes 1000000", "--ray-store-bytes"),
        ("--ray-address here", "--ray-address"),
        ("--prefil 2", "--prefill"),
        ("--api-keys-file /no/such/file", "twostep keys create"),
        ("--autoscale --aggregated", "--aggregated"),
        ("--autoscale --decode-min-workers 2", "--decode-min-workers 2"),
        ("--autoscale --prefill-min-workers 0", "--prefill-min-workers 0"),
        ("--autoscale --prefill 3 --prefill-max-workers 2", "--prefill-max-workers 2"),
        ("--autoscale --decode-max-workers 1000", "128"),
    ],
)
def test_what_makes_no_system_is_refused_by_name(words: str, names: str) -> None:
    with pytest.raises(SetupError, match=names):
        told("up", *words.split())


def test_all_that_is_wrong_is_said_at_once(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words alone are judged first, then this machine and model."""
    monkeypatch.setenv("TWOSTEP_MAX_WAITING", "-1")
    with pytest.raises(WrongSettings) as refused:
        told("up", "--prefil", "2", "--block-size", "7", "--gpu-memory-utilization", "3", "--max-num-seqs", "0", "--decode", "0")
    named = ("--prefil", "--block-size", "--gpu-memory-utilization", "--max-num-seqs", "TWOSTEP_MAX_WAITING", "at least one prefill")
    assert [any(name in problem for problem in refused.value.problems) for name in named] == [True] * len(named)
    monkeypatch.delenv("TWOSTEP_MAX_WAITING")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    words = f"up --model {tiny_llama_dir} --decode 59 --tensor-parallel-size 3 --max-model-len 1000000 --ray-store-bytes {1 << 49}"
    with pytest.raises(SetupError) as refusal:
        planned(told(*words.split(), "--kv-cache-memory-bytes", str(1 << 44), "--block-size", "1", "--port", "0"))
    too_much = ("--overcommit", "--ray-store-bytes", "--tensor-parallel-size 3", "--block-size")
    assert [name for name in too_much if name not in refusal.value.message] == []
    planned(told("up", "--model", str(tiny_llama_dir), "--decode", "30", "--overcommit", "--runner", "fake", "--port", "0"))


KV_ALONE = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
WEIGHTS = {"quant_method": "awq", "bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    ("config", "words", "named"),
    [
        ({"quant_method": "bitsandbytes"}, [], "quantization_config.quant_method"),
        (WEIGHTS, ["--quantization", "int8"], "--quantization int8"),
        (KV_ALONE, ["--kv-wire", "fp8"], "--kv-wire fp8"),
        (KV_ALONE, ["--block-size", "2"], "--block-size 2"),
        (KV_ALONE, ["--quantization", "int8"], ""),
        (KV_ALONE, ["--kv-wire", "fp8", "--block-size", "2", "--kv-cache-dtype", "exact"], "--block-size"),
        (KV_ALONE, ["--kv-wire", "fp8", "--kv-cache-dtype", "exact"], ""),
    ],
    ids=str,
)
def test_what_a_checkpoint_cannot_be_held_in_is_refused_before_anything_starts(
    config: dict[str, object], words: list[str], named: str, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_llama_dir, tmp_path / "m")
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with pytest.raises(SetupError, match=named) if named else nullcontext():
        planned(told("up", "--model", str(model), "--port", "0", *words))


def test_a_draft_model_is_looked_for_before_anything_starts(tiny_llama_dir: Path, tmp_path: Path) -> None:
    def drafting_with(model: Path) -> list[str]:
        config = json.dumps({"method": "draft_model", "model": str(model)})
        return ["up", "--model", str(tiny_llama_dir), "--port", "0", "--speculative-config", config]

    with pytest.raises(SetupError, match=r"--speculative-config.*missing"):
        planned(told(*drafting_with(tmp_path / "missing")))
    assert "decode-0" in planned(told(*drafting_with(tiny_llama_dir))).components


def test_a_port_that_was_given_goes_to_no_other_process(tiny_llama_dir: Path) -> None:
    (port,) = free_ports(1)
    for _ in range(3):
        started = planned(told("up", "--model", str(tiny_llama_dir), "--port", str(port + 4), "--grpc-port", str(port + 8)))
        assert not {port + 4, port + 8} & {worker.port for worker in started.plan.workers}


def test_the_cores_go_to_the_workers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for options in (told("up", "--aggregated", "--decode", "2"), told("up")):
        assert options.threads_of_each(options.num_workers) == 4
    assert told("up", "--cpu-threads", "3").threads_of_each(2) == 3


# Values that a table reads, given by a flag of `up`. Names that `up` settles itself are left out.
SAMPLES = {
    "quantization": ("int8", "quantization", "int8"),
    "kv-cache-dtype": ("int8", "kv_cache_dtype", "int8"),
    "prefix-cache-space": ("1.5", "prefix_cache_space", 1.5),
    "kv-transfer": ("ray", "kv_transfer", "ray"),
    "log-level": ("debug", "log_level", "debug"),
    "otlp-endpoint": ("http://c:4317", "otlp_endpoint", "http://c:4317"),
    "allowed-hosts": ("a.example,b.example", "allowed_hosts", ("a.example", "b.example")),
    "allowed-origins": ("https://a.example", "allowed_origins", ("https://a.example",)),
    "reasoning-parser": ("qwen3", "reasoning_parser", "qwen3"),
    "max-waiting": ("77", "max_waiting", 77),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_setting_of_a_process_reaches_it(name: str, tiny_llama_dir: Path) -> None:
    text, field, value = SAMPLES[name]
    started = planned(told("up", "--model", str(tiny_llama_dir), "--port", "0", f"--{name}", text))
    found = {}
    for component, table, defaults in (("router", RouterConfig, {}), ("decode-0", WorkerConfig, {"role": "decode"})):
        process = started.components[component]
        argv = process.argv[process.argv.index("-m") + 2 :]
        config = read_settings(table, argv, prog="p", description="", defaults=defaults, environ=process.env)
        if hasattr(config, field):
            found[component] = getattr(config, field)
    assert found
    assert set(found.values()) == {value}


def test_every_setting_is_offered_once() -> None:
    names = [each.name for each in ALL]
    assert len(names) == len(set(names))
    assert {"kv-cache-dtype", "max-inflight", "hysteresis", "prefill-max-workers"} <= set(names)
    assert not {"tls-ca", "worker-id", "secret-file"} & set(names), "wrong for every process of the system"


def test_what_is_a_client_s_is_not_for_the_processes(tiny_llama_dir: Path) -> None:
    started = planned(told("up", "--model", str(tiny_llama_dir), "--port", "0"))
    for component in started.components.values():
        assert not {"TWOSTEP_TLS_CA", "TWOSTEP_CONFIG"} & set(component.env)


def test_files_are_found_from_wherever_a_process_runs(tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("")
    words = ("--api-keys-file", "keys", "--batch-dir", "kept", "--placement-log", "log")
    router = planned(told("up", "--model", str(tiny_llama_dir), "--port", "0", *words)).components["router"]
    assert router.env["TWOSTEP_API_KEYS_FILE"] == str(tmp_path / "keys")
    assert router.env["TWOSTEP_PLACEMENT_LOG"] == str(tmp_path / "log")
    assert f"--batch-dir={tmp_path / 'kept'}" in router.argv


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_what_drafts_is_found_from_wherever_a_worker_runs(
    method: str, tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").symlink_to(tiny_llama_dir)
    config = json.dumps({"method": method, "model": "./small", "num_speculative_tokens": 3})
    worker = planned(told("up", "--model", str(tiny_llama_dir), "--port", "0", "--speculative-config", config)).components["decode-0"]
    drafts = json.loads(worker.env["TWOSTEP_SPECULATIVE_CONFIG"])
    assert drafts == {"method": method, "model": str(tmp_path / "small"), "num_speculative_tokens": 3}


def test_batches_go_with_the_system_unless_told(tiny_llama_dir: Path) -> None:
    found = Path(planned(told("up", "--model", str(tiny_llama_dir), "--port", "0")).flag("router", "--batch-dir") or "")
    assert found.name == "batches"
    assert not found.parent.exists(), "which is gone with its run directory"
