"""Shared by the checks of coding agents: each runs once without a terminal, in a home of its own, against a proxy of the system.

Nothing leaves the machine: whatever is not on loopback goes to a proxy that does not exist.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from agent_proxy import Seen, proxy

FOLDER = Path(os.environ["CLIENT_FOLDER"])
_RUN_S = 600.0
_NOWHERE = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
_HERE = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")


def run_agent(url: str, tool: str, words: list[str], configure: Callable[[Path, str], Mapping[str, str]], *, api: str) -> tuple[str, Seen]:
    """Has the agent say hello, and the model call a harmless tool of it first.

    `tool`: how the tool's name ends. `configure` writes files below the home for the API at a URL, and returns variables. Returns what the
    agent printed, and what was asked of `api`. Raises AssertionError: a request was refused, or the call's result never came back."""
    with tempfile.TemporaryDirectory(prefix="ts-agent-") as folder, proxy(url, tool) as (proxied, seen):
        home, work = Path(folder), Path(folder, "work")
        work.mkdir()
        environ = {"PATH": os.environ["PATH"], "HOME": folder, "CI": "1", **_NOWHERE, **_HERE, **configure(home, proxied)}
        binary = FOLDER / "node_modules/.bin" / words[0]
        done = subprocess.run(
            [str(binary), *words[1:]], cwd=work, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RUN_S
        )
    assert not seen.failures(), seen.failures()
    assert done.returncode == 0, (done.returncode, done.stdout[-500:], done.stderr[-500:])
    asked = [each for each in seen.exchanges if each.path.startswith(api)]
    assert seen.called, f"no request offered a tool called {tool}"
    # The turn after the call has what became of it.
    assert any(kind in str(each.asked) for each in asked[1:] for kind in _RESULTS), [each.path for each in seen.exchanges]
    return done.stdout, seen


_RESULTS = ("function_call_output", "tool_result", "tool_call_id")
