"""Asks through LiteLLM, over all three APIs, and looks at which of its errors it makes of ours. Its Responses need the package `mcp`."""

from __future__ import annotations

import json
import os
from typing import Any

# No prices are fetched from the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from outside import check, refused, run

litellm.suppress_debug_info = True
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
LONG: list[Any] = [{"role": "user", "content": "so many words " * 20_000}]
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "description": "The weather in a city.", "parameters": CITY}}]


def routes(url: str, model: str) -> dict[str, dict[str, Any]]:
    """Returns the arguments by which the same call reaches each API."""
    common = {"api_key": "unused", "num_retries": 0, "timeout": 300}
    return {
        "chat": {"model": f"openai/{model}", "api_base": f"{url}/v1", **common},
        "responses": {"model": f"openai/responses/{model}", "api_base": f"{url}/v1", **common},
        "messages": {"model": f"anthropic/{model}", "api_base": url, **common},
    }


@check
def answers_whole_and_streamed(url: str, model: str) -> str:
    told = {}
    for name, route in routes(url, model).items():
        whole = litellm.completion(**route, messages=QUESTION, max_tokens=16, temperature=0.0).choices[0].message.content
        chunks = litellm.completion(**route, messages=QUESTION, max_tokens=16, temperature=0.0, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert whole == streamed, (name, whole, streamed)
        told[name] = whole
    assert len(set(told.values())) == 1, told
    return repr(told["chat"])


@check
def tools_are_called(url: str, model: str) -> str:
    told = {}
    for name, route in routes(url, model).items():
        answer = litellm.completion(
            **route, messages=QUESTION, max_tokens=100, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
        assert answer.finish_reason == "tool_calls", (name, answer.finish_reason)
        call = answer.message.tool_calls[0].function
        assert "city" in json.loads(call.arguments), (name, call)
        told[name] = call.name
    return str(told)


@check
def responses_api(url: str, model: str) -> str:
    route = routes(url, model)["chat"]
    answer = litellm.responses(**route, input="How is the weather?", max_output_tokens=16)
    kinds = [event.type for event in litellm.responses(**route, input="How is the weather?", max_output_tokens=16, stream=True)]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    return str(answer.status)


@check
def errors_are_known(url: str, model: str) -> str:
    for route in routes(url, model).values():
        refused(litellm.ContextWindowExceededError, lambda route=route: litellm.completion(**route, messages=LONG, max_tokens=5))
        refused(
            litellm.ContextWindowExceededError, lambda route=route: litellm.completion(**route, messages=QUESTION, max_tokens=10_000_000)
        )
        refused(litellm.BadRequestError, lambda route=route: litellm.completion(**route, messages=QUESTION, temperature=-3, max_tokens=5))
        wrong = {**route, "model": f"{route['model'].rpartition('/')[0]}/no-such-model"}
        refused(litellm.NotFoundError, lambda wrong=wrong: litellm.completion(**wrong, messages=QUESTION, max_tokens=5))
    return "as LiteLLM's"


if __name__ == "__main__":
    run()
