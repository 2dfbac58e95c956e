"""The commands on the pages work as printed: every `curl`, and the Python with OpenAI's client: the README's, and that of batches."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import System

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/http-api.md", "docs/tool-calls.md", "docs/structured-output.md")
PRINTED = "http://localhost:8000"


def blocks(page: str, language: str) -> list[str]:
    path = ROOT / page
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE) if path.exists() else []


def commands_of(block: str) -> Iterator[str]:
    """A command goes on until its quotes are closed and no line ends with a backslash. With the comment before it, if there is one."""
    command = ""
    for line in block.splitlines(keepends=True):
        command += line
        with contextlib.suppress(ValueError):
            shlex.split(command, comments=True)
            if not command.endswith("\\\n") and not line.startswith("#"):
                yield command
                command = ""
    assert not command, f"a quote is never closed: {command}"


def curls() -> list[tuple[str, str]]:
    """Page and command."""
    return [
        (page, command) for page in PAGES for block in blocks(page, "sh") for command in commands_of(block) if command.startswith("curl ")
    ]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("kind", "embeds"), [("named_pair", True), ("aggregated", False)])
def test_every_curl_is_answered(request: pytest.FixtureRequest, kind: str, embeds: bool) -> None:
    """Decode workers that never compute prompts for others give no embeddings: those are asked of a pair."""
    commands = [(page, command) for page, command in curls() if ("/v1/embeddings" in command) == embeds]
    assert len(commands) >= (1 if embeds else 8)
    system: System = request.getfixturevalue(kind)
    url = system.http_url
    for page, command in commands:
        if "json_schema" in command:
            # This model knows no better than to write all the blanks that may stand there.
            command = command.replace('"max_tokens": 64', '"max_tokens": 1000')
        told = subprocess.run(
            ["bash", "-c", command.replace(PRINTED, url).replace("curl ", "curl -sS --fail-with-body --max-time 240 ", 1)],
            capture_output=True,
            text=True,
            timeout=270,
            check=False,
        )
        if refused := re.match(r"# answered with (\d+)", command):
            assert f"error: {refused[1]}" in told.stderr, f"{page}: {command}"
            assert json.loads(told.stdout)["error"]["message"]
            continue
        assert told.returncode == 0, f"{page}: {command}\n{told.stdout}\n{told.stderr}"
        if "/metrics" in command:
            assert "twostep_process_info" in told.stdout
        elif told.stdout.startswith("data: "):
            assert told.stdout.rstrip().endswith("data: [DONE]"), f"{page}: {command}"
        elif told.stdout.startswith("event: "):
            last = re.findall(r"^event: (\S+)$", told.stdout, re.MULTILINE)[-1]
            assert last in ("message_stop", "response.completed", "response.incomplete"), f"{page}: {command}"
        else:
            answer = json.loads(told.stdout)
            assert "error" not in answer, f"{page}: {command}"
            if "json_schema" in command:
                # Whatever the model: its answer is held to the schema to its end.
                (choice,) = answer["choices"]
                assert choice["finish_reason"] == "stop", f"{page}: {command}\n{told.stdout}"
                assert {"name", "population"} <= json.loads(choice["message"]["content"]).keys()


def test_openais_client_as_the_readme_has_it(aggregated: System) -> None:
    (program,) = [block for block in blocks("README.md", "python") if "from openai" in block]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program.replace(PRINTED, aggregated.http_url), "README.md", "exec"), {})
    assert out.getvalue()


def test_a_batch_as_the_page_has_it(aggregated: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program waits for the batch by itself, and prints an answer for each request of the file."""
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("docs/batches.md", "python")
    (line,) = blocks("docs/batches.md", "json")
    body = '"body": {"max_tokens": 8, '
    Path("requests.jsonl").write_text("".join(line.replace('"body": {', body).replace('"1"', f'"{i}"') for i in range(2)))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program.replace(PRINTED, aggregated.http_url), "docs/batches.md", "exec"), {})
    assert [json.loads(answer)["custom_id"] for answer in out.getvalue().split("\n") if answer] == ["0", "1"]
