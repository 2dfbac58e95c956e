"""Chats are rendered beside the router, in processes that may die of it: a template is a program of the model's, its input a stranger's.

    chat ─ short? ─┬─ yes ─ a process that is free, few steps ─────────▶ text
                   │           └─ it takes more ─┐
                   └─ no ───────────────────────┴─ in turn, many steps ─▶ text
                                                     └─ out of memory, or of processor time: it is over ─▶ refused

There are two processes, one of which at most works long: whatever a template does, the other is there for short chats. Callers take turns.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from router.prompting.chat import num_chars
from router.prompting.helper_pool import TIME, Helper, HelperPool, Lost
from router.prompting.render_process import STEPS, read_answer
from router.waiting.fair_queue import EVERYBODY_ALIKE, Quota
from router.waiting.turns import Turns
from twostep.errors import InvalidRequest
from twostep.rpc.v1 import inference_pb2
from twostep.text.chat_template import Rendered, TooMuchWork
from twostep.text.template_sandbox import MAX_STEPS

log = logging.getLogger(__name__)

_NUM_PROCESSES = 2
# Up to here, and with so little work, a render takes a millisecond or two.
_MAX_SHORT_CHARS = 4096
_SHORT_STEPS = 20_000
# Of the processor. Steps end most renders before; these end what one step of a library's takes.
_SHORT_S = 0.1
_LONG_S = 5.0
_COMPILE_S = 10.0
_MAX_LONG = 128
_MAX_SHORT = 4096


class Renderer:
    """Renders the chats of one router. Belongs to its event loop."""

    def __init__(
        self, setup: Mapping[str, Any], *, quota: Quota = EVERYBODY_ALIKE, short_s: float = _SHORT_S, long_s: float = _LONG_S
    ) -> None:
        """Starts nothing yet. `setup`: of render_process.setup_of. `short_s`, `long_s`: what a render may take of the processor."""
        self._has_template = setup["template"] is not None
        self._short_s = short_s
        self._long_s = long_s
        helper = Helper(
            module="router.prompting.render_process",
            setup=json.dumps(setup).encode(),
            purpose="render chats",
            setup_s=_COMPILE_S,
            lost="the model's chat template takes too much {} to compile; correct or remove it",
        )
        self._pool = HelperPool(helper, _NUM_PROCESSES)
        each = _NUM_PROCESSES  # of a caller's short chats none takes long
        self._short = Turns("chats are being rendered", most=_MAX_SHORT, at_once=_NUM_PROCESSES, each=each, quota=quota)
        self._long = Turns("long chats are being rendered", most=_MAX_LONG, at_once=1, each=1, quota=quota)

    async def start(self) -> None:
        """Starts a process, so that the first chat does not wait for it. Raises SetupError: a template that cannot be compiled within
        bounds."""
        if self._has_template:
            await self._pool.start()

    async def render(self, chat: inference_pb2.Chat, caller: str) -> Rendered:
        """Raises InvalidRequest (what the template refuses, what is not JSON, TooMuchWork), ResourceExhausted, SetupError."""
        data = chat.SerializeToString()
        if num_chars(chat) <= _MAX_SHORT_CHARS:
            try:
                return await self._ask(self._short, caller, _SHORT_STEPS, data, self._short_s)
            except TooMuchWork:
                pass
        return await self._ask(self._long, caller, MAX_STEPS, data, self._long_s)

    async def close(self) -> None:
        """Ends all processes. Called when no caller waits for an answer any more."""
        await self._pool.close()

    async def _ask(self, turns: Turns, caller: str, max_steps: int, data: bytes, cpu_s: float) -> Rendered:
        try:
            return read_answer(await self._pool.ask(turns, caller, STEPS.pack(max_steps), data, cpu_s=cpu_s))
        except Lost as lost:
            log.warning("a chat of %d bytes ended the process that renders: too much %s", len(data), lost)
            raise (TooMuchWork if lost.args == (TIME,) else InvalidRequest)(
                f"the model's chat template takes too much {lost} for these messages; send fewer or shorter messages, tools or variables"
            ) from lost
