"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from aiohttp import web
from pydantic import Field

from router.http.calls import json_body
from router.http.chat_body import ChatPrompt, adapt_roles
from router.http.described import described
from router.http.errors import blaming
from router.http.fields import Body, TokenId, parse_body
from router.http.front import FRONT
from router.http.replies import Detokenized, Tokenized
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.text.tokenizer import Tokenizer

routes = web.RouteTableDef()

_MAX_IDS = 1 << 20
# Up to here it takes well under a millisecond.
_MAX_INLINE_IDS = 2048


class TokenizeText(Body):
    model: str = ""
    prompt: str
    add_special_tokens: bool | None = None
    """What the tokenizer puts around a text; true if not given."""
    return_token_strs: bool | None = None


class TokenizeChat(ChatPrompt):
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str = ""
    tokens: list[TokenId] = Field(max_length=_MAX_IDS, fail_fast=True)


@routes.post("/tokenize")
@described(
    "The token ids of a text, or of a chat with the model's template around it.", bodies=(TokenizeText, TokenizeChat), reply=Tokenized
)
async def tokenize(request: web.Request) -> web.Response:
    raw = await json_body(request)
    front = request.app[FRONT]
    body = parse_body(TokenizeChat, raw) if _is_chat(raw) else parse_body(TokenizeText, raw)
    ids: Sequence[int] = ()
    with blaming(type(body).model_fields):
        front.inference.check_model(body.model)
        if isinstance(body, TokenizeChat):
            chat = body.chat()
            adapt_roles(chat, front.card.chat_template)
            ids = (await front.inference.tokenize(pb.TokenizeRequest(chat=chat))).token_ids
        elif body.prompt:
            ids = await front.inference.text_ids(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    head = {"count": len(ids), "max_model_len": front.inference.max_model_len}

    def told() -> str:
        names = [front.token_bytes.text(token_id) for token_id in ids] if body.return_token_strs else None
        return f'{json.dumps(head)[:-1]}, "tokens": {_listed(ids)}, "token_strs": {"null" if names is None else _listed(names)}}}'

    text = told() if len(ids) <= _MAX_INLINE_IDS else await asyncio.to_thread(told)
    return web.Response(text=text, content_type="application/json")


def _listed(values: Sequence[int] | Sequence[str]) -> str:
    """As JSON, in pieces: nothing else runs in this process while one is written."""
    pieces = (json.dumps(list(values[i : i + _MAX_INLINE_IDS]))[1:-1] for i in range(0, len(values), _MAX_INLINE_IDS))
    return f"[{', '.join(pieces)}]"


def _is_chat(raw: bytes) -> bool:
    if b'"messages"' not in raw:
        return False
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        return False  # which is said when it is parsed
    return isinstance(given, dict) and "messages" in given


@routes.post("/detokenize")
@described("The text of token ids, special tokens written out.", bodies=(DetokenizeBody,), reply=Detokenized)
async def detokenize(request: web.Request) -> web.Response:
    body = parse_body(DetokenizeBody, await json_body(request))
    front = request.app[FRONT]
    front.inference.check_model(body.model)
    return web.json_response({"prompt": await decoded(front.tokenizer, body.tokens, skip_special_tokens=False)})


async def decoded(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Many of them in a thread."""
    if len(ids) <= _MAX_INLINE_IDS:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
