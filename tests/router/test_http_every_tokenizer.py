"""Answers of models with other tokenizers than byte-level ones: what transformers decodes of prompt and answer, wherever text is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from http_fakes import CHAT, TEXT, served, streamed, text_in, told
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
    async with served(cluster) as http:

        async def ask(path: str, **body: Any) -> tuple[str, list[int]]:
            """The answer's text, the same whole and streamed, and the prompt that was computed."""
            cluster.prefills[0].requests.clear()
            asked = {"max_tokens": 12, "temperature": 0, **body}
            (whole,) = (await told(http, path, asked))["choices"]
            events = await streamed(http, path, asked)
            text: str = whole.get("text") or whole["message"]["content"]
            assert text == text_in(events)
            if "logprobs" in body:
                parts = [event["choices"][0]["logprobs"] or {"tokens": []} for event in events]
                assert text == "".join(whole["logprobs"]["tokens"]) == "".join(name for part in parts for name in part["tokens"])
                for name, place in zip(whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"], strict=True):
                    assert text.startswith(name, place)
            return text, list(cluster.prefills[0].requests[0].token_ids)

        prompt = "The quick brown fox"
        ids = theirs.encode(prompt)
        wanted = text_after(theirs, ids, cluster.expected(12))
        assert await ask(TEXT, prompt=prompt, logprobs=2) == (wanted, ids)
        assert await ask(TEXT, prompt=prompt, echo=True) == (prompt + wanted, ids)
        assert await ask(TEXT, prompt=ids) == (wanted, ids)
        # With the space before it, a stop string is found at the answer's very first token too.
        assert await ask(TEXT, prompt=prompt, stop=[wanted[4:8]]) == (wanted[:4], ids)
        assert (await told(http, TEXT, {"prompt": prompt, "stop": [wanted[:3]]}))["choices"][0]["text"] == ""
        ids = theirs.encode("[INST] The quick [/INST]")
        chat = await ask(CHAT, messages=[{"role": "user", "content": "The quick"}])
        assert chat == (text_after(theirs, ids, cluster.expected(12)), ids)


async def test_a_grammar_is_right_or_refused(odd_cluster: Cluster) -> None:
    """That answers match is shown where tokens are drawn by it: tests/text/test_every_tokenizer.py."""
    knows = odd_cluster.model_dir.name in ("sentencepiece_bpe", "unigram", "byte_level")
    body = {"prompt": "The", "structured_outputs": {"regex": " fox"}, "max_tokens": 4}
    async with served(odd_cluster) as http:
        found = await told(http, TEXT, body, 200 if knows else 400)
        assert knows or "between which its decoder" in found["error"]["message"]
