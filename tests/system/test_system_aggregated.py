"""A system without prefill workers, in real processes: right tokens, turns that find their prefix, and a worker that dies."""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from loads import answered, kill_under_load
from oracle import Oracle
from running import System, wait_until

pytestmark = pytest.mark.timeout(600)


def test_an_aggregated_system_gives_the_oracle_s_tokens_without_ray(aggregated: System, oracle: Oracle) -> None:
    assert set(answered(aggregated, oracle, seed=7)) == {"none"}
    assert aggregated.pids_of_program("raylet") == []
    aggregated.check_empty()


def test_an_aggregated_system_embeds(aggregated: System) -> None:
    asked = Request(f"{aggregated.http_url}/v1/embeddings", b'{"input": ["Say hello.", "Say no."]}', {"Content-Type": "application/json"})
    with urlopen(asked, timeout=60) as answer:
        vectors = [each["embedding"] for each in json.load(answer)["data"]]
    assert [round(sum(x * x for x in vector), 3) for vector in vectors] == [1.0, 1.0]
    assert vectors[0] != vectors[1]


def test_another_worker_goes_on_where_a_killed_one_was(aggregated: System, oracle: Oracle) -> None:
    is_whole = functools.partial(aggregated.is_whole, 0, 2)
    asyncio.run(kill_under_load(aggregated, oracle, "decode_worker", is_whole=is_whole, seed=1))
    wait_until(is_whole, timeout_s=180, what="the killed worker is back")
    aggregated.check_empty()


@pytest.mark.usefixtures("alone")
def test_the_demo_of_an_aggregated_system(tiny_llama_dir: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-m", "twostep.cli", "demo", "--aggregated", "--model", str(tiny_llama_dir), "--max-tokens", "16"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for sign in ("decode-0", "computed the prompt itself", "hold nothing any more", "All is well"):
        assert sign in done.stdout, done.stdout
    assert "ray" not in done.stdout
