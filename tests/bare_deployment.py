"""Base of the tests of routers and of whole systems: a model directory without a model, a Redis server, and waiting."""

from __future__ import annotations

import asyncio
import json
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from twostep.keys.secret import DeploymentSecret
from twostep.local.redis_server import server_argv, server_binary, server_url, socket_path

SECRET = DeploymentSecret(b"a secret of the tests, long enough")
EOS_ID = 2
MAX_MODEL_LEN = 2048


def make_bare_model_dir(
    path: Path, *, text: str = "rivers run to the sea, and so on to the end of the answer", chat_template: str = ""
) -> Path:
    """Everything that a router and a fake runner's worker read, with a tokenizer trained on `text`; the weights are one number."""
    path.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": EOS_ID,
    }
    (path / "config.json").write_text(json.dumps(config))
    template = {"chat_template": chat_template} if chat_template else {}
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | template))
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    return path


class RedisServer:
    """A real server on a unix socket, which tests may kill and start again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.url = server_url(directory)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        argv = server_argv(server_binary(), self._directory)
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up = time.monotonic() + 60
        client = redis.Redis.from_url(self.url)
        while True:
            try:
                client.ping()
                break
            except redis.exceptions.RedisError:
                assert time.monotonic() < give_up, "the Redis server did not start"
                time.sleep(0.01)
        client.close()

    def reset(self) -> None:
        """Makes it as new, whatever a test has done to it."""
        if self._process is None:
            self.start()
        self.thaw()
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def freeze(self) -> None:
        """It answers nothing until it thaws."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            socket_path(self._directory).unlink(missing_ok=True)


async def until(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    give_up = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < give_up, f"not within {timeout} s: {what}"
        await asyncio.sleep(0.01)
