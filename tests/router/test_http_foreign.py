"""Fields of other servers' APIs: what would change an answer is done or refused by name, and never ignored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from router.http.body import Body, Unsupported, parse_body
from router.http.errors import HttpError
from router.http.generation import request_of
from router.http.messages_body import CountBody, MessagesBody
from router.http.request_bodies import ChatBody, CommonBody, CompletionBody, EmbeddingBody
from router.http.responses_body import ResponsesBody
from router.http.tokens import TokenizeChat

MESSAGES = [{"role": "user", "content": "hi"}]
LEAST: dict[type[Body], dict[str, Any]] = {
    ChatBody: {"messages": MESSAGES},
    CompletionBody: {"prompt": "x"},
    ResponsesBody: {"input": "x"},
    MessagesBody: {"messages": MESSAGES, "max_tokens": 4},
    CountBody: {"messages": MESSAGES},
    EmbeddingBody: {"input": "x"},
    TokenizeChat: {"messages": MESSAGES},
}
# By the server whose clients send them; values with which those servers answer otherwise than without.
CHAT: dict[str, dict[str, Any]] = {
    "vLLM": {
        **{"guided_json": {"type": "object"}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "root ::= 'a'"},
        **{"structured_outputs": {"regex": "a"}, "chat_template": "x", "documents": [{"text": "x"}], "mm_processor_kwargs": {"a": 1}},
        **{"bad_words": ["x"], "allowed_token_ids": [1], "thinking_token_budget": 9, "chat_template_kwargs": {"enable_thinking": False}},
        **{"include_reasoning": False, "reasoning_effort": "low", "length_penalty": 2, "use_beam_search": True, "min_tokens": 3},
        **{"truncate_prompt_tokens": 9, "include_stop_str_in_output": True, "stop_token_ids": [5], "logit_bias": {"5": 1}},
    },
    "SGLang": {
        **{"regex": "a+", "ebnf": "root ::= 'a'", "json_schema": '{"type": "object"}', "separate_reasoning": False, "stop_regex": "a"},
        **{"no_stop_trim": True, "custom_params": {"a": 1}, "custom_logit_processor": "x", "lora_path": "x", "input_ids": [1]},
        **{"session_params": {"id": "x"}, "return_hidden_states": True},
    },
    "OpenRouter": {
        **{"reasoning": {"effort": "high"}, "plugins": [{"id": "web"}], "top_a": 0.5, "preset": "mine"},
    },
    "TGI": {"typical_p": 0.5, "watermark": True, "do_sample": False, "max_new_tokens": 5, "truncate": 5, "adapter_id": "a"},
    "llama.cpp": {
        **{
            "grammar": "root ::= 'a'",
            "n_predict": 5,
            "repeat_penalty": 1.3,
            "mirostat": 2,
            "tfs_z": 0.5,
            "typical_p": 0.5,
            "top_n_sigma": 1,
        },
        **{"dynatemp_range": 0.5, "dry_multiplier": 0.8, "xtc_probability": 0.5, "samplers": ["top_k"], "n_probs": 3, "lora": [{"id": 0}]},
        **{"reasoning_format": "none"},
    },
    "Ollama": {
        "options": {"temperature": 0},
        "format": "json",
        "think": False,
        "raw": True,
        "template": "x",
        "system": "x",
        "images": ["x"],
    },
    "text-generation-webui": {
        **{"no_repeat_ngram_size": 3, "encoder_repetition_penalty": 1.5, "penalty_alpha": 0.5, "guidance_scale": 1.5, "min_length": 5},
        **{"negative_prompt": "x", "ban_eos_token": True, "custom_token_bans": "1,2", "smoothing_factor": 0.5, "continue_": True},
    },
    "others": {
        **{"enable_thinking": False, "thinking": {"type": "disabled"}, "thinking_budget": 9, "safe_prompt": True, "random_seed": 1},
        **{"search_parameters": {"mode": "on"}, "enable_search": True, "nvext": {"top_k": 1}, "stop_sequences": ["x"], "deferred": True},
        **{"response_mime_type": "application/json", "modalities": ["audio"], "web_search_options": {"a": 1}},
    },
}
EMBEDDINGS = {
    **{"input_type": "query", "task": "retrieval.query", "prompt_name": "query", "instruction": "x", "truncate": True, "dimensions": 3},
    **{"embedding_types": ["int8"], "output_dtype": "binary", "output_dimension": 3, "late_chunking": True, "messages": MESSAGES},
}


def parse(kind: type[Body], **fields: Any) -> Any:
    return parse_body(kind, json.dumps(LEAST[kind] | fields).encode())


def asked(body: Any) -> tuple[Any, ...]:
    """Returns all that a body asks for."""
    if isinstance(body, EmbeddingBody):
        return (body.input, body.dimensions)
    told = request_of(body, {}, seed=1).SerializeToString(deterministic=True)
    return (told, body.prompt().SerializeToString(deterministic=True), body.tells_reasoning)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(ChatBody, name, value) for fields in CHAT.values() for name, value in fields.items()]
    + [(EmbeddingBody, name, value) for name, value in EMBEDDINGS.items()],
)
def test_known_fields_are_done_or_refused(kind: type[Body], name: str, value: Any) -> None:
    try:
        body = parse(kind, **{name: value})
    except HttpError as error:
        refusal = error
    else:
        assert asked(body) != asked(parse(kind)), "it is ignored"
        return
    assert (refusal.status, refusal.param, refusal.code) == (400, name, "unsupported_parameter")
    assert ";" in refusal.message, "it says what to do instead"


def test_reasoning_is_switched_by_the_names_that_clients_have() -> None:
    def switched(**fields: Any) -> bool | None:
        variables = json.loads(parse(ChatBody, **fields).prompt().template_kwargs or "{}")
        assert variables.get("thinking") == variables.get("enable_thinking")
        return variables.get("enable_thinking")

    assert switched() is None
    for off in (
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none"},
    ):
        assert switched(**off) is False
    for on in ({"enable_thinking": True}, {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"reasoning": {"enabled": True}}):
        assert switched(**on) is True
    for kind in (ChatBody, ResponsesBody):
        assert not parse(kind, reasoning={"exclude": True}).tells_reasoning
        assert parse(kind, reasoning={"exclude": False, "effort": "high"}).tells_reasoning


def unsupported(kind: type[BaseModel]) -> list[tuple[str, str, Sequence[Any]]]:
    """Returns each field that is not supported: its name here and to clients, and the values that are harmless."""
    return [
        (name, field.alias or name, each.harmless)
        for name, field in kind.model_fields.items()
        for each in field.metadata
        if isinstance(each, Unsupported)
    ]


@pytest.mark.parametrize("kind", LEAST)
def test_values_that_switch_a_feature_off_are_accepted(kind: type[Body]) -> None:
    for field, name, harmless in unsupported(kind):
        for value in harmless:
            kept = getattr(parse(kind, **{name: float(value) if type(value) is int else value}), field)
            assert (kept, type(kept)) == (value, type(value))
        for value in ("something", True, 7.5, ["x"], {"x": 1}):
            if value not in harmless:
                with pytest.raises(HttpError) as refused:
                    parse(kind, **{name: value})
                assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("kind", [ResponsesBody, MessagesBody])
def test_a_chat_s_field_is_never_ignored_by_another_dialect(kind: type[CommonBody]) -> None:
    def keys(kind: type[BaseModel]) -> set[str]:
        return {field.alias or name for name, field in kind.model_fields.items()}

    assert keys(ChatBody) - keys(kind) <= {"messages"}, "without its own items a body is refused"
