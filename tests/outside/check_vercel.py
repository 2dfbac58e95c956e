"""Asks through Vercel's AI SDK, in Node: see check_vercel.mjs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from outside import check, run


@check
def two_turns_with_a_tool(url: str, model: str) -> str:
    words = ["node", str(Path(__file__).with_suffix(".mjs")), url, model, os.environ["CLIENT_FOLDER"]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-1500:]
    told = json.loads(done.stdout)
    assert "tool-result" in told["first"][0], told
    assert "tool-result" in told["kinds"][0], told
    # Items of the first turn are referred to: they are stored.
    assert told["references"] > 0, told
    return json.dumps(told)


if __name__ == "__main__":
    run()
