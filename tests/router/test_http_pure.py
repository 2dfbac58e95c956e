"""The parts of the HTTP front that need no server: bodies, events, names of tokens, the API's description."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import pytest
from aiohttp import web
from http_fakes import check_shape
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from router.http import chat, completions, messages, openapi, responses, system, tokens
from router.http.batches import BatchBody
from router.http.body import parse_body
from router.http.choices import AnswerOptions, ChunkWriter, WholeChoice, stop_reason_of, total_usage, usage_of
from router.http.errors import HttpError, blaming, body_of
from router.http.generation import grammar_of, request_of, sampling_of, timeout_of
from router.http.logprobs import ChatLogprobsWriter, KeptLogprobs, TextLogprobsWriter, TokenNames
from router.http.request_bodies import ChatBody, CompletionBody
from router.http.text_places import TextPlaces
from router.request.memory_budget import Holding
from router.request.targets import Reason, Refused
from router.serving.answers import choice_seed
from twostep.errors import ContextExceeded, InvalidRequest, ResourceExhausted, Unavailable
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.text.detokenizer import Detokenizer
from twostep.text.tokenizer import TokenBytes, Tokenizer

HEAD = {"id": "i", "created": 1, "model": 'a "model"', "system_fingerprint": "fp_0"}
MESSAGES = [{"role": "user", "content": "hi"}]
BATCH = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}


def chat_body(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"messages": MESSAGES, **fields}).encode())


def data_of(event: bytes) -> Any:
    text = event.decode("ascii")
    assert text.startswith("data: ")
    assert text.endswith("\n\n")
    assert "\n" not in text[:-2]
    return json.loads(text[6:])


# ---- events ----------------------------------------------------------------------------------------------------------------


@given(st.text(), st.integers(0, 200), st.booleans())
def test_an_event_of_text_is_what_json_would_have_made(text: str, index: int, with_usage: bool) -> None:
    usage = {"usage": None} if with_usage else {}
    for wrap, kind, shape in (
        (chat.MessageTeller.wrap, "chat.completion.chunk", {"delta": {"content": text}}),
        (completions.TextTeller.wrap, "text_completion", {"text": text}),
    ):
        head = {**HEAD, "object": kind}
        chunks = ChunkWriter(head, index, wrap=wrap, with_usage=with_usage)
        fields = {**shape, "logprobs": None, "finish_reason": None}
        wanted = {**head, "choices": [{"index": index, **fields}], **usage}
        assert data_of(chunks.text(text)) == wanted
        assert data_of(chunks.choice(fields)) == wanted
        check_shape(data_of(chunks.text(text)))


async def test_whole_answers_are_counted_as_they_grow() -> None:
    counted: list[int] = []
    holding = cast(Holding, SimpleNamespace(add=counted.append))
    names = ("logprobs", "token_ids", "phases", "include_usage", "continuous_usage")
    wanted = AnswerOptions(n=1, stop_strings=(), **dict.fromkeys(names, False))
    writer = ChatLogprobsWriter(cast(TokenNames, None))
    choice = WholeChoice(chat.MessageTeller(writer, with_reasoning=True), 0, wanted, holding)
    for i in range(300):
        await choice.write(pb.GenerateResponse(piece=pb.Piece(text="a word", token_ids=[i])))
    assert sum(counted) > 1000


# ---- bodies ----------------------------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields})


@given(st.dictionaries(st.sampled_from(_FIELDS) | st.text(max_size=8), _JSON, max_size=6), st.booleans())
def test_any_json_is_a_body_or_refused_with_400(fields: dict[str, Any], complete: bool) -> None:
    refusals = []
    for kind, least in ((ChatBody, {"messages": MESSAGES}), (CompletionBody, {"prompt": "x"})):
        given_body = {**fields, **(least if complete else {})}
        try:
            body = parse_body(kind, json.dumps(given_body).encode())
            request_of(body, {}, seed=1)
            timeout_of(body, {})
            if isinstance(body, ChatBody):
                body.prompt().SerializeToString()
            else:
                assert body.prompts()
        except HttpError as error:
            refusals.append(error)
    for refusal in refusals:
        status, told, _ = body_of(refusal)
        assert status == 400
        assert set(told["error"]) == {"message", "type", "param", "code"}


MANY = 100_000


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatBody, {"messages": [1] * MANY}, "messages[0]"),
        (ChatBody, {"messages": [{"role": "user", "content": [1] * MANY}]}, "messages[0].content[0]"),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]}, "messages[0].content"),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]}, "messages[0].tool_calls[0]"),
        (ChatBody, {"messages": MESSAGES, "tools": [1] * MANY}, "tools[0]"),
        (ChatBody, {"messages": MESSAGES, "documents": [1] * MANY}, "documents[0]"),
        (ChatBody, {"messages": MESSAGES, "stop": [1] * MANY}, "stop[0]"),
        (ChatBody, {"messages": MESSAGES, "stop_token_ids": [""] * MANY}, "stop_token_ids[0]"),
        (ChatBody, {"messages": MESSAGES, "structured_outputs": {"choice": [1] * MANY}}, "structured_outputs.choice[0]"),
        (CompletionBody, {"prompt": [0.5] * MANY}, "prompt[0]"),
        (tokens.DetokenizeBody, {"tokens": [-1] * MANY}, "tokens[0]"),
        (BatchBody, {**BATCH, "metadata": {str(i): 1 for i in range(MANY)}}, "metadata"),
    ],
)
def test_of_many_mistakes_one_is_looked_at(kind: type[BaseModel], fields: dict[str, Any], param: str) -> None:
    """A message for each takes minutes and gigabytes, of the one thread that serves everybody."""
    raw = json.dumps(fields).encode()
    began = time.thread_time()
    with pytest.raises(HttpError) as refused:
        parse_body(kind, raw)
    # All messages would take 2 s and more; JSON itself takes 10 ms.
    assert time.thread_time() - began < 1.0
    assert refused.value.param == param
    assert len(refused.value.message) < 400


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_seeds_of_choices(seed: int) -> None:
    seeds = [choice_seed(seed, i) for i in range(16)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16
    assert all(0 <= each < 1 << 63 for each in seeds[1:])


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, pb.Grammar(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}}}},
            pb.Grammar(json_schema='{"type": "object"}', strict=True),
        ),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, pb.Grammar(regex="a+")),
        ({"response_format": {"type": "grammar", "grammar": "start: A"}}, pb.Grammar(lark="start: A")),
        ({"structured_outputs": {"regex": "a+"}}, pb.Grammar(regex="a+")),
        ({"structured_outputs": {"json": {"type": "object"}}}, pb.Grammar(json_schema='{"type": "object"}')),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, pb.Grammar(json_schema='{"type": "object"}')),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, pb.Grammar(regex="a")),
        ({"structured_outputs": {"json_object": True}}, pb.Grammar(json_object=True)),
        ({"structured_outputs": {"choice": ["yes", "no (really)"]}}, pb.Grammar(regex="yes|no \\(really\\)")),
        ({"structured_outputs": {"grammar": "start: A"}}, pb.Grammar(lark="start: A")),
    ],
    ids=str,
)
def test_every_way_to_say_what_an_answer_looks_like(fields: dict[str, Any], wanted: pb.Grammar | None) -> None:
    assert grammar_of(chat_body(**fields)) == wanted


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_a_choice_matches_itself_and_nothing_else(choices: list[str]) -> None:
    grammar = grammar_of(chat_body(structured_outputs={"choice": choices}))
    assert grammar is not None
    for choice in choices:
        assert re.fullmatch(grammar.regex, choice)
        assert bool(re.fullmatch(grammar.regex, choice + "x")) == (choice + "x" in choices)


@pytest.mark.parametrize(
    ("fields", "headers", "wanted"),
    [
        ({}, {}, pb.REQUEST_CLASS_UNSPECIFIED),
        ({"service_tier": "flex"}, {}, pb.REQUEST_CLASS_BATCH),
        ({"service_tier": "priority"}, {}, pb.REQUEST_CLASS_INTERACTIVE),
        ({"service_tier": "auto"}, {}, pb.REQUEST_CLASS_UNSPECIFIED),
        ({"priority": -3}, {}, pb.REQUEST_CLASS_INTERACTIVE),
        ({"priority": 3}, {}, pb.REQUEST_CLASS_BATCH),
        ({"service_tier": "flex"}, {"x-twostep-class": "interactive"}, pb.REQUEST_CLASS_INTERACTIVE),
        ({"request_class": "standard"}, {"x-twostep-class": "batch"}, pb.REQUEST_CLASS_STANDARD),
    ],
    ids=str,
)
def test_classes(fields: dict[str, Any], headers: dict[str, str], wanted: int) -> None:
    assert request_of(chat_body(**fields), headers, seed=1).request_class == wanted


def test_sampling_values_have_their_names() -> None:
    same = {
        **{"temperature": 0.5, "top_p": 0.25, "frequency_penalty": 0.5, "presence_penalty": -0.5, "min_p": 0.125},
        **{"repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True, "stop": ["a"], "stop_token_ids": [7]},
    }
    body = chat_body(**same, top_k=-1, max_tokens=3, max_completion_tokens=5, logprobs=True, top_logprobs=2, unheard_of=1)
    assert sampling_of(body, seed=9) == pb.SamplingParams(**same, top_k=0, max_tokens=5, logprobs=2, seed=9)


def test_targets_and_timeouts_come_from_body_or_headers() -> None:
    headers = {"x-twostep-ttft-ms": "250", "x-twostep-tpot-ms": "40.5", "x-twostep-gap-ms": "90", "x-twostep-timeout-ms": "1500"}
    request = request_of(chat_body(ttft_ms=100), headers, seed=1)
    assert (request.ttft_ms, request.tpot_ms, request.gap_ms) == (100, 40.5, 90)
    assert timeout_of(chat_body(), headers) == 1.5
    assert timeout_of(chat_body(timeout=3), headers) == 3
    assert timeout_of(chat_body(), {}) == float("inf")


def test_chats_keep_what_clients_wrote() -> None:
    parameters = {"type": "object", "properties": {"a": {"default": None, "enum": [None, 1]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "so"},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    prompt = chat_body(messages=messages, tools=[tool], chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low").prompt()
    assert json.loads(prompt.tools[0]) == tool
    assert json.loads(prompt.template_kwargs) == {"reasoning_effort": "low", "enable_thinking": False}
    calls = [pb.ToolCall(id="c", name="f", arguments='{"a": 1}')]
    assert prompt.messages[1] == pb.ChatMessage(role="assistant", reasoning="so", tool_calls=calls)
    assert prompt.messages[2] == pb.ChatMessage(role="tool", tool_call_id="c", content="7")


def test_messages_about_a_field_name_it() -> None:
    for message, error, wanted in (
        ("chat.messages[0].role is empty; x", InvalidRequest, "messages[0].role"),
        ("top_p is 7; x", InvalidRequest, "top_p"),
        ("stop takes up to 16", InvalidRequest, "stop"),
        ("max_tokens is 7; x", ContextExceeded, "max_tokens"),
    ):
        with pytest.raises(HttpError) as caught, blaming(ChatBody.names()):
            raise error(message)
        assert caught.value.param == wanted
        assert not caught.value.message.startswith("chat.")
    with pytest.raises(InvalidRequest, match="the prompt") as other, blaming(ChatBody.names()):
        raise InvalidRequest("the prompt has 7 tokens")
    assert not isinstance(other.value, HttpError)


def test_errors_that_may_be_repeated_say_when() -> None:
    status, body, headers = body_of(ResourceExhausted("no room", retry_after_s=2.2))
    assert (status, headers["Retry-After"], body["error"]["code"]) == (429, "3", "rate_limit_exceeded")
    assert body_of(Unavailable("away"))[0] == 503
    for retry_after_s, told in ((7.0, {"Retry-After": "7"}), (None, {"x-should-retry": "false"})):
        refused = Refused(Reason.TARGET_TPOT, "too slow", retry_after_s=retry_after_s)
        assert body_of(refused)[::2] == (429, told), "of no use, however long one waits, is said too"


# ---- ends ------------------------------------------------------------------------------------------------------------------


def test_usage_and_stop_reasons() -> None:
    one = pb.Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=4, reasoning_tokens=1)
    other = pb.Usage(prompt_tokens=7, completion_tokens=2)
    assert total_usage([[one, one], [other, other]]) == usage_of(17, 10, cached_tokens=4, reasoning_tokens=2), "a prompt counts once"
    assert stop_reason_of(pb.End(), []) is None
    assert stop_reason_of(pb.End(stop_reason="17"), []) == 17
    assert stop_reason_of(pb.End(stop_reason="17"), ["17"]) == "17"


@given(st.text(min_size=1))
def test_the_bytes_of_tokens_are_those_of_the_text(bare_tokenizer: Tokenizer, text: str) -> None:
    token_bytes = TokenBytes(bare_tokenizer)
    ids = bare_tokenizer.encode(text)
    assert b"".join(token_bytes.of(token_id) for token_id in ids) == text.encode()
    writer = TextLogprobsWriter(TokenNames(token_bytes), lambda: TextPlaces(bare_tokenizer, Detokenizer(bare_tokenizer)))
    told = writer.of(ids, [pb.TokenLogprobs(logprob=float("-inf"))] * len(ids))
    assert told["token_logprobs"] == [-9999.0] * len(ids)
    assert token_bytes.of(1 << 30) == b""


@pytest.fixture(scope="module")
def bare_tokenizer(bare_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(bare_model_dir)


# ---- the description -------------------------------------------------------------------------------------------------------


LOGPROBS = st.floats(max_value=0.0, width=32)


@given(
    st.lists(st.tuples(st.integers(0, 299), LOGPROBS, st.lists(st.tuples(st.integers(0, 299), LOGPROBS)))),
    st.booleans(),
)
def test_streamed_log_probabilities_are_those_of_whole_answers(
    bare_tokenizer: Tokenizer, given_tokens: list[tuple[int, float, list[tuple[int, float]]]], by_id: bool
) -> None:
    writer = ChatLogprobsWriter(TokenNames(TokenBytes(bare_tokenizer), by_id=by_id))
    logprobs = [
        pb.TokenLogprobs(logprob=logprob, top=[pb.TopLogprob(token_id=token_id, logprob=each) for token_id, each in top])
        for _, logprob, top in given_tokens
    ]
    token_ids = [token_id for token_id, _, _ in given_tokens]
    kept = KeptLogprobs()
    kept.add(token_ids, logprobs)
    assert json.loads(str(writer.of(token_ids, logprobs))) == json.loads(json.dumps(writer.of_all(kept, list)))


def test_the_description_has_every_route_and_schemas_that_take_real_bodies() -> None:
    app = web.Application()
    for module in (chat, completions, responses, messages, tokens, system, openapi):
        app.add_routes(module.routes)
    document = openapi.document(app.router.routes())
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]["/v1/models/{model}"]["get"]["parameters"][0]) >= {"name", "in", "required"}
    text = json.dumps(document)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in document["components"]["schemas"]
    for path, good, bad in (
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "stop": ["x"], "response_format": {"type": "regex", "pattern": "a"}},
            {"messages": []},
        ),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2}, {"prompt": 5}),
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 3}, {"input": 5}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3, "tool_choice": {"type": "any"}}, {"messages": MESSAGES}),
        ("/tokenize", {"messages": MESSAGES}, {"prompt": None}),
        ("/detokenize", {"tokens": [1]}, {"tokens": [-1]}),
    ):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = {**body, "components": document["components"]}
        jsonschema.validate(good, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
