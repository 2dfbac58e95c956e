"""A process that applies a model's chat template to strangers' chats, so that the router survives both.

Asked first, in JSON, to take the template (`setup_of`): it answers with nothing, or with what is wrong. Then asked again and again, with
the most steps that a render may take and a Chat:

    | u32 steps | Chat |      ->      | u8 kind | u32 n | n * u32: where control tokens of the client's begin | text, or what is wrong |
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from router.prompting.chat import conversation_of
from twostep.errors import InvalidRequest, SetupError
from twostep.process.helper_service import limit_memory, serve
from twostep.rpc.v1 import inference_pb2
from twostep.text.chat_format import ChatFormat
from twostep.text.chat_template import ChatTemplate, Rendered, TooMuchWork
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import AddedToken, AddedTokens, Tokenizer

STEPS = struct.Struct("<I")
_HEAD = struct.Struct("<BI")
# A chat of 16 MiB takes a third of it.
_MEMORY_BYTES = 512 << 20
_RENDERED, _REFUSED, _TOO_MUCH = range(3)
# A template may quote whatever it was given.
_MAX_MESSAGE = 4096


def setup_of(card: ModelCard, chat_format: ChatFormat, tokenizer: Tokenizer | None, *, memory_bytes: int = _MEMORY_BYTES) -> dict[str, Any]:
    """Describes a model's template to the process. `tokenizer`: clients make none of its tokens; None: whatever stands in a text is a
    token. `memory_bytes` is what a render may take."""
    return {
        "template": card.chat_template,
        "tool_use": card.tool_use_template,
        "special_tokens": card.special_tokens,
        "tokens": None if tokenizer is None else [(t.content, t.control, t.single_word) for t in tokenizer.added_tokens],
        "model_markers": chat_format.markers,
        "memory_bytes": memory_bytes,
    }


def read_answer(answer: bytes) -> Rendered:
    """Raises InvalidRequest (TooMuchWork) as the template did."""
    kind, num = _HEAD.unpack_from(answer)
    text = answer[_HEAD.size + 4 * num :].decode("utf-8", "surrogatepass")
    if kind == _RENDERED:
        return Rendered(text, struct.unpack_from(f"<{num}I", answer, _HEAD.size))
    raise (TooMuchWork if kind == _TOO_MUCH else InvalidRequest)(text)


def main() -> None:
    def begin(setup: bytes) -> Callable[[bytes], bytes]:
        try:
            return partial(_answer, _template(json.loads(setup)))
        except MemoryError as error:
            raise SetupError("the model's chat template takes too much memory to compile; correct or remove it") from error

    serve(begin)


def _template(setup: dict[str, Any]) -> ChatTemplate:
    limit_memory(setup["memory_bytes"])
    tokens = setup["tokens"]
    return ChatTemplate(
        setup["template"],
        setup["special_tokens"],
        tool_use=setup["tool_use"],
        tokens=None if tokens is None else AddedTokens({token[0]: AddedToken(*token) for token in tokens}),
        model_markers=setup["model_markers"],
    )


def _answer(template: ChatTemplate, question: bytes) -> bytes:
    try:
        (max_steps,) = STEPS.unpack_from(question)
        conversation = conversation_of(inference_pb2.Chat.FromString(question[STEPS.size :]))
        rendered = template.render_telling(**conversation, max_steps=max_steps)
        places = struct.pack(f"<{len(rendered.clients)}I", *rendered.clients)
        return _HEAD.pack(_RENDERED, len(rendered.clients)) + places + rendered.text.encode("utf-8", "surrogatepass")
    except InvalidRequest as error:
        kind, message = _TOO_MUCH if isinstance(error, TooMuchWork) else _REFUSED, error.message
    except MemoryError:
        kind, message = _REFUSED, "the chat takes too much memory; send fewer or shorter messages, tools or variables"
    return _HEAD.pack(kind, 0) + message[:_MAX_MESSAGE].encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    main()
