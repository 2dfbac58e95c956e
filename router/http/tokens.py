"""POST /tokenize and /detokenize, and GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from router.http.body import Body, packed, parse_body
from router.http.errors import HttpError, blaming
from router.http.front import FRONT, IDENTITY, parsed
from router.http.openapi import Described
from router.http.request_bodies import ChatPrompt, IdArray, ModelName, TokenId, adapt_roles, ids_of
from router.http.whole_answer import ENCODER, JSON_ID_BYTES, WholeAnswer
from router.json_pieces import json_pieces, small
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.text.model_card import SPECIAL_TOKENS
from twostep.text.tokenizer import Tokenizer

routes = web.RouteTableDef()

# Of a model with a longer context: as many as that has.
_MAX_IDS = 1 << 17
# Up to here it takes well under a millisecond.
_MAX_INLINE_IDS = 2048


class TokenizeText(Body):
    model: ModelName = ""
    prompt: str
    add_special_tokens: bool | None = None
    """Whether the tokenizer puts something around a text; true if not given."""
    return_token_strs: bool | None = None


class TokenizeChat(ChatPrompt):
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: ModelName = ""
    tokens: Annotated[IdArray, packed(ids_of, Annotated[list[TokenId], Field(fail_fast=True)])]
    """131,072 at most, or what the model's context has if that is more."""


@routes.post("/tokenize")
@Described("The token ids of a text, or of a chat with the model's template around it.", bodies=(TokenizeText, TokenizeChat))
async def tokenize(request: web.Request) -> web.StreamResponse:
    body = await parsed(request, _tokenize_body)
    front = request.app[FRONT]
    ids: Sequence[int] = ()
    with blaming(body.names()):
        front.inference.check_model(body.model)
        if isinstance(body, TokenizeChat):
            chat = body.prompt()
            adapt_roles(chat, front.card.chat_template)
            ids = (await front.inference.tokenize(pb.TokenizeRequest(chat=chat), request[IDENTITY].share)).token_ids
        elif body.prompt:
            text_ids = front.inference.prompts.text_ids
            ids = await text_ids(body.prompt, request[IDENTITY].share, add_special_tokens=body.add_special_tokens is not False)
    fields = {"count": len(ids), "max_model_len": front.inference.max_model_len, "tokens": list(ids), "token_strs": None}
    num_bytes = JSON_ID_BYTES * len(ids)
    if body.return_token_strs:
        fields["token_strs"] = small(front.token_bytes.text(token_id) for token_id in ids)
        num_bytes *= 3
    return await _respond(request, fields, num_bytes)


async def _respond(request: web.Request, fields: dict[str, Any], num_bytes: int) -> web.StreamResponse:
    """Answers with about so many bytes, which are the caller's until they are read."""
    async with request.app[FRONT].inference.memory.hold(request[IDENTITY].caller) as holding:
        holding.add(num_bytes)
        return await request.app[ENCODER].respond(request, WholeAnswer({}, num_bytes, json_pieces(fields)))


def _tokenize_body(raw: bytes) -> TokenizeChat | TokenizeText:
    return parse_body(TokenizeChat, raw) if _is_chat(raw) else parse_body(TokenizeText, raw)


def _is_chat(raw: bytes) -> bool:
    if b'"messages"' not in raw:
        return False
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        return False  # which is said when it is parsed
    return isinstance(given, dict) and "messages" in given


@routes.post("/detokenize")
@Described("The text of token ids, special tokens written out.", bodies=(DetokenizeBody,))
async def detokenize(request: web.Request) -> web.StreamResponse:
    body = await parsed(request, partial(parse_body, DetokenizeBody))
    front = request.app[FRONT]
    front.inference.check_model(body.model)
    most = max(_MAX_IDS, front.card.max_model_len)
    if len(body.tokens) > most:
        raise HttpError(400, f"tokens has {len(body.tokens)} ids; send at most {most} at a time", param="tokens")
    # A tokenizer may have more of them than the model, and the other way about.
    last = max(front.card.vocab_size, front.tokenizer.vocab_size) - 1
    if len(body.tokens) and max(body.tokens) > last:
        at, wrong = next((i, token_id) for i, token_id in enumerate(body.tokens) if token_id > last)
        raise HttpError(400, f"tokens[{at}] is {wrong}; the vocabulary of this model has ids from 0 to {last}", param=f"tokens[{at}]")
    text = await decoded(front.tokenizer, body.tokens, skip_special_tokens=False)
    return await _respond(request, {"prompt": text}, len(text))


@routes.get("/tokenizer_info")
@Described("The tokenizer's special tokens and the chat template.")
async def tokenizer_info(request: web.Request) -> web.Response:
    """Has what a client needs to write chats as /tokenize does. Whoever may ask /tokenize sees the template's texts anyway."""
    front = request.app[FRONT]
    card = front.card
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # transformers' name for what reads any tokenizer.json
        "model_max_length": front.inference.max_model_len,
        **dict.fromkeys(SPECIAL_TOKENS),
        **card.special_tokens,
        "chat_template": card.chat_template,
    }
    return web.json_response(fields)


async def decoded(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Returns the text of the tokens; many of them are decoded in a thread."""
    if len(ids) <= _MAX_INLINE_IDS:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
