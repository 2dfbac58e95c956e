"""Batches on disk. Everything blocks: it runs in threads.

    DIR/open/batch_…                            names the owner; every batch that is not over has one, and some are left behind
    DIR/OWNER/batches/batch_…/asked.json        what the client asked for
                              input.jsonl       the input file, whatever becomes of that one
                              cancel            since when a client wants no more of it
                              run-00000001.json how far the first run came
                              run-00000001.log  and its answers (journal.py)
                              end.json          how it ended, as the first run that got there has it

A run has a number that no other has, because it creates its .json exclusively; it writes no file of another run. So routers that think
they run the same batch do each other no harm. Which of them should is the lease's matter (service.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from router.batches.disk import Disk
from router.batches.files import FileStore, Page, names_in, page_of
from router.batches.journal import AnswerRecord, Record, Results, decode, encode
from router.batches.lines import MAX_REQUESTS, InputLine, LineRequest, duplicate, parse_line
from router.batches.records import BATCH_ID, MAX_ERRORS, BatchRequest, LineError, RunState, from_json, is_output_of, owner_of, to_json
from twostep.errors import DataLoss, NotFound, ResourceExhausted

_RUN = re.compile(r"run-(\d{8})\.json")
_OWNER = re.compile(r"[0-9a-f]{32}")
MAX_OPEN = 1000
_ABANDONED_S = 3600.0
_PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A batch as it is on disk. `cancelled`: since when a client wants no more of it."""

    asked: BatchRequest
    state: RunState | None
    cancelled: int | None


@dataclass(frozen=True, slots=True)
class Input:
    """An input file, looked through. `errors`: why it is no batch."""

    lines: list[InputLine]
    errors: tuple[LineError, ...]


class BatchStore:
    def __init__(self, disk: Disk, files: FileStore) -> None:
        self._root, self._disk, self.files = files.config.root, disk, files
        self._max_line_bytes = files.config.max_line_bytes

    def prepare(self) -> None:
        self._disk.make_folder(self._root / "open")
        probe = self._root / "open" / f".probe-{os.urandom(4).hex()}"
        self._disk.create(probe, b"")
        self._disk.delete(probe)

    # ---- clients -------------------------------------------------------------------------------------------------------------

    def create(self, asked: BatchRequest) -> Stored:
        """Raises NotFound (the input file), ResourceExhausted, DataLoss."""
        owner = owner_of(asked.tenant)
        source = self.files.content(owner, asked.input_file_id)
        if len([each for each in self.open_batches().values() if each == owner]) >= MAX_OPEN:
            raise ResourceExhausted(f"you have {MAX_OPEN} batches that are not over; wait for one, or cancel it")
        self.files.check_room(owner)
        making = self._root / owner / "uploads" / asked.id
        self._disk.make_folder(making)
        self._disk.make_folder(self._root / owner / "batches")
        try:
            self._disk.link(source, making / "input.jsonl")
        except FileNotFoundError:
            raise NotFound(f"there is no file {asked.input_file_id!r}; GET /v1/files lists yours") from None
        self._disk.create(making / "asked.json", to_json(asked))
        # One more marker than batches does no harm; a batch without one would never be run.
        self._disk.write(self._marker(asked.id), owner.encode())
        self._disk.rename(making, self._folder(owner, asked.id))
        return Stored(asked, None, None)

    def get(self, owner: str, batch_id: str) -> Stored:
        """Raises NotFound, DataLoss."""
        if BATCH_ID.fullmatch(batch_id):
            folder = self._folder(owner, batch_id)
            try:
                asked = from_json(BatchRequest, (folder / "asked.json").read_bytes())
                return Stored(asked, self._state(folder), _cancelled(folder))
            except FileNotFoundError:
                pass
        raise NotFound(f"there is no batch {batch_id[:64]!r}; GET /v1/batches lists yours")

    def page(self, owner: str, *, after: str | None, limit: int) -> Page[Stored]:
        """Returns a page of an owner's batches, the newest first. Damaged ones are passed over."""
        names = names_in(self._root / owner / "batches")
        return page_of(filter(BATCH_ID.fullmatch, names), partial(self.get, owner), after=after, limit=limit)

    def cancel(self, owner: str, batch_id: str, now: int) -> Stored:
        """Raises NotFound, DataLoss. The first cancel counts."""
        stored = self.get(owner, batch_id)
        if stored.cancelled is None and not (stored.state is not None and stored.state.status.final):
            try:
                self._disk.create(self._folder(owner, batch_id) / "cancel", str(now).encode())
            except FileExistsError:
                pass
            stored = self.get(owner, batch_id)
        return stored

    # ---- runs ----------------------------------------------------------------------------------------------------------------

    def open_batches(self) -> dict[str, str]:
        """Owners by batch."""
        found: dict[str, str] = {}
        for name in os.listdir(self._root / "open"):
            if BATCH_ID.fullmatch(name):
                try:
                    owner = (self._root / "open" / name).read_text("ascii")
                except (FileNotFoundError, UnicodeDecodeError):
                    continue
                if _OWNER.fullmatch(owner):
                    found[name] = owner
        return found

    def begin_run(self, owner: str, batch_id: str) -> RunState:
        """Begins a run, under a number of its own. Raises NotFound, DataLoss."""
        folder = self._folder(owner, batch_id)
        while True:
            before = self.get(owner, batch_id).state
            epochs = _epochs(folder)
            state = (before or RunState(epoch=0)).taken_over(max(epochs, default=0) + 1)
            try:
                if not state.status.final:
                    self._disk.create(folder / f"run-{state.epoch:08}.json", to_json(state))
                return state
            except FileExistsError:
                continue

    def write_state(self, owner: str, batch_id: str, state: RunState) -> None:
        self._disk.write(self._folder(owner, batch_id) / f"run-{state.epoch:08}.json", to_json(state))

    def record(self, owner: str, batch_id: str, epoch: int, entries: Iterable[Record]) -> None:
        """Adds to the journal of a run. It is on disk when this returns."""
        self._disk.append(self._log(self._folder(owner, batch_id), epoch), b"".join(map(encode, entries)))

    def end(self, owner: str, batch_id: str, state: RunState) -> None:
        """Notes that a batch ended so, unless another run has ended it otherwise."""
        path = self._folder(owner, batch_id) / "end.json"
        try:
            self._disk.create_whole(path, to_json(state))
        except FileExistsError:
            if _end(path.parent) is None:
                # Half of one, on a volume without links.
                self._disk.write(path, to_json(state))

    def is_cancelled(self, owner: str, batch_id: str) -> bool:
        return (self._folder(owner, batch_id) / "cancel").exists()

    def is_over(self, owner: str, batch_id: str) -> bool:
        return (self._folder(owner, batch_id) / "end.json").exists()

    def results(self, owner: str, batch_id: str, epoch: int) -> Results:
        """Reads the journals of all runs. That of `epoch` is the caller's."""
        folder, found = self._folder(owner, batch_id), Results()
        for each in _epochs(folder):
            try:
                with self._log(folder, each).open("rb") as log:
                    found.read(each, log, runs=each == epoch)
            except FileNotFoundError:
                continue
        return found

    def read_input(self, asked: BatchRequest) -> Input:
        try:
            return self._read_input(asked)
        except FileNotFoundError:
            return Input([], (LineError(code="input_lost", message="the batch's input is gone from its volume; send it again"),))

    def _read_input(self, asked: BatchRequest) -> Input:
        lines: list[InputLine] = []
        errors: list[LineError] = []
        known: set[str] = set()
        with (self._folder(owner_of(asked.tenant), asked.id) / "input.jsonl").open("rb") as file:
            for number, (offset, raw) in enumerate(_lines(file, self._max_line_bytes), 1):
                parsed = parse_line(raw, number, endpoint=asked.endpoint, max_bytes=self._max_line_bytes)
                if isinstance(parsed, LineRequest):
                    parsed = duplicate(parsed.custom_id, number, known) or parsed
                if isinstance(parsed, LineError):
                    errors.append(parsed)
                elif parsed is not None:
                    known.add(parsed.custom_id)
                    lines.append(InputLine(parsed.custom_id, offset, len(raw)))
                if len(lines) > MAX_REQUESTS:
                    errors.append(
                        LineError(code="too_many_requests", message=f"there are more than {MAX_REQUESTS} requests; make several batches")
                    )
                    break
                if len(errors) >= MAX_ERRORS:
                    break
        if not lines and not errors:
            errors.append(LineError(code="empty_file", message="the input file has no requests; write one a line"))
        return Input(lines, tuple(errors))

    def read_request(self, asked: BatchRequest, line: InputLine) -> LineRequest:
        """Reads a request that was read before. Raises DataLoss."""
        with (self._folder(owner_of(asked.tenant), asked.id) / "input.jsonl").open("rb") as file:
            file.seek(line.offset)
            raw = file.read(line.length)
        parsed = parse_line(raw, 1, endpoint=asked.endpoint, max_bytes=self._max_line_bytes)
        if not isinstance(parsed, LineRequest) or parsed.custom_id != line.custom_id:
            raise DataLoss("the batch's input has changed on disk; send it again")
        return parsed

    # ---- the end ---------------------------------------------------------------------------------------------------------------

    def publish(self, asked: BatchRequest, epoch: int, wanted: list[InputLine], results: Results) -> tuple[str | None, str | None]:
        """Writes the output file and the error file, in the order of the input; None for one without lines."""
        ids = [self._publish(asked, epoch, kind, wanted, results) for kind in ("output", "error")]
        return ids[0], ids[1]

    def _publish(self, asked: BatchRequest, epoch: int, kind: str, wanted: list[InputLine], results: Results) -> str | None:
        owner = owner_of(asked.tenant)
        folder, num_bytes = self._folder(owner, asked.id), 0
        path = folder / f".{kind}-{epoch:08}"
        self._disk.delete(path)
        with ExitStack() as opened:
            # Another run that has ended the batch may have deleted one of them.
            epochs = {place.epoch for place in results.places.values()}
            logs = {number: opened.enter_context(self._log(folder, number).open("rb")) for number in epochs}

            def answers() -> Iterator[bytes]:
                for line in wanted:
                    place = results.places.get(line.custom_id)
                    if place is None or place.ok != (kind == "output"):
                        continue
                    logs[place.epoch].seek(place.offset)
                    entry = decode(logs[place.epoch].read(place.length))
                    if not isinstance(entry, AnswerRecord):
                        raise DataLoss("a batch's answers have changed on disk while they were put together; look after the volume")
                    yield entry.payload + b"\n"

            for part in joined(answers(), _PART_BYTES):
                self._disk.append(path, part)
                num_bytes += len(part)
        if not num_bytes:
            return None
        record = self.files.new_record(
            filename=f"{asked.id}_{kind}.jsonl",
            num_bytes=num_bytes,
            purpose="batch_output",
            lives_s=asked.output_lives_s,
            made=(asked.id, epoch, kind),
        )
        self._disk.make_folder(self._root / owner / "files")
        return self.files.keep(owner, path, record).id

    def close(self, owner: str, batch_id: str) -> None:
        """Clears up behind a batch that is over: what it was made of, what other runs published, and its marker."""
        folder = self._folder(owner, batch_id)
        epochs, end = _epochs(folder), _end(folder)
        kept = () if end is None else (end.output_file_id, end.error_file_id)
        for file_id in self.files.ids(owner):
            if file_id not in kept and any(is_output_of(file_id, batch_id, epoch) for epoch in epochs):
                self.files.remove(owner, file_id)
        for epoch in epochs:
            self._disk.delete(self._log(folder, epoch))
        self._disk.delete(folder / "input.jsonl")
        self._disk.delete(self._marker(batch_id))

    def forget_marker(self, batch_id: str, now: float) -> None:
        """Deletes the marker of a batch that is not there: its making was broken off, or it was swept away."""
        try:
            if now - self._marker(batch_id).stat().st_mtime > _ABANDONED_S:
                self._disk.delete(self._marker(batch_id))
        except FileNotFoundError:
            pass

    def sweep(self, now: float) -> None:
        """Deletes everything whose time is over."""
        for owner in os.listdir(self._root):
            if not _OWNER.fullmatch(owner):
                continue
            self.files.sweep(owner, now)
            for batch_id in names_in(self._root / owner / "batches"):
                try:
                    stored = self.get(owner, batch_id)
                except (NotFound, DataLoss):
                    continue
                ended = stored.state is not None and stored.state.status.final and stored.state.ended_at
                if ended and ended + self.files.config.lifetime_s < now:
                    self._disk.delete_folder(self._folder(owner, batch_id))

    def _state(self, folder: Path) -> RunState | None:
        """Returns the state of its end, or what the last run says. One that died as it began says nothing."""
        end = _end(folder)
        if end is not None:
            return end
        for epoch in reversed(_epochs(folder)):
            try:
                return from_json(RunState, (folder / f"run-{epoch:08}.json").read_bytes())
            except DataLoss:
                continue
        return None

    def _folder(self, owner: str, batch_id: str) -> Path:
        return self._root / owner / "batches" / batch_id

    def _marker(self, batch_id: str) -> Path:
        return self._root / "open" / batch_id

    def _log(self, folder: Path, epoch: int) -> Path:
        return folder / f"run-{epoch:08}.log"


def joined(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Joins pieces to some of so many bytes at least, but for the last."""
    waiting: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        waiting.append(piece)
        num_bytes += len(piece)
        if num_bytes >= size:
            yield b"".join(waiting)
            waiting, num_bytes = [], 0
    if waiting:
        yield b"".join(waiting)


def _epochs(folder: Path) -> list[int]:
    return sorted(int(found[1]) for found in map(_RUN.fullmatch, os.listdir(folder)) if found)


def _end(folder: Path) -> RunState | None:
    try:
        return from_json(RunState, (folder / "end.json").read_bytes())
    except (FileNotFoundError, DataLoss):
        return None


def _cancelled(folder: Path) -> int | None:
    try:
        text = (folder / "cancel").read_bytes()
    except FileNotFoundError:
        return None
    # Created and written are two steps.
    return int(text) if text.isdigit() else int((folder / "cancel").stat().st_mtime)


def _lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields lines with their offsets. Of a longer line no more than its beginning."""
    offset = 0
    while raw := file.readline(max_bytes + 1):
        yield offset, raw
        offset += len(raw)
        rest = raw
        while len(rest) > max_bytes and not rest.endswith(b"\n"):
            rest = file.readline(max_bytes + 1)
            offset += len(rest)
