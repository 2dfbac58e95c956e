"""Chats become the prompts that transformers makes of them, and nothing that a client sends holds up a router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from chat_templates import QWEN3, TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from router.prompting.chat import check_chat, conversation_of
from twostep.errors import InvalidRequest
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.text.chat_template import ChatTemplate
from twostep.text.template_sandbox import MAX_STEPS

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

words = st.sampled_from(["", "hello", " größer 🙂\n", "<think>a</think>\n\nb", "{{ x }}", "<b>'\"&", "it is 4 "])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
)
arguments = st.dictionaries(st.sampled_from(["city", "n", "é"]), values, max_size=3)
call_ids = st.sampled_from(["abcdefghi", "123456789"])
# In the order in which OpenAI's clients send it.
calls = st.builds(
    lambda call_id, name, given: {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}},
    call_ids,
    st.sampled_from(["weather", "f_1"]),
    arguments,
)


def message(role: str, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"role": st.just(role), "content": words, **more})


turns = st.one_of(
    st.tuples(message("user"), message("assistant")),
    st.tuples(message("user"), message("assistant", reasoning_content=st.sampled_from(["I see", "x\n"]))),
    st.tuples(
        *(message("user"), message("assistant", tool_calls=st.lists(calls, min_size=1, max_size=2))),
        *(message("tool", tool_call_id=call_ids), message("assistant")),
    ),
)
conversations = st.builds(
    lambda system, middle, last: [*system, *(each for turn in middle for each in turn), *last],
    st.lists(message("system"), max_size=1),
    st.lists(turns, max_size=3),
    st.one_of(message("user").map(lambda m: [m]), st.tuples(message("user"), message("assistant")).map(list)),
)
functions = st.builds(
    lambda name, description: {"name": name, "description": description, "parameters": {"type": "object", "properties": {}}},
    st.sampled_from(["weather", "f_1"]),
    words,
)
tools = st.none() | st.lists(functions.map(lambda function: {"type": "function", "function": function}), min_size=1, max_size=2)
variables = st.fixed_dictionaries(
    {},
    optional={
        "enable_thinking": st.booleans(),
        "date_string": st.just("26 Jul 2024"),
        "tools_in_user_message": st.booleans(),
        "documents": st.just([{"title": "A", "text": "b"}]),
    },
)


def chat_of(messages: list[dict[str, Any]], **more: Any) -> pb.Chat:
    """As a client sends it."""

    def call_of(call: dict[str, Any]) -> pb.ToolCall:
        return pb.ToolCall(id=call["id"], name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"]))

    protos = [
        pb.ChatMessage(
            role=each["role"],
            content=each["content"],
            tool_calls=map(call_of, each.get("tool_calls", ())),
            tool_call_id=each.get("tool_call_id", ""),
            reasoning=each.get("reasoning_content", ""),
        )
        for each in messages
    ]
    return pb.Chat(messages=protos, **more)


def rendered(template: ChatTemplate, chat: pb.Chat, max_steps: int = MAX_STEPS) -> str:
    check_chat(chat)
    return template.render(**conversation_of(chat), max_steps=max_steps)


@pytest.fixture(scope="module")
def theirs(tiny_llama_dir: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    tokenizer.bos_token, tokenizer.eos_token = SPECIAL["bos_token"], SPECIAL["eos_token"]
    return tokenizer


@pytest.mark.system
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_is_transformers(theirs: Any, name: str) -> None:
    ours = ChatTemplate(TEMPLATES[name], SPECIAL)
    outcomes = set()

    @settings(max_examples=150, deadline=None)
    @given(conversations, tools, variables, st.booleans())
    def check(messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any], continued: bool) -> None:
        chat = chat_of(messages, tools=[json.dumps(tool) for tool in tools or ()], continue_final_message=continued)
        given_to_them = {"date_string": "26 Jul 2024"} | variables
        chat.template_kwargs = json.dumps(given_to_them)
        try:
            expected = theirs.apply_chat_template(
                messages,
                chat_template=TEMPLATES[name],
                tools=tools,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                tokenize=False,
                **given_to_them,
            )
        except (jinja2.TemplateError, ValueError) as error:
            outcomes.add(type(error))
            with pytest.raises(InvalidRequest, match="the model's chat template"):
                rendered(ours, chat)
            return
        outcomes.add(continued)
        assert rendered(ours, chat) == expected

    check()
    assert {True, False} <= outcomes, "both kinds were compared"


def test_arguments_are_objects_where_they_are_json() -> None:
    def given(arguments: str) -> Any:
        call = pb.ToolCall(id="i", name="f", arguments=arguments)
        chat = pb.Chat(messages=[pb.ChatMessage(role="assistant", tool_calls=[call])])
        return conversation_of(chat)["messages"][0]["tool_calls"][0]["function"]["arguments"]

    assert given('{"a": [1]}') == {"a": [1]}
    assert given("") == {}
    for text in ('{"a": ', "plain", "[" * 100_000):
        assert given(text) == text


def test_variables_of_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ add_generation_prompt }}", SPECIAL)
    chat = chat_of([{"role": "user", "content": ""}], template_kwargs='{"enable_thinking": false, "add_generation_prompt": false}')
    assert rendered(template, chat) == "FalseFalse"
    for name in ("messages", "tools", "bos_token", "raise_exception", "range", "namespace", "chat_template", "continue_final_message"):
        with pytest.raises(InvalidRequest, match=f"'{name}' is not the client's to set"):
            rendered(template, chat_of([{"role": "user", "content": ""}], template_kwargs=json.dumps({name: 1})))


def test_what_is_just_within_the_bounds_is_rendered() -> None:
    deep = '{"a": ' + "[" * 63 + "]" * 63 + ', "b": [[]]}'
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")] * 4096, template_kwargs=deep)
    assert rendered(ChatTemplate("{{ messages | length }}"), chat) == "4096"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template_kwargs": "[1]"}, "not a JSON object"),
        ({"template_kwargs": "{"}, "not JSON"),
        ({"template_kwargs": "[" * 100_000}, "not JSON"),
        ({"template_kwargs": '{"a": ' + "[" * 80 + "]" * 80 + "}"}, "depth beyond 64"),
        ({"template_kwargs": json.dumps({f"v{i}": 1 for i in range(300)})}, "at most 256"),
        ({"tools": ["{}"]}, r"chat.tools\[0\] is no tool"),
        ({"tools": ['{"function": {"name": 5}}']}, "is no tool"),
        ({"tools": ["{"]}, r"chat.tools\[0\] is not JSON"),
        ({"tools": ["{}"] * 2000}, "at most 1024"),
        ({"messages": [pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f")] * 2000)]}, "at most 1024"),
        ({"messages": [pb.ChatMessage(content="x")]}, "role is empty"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [pb.ChatMessage(role="user")] * 4097}, "at most 4096"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    chat = pb.Chat(**({"messages": [pb.ChatMessage(role="user", content="x")]} | fields))
    with pytest.raises(InvalidRequest, match=message):
        rendered(ChatTemplate("{{ tools }}"), chat)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}{{ c.content }}{% endfor %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(n) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set s = 'ab' * (n * 10000) %}",
        "{{ n ** (n * 1000) }}",
        "{% macro f(m) %}{% for x in m %}{% for y in m %}{{ f(m) }}{% endfor %}{% endfor %}{% endmacro %}{{ f(messages) }}",
    ],
)
def test_a_render_is_bounded(source: str) -> None:
    template = ChatTemplate(source, max_chars=1 << 20)
    chat = chat_of([{"role": "user", "content": "x" * 10}] * 200, template_kwargs='{"n": 90000}')
    with pytest.raises(InvalidRequest, match=r"send fewer or shorter|recursion"):
        rendered(template, chat, max_steps=50_000)
    # The next one begins anew.
    ok = ChatTemplate("{{ messages[0].content }}")
    for _ in range(20):
        assert rendered(ok, chat, max_steps=10) == "x" * 10


def test_long_conversations_are_well_within_the_bounds() -> None:
    turn = [{"role": "user", "content": "hello " * 20}, {"role": "assistant", "content": "hi", "reasoning_content": "hm"}]
    chat = chat_of(turn * 2048)
    text = rendered(ChatTemplate(QWEN3), chat, max_steps=200_000)
    assert text.count("<|im_start|>user") == 2048
