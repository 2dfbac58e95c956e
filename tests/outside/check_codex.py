"""Runs Codex CLI once: its default tools, with a namespace and a web search among them, and a call of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agents import run_agent
from outside import check, run

CONFIG = """
model = "{model}"
model_provider = "twostep"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.twostep]
name = "Twostep"
base_url = "{url}/v1"
wire_api = "responses"
"""


@check
def a_task_with_a_call(url: str, model: str) -> str:
    def configure(home: Path, proxied: str) -> Mapping[str, str]:
        (home / ".codex").mkdir()
        (home / ".codex/config.toml").write_text(CONFIG.format(model=model, url=proxied))
        return {}

    told, seen = run_agent(url, "get_goal", ["codex", "exec", "--skip-git-repo-check", "Say hello"], configure, api="/v1/responses")
    kinds = {tool["type"] for each in seen.exchanges for tool in each.asked.get("tools", [])}
    assert {"namespace", "web_search"} <= kinds, kinds
    return f"{told.strip()!r} after {len(seen.exchanges)} requests with tools of {sorted(kinds)}"


if __name__ == "__main__":
    run()
