"""Whatever a chat template does, it ends, takes no more memory than it may, and others' chats are rendered meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from chat_templates import QWEN3
from evil_templates import BYTES, STEPS, TIME
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompting.chat import conversation_of
from router.prompting.render_process import Setup
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
# What may be done with a text, one after the other.
OPERATIONS = {
    "ljust": "ns.s.ljust(n)",
    "center": "ns.s | center(n)",
    "indent": "ns.s | indent(n, true)",
    "replace": "ns.s | replace('a', 'b' ~ ns.s)",
    "join": "ns.s | join(ns.s)",
    "twice": "ns.s ~ ns.s",
    "times": "(ns.s | string) * n",
    "JSON": "ns.s | tojson",
    "list": "ns.s | list",
    "pairs": "[ns.s, ns.s]",
    "map": "ns.s | map('upper') | list",
    "sort": "ns.s | sort",
    "sum": "ns.s | batch(7, 'x') | sum(start=[])",
    "wrap": "ns.s | string | wordwrap(3)",
    "urls": "ns.s | string | urlize",
    "format": "('%' ~ n ~ 's') | format(ns.s)",
    "power": "n ** n",
    "xml": "{'a': ns.s} | xmlattr",
    "slice": "ns.s | slice(n) | list",
    "pretty": "ns.s | pprint",
}
INTERPRETER = (
    "{% set ns = namespace(s='a') %}{% for op, n in ops %}"
    + "".join(
        f"{{% {'elif' if i else 'if'} op == {name!r} %}}{{% set ns.s = {expression} %}}"
        for i, (name, expression) in enumerate(OPERATIONS.items())
    )
    + "{% endif %}{% endfor %}{{ ns.s }}"
)


def setup(template: str, *, memory_bytes: int = 64 << 20) -> Setup:
    return Setup(template=template, tool_use=None, special_tokens={}, tokens=[], model_markers=[], memory_bytes=memory_bytes)


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
            await renderer.render(chat(which=name, n=3000))
        assert (await renderer.render(chat("others"))).text == "others", name


async def test_work_that_steps_count_ends_by_steps(renderer_of: Callable[..., Renderer]) -> None:
    """And so always at the same place, whatever the time."""
    renderer = renderer_of(EVIL_TEMPLATE, short_s=600.0, long_s=600.0)
    for name in STEPS:
        with pytest.raises(InvalidRequest, match=r"too much work|recursion"):
            await renderer.render(chat(which=name, n=90_000))


async def test_others_are_rendered_while_a_template_computes(renderer_of: Callable[..., Renderer]) -> None:
    renderer = renderer_of(EVIL_TEMPLATE, short_s=0.05, long_s=60.0)
    working = asyncio.create_task(renderer.render(chat(which="a tree compared", n=1)))
    for i in range(50):
        assert (await renderer.render(chat(f"{i}"))).text == f"{i}"
    assert not working.done()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_too_many_long_ones_are_told_so(renderer_of: Callable[..., Renderer]) -> None:
    renderer = renderer_of("{{ messages[0].content }}")
    asking = [asyncio.create_task(renderer.render(chat("long " * 1000))) for _ in range(80)]
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(result) for result in results if isinstance(result, BaseException)} == {ResourceExhausted}
    assert sum(not isinstance(result, BaseException) for result in results) == 64


async def test_a_template_that_cannot_be_compiled_is_found_at_the_start(renderer_of: Callable[..., Renderer]) -> None:
    """Jinja computes what is constant when it compiles."""
    with pytest.raises(SetupError):
        await renderer_of("{{ 'a' | center(10000000) }}" * 40).start()


async def test_what_is_no_json_is_said(renderer_of: Callable[..., Renderer]) -> None:
    renderer = renderer_of("{{ messages[0].content }}")
    for text in ("[1]", "{", "[" * 100_000):
        with pytest.raises(InvalidRequest, match=r"chat\.template_kwargs"):
            await renderer.render(pb.Chat(messages=[pb.ChatMessage(role="user")], template_kwargs=text))
    tool = '{"type": "function", "function": {"name": "f", "description": "\\ud800"}}'
    assert (
        await renderer_of("{{ tools[0].function.description }}").render(pb.Chat(messages=chat().messages, tools=[tool]))
    ).text == "\ud800"


async def test_the_same_as_in_this_process(renderer_of: Callable[..., Renderer]) -> None:
    turns = [pb.ChatMessage(role="user", content="größer 🙂 " * 20), pb.ChatMessage(role="assistant", content="hi", reasoning="hm\n")]
    sent = pb.Chat(messages=turns * 2048, template_kwargs='{"enable_thinking": false}')
    conversation = conversation_of(sent)
    expected = ChatTemplate(QWEN3).render(conversation.messages, variables=conversation.variables)
    assert (await renderer_of(QWEN3).render(sent)).text == expected


@pytest.mark.system
async def test_whatever_a_template_does_with_a_text(renderer_of: Callable[..., Renderer]) -> None:
    renderer = renderer_of(INTERPRETER, short_s=0.05, long_s=0.1)
    loop = asyncio.get_running_loop()

    @settings(max_examples=25)
    @given(st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.sampled_from([0, 3, 70, 5000, 10**6, 10**10])), max_size=12))
    def check(operations: list[tuple[str, int]]) -> None:
        try:
            asyncio.run_coroutine_threadsafe(renderer.render(chat(ops=operations)), loop).result()
        except InvalidRequest:
            pass

    await asyncio.to_thread(check)
    assert (await renderer.render(chat(ops=[("twice", 0)]))).text == "aa"
