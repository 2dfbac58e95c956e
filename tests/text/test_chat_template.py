"""Chat templates render what transformers renders, and refuse with a reason."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from twostep.errors import InvalidRequest, SetupError
from twostep.text.chat_template import ChatTemplate, unknown_control_tokens
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import Tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer <b>shortly</b>."}, {"role": "user", "content": "  größer?\n"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3 & 4"}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("model", ["tiny_llama_dir", "smollm2_dir"])
def test_same_as_transformers(
    request: pytest.FixtureRequest, model: str, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    model_dir: Path = request.getfixturevalue(model)
    theirs = AutoTokenizer.from_pretrained(model_dir)
    text = ChatTemplate.of(ModelCard.load(model_dir)).render(messages, add_generation_prompt)
    assert text == theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)["input_ids"]
    assert Tokenizer.load(model_dir).encode(text, add_special_tokens=False) == ids


FEATURES = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}{{ message | tojson }}{% endif %}
{%- endfor %}{{ {'b': ['<é>'], 'a': 1} | tojson(indent=1) }}{{ nothing is defined }}{{ nothing }}"""


def test_features_of_transformers(tiny_llama_dir: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(tiny_llama_dir)
    theirs.bos_token = "<|im_start|>"
    messages = [{"role": "user", "content": "'<a>' & \"é\""}, {"role": "tool", "content": "x"}, {"role": "assistant", "content": " yes "}]
    expected = theirs.apply_chat_template(messages, chat_template=FEATURES, tokenize=False)
    assert ChatTemplate(FEATURES, {"bos_token": "<|im_start|>"}).render(messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "undefined|no element"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append('x') }}", "unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big|range"),
    ],
)
def test_refusals_are_bad_requests(source: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


def test_arguments_that_a_template_joins_to_a_text_are_json() -> None:
    template = ChatTemplate("{{ '>' + messages[0].tool_calls[0].function.arguments + '<' }}", {})
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": ["é"]}}}
    assert template.render([{"role": "assistant", "content": "", "tool_calls": [call]}]) == '>{"a": ["é"]}<'


def test_what_cannot_be_rendered() -> None:
    template, messages = ChatTemplate(None), [{"role": "user", "content": "hi"}]
    assert not template.available
    with pytest.raises(InvalidRequest):
        template.render(messages)
    with pytest.raises(InvalidRequest, match="messages"):
        ChatTemplate("x").render([])
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages[0].update({'role': 'x'}) }}").render(messages)
    assert messages == [{"role": "user", "content": "hi"}]
    with pytest.raises(SetupError):
        ChatTemplate("{% for %}")
    begun = [{"role": "assistant", "content": "It is "}]
    for source, text in (("{{ messages[0].content }}!", "It is "), ("{{ messages[0].content | trim }}!", "It is")):
        assert ChatTemplate(source).render(begun, continue_final_message=True) == text
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(messages) == str(datetime.now().year)


@pytest.mark.parametrize(
    ("template", "unknown"),
    [
        ("{{ '<|im_start|>' + messages[0].role }}a<|im_end|>", []),
        ("<|start|>{{ '<|channel|>' }}{# <|comment|> #}<|im_end|><|start|>", ["<|start|>", "<|channel|>"]),
        ("<｜User｜>{{ messages[0].content }}<end_of_turn>", ["<｜User｜>", "<end_of_turn>"]),
        ("[INST] {{ messages[0].content }} <b> a <| b |> [/INST]", []),
        ("{{ '<|' + messages[0].role + '|>' }}", []),
    ],
)
def test_control_tokens_that_the_tokenizer_does_not_have(template: str, unknown: list[str], tiny_llama_dir: Path) -> None:
    tokenizer, card = Tokenizer.load(tiny_llama_dir), ModelCard.load(tiny_llama_dir)
    assert unknown_control_tokens(card, tokenizer) == []
    assert set(unknown_control_tokens(replace(card, chat_template=template), tokenizer)) == set(unknown)
    assert set(unknown_control_tokens(replace(card, tool_use_template=template), tokenizer)) == set(unknown)
    assert unknown_control_tokens(replace(card, chat_template=None), tokenizer) == []
