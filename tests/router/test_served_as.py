"""Operators set the names that clients ask for, and the chat template."""

from __future__ import annotations

from pathlib import Path

from http_fakes import CHAT, TEXT, chat, refused, served, told
from router_fakes import Cluster


async def test_a_model_may_have_several_names(cluster: Cluster) -> None:
    async with served(cluster, served_model_name=("first", "second")) as http:
        listed = await told(http, "/v1/models")
        assert [each["id"] for each in listed["data"]] == ["first", "second"]
        assert (await told(http, "/v1/models/second"))["id"] == "second"
        for name in ("first", "second"):
            assert (await told(http, CHAT, chat(model=name, max_tokens=2)))["model"] == "first"
            assert (await told(http, TEXT, {"model": name, "prompt": "a", "max_tokens": 2}))["model"] == "first"
        await refused(http, CHAT, chat(model="third"), 404)


async def test_a_template_of_the_operator_s_is_used_in_place_of_the_model_s(cluster: Cluster, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}")
    async with served(cluster, chat_template=template) as http:
        ids = (await told(http, "/tokenize", {"messages": [{"role": "user", "content": "hello"}]}))["tokens"]
        assert cluster.tokenizer.decode(ids) == "[user] hello"
