"""Every chat template ends, takes no more memory than it may, and others' chats are rendered meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from chat_templates import QWEN3
from evil_templates import BYTES, STEPS, TIME

from router.prompting.chat import conversation_of
from router.prompting.renderer import Renderer
from twostep.errors import InvalidRequest, ResourceExhausted, SetupError
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.text.chat_template import ChatTemplate

EVIL = BYTES | TIME | STEPS
# One model whose template does all of it, as the client likes.
EVIL_TEMPLATE = (
    "".join(f"{{% {'elif' if i else 'if'} which == {name!r} %}}{source}" for i, (name, source) in enumerate(EVIL.items()))
    + "{% else %}{{ messages[0].content }}{% endif %}"
)


def setup(template: str) -> dict[str, Any]:
    plain = {"tool_use": None, "special_tokens": {}, "tokens": [], "model_markers": [], "memory_bytes": 64 << 20}
    return plain | {"template": template}


def chat(content: str = "hi", **variables: Any) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", content=content)], template_kwargs=json.dumps(variables))


@pytest.fixture
async def renderer_of() -> AsyncIterator[Callable[..., Renderer]]:
    made = []

    def of(template: str, **options: Any) -> Renderer:
        made.append(Renderer(setup(template), **options))
        return made[-1]

    yield of
    for renderer in made:
        await renderer.close()


@pytest.mark.system
async def test_every_evil_template_ends(renderer_of: Callable[..., Renderer]) -> None:
    renderer = renderer_of(EVIL_TEMPLATE, short_s=0.05, long_s=0.2)
    for name in EVIL:
        with pytest.raises(InvalidRequest):
            await renderer.render(chat(which=name, n=3000), "caller")
        assert (await renderer.render(chat("others"), "caller")).text == "others", name


async def test_work_that_steps_count_ends_by_steps(renderer_of: Callable[..., Renderer]) -> None:
    """And so always at the same place, whatever the time."""
    renderer = renderer_of(EVIL_TEMPLATE, short_s=600.0, long_s=600.0)
    for name in STEPS:
        with pytest.raises(InvalidRequest, match=r"too much work|recursion"):
            await renderer.render(chat(which=name, n=90_000), "caller")


async def test_others_are_rendered_while_a_template_computes(renderer_of: Callable[..., Renderer]) -> None:
    renderer = renderer_of(EVIL_TEMPLATE, short_s=0.05, long_s=60.0)
    working = asyncio.create_task(renderer.render(chat(which="a tree compared", n=1), "caller"))
    for i in range(50):
        assert (await renderer.render(chat(f"{i}"), "caller")).text == f"{i}"
    assert not working.done()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_too_many_long_ones_are_told_so(renderer_of: Callable[..., Renderer]) -> None:
    renderer = renderer_of("{{ messages[0].content }}")
    asking = [asyncio.create_task(renderer.render(chat("long " * 1000), "caller")) for _ in range(80)]
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(result) for result in results if isinstance(result, BaseException)} == {ResourceExhausted}
    assert sum(not isinstance(result, BaseException) for result in results) == 64


async def test_a_template_that_cannot_be_compiled_is_found_at_the_start(renderer_of: Callable[..., Renderer]) -> None:
    """Jinja computes what is constant when it compiles."""
    with pytest.raises(SetupError):
        await renderer_of("{{ 'a' | center(10000000) }}" * 40).start()


async def test_the_same_as_in_this_process(renderer_of: Callable[..., Renderer]) -> None:
    turns = [pb.ChatMessage(role="user", content="größer 🙂 " * 20), pb.ChatMessage(role="assistant", content="hi", reasoning="hm\n")]
    sent = pb.Chat(messages=turns * 2048, template_kwargs='{"enable_thinking": false}')
    conversation = conversation_of(sent)
    expected = ChatTemplate(QWEN3).render(**conversation)
    assert (await renderer_of(QWEN3).render(sent, "caller")).text == expected
