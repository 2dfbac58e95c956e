"""Traces and conversations out of files, and what a server streams."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.content import COMMON, PromptContent, Words
from twostep.lab.bench.serve.openai_target import EventReader, StreamEvent, read_event
from twostep.lab.bench.serve.traces import RequestTrace, TraceRequest, prompt_of, read_sharegpt, read_trace, sharegpt_pairs
from twostep.lab.bench.serve.workloads import Text
from twostep.text.tokenizer import Tokenizer

ALPHABET = range(256, 4096)
CONTENT = PromptContent("a", ALPHABET)

# The first lines of each public trace, in its own spelling.
MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 1030, "output_length": 794, "hash_ids": [0, 1, 28]}

{"timestamp": 3052, "input_length": 2287, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]}
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,0,0
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_mooncake_trace_is_read(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE), "mooncake")
    assert trace.requests == (
        TraceRequest(arrival_s=0.0, input_tokens=1100, output_tokens=500, hash_ids=(0, 1, 2)),
        TraceRequest(arrival_s=3.052, input_tokens=1030, output_tokens=794, hash_ids=(0, 1, 28)),
        TraceRequest(arrival_s=3.052, input_tokens=2287, output_tokens=316, hash_ids=(0, 42, 43, 44, 45)),
    )
    assert trace.rate == pytest.approx(2 / 3.052)


def test_equal_hash_ids_are_equal_text_and_others_are_not(tmp_path: Path) -> None:
    content = PromptContent("a", ALPHABET)
    sessions = list(read_trace(written(tmp_path, MOONCAKE), "mooncake").sessions(content, random.Random(0)))
    assert [s.arrival_s for s in sessions] == [0.0, 3.052, 3.052]
    first, second, third = (list(s.turns[0].prompt) for s in sessions)  # type: ignore[arg-type]
    assert [len(p) for p in (first, second, third)] == [1100, 1030, 2287]
    assert first[:1024] == second[:1024]
    assert first[1024] != second[1024]
    assert first[:512] == third[:512]
    assert first[512:516] != third[512:516]
    assert [s.turns[0].output_tokens for s in sessions] == [500, 794, 316]


@given(st.integers(1, 3000), st.lists(st.integers(0, 9), max_size=6))
def test_a_prompt_has_its_length_however_many_ids_there_are(tokens: int, hash_ids: list[int]) -> None:
    request = TraceRequest(arrival_s=0, input_tokens=tokens, output_tokens=1, hash_ids=tuple(hash_ids))
    assert len(prompt_of(request, CONTENT)) == tokens


def test_azures_traces_are_read_in_both_years_spelling_and_as_jsonl(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AZURE_2023), "azure")
    assert [r.arrival_s for r in trace.requests] == pytest.approx([0.0, 4.314579, 60.0], abs=1e-6)
    assert [(r.input_tokens, r.output_tokens) for r in trace.requests] == [(374, 44), (396, 109), (1, 1)]
    later = read_trace(written(tmp_path, AZURE_2024), "azure")
    assert [r.arrival_s for r in later.requests] == pytest.approx([0.0, 0.007405], abs=1e-6)
    rows = [{"TIMESTAMP": 12.5, "ContextTokens": 7, "GeneratedTokens": 8}, {"TIMESTAMP": 12, "ContextTokens": 5, "GeneratedTokens": 6}]
    lines = read_trace(written(tmp_path, "\n".join(map(json.dumps, rows))), "azure")
    assert lines == RequestTrace(
        requests=(
            TraceRequest(arrival_s=0.0, input_tokens=5, output_tokens=6),
            TraceRequest(arrival_s=0.5, input_tokens=7, output_tokens=8),
        )
    )


@pytest.mark.parametrize(
    ("text", "form", "said"),
    [
        ("", "mooncake", "mooncake"),
        ('{"timestamp": 0}', "mooncake", "line 1"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{broken', "mooncake", "line 2"),
        (AZURE_2023, "mooncake", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "azure", "line 2"),
        (MOONCAKE, "azure", "TIMESTAMP, ContextTokens, GeneratedTokens"),
    ],
)
def test_what_is_no_trace_is_said_with_its_line(tmp_path: Path, text: str, form: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_trace(written(tmp_path, text), form)
    with pytest.raises(InvalidRequest):
        read_trace(tmp_path / "missing", form)


SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "How do tides work?"}, {"from": "gpt", "value": "The moon pulls the sea."}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "Go on"}, {"from": "human", "value": "with what follows"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "only a question"}]},
    {"id": "d", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello to you, whoever you are."}]},
]


async def test_sharegpts_file_gives_first_questions_and_lengths_of_first_answers(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(SHAREGPT))
    assert [q for q, _ in sharegpt_pairs(path)] == ["How do tides work?", "Hi"]

    async def words(text: str) -> array[int]:
        await asyncio.sleep(0)
        return array("I", range(len(text.split())))

    replay = await read_sharegpt(path, words, output_tokens=None, seed="0")
    # "Hi" is one word: too short.
    assert [(t.prompt, t.output_tokens) for s in replay.items for t in s.turns] == [(Text("How do tides work?", array("I", range(4))), 5)]
    told = await read_sharegpt(path, words, output_tokens=77, seed="0")
    assert told.items[0].turns[0].output_tokens == 77
    with pytest.raises(InvalidRequest, match="ShareGPT"):
        await read_sharegpt(written(tmp_path, '{"a": 1}'), words, output_tokens=None, seed="0")


def test_texts_have_as_many_tokens_as_words(smollm2_dir: Path) -> None:
    assert Words(COMMON).text(array("I", [0, 1])) == f" {COMMON[0]} {COMMON[1]}"
    assert len(set(COMMON)) == len(COMMON)
    tokenizer = Tokenizer.load(smollm2_dir)
    words = Words.of(tokenizer)
    assert len(words) > 1000
    for count in (1, 17, 2600):
        ids = array("I", random.Random(count).choices(range(len(words)), k=count))
        assert len(tokenizer.encode(words.text(ids), add_special_tokens=False)) == count
    assert len(tokenizer.encode(Words(COMMON).text(array("I", range(len(COMMON)))), add_special_tokens=False)) == len(COMMON)


STREAM = b': hello\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata: one\ndata:two\n\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    reader = EventReader()
    places = sorted([0, *cuts, len(STREAM)])
    events = [event for a, b in pairwise(places) for event in reader.feed(STREAM[a:b])]
    assert events == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


def test_a_line_without_an_end_is_no_stream() -> None:
    with pytest.raises(ValueError, match=r"10 bytes"):
        EventReader(max_bytes=10).feed(b"x" * 11)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"choices": [{"text": " a", "finish_reason": None}]}, StreamEvent(text=" a", has_token=True)),
        # Half a character, held back.
        ({"choices": [{"text": "", "finish_reason": None}]}, StreamEvent(has_token=True)),
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, StreamEvent(finish_reason="stop")),
        ({"choices": [{"text": "z", "finish_reason": "length"}]}, StreamEvent(text="z", has_token=True, finish_reason="length")),
        # A chat begins with its role alone.
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, StreamEvent()),
        ({"choices": [{"delta": {"role": "assistant", "content": "Hi"}}]}, StreamEvent(text="Hi", has_token=True)),
        ({"choices": [{"delta": {"content": "x"}}]}, StreamEvent(text="x", has_token=True)),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, StreamEvent(text="hm", has_token=True)),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, StreamEvent(finish_reason="stop")),
        (
            {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}},
            StreamEvent(prompt_tokens=9, completion_tokens=4, cached_tokens=8),
        ),
        ({"error": {"message": "too long", "code": 400}}, StreamEvent(error="too long")),
    ],
)
def test_events_of_openais_kind_are_understood(body: dict[str, Any], expected: StreamEvent) -> None:
    assert read_event(json.dumps(body).encode()) == expected


def test_an_event_that_is_none_is_said() -> None:
    assert read_event(b"[DONE]") == StreamEvent(done=True)
    for data in (b"{", b"[1]"):
        with pytest.raises(ValueError, match=r".+"):
            read_event(data)
