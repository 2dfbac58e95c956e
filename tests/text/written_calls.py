"""Calls as models write them, in each format's own syntax."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
MARKERS = (CALLS, CALLS_END, CALL, CALL_END, SEP, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def coder(name: str, **values: str) -> str:
    arguments = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    arguments = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{arguments}</tool_call>"


def v3(*calls: tuple[str, str]) -> str:
    """Calls as name and arguments."""
    told = (f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}" for name, arguments in calls)
    return CALLS + "\n".join(told) + CALLS_END


def v31(*calls: tuple[str, str]) -> str:
    return CALLS + "".join(f"{CALL}{name}{SEP}{arguments}{CALL_END}" for name, arguments in calls) + CALLS_END


Calls = Sequence[tuple[str, Mapping[str, Any]]]


def _plain(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


def _objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}) for name, arguments in calls]


def _json(calls: Calls) -> list[tuple[str, str]]:
    return [(name, json.dumps(arguments)) for name, arguments in calls]


def _python(calls: Calls) -> str:
    told = (f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls)
    return f"[{', '.join(told)}]"


# By the names of formats. Mistral's newer models have another: "mistral[ARGS]".
WRITTEN: dict[str, Callable[[Calls], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _objects(calls)),
    "llama3_json": lambda calls: "; ".join(_objects(calls, "parameters")),
    "llama4_json": lambda calls: "; ".join(_objects(calls, "parameters")),
    "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(_objects(calls))}]",
    "mistral[ARGS]": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in _json(calls)),
    "deepseek_v3": lambda calls: v3(*_json(calls)),
    "deepseek_v31": lambda calls: v31(*_json(calls)),
    "qwen3_coder": lambda calls: "\n".join(coder(name, **_plain(arguments)) for name, arguments in calls),
    "glm45": lambda calls: "\n".join(glm(name, **_plain(arguments)) for name, arguments in calls),
    "pythonic": _python,
    "openai": lambda calls: "".join(f"<|call|>{name}<|message|>{arguments}<|end|>" for name, arguments in _json(calls)),
}
