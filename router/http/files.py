"""/v1/files: what batches are made of, and what comes out of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from router.batches.records import FileRecord
from router.batches.service import Batches
from router.http.batch_replies import MAX_LIFE_S, MIN_LIFE_S, FileDeleted, FileForm, FileList, FileQuery, FileReply
from router.http.batches import batches_of, listed, owner, query_of
from router.http.described import described
from router.http.errors import HttpError

routes = web.RouteTableDef()

_DEFAULT_LIMIT = 10_000
_PART_BYTES = 256 << 10
_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 1024
_MAX_PART_HEADERS = 32
# Before the first part. Clients write none, and each costs a turn.
_MAX_FIRST_LINES = 16
_MAX_NAME_CHARS = 255
_ENCODINGS = ("", "binary", "8bit", "7bit")


@routes.post("/v1/files")
@described("Takes a file of requests, for a batch.", form=FileForm, reply=FileReply)
async def upload(request: web.Request) -> web.Response:
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
            told = "is missing" if purpose is None else f"is {purpose[:40]!r}"
            raise HttpError(400, f"purpose {told}; files are for batches here: give batch", param="purpose")
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
    """The file goes to `path`, never whole into memory. Raises HttpError 400 and 413."""
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
    """A name as it may be shown anywhere."""
    return "".join(char if char.isprintable() else "_" for char in text[:_MAX_NAME_CHARS])


@routes.get("/v1/files")
@described("Your files, newest first.", query=FileQuery, reply=FileList)
async def file_list(request: web.Request) -> web.StreamResponse:
    batches, query = batches_of(request), query_of(FileQuery, request)
    found, has_more = await batches.threads.short(
        batches.files.page,
        owner(request),
        after=query.after,
        limit=query.limit or _DEFAULT_LIMIT,
        ascending=query.order == "asc",
        purpose=query.purpose,
    )
    return await listed(request, [each.view() for each in found], has_more=has_more)


@routes.get("/v1/files/{file_id}")
@described("What a file is.", reply=FileReply)
async def retrieve(request: web.Request) -> web.Response:
    return web.json_response((await _record(request)).view())


@routes.delete("/v1/files/{file_id}")
@described("Deletes a file. A batch that was made of it goes on.", reply=FileDeleted)
async def delete(request: web.Request) -> web.Response:
    batches, file_id = batches_of(request), request.match_info["file_id"]
    await batches.threads.short(batches.files.delete, owner(request), file_id)
    return web.json_response({"id": file_id, "object": "file", "deleted": True})


@routes.get("/v1/files/{file_id}/content")
@described("A file's content.", media="application/octet-stream")
async def content(request: web.Request) -> web.StreamResponse:
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
