"""The chat template that comes with the default model: the model's own text, and tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.model.loading.store import DEFAULT_MODEL, chat_template_of
from twostep.text.chat_format import ChatFormat
from twostep.text.chat_template import ChatTemplate
from twostep.text.model_card import ModelCard

# As the model's makers wrote it.
ORIGINAL = ChatTemplate(
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")]
ROLES = st.sampled_from(["system", "user", "assistant"])
CHATS = st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=20)}), min_size=1, max_size=5)


def template_path() -> Path:
    path = chat_template_of(DEFAULT_MODEL)
    assert path is not None
    return path


def ours() -> ChatTemplate:
    return ChatTemplate(template_path().read_text())


@given(CHATS, st.booleans())
def test_without_tools_the_text_is_the_model_s_own(chat: list[dict[str, Any]], prompt: bool) -> None:
    assert ours().render(chat, prompt) == ORIGINAL.render(chat, prompt)


def test_tools_and_calls_have_a_place() -> None:
    call = {"type": "function", "id": "call_1", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    chat = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]
    text = ours().render(chat, tools=TOOLS)
    for tool in TOOLS:
        assert json.dumps(tool) in text
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{written}\n{written}<|im_end|>" in text
    assert "<tool_response>\nsun\n</tool_response>" in text


@pytest.mark.parametrize("given_by", ["model", "flag"])
def test_the_format_of_calls_is_found_in_it(given_by: str, tiny_llama_dir: Path) -> None:
    card = ModelCard.load(tiny_llama_dir)
    found = ChatFormat.of(card if given_by == "model" else card.with_chat_template(template_path()))
    assert found.shows_tools == (given_by == "flag")
    assert (found.tool_calls.name if found.tool_calls else "none") == ("hermes" if given_by == "flag" else "none")
