"""Runs Claude Code once: its own prompt and tools, a call of one, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from agents import run_agent
from outside import check, run


@check
def a_task_with_a_call(url: str, model: str) -> str:
    def configure(home: Path, proxied: str) -> Mapping[str, str]:
        quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER")
        models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
        return {"ANTHROPIC_BASE_URL": proxied, "ANTHROPIC_API_KEY": "unused", **dict.fromkeys(models, model), **dict.fromkeys(quiet, "1")}

    words = ["claude", "-p", "Say hello", "--model", model, "--output-format", "json"]
    told, seen = run_agent(url, "Read", words, configure, api="/v1/messages")
    result = json.loads(told)
    assert (result["is_error"], result["num_turns"]) == (False, 2), result
    return f"{result['result']!r} after {len(seen.exchanges)} requests"


if __name__ == "__main__":
    run()
