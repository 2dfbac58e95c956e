"""Endpoints of OpenAI's and vLLM's APIs that are not served here: whoever asks is told so, and what to use."""

from __future__ import annotations

from aiohttp import web

from router.http.errors import HttpError

_REFUSED = {
    "/v1/embeddings": "the models served here generate text and compute no embeddings; use another server for them",
    "/v1/responses": "the Responses API is not served; use /v1/chat/completions",
    "/v1/conversations": "no conversations are kept; use /v1/chat/completions, and send the messages with each request",
    "/v1/assistants": "the Assistants API is not served; use /v1/chat/completions",
    "/v1/threads": "the Assistants API is not served; use /v1/chat/completions",
    "/v1/vector_stores": "no documents are searched here; use /v1/chat/completions, and put what was found into the messages",
    "/v1/moderations": "texts are not judged here; use another server for it",
    "/v1/images": "the models served here write text; images are not served",
    "/v1/videos": "the models served here write text; videos are not served",
    "/v1/audio": "the models served here read and write text; audio is not served",
    "/v1/realtime": "the Realtime API is not served; use /v1/chat/completions with stream",
    "/v1/fine_tuning": "models are not trained here",
    "/v1/evals": "answers are not judged here",
    "/v1/containers": "no code is run here",
    "/v1/uploads": "files come whole: use /v1/files",
    "/v1/messages": "Anthropic's API is not served; use /v1/chat/completions",
    "/v1/rerank": "the models served here generate text; nothing is ranked",
    "/v1/score": "the models served here generate text; nothing is scored",
    "/rerank": "the models served here generate text; nothing is ranked",
    "/score": "the models served here generate text; nothing is scored",
    "/pooling": "the models served here generate text and compute no embeddings",
    "/classify": "the models served here generate text; nothing is classified",
}


async def _refuse(request: web.Request) -> web.StreamResponse:
    path = next(path for path in _REFUSED if request.path == path or request.path.startswith(f"{path}/"))
    raise HttpError(404, f"{path}: {_REFUSED[path]}", code="unsupported_endpoint")


routes = [web.route("*", path + tail, _refuse) for path in _REFUSED for tail in ("", "/{rest:.*}")]
