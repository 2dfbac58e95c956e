"""Files of a benchmark of the router, and what its processes must agree on: the model, the answer that every request gets, the request."""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from twostep.keys.secret import DeploymentSecret
from twostep.local.redis_server import server_url
from twostep.rpc.v1 import inference_pb2

_ROOT = Path(__file__).resolve().parent.parent
HASH_UNIT = 64
SECRET = DeploymentSecret(b"a secret of this benchmark, long enough")
_VOCAB = 4096


@dataclass(frozen=True)
class RigFiles:
    """Paths of the rig's files."""

    directory: Path

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def secret(self) -> Path:
        return self.directory / "secret"

    @property
    def redis_url(self) -> str:
        return server_url(self.directory)

    def fill(self, tokenizer: Path | None) -> None:
        """Writes what a router reads. Without `tokenizer`: one of 4,096 tokens, trained on this project's documentation."""
        self.secret.write_bytes(SECRET.own)
        self.model.mkdir()
        if tokenizer is None:
            inner = Tokenizer(models.BPE())
            inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            inner.decoder = decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            trainer = trainers.BpeTrainer(vocab_size=_VOCAB, initial_alphabet=alphabet, show_progress=False)
            inner.train([str(page) for page in sorted((_ROOT / "docs").glob("*.md"))], trainer)
        else:
            inner = Tokenizer.from_file(str(tokenizer))
        inner.save(str(self.model / "tokenizer.json"))
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": inner.get_vocab_size(),
            "max_position_embeddings": 32768,
        }
        (self.model / "config.json").write_text(json.dumps(config))
        header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (self.model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.model / "tokenizer.json"))

    def answer(self) -> list[int]:
        """Token ids of a text, which every answer repeats."""
        text = (_ROOT / "docs" / "architecture.md").read_text()
        ids: list[int] = self.tokenizer().encode(text).ids
        return ids


def encode_request(token_ids: Sequence[int], *, num_tokens: int) -> bytes:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=token_ids), sampling=inference_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0)
    ).SerializeToString()


def fresh_prompt(vocab_size: int, length: int) -> list[int]:
    return [secrets.randbelow(vocab_size) for _ in range(length)]


@dataclass(eq=False)
class AnswerStream:
    """One answer as it came: messages undecoded. Instants in time.monotonic() seconds."""

    sent_at: float = 0.0
    first_at: float = 0.0
    messages: list[bytes] = field(default_factory=list)

    def responses(self) -> list[inference_pb2.GenerateResponse]:
        return [inference_pb2.GenerateResponse.FromString(data) for data in self.messages]

    def check(self, answer: Sequence[int], num_tokens: int, tokenizer: Tokenizer) -> inference_pb2.End:
        """The whole of it, each token once and in order."""
        *pieces, last = self.responses()
        assert last.HasField("end"), "an answer ends with its End"
        ids: list[int] = []
        for response in pieces:
            assert response.piece.position == len(ids), "each position once, in order"
            ids += response.piece.token_ids
        assert ids == [answer[i % len(answer)] for i in range(num_tokens)], "the right tokens"
        assert "".join(r.piece.text for r in pieces) == tokenizer.decode(ids), "the text of all of them"
        return last.end


def tokens_in(messages: Sequence[bytes]) -> int:
    return sum(len(inference_pb2.GenerateResponse.FromString(data).piece.token_ids) for data in messages)
