"""docs/http-api.md: what it prints works, and its table knows every field."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

from http_fakes import events_of, url
from router_fakes import Cluster

from router.http.request_bodies import ChatBody, CompletionBody

_PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()


async def test_curl_examples_work_as_printed(cluster: Cluster) -> None:
    await cluster.prefill()
    await cluster.decode()
    examples = re.findall(r"```sh\n(curl .*?)\n```", _PAGE, flags=re.DOTALL)
    assert len(examples) >= 7
    async with cluster.serving():
        for example in examples:
            command = example.replace("http://localhost:8000", url(cluster))
            assert command != example
            process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
            stdout, stderr = await asyncio.wait_for(process.communicate(), 120)
            assert process.returncode == 0, (example, stderr)
            if '"stream": true' in example:
                *_, last, done = events_of(stdout)
                assert done == "[DONE]"
                assert {"usage", "twostep"} <= set(last)
            else:
                told = json.loads(stdout)
                assert ("error" in told) == ("logit_bias" in example), (example, told)


def test_every_field_is_in_the_tables() -> None:
    named = {
        name
        for row in re.findall(r"^\|.*$", _PAGE, flags=re.MULTILINE)
        for code in re.findall(r"`([^`]+)`", row)
        for name in re.findall(r"\w+", code)
    }
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields}
    assert fields <= named, fields - named
