"""Runs opencode once: its own prompt and tools, a call of one, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents import run_agent
from outside import check, run


@check
def a_task_with_a_call(url: str, model: str) -> str:
    def configure(home: Path, proxied: str) -> Mapping[str, str]:
        provider: dict[str, Any] = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Twostep",
            "options": {"baseURL": f"{proxied}/v1", "apiKey": "unused"},
            "models": {model: {"name": model, "limit": {"context": 1 << 17, "output": 4096}}},
        }
        named = f"twostep/{model}"
        config = {"provider": {"twostep": provider}, "model": named, "small_model": named, "autoupdate": False, "share": "disabled"}
        folder = home / ".config/opencode"
        folder.mkdir(parents=True)
        (folder / "opencode.json").write_text(json.dumps(config))
        return dict.fromkeys(("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD"), "1")

    told, seen = run_agent(url, "todowrite", ["opencode", "run", "Say hello"], configure, api="/v1/chat/completions")
    return f"{told.strip()!r} after {len(seen.exchanges)} requests"


if __name__ == "__main__":
    run()
