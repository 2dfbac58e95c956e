"""The commands as a user runs them: in processes of their own, against a scripted server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commands import run
from scripted_server import ScriptedInference, serving_in_thread
from terminal_session import Session

from twostep.cli._up import typed_command

DEADLINE_S = 240.0
COMMAND = [sys.executable, "-P", "-W", "error", "-m", "twostep.cli"]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[ScriptedInference, str]]:
    servicer = ScriptedInference()
    with serving_in_thread(servicer) as target:
        yield servicer, target


def test_generate(server: tuple[ScriptedInference, str]) -> None:
    done = run("generate", "ok", "--target", server[1], "--max-tokens", "7", "--temperature", "0", "--stop", "a", "--stop", "b")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one two three\n", "")
    sampling = server[0].requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, list(sampling.stop)) == (7, 0.0, ["a", "b"])
    assert not sampling.HasField("top_k")


def test_at_a_terminal_an_answer_cannot_command_it(server: tuple[ScriptedInference, str]) -> None:
    with Session([*COMMAND, "generate", "bare", "--target", server[1]]) as terminal:
        terminal.expect("a␛[31mb␇c")
        assert terminal.wait() == 0
        assert "\x1b[31m" not in terminal.raw
    assert "a\x1b[31mb" in run("generate", "bare", "--target", server[1]).stdout, "into a file goes what the model wrote"


def test_generate_from_standard_input_as_json(server: tuple[ScriptedInference, str]) -> None:
    done = run("generate", "--json", stdin="ok", TWOSTEP_TARGET=server[1])
    answer = json.loads(done.stdout)
    assert answer["text"] == "one two three"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 2, "reasoning_tokens": 0}
    assert answer["transfer"]["transport"] == "ray"


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (["generate", "invalid"], "", "temperature is -1; give a value from 0 to 100"),
        (["generate", "x", "--model", "other"], "", "model 'other' is not served here"),
        (["generate", "x", "--timeout", "-1"], "", "timeout"),
        (["generate", "break"], "", "broke off after 2 tokens"),
        (["generate"], "", "the prompt is empty"),
        (["generate"], b"\xff\xfe", "not UTF-8"),
        (["generate", "x", "--tls-ca", "/does/not/exist"], "", "/does/not/exist"),
        (["chat"], "invalid\n", "temperature is -1"),
    ],
)
def test_errors_are_one_line(server: tuple[ScriptedInference, str], words: list[str], stdin: str | bytes, message: str) -> None:
    done = run(*words, "--target", server[1], stdin=stdin)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_nobody_there_and_wrong_usage() -> None:
    done = run("models", "--target", "127.0.0.1:9")
    assert done.returncode == 1
    assert "no server answers at 127.0.0.1:9; start one with `twostep up`" in done.stderr
    assert run("generate", "--temperature", "hot").returncode == 2
    assert run("dance").returncode == 2
    done = run("generate", "hi", "--router", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: twostep generate")
    assert done.stderr.endswith("twostep generate: error: unrecognized arguments: --router x\n")
    assert "unrecognized arguments: a-model; did you mean --model a-model?" in run("bench", "engine", "a-model").stderr
    assert "a-model is neither a directory nor a known name" in run("serve", "a-model").stderr
    assert "did you mean --prefix-cache-space" in run("up", "--prefix-cach-space", "4").stderr
    assert "give --prefill-max-workers" in run("up", "--max-prefill", "4").stderr


def test_models(server: tuple[ScriptedInference, str]) -> None:
    done = run("models", "--target", server[1])
    assert done.stdout.splitlines()[1].split() == ["scripted", "512", "1", "2"]
    assert json.loads(run("models", "--json", "--target", server[1]).stdout)[0]["name"] == "scripted"


def test_models_of_a_directory(tmp_path: Path) -> None:
    """In the files' own words; a directory that cannot be served is refused by the key, in one line."""
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run("models", str(tmp_path))
    assert done.returncode == 1
    assert "quantization_config.activation_scheme" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    config["quantization_config"] |= {"activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [4, 6], 24),
        "model.layers.0.mlp.up_proj.weight_scale": ("F32", [], 4),
        "model.embed_tokens.weight": ("BF16", [8, 6], 96),
    }
    header, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(at))
    found = json.loads(run("models", str(tmp_path), "--json").stdout)
    assert (found["method"], found["unquantized"], found["num_bytes"]) == ("fp8", ["model.embed_tokens"], 124)
    assert [(share["num_layers"], share["num_weights"], share["num_bytes"]) for share in found["formats"]] == [(1, 24, 28)]
    # The one scale is written out for each row; a CPU has no product for it.
    assert (found["loaded_bytes"], found["cpu_bytes"]) == (24 + 4 * 4 + 2 * 48, 2 * (24 + 48))
    assert found["kv"] is None
    # What there is of it is told all the same.
    assert "hidden_size" in found["refused"]
    done = run("models", str(tmp_path))
    assert (done.returncode, "fp8" in done.stdout, "hidden_size" in done.stderr) == (1, True, True)
    assert "BloomForCausalLM" in run("models", str(tmp_path), "--architecture", "BloomForCausalLM").stderr
    assert run("models", str(tmp_path / "nowhere")).returncode == 1
    config["quantization_config"] |= {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "fp8" in json.loads(run("models", str(tmp_path), "--json").stdout)["kv"]
    assert sum("kv-cache-dtype" in line for line in run("models", str(tmp_path)).stdout.splitlines()) == 1


def test_chat_through_a_pipe_keeps_the_history(server: tuple[ScriptedInference, str]) -> None:
    done = run("chat", "--target", server[1], "--system", "be brief", stdin="first\nsecond\n/new\nthird\n")
    assert (done.returncode, done.stdout) == (0, "one two three\n" * 3)
    turns = [[(m.role, m.content) for m in request.chat.messages] for request in server[0].requests[-3:]]
    assert turns[1] == [("system", "be brief"), ("user", "first"), ("assistant", "one two three"), ("user", "second")]
    assert turns[2] == [("system", "be brief"), ("user", "third")]


def test_ctrl_c_cancels_generate(server: tuple[ScriptedInference, str]) -> None:
    before = server[0].cancelled["endless"]
    with subprocess.Popen(
        [*COMMAND, "generate", "endless", "--target", server[1]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
        assert b"Traceback" not in errors
    deadline = time.monotonic() + DEADLINE_S
    while server[0].cancelled["endless"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_reader_that_leaves_is_no_error_message(server: tuple[ScriptedInference, str]) -> None:
    with subprocess.Popen(
        [*COMMAND, "generate", "endless", "--target", server[1]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(8)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(DEADLINE_S) == 1


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Enough of a model to get past the first look."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_up_refuses_what_cannot_be(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = run("up", "--model", str(tmp_path / "empty"))
    assert done.returncode == 1
    assert "has no config.json" in done.stderr
    assert "neither a directory nor a known name" in run("up", "--model", str(tmp_path / "missing")).stderr
    assert "--prefill and --decode of 1 or more" in run("up", "--model", str(model_dir), "--decode", "0").stderr
    assert "--tensor-parallel-size" in run("up", "--model", str(model_dir), "--tensor-parallel-size", "0").stderr
    (model_dir / "config.json").write_text('{"architectures": ["BloomForCausalLM"]}')
    assert "BloomForCausalLM" in run("up", "--model", str(model_dir)).stderr
    (model_dir / "config.json").write_text("{")
    assert "config.json is not valid JSON" in run("up", "--model", str(model_dir)).stderr


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short enough for a system's sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield Path(directory)


def test_ctrl_c_while_the_command_is_still_being_imported() -> None:
    """As a user presses it in the first half second."""
    program = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "twostep.settings":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from twostep.cli import main
main(["up"])
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_printed_commands_can_be_typed_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with space").mkdir()
    program = tmp_path / "with space" / "twostep"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["with space/twostep", "up"])
    assert shlex.split(typed_command()) == [str(program)]
    monkeypatch.setenv("PATH", str(program.parent))
    assert typed_command() == "twostep"
    monkeypatch.setattr("sys.argv", ["/elsewhere/twostep/cli/__main__.py", "up"])
    assert shlex.split(typed_command()) == [sys.executable, "-P", "-m", "twostep.cli"]


def test_up_with_a_port_in_use_or_no_redis(model_dir: Path, temporary: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("up", "--model", str(model_dir), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "choose another port with --port" in done.stderr
    done = run("up", "--model", str(model_dir), "--port", "0", "--redis-url", "redis://127.0.0.1:9/0")
    assert done.returncode == 1
    assert "no Redis answers at redis://127.0.0.1:9/0" in done.stderr
    assert "--redis-url" in done.stderr
    assert not list(temporary.iterdir()), "nothing had begun that would have something to say"


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_up_with_a_model_that_is_none_shows_the_log_and_leaves_nothing(model_dir: Path, tmp_path: Path) -> None:
    """Neither files nor processes are left, Ray's among them, which run when the start fails."""
    (model_dir / "generation_config.json").write_text("{")
    # Router and workers wait for a writer of this pipe before they import anything.
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif {{'router', 'prefill_worker', 'decode_worker'}}.intersection(sys.orig_argv):\n    open({str(gate)!r}).read()\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))}
    words = ["up", "--runner", "fake", "--model", str(model_dir), "--port", "0", "--start-timeout", "200", "--drain-timeout", "1"]
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if "ray: ready" in line:
                    break
            assert "ray: ready" in said[-1], "".join(said)
            started = psutil.Process(process.pid).children(recursive=True)
            assert all(any(name in words_of(child) for child in started) for name in ("gcs_server", "raylet"))
            opened = os.open(gate, os.O_RDWR)
            # A process that comes later passes too.
            (tmp_path / "open-gate").touch()
            (tmp_path / "open-gate").replace(gate)
            os.close(opened)
            said += process.stdout
            assert process.wait(DEADLINE_S) == 1
        finally:
            process.kill()
    text = "".join(said)
    assert "at its start. The end of" in text
    assert "generation_config.json" in text
    assert "Traceback" not in text
    found = re.search(r"The end of (\S+)/logs/", text)
    assert found is not None
    run_dir = Path(found[1])
    assert [path.name for path in run_dir.iterdir()] == ["logs"]
    # Processes that the first of a container does not bury stay as zombies, which have no words.
    deadline = time.monotonic() + DEADLINE_S
    while left := [words for child in started if child.is_running() and (words := words_of(child))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    assert not [words for words in map(words_of, psutil.process_iter()) if str(run_dir) in words]
    shutil.rmtree(run_dir)


def words_of(process: psutil.Process) -> str:
    """Its command line; empty if it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
