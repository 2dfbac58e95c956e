"""/v1/files and /v1/batches: OpenAI's, over router.batches."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import BaseModel, BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from router.access.account import Identity
from router.batches.records import COMPLETION_WINDOWS, BatchRequest, FileRecord, owner_of, view
from router.batches.run import Answered
from router.batches.service import Batches
from router.batches.store import Stored
from router.http.body import Body, Whole, parse_body
from router.http.chat import ChatGeneration
from router.http.completions import CompletionGeneration
from router.http.embeddings import HttpEmbeddings
from router.http.errors import HttpError, body_of
from router.http.front import FRONT, IDENTITY, Front, parsed, tenant_name
from router.http.generation import HttpCall, HttpGeneration
from router.http.openapi import Described
from router.http.request_bodies import ChatBody, CompletionBody, EmbeddingBody
from router.http.responses import ResponsesGeneration
from router.http.responses_body import ResponsesBody
from router.http.whole_answer import ENCODER, INLINE_BYTES, AnswerEncoder, WholeAnswer
from router.json_pieces import json_pieces, small

MIN_LIFE_S, MAX_LIFE_S = 3600, 2_592_000
MAX_METADATA = 16
assert set(COMPLETION_WINDOWS) == {"24h"}, "the type below says so too"


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Whole(MIN_LIFE_S, MAX_LIFE_S)]


class FileForm(Body):
    purpose: Literal["batch"]


def _few(entries: Any) -> Any:
    # Before each is looked at: a message for each of a million that are wrong would take minutes.
    if isinstance(entries, dict) and len(entries) > MAX_METADATA:
        raise PydanticCustomError(
            "too_long", "it should have at most {most} entries, not {num}", {"most": MAX_METADATA, "num": len(entries)}
        )
    return entries


Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(_few),
]


class BatchBody(Body):
    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    """A file of purpose `batch`: one request a line."""
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    """Requests that are not answered by then get no answer at all."""
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchQuery(Body):
    after: str | None = None
    """The last id of the page before."""
    limit: Annotated[int, Whole(1, 100)] | None = None


class FileQuery(Body):
    after: str | None = None
    """The last id of the page before."""
    limit: Annotated[int, Whole(1, 10_000)] | None = None
    order: Literal["asc", "desc"] | None = None
    purpose: str | None = None


routes = web.RouteTableDef()

_DEFAULT_BATCHES, _DEFAULT_FILES = 20, 10_000
# An entry of a list, about.
_LISTED_BYTES = 400
AnyQuery = TypeVar("AnyQuery", bound=BaseModel)


@routes.post("/v1/batches")
@Described("Has the requests of a file answered when there is room.", bodies=(BatchBody,))
async def batch_create(request: web.Request) -> web.Response:
    batches = batches_of(request)
    body = await parsed(request, partial(parse_body, BatchBody))
    identity = request[IDENTITY]
    stored = await batches.create(
        tenant=tenant_name(identity),
        key_id=identity.key_id,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_lives_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
    )
    return _batch(stored)


@routes.get("/v1/batches")
@Described("Your batches, newest first.", query=BatchQuery)
async def batch_list(request: web.Request) -> web.StreamResponse:
    batches, query = batches_of(request), query_of(BatchQuery, request)
    limit = query.limit or _DEFAULT_BATCHES
    found, has_more = await batches.threads.short(batches.store.page, owner(request), after=query.after, limit=limit)
    return await listed(request, [_view(each) for each in found], has_more=has_more)


@routes.get("/v1/batches/{batch_id}")
@Described("How far a batch is.")
async def batch_retrieve(request: web.Request) -> web.Response:
    batches = batches_of(request)
    return _batch(await batches.threads.short(batches.store.get, owner(request), request.match_info["batch_id"]))


@routes.post("/v1/batches/{batch_id}/cancel")
@Described("Ends a batch; what is answered already is kept.")
async def batch_cancel(request: web.Request) -> web.Response:
    stored = await batches_of(request).cancel(owner(request), request.match_info["batch_id"])
    if stored.cancelled is None:
        raise HttpError(409, f"the batch is over ({_view(stored)['status']}); there is nothing to cancel", code="batch_over")
    return _batch(stored)


def _batch(stored: Stored) -> web.Response:
    return web.json_response(_view(stored))


def _view(stored: Stored) -> dict[str, Any]:
    return view(stored.asked, stored.state, stored.cancelled)


# ---- shared with files ---------------------------------------------------------------------------------------------------------


def batches_of(request: web.Request) -> Batches:
    """Raises HttpError 404 where there are none."""
    batches = request.app[FRONT].batches
    if batches is None:
        raise HttpError(
            404, f"{request.path}: this router keeps no files and batches; start it with --batch-dir DIR", code="unsupported_endpoint"
        )
    return batches


def owner(request: web.Request) -> str:
    return owner_of(tenant_name(request[IDENTITY]))


def query_of(kind: type[AnyQuery], request: web.Request) -> AnyQuery:
    """Raises HttpError 400. Of what is said twice, the first counts."""
    given: dict[str, Any] = {}
    for name in kind.model_fields:
        value = request.query.get(name)
        if value is not None:
            given[name] = int(value) if name == "limit" and value.isascii() and value.isdigit() and len(value) < 10 else value
    return parse_body(kind, json.dumps(given).encode())


async def listed(
    request: web.Request, data: Sequence[Mapping[str, Any]], *, has_more: bool, num_bytes: int | None = None
) -> web.StreamResponse:
    """`num_bytes`: of entries that are longer than those of files and batches."""
    ids = [data[0]["id"], data[-1]["id"]] if data else [None, None]
    body = {"object": "list", "data": small(iter(data)), "first_id": ids[0], "last_id": ids[1], "has_more": has_more}
    return await request.app[ENCODER].respond(request, WholeAnswer({}, num_bytes or _LISTED_BYTES * len(data), json_pieces(body)))


# ---- what batches ask ----------------------------------------------------------------------------------------------------------


_ENDPOINTS: Mapping[str, tuple[type[Any], Callable[[Front, Any, HttpCall], HttpGeneration[Any] | HttpEmbeddings]]] = {
    "/v1/chat/completions": (ChatBody, ChatGeneration),
    "/v1/completions": (CompletionBody, CompletionGeneration),
    "/v1/responses": (ResponsesBody, ResponsesGeneration),
    "/v1/embeddings": (EmbeddingBody, HttpEmbeddings),
}


class BatchEndpoints:
    """See router.batches.run.Endpoints: the same code answers that answers HTTP requests."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._encoder = AnswerEncoder()
        self._large = asyncio.Lock()

    @asynccontextmanager
    async def answer(self, asked: BatchRequest, body: bytes, request_id: str) -> AsyncIterator[Answered]:
        """Raises TwostepError."""
        identity = self._identity(asked)
        with identity.calling():
            call = HttpCall(request_id=request_id, identity=identity)
            kind, generation = _ENDPOINTS[asked.endpoint]
            endpoint = generation(self._front, await self._front.parser.parse(partial(parse_body, kind), body, identity.share), call)
            endpoint.check_size(is_line=True)
            # As JSON an answer is ten times as large, and stays so until it is on disk: one such at a time.
            async with endpoint.whole() as whole, self._large if whole.num_bytes > INLINE_BYTES else nullcontext():
                yield Answered(body=await self._encoder.line(whole), usage=whole.usage)

    def failure(self, error: Exception) -> tuple[int, bytes]:
        status, body, _ = body_of(error)
        return status, json.dumps(body).encode("ascii")

    def ready(self) -> bool:
        return self._front.ready()

    def _identity(self, asked: BatchRequest) -> Identity:
        """Returns the identity that made the batch, as far as it may still ask."""
        identity = self._front.access.identity_of(asked.key_id)
        return identity if identity.tenant is not None else dataclasses.replace(identity, tenant=asked.tenant)


_PART_BYTES = 256 << 10
_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 1024
_MAX_PART_HEADERS = 32
# Before the first part. Clients write none, and each costs a turn.
_MAX_FIRST_LINES = 16
_MAX_NAME_CHARS = 255
_ENCODINGS = ("", "binary", "8bit", "7bit")


@routes.post("/v1/files")
@Described("Takes a file of requests, for a batch.", form=FileForm)
async def file_upload(request: web.Request) -> web.Response:
    batches = batches_of(request)
    if request.content_type != "multipart/form-data":
        raise HttpError(415, f"the body is {request.content_type}; send a form, as multipart/form-data, with purpose and file")
    whose = owner(request)
    path = await batches.threads.short(batches.files.begin_upload, whose)
    try:
        form = await _read_form(request, batches, whose, path)
        lives_s = form.checked()
        record = batches.files.new_record(filename=form.filename, num_bytes=form.num_bytes, purpose="batch", lives_s=lives_s)
        await batches.threads.short(batches.files.finish_upload, whose, path, record)
    except BaseException:
        await asyncio.shield(batches.threads.short(batches.files.drop_upload, path))
        raise
    return web.json_response(record.view())


@dataclass(slots=True)
class _Form:
    """`num_bytes` of -1: no file has come."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    num_bytes: int = -1

    def checked(self) -> int | None:
        """Raises HttpError 400. How many seconds the file is kept, if the client says so."""
        purpose = self.fields.get("purpose")
        if purpose != "batch":
            problem = "is missing" if purpose is None else f"is {purpose[:40]!r}"
            raise HttpError(400, f"purpose {problem}; files are for batches here: give batch", param="purpose")
        if self.num_bytes < 0:
            raise HttpError(400, "file is missing; send the content as a part with a filename", param="file")
        if self.num_bytes == 0:
            raise HttpError(400, "file is empty; write one request a line", param="file")
        seconds, anchor = self.fields.get("expires_after[seconds]"), self.fields.get("expires_after[anchor]")
        if seconds is None and anchor is None:
            return None
        if anchor not in (None, "created_at"):
            raise HttpError(400, "expires_after.anchor is not created_at; give that", param="expires_after[anchor]")
        number = int(seconds) if seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 10 else 0
        if not MIN_LIFE_S <= number <= MAX_LIFE_S:
            param = "expires_after[seconds]"
            raise HttpError(400, f"expires_after.seconds is not within {MIN_LIFE_S} and {MAX_LIFE_S}; change it", param=param)
        return number


class _FormReader(MultipartReader):
    """aiohttp's, which would look for the first part as long as there are lines."""

    _num_lines = 0

    async def _readline(self) -> bytes:
        self._num_lines += 1
        if self._num_lines > _MAX_FIRST_LINES + 2 * _MAX_FIELDS:
            raise ValueError("there is no first part")
        return await super()._readline()


async def _read_form(request: web.Request, batches: Batches, whose: str, path: Path) -> _Form:
    """Reads an upload. The file goes to `path`, never whole into memory. Raises HttpError 400 and 413."""
    form = _Form()
    try:
        reader = _FormReader(request.headers, request.content, max_headers=_MAX_PART_HEADERS)
        for _ in range(_MAX_FIELDS):
            part = await reader.next()
            if part is None:
                return form
            await _read_part(part, form, batches, whose, path)
    except HttpError:
        raise
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:
        # aiohttp's reader of forms says in many ways that this is none.
        raise HttpError(400, "the body is no form as its content-type says; send multipart/form-data with purpose and file") from error
    raise HttpError(400, f"the form has more than {_MAX_FIELDS} parts; send purpose and file")


async def _read_part(part: BodyPartReader | MultipartReader, form: _Form, batches: Batches, whose: str, path: Path) -> None:
    if not isinstance(part, BodyPartReader):
        raise HttpError(400, "a part of the form is itself of several parts; send one file", param="file")
    if part.headers.get("Content-Transfer-Encoding", "").lower() not in _ENCODINGS:
        raise HttpError(400, "parts of the form are taken as they are; send them without a Content-Transfer-Encoding")
    if part.name == "file":
        if form.num_bytes >= 0:
            raise HttpError(400, "file occurs twice; send one at a time", param="file")
        form.filename = _printable(part.filename or "") or "batch.jsonl"
        form.num_bytes = await _save(part, batches, whose, path)
        return
    value = b""
    while chunk := await part.read_chunk(_MAX_FIELD_BYTES):
        value += chunk
        if len(value) > _MAX_FIELD_BYTES:
            raise HttpError(400, f"the form's field {_printable(part.name or '')!r} is longer than {_MAX_FIELD_BYTES} bytes; shorten it")
    form.fields[part.name or ""] = value.decode("utf-8", "replace")


async def _save(part: BodyPartReader, batches: Batches, whose: str, path: Path) -> int:
    most, num_bytes = batches.config.max_file_bytes, 0
    waiting: list[bytes] = []
    size = 0
    while chunk := await part.read_chunk(_PART_BYTES):
        num_bytes += len(chunk)
        if num_bytes > most:
            raise HttpError(413, f"the file has more than {most} bytes; send it in parts", param="file")
        waiting.append(bytes(chunk))
        size += len(chunk)
        if size >= _PART_BYTES:
            await batches.threads.short(batches.files.append_upload, whose, path, b"".join(waiting))
            waiting, size = [], 0
    await batches.threads.short(batches.files.append_upload, whose, path, b"".join(waiting))
    return num_bytes


def _printable(text: str) -> str:
    """Returns a name as it may be shown anywhere."""
    return "".join(char if char.isprintable() else "_" for char in text[:_MAX_NAME_CHARS])


@routes.get("/v1/files")
@Described("Your files, newest first.", query=FileQuery)
async def file_list(request: web.Request) -> web.StreamResponse:
    batches, query = batches_of(request), query_of(FileQuery, request)
    found, has_more = await batches.threads.short(
        batches.files.page,
        owner(request),
        after=query.after,
        limit=query.limit or _DEFAULT_FILES,
        ascending=query.order == "asc",
        purpose=query.purpose,
    )
    return await listed(request, [each.view() for each in found], has_more=has_more)


@routes.get("/v1/files/{file_id}")
@Described("What a file is.")
async def file_retrieve(request: web.Request) -> web.Response:
    return web.json_response((await _record(request)).view())


@routes.delete("/v1/files/{file_id}")
@Described("Deletes a file. A batch that was made of it goes on.")
async def file_delete(request: web.Request) -> web.Response:
    batches, file_id = batches_of(request), request.match_info["file_id"]
    await batches.threads.short(batches.files.delete, owner(request), file_id)
    return web.json_response({"id": file_id, "object": "file", "deleted": True})


@routes.get("/v1/files/{file_id}/content")
@Described("A file's content.", media="application/octet-stream")
async def file_content(request: web.Request) -> web.StreamResponse:
    batches, record = batches_of(request), await _record(request)
    short = batches.threads.short
    file = await short(batches.files.open_content, owner(request), record.id)
    try:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Content-Disposition": "attachment"})
        response.content_length = record.num_bytes
        await response.prepare(request)
        while chunk := await short(file.read, _PART_BYTES):
            await response.write(chunk)
        await response.write_eof()
        return response
    finally:
        file.close()


async def _record(request: web.Request) -> FileRecord:
    """Raises NotFound."""
    batches = batches_of(request)
    return await batches.threads.short(batches.files.get, owner(request), request.match_info["file_id"])
