"""Answers of models with other tokenizers than byte-level ones: what transformers decodes of prompt and answer, wherever text is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from http_fakes import CHAT, TEXT, open_http, raw_events
from router_fakes import EOS_ID, Cluster, RedisServer, make_model_dir
from tokenizer_kinds import save_kind
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.system

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endfor %}"
KINDS = ["sentencepiece_bpe", "unigram", "wordpiece", "words", "byte_level"]


@pytest.fixture(scope="module", params=KINDS)
def kind_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = make_model_dir(tmp_path_factory.mktemp("kind") / request.param)
    save_kind(model_dir, request.param)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (model_dir / "tokenizer_config.json").write_text(json.dumps({**names, "add_bos_token": True, "chat_template": TEMPLATE}))
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"vocab_size": 1024, "eos_token_id": EOS_ID}))
    return model_dir


@pytest.fixture
async def odd_cluster(kind_dir: Path, redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    built = Cluster(kind_dir, redis_server, tmp_path)
    built.answer[:] = built.tokenizer.encode("jumps over the lazy dog, and the größte Straße. fox!", add_special_tokens=False).ids
    yield built
    await built.close()


def text_after(theirs: Any, prompt: list[int], answer: list[int]) -> str:
    before, whole = (theirs.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + answer))
    assert whole.startswith(before)
    return str(whole[len(before) :])


async def test_completions_and_chats(odd_cluster: Cluster) -> None:
    cluster = odd_cluster
    theirs = PreTrainedTokenizerFast.from_pretrained(cluster.model_dir)
    theirs.add_bos_token = True
    prefill, _ = await cluster.prefill(), await cluster.decode()
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    async with cluster.serving(), open_http(cluster) as http:

        async def ask(path: str, **body: Any) -> tuple[list[dict[str, Any]], list[int]]:
            """The choice, whole and as it adds up from a stream, and the prompt that was computed."""
            prefill.requests.clear()
            async with http.post(path, json=asked | body) as reply:
                told = await reply.json()
                assert reply.status == 200, told
                (whole,) = told["choices"]
            async with http.post(path, json=asked | body | {"stream": True}) as reply:
                *events, _done = await raw_events(reply)
            streamed: dict[str, Any] = {"text": "", "finish_reason": None, "tokens": []}
            for event in events:
                for choice in event["choices"]:
                    streamed["text"] += choice.get("text", choice.get("delta", {}).get("content")) or ""
                    streamed["finish_reason"] = choice["finish_reason"] or streamed["finish_reason"]
                    streamed["tokens"] += (choice.get("logprobs") or {}).get("tokens", [])
            whole = {
                "text": whole.get("text", whole.get("message", {}).get("content")),
                "finish_reason": whole["finish_reason"],
                "tokens": (whole.get("logprobs") or {}).get("tokens", []),
            }
            return [whole, streamed], list(prefill.requests[0].token_ids)

        prompt = "The quick brown fox"
        wanted = text_after(theirs, theirs.encode(prompt), cluster.expected(12))
        both, ids = await ask(TEXT, prompt=prompt, logprobs=2)
        assert ids == theirs.encode(prompt)
        assert [each["text"] for each in both] == [wanted] * 2
        assert ["".join(each["tokens"]) for each in both] == [wanted] * 2

        both, _ = await ask(TEXT, prompt=prompt, echo=True)
        assert [each["text"] for each in both] == [prompt + wanted] * 2

        both, _ = await ask(TEXT, prompt=theirs.encode(prompt))
        assert [each["text"] for each in both] == [wanted] * 2

        # With the space before it, a stop string is found at the answer's very first token too.
        for stop in (wanted[4:8], wanted[:3]):
            both, _ = await ask(TEXT, prompt=prompt, stop=[stop])
            assert [(each["text"], each["finish_reason"]) for each in both] == [(wanted[: wanted.index(stop)], "stop")] * 2

        both, ids = await ask(CHAT, messages=[{"role": "user", "content": "The quick"}])
        assert ids == theirs.encode("[INST] The quick [/INST]")
        assert [each["text"] for each in both] == [text_after(theirs, ids, cluster.expected(12))] * 2


async def test_a_grammar_is_right_or_refused(odd_cluster: Cluster) -> None:
    """That answers match is shown where tokens are drawn by it: tests/text/test_every_tokenizer.py."""
    await odd_cluster.prefill()
    await odd_cluster.decode()
    knows = odd_cluster.model_dir.name in ("sentencepiece_bpe", "unigram", "byte_level")
    body = {"prompt": "The", "structured_outputs": {"regex": " fox"}, "max_tokens": 4}
    async with odd_cluster.serving(), open_http(odd_cluster) as http, http.post(TEXT, json=body) as reply:
        told = await reply.json()
        assert reply.status == (200 if knows else 400), told
        assert knows or "between which its decoder" in told["error"]["message"]
