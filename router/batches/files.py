"""Files of clients on disk. Everything blocks: it runs in threads.

    DIR/OWNER/files/file-….json   what the file is; it exists from here on
    DIR/OWNER/files/file-….data   its content, there before
    DIR/OWNER/uploads/            what is still coming

OWNER stands for a tenant: none reaches another's folder.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar

from router.batches.disk import Disk
from router.batches.records import FILE_ID, FileRecord, from_json, new_id, output_id, to_json
from twostep.errors import DataLoss, NotFound, ResourceExhausted

Item = TypeVar("Item")
_LEAST_S = 2.0
# Looking takes this part of the time at most.
_SHARE = 1 / 50
_BLOCK_BYTES = 512


class Occupied(NamedTuple):
    num_files: int
    num_bytes: int


@dataclass(slots=True)
class _Seen:
    occupied: Occupied
    until: float


class Occupancy:
    """Knows what files and batches of an owner take on disk. A folder is looked through from time to time, and what this router changes is
    counted at once; what others change is known at the next look. So a file more costs the same however many there are. May be asked from
    several threads."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seen: dict[Path, _Seen] = {}

    def of(self, folder: Path) -> Occupied:
        """Counts all there is below it, as far as it is known."""
        seen, began = self._seen.get(folder), self._monotonic()
        if seen is not None:
            if began < seen.until:
                return seen.occupied
            seen.until = began + _LEAST_S  # others need not look as well
        occupied, ended = _look(folder, set()), self._monotonic()
        self._seen[folder] = _Seen(occupied, ended + max(_LEAST_S, (ended - began) / _SHARE))
        return occupied

    def changed(self, folder: Path, num_files: int, num_bytes: int) -> None:
        """Counts so many bytes more, or fewer."""
        for each, seen in list(self._seen.items()):
            if folder.is_relative_to(each):
                seen.occupied = Occupied(seen.occupied.num_files + num_files, seen.occupied.num_bytes + num_bytes)


def _look(folder: Path, known: set[tuple[int, int]]) -> Occupied:
    num_files = num_bytes = 0
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return Occupied(0, 0)
    with entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            num_files += 1
            if stat.S_ISDIR(found.st_mode):
                below = _look(folder / entry.name, known)
                num_files, num_bytes = num_files + below.num_files, num_bytes + below.num_bytes
            elif found.st_nlink > 1:
                # The same content under two names, in one of which it was counted.
                num_bytes += 0 if (found.st_dev, found.st_ino) in known else size_of(found)
                known.add((found.st_dev, found.st_ino))
            else:
                num_bytes += size_of(found)
    return Occupied(num_files, num_bytes)


def size_of(found: os.stat_result) -> int:
    """Returns the bytes that a file takes. Not every volume tells its blocks."""
    return max(found.st_size, found.st_blocks * _BLOCK_BYTES)


_UPLOADS = "uploads"
# For how long unfinished things are kept: uploads that broke off, contents whose records never came.
_ABANDONED_S = 3600.0
# Records of files and of batches are files too. Lists are read whole.
MAX_OWNER_FILES = 100_000
# A volume's smallest.
_RECORD_BYTES = 4096


class Page(NamedTuple, Generic[Item]):
    """A part of a list. `has_more`: more follow."""

    items: list[Item]
    has_more: bool


def page_of(
    ids: Iterable[str], read: Callable[[str], Item | None], *, after: str | None, limit: int, ascending: bool = False
) -> Page[Item]:
    """Reads a page of a list, newest first or the other way round. `after`: the last id of the page before, which may be gone by now. What
    cannot be read (NotFound, DataLoss) is passed over, as is what `read` returns None for."""
    found: list[Item] = []
    for each in sorted(ids, reverse=not ascending):
        if after is not None and not (each > after if ascending else each < after):
            continue
        try:
            item = read(each)
        except (NotFound, DataLoss):
            continue
        if item is None:
            continue
        if len(found) == limit:
            return Page(found, True)
        found.append(item)
    return Page(found, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """`served`: the model's name. `concurrency`: requests of all batches that this router asks at once. `lifetime_s`: for how long ended
    batches are kept, and files that say nothing themselves. `max_owner_bytes`: of all that one tenant has on disk, 0 for no bound; with
    `one_account` it is the bound of all tenants together, who are not told apart."""

    root: Path
    served: str
    concurrency: int
    max_file_bytes: int
    max_line_bytes: int
    max_owner_bytes: int
    lifetime_s: float
    one_account: bool = False


class FileStore:
    def __init__(
        self, config: BatchConfig, disk: Disk, *, wall: Callable[[], float] = time.time, occupancy: Occupancy | None = None
    ) -> None:
        self.config = config
        self._root, self._disk, self._wall = config.root, disk, wall
        self._occupancy = occupancy or Occupancy()

    # ---- coming in ---------------------------------------------------------------------------------------------------------

    def begin_upload(self, owner: str) -> Path:
        """Returns the path to append to. Raises ResourceExhausted."""
        self.check_room(owner)
        folder = self._root / owner / _UPLOADS
        self._disk.make_folder(folder)
        self._disk.make_folder(self._folder(owner))
        return folder / os.urandom(16).hex()

    def append_upload(self, owner: str, upload: Path, data: bytes) -> None:
        """Raises ResourceExhausted: there may be many at once, each of which alone would have room."""
        self.check_room(owner, len(data))
        is_new = not upload.exists()
        self._disk.append(upload, data)
        self._occupancy.changed(upload, int(is_new), len(data))

    def finish_upload(self, owner: str, upload: Path, record: FileRecord) -> FileRecord:
        """Raises ResourceExhausted: others may have come meanwhile."""
        self.check_room(owner)
        return self.keep(owner, upload, record)

    def keep(self, owner: str, path: Path, record: FileRecord) -> FileRecord:
        """Makes a file of what is at `path`."""
        self._disk.rename(path, self._data(owner, record.id))
        self._disk.write(self._record(owner, record.id), to_json(record))
        self._occupancy.changed(self._folder(owner), 1, _RECORD_BYTES)
        return record

    def drop_upload(self, upload: Path) -> None:
        self._delete(upload)

    def new_record(
        self, *, filename: str, num_bytes: int, purpose: str, lives_s: int | None, made: tuple[str, int, str] | None = None
    ) -> FileRecord:
        """`made`: batch, run and kind of an output."""
        now = self._wall()
        return FileRecord(
            id=new_id("file-", now) if made is None else output_id(*made, now),
            filename=filename,
            num_bytes=num_bytes,
            created=int(now),
            purpose=purpose,
            expires=int(now + (self.config.lifetime_s if lives_s is None else lives_s)),
        )

    # ---- what is there -----------------------------------------------------------------------------------------------------

    def get(self, owner: str, file_id: str) -> FileRecord:
        """Raises NotFound, DataLoss."""
        if FILE_ID.fullmatch(file_id):
            try:
                return from_json(FileRecord, self._record(owner, file_id).read_bytes())
            except FileNotFoundError:
                pass
        raise NotFound(f"there is no file {file_id[:64]!r}; GET /v1/files lists yours")

    def open_content(self, owner: str, file_id: str) -> BinaryIO:
        """Raises NotFound, DataLoss."""
        try:
            return self.content(owner, file_id).open("rb")
        except FileNotFoundError:
            raise NotFound(f"the file {file_id} is gone") from None

    def content(self, owner: str, file_id: str) -> Path:
        """Raises NotFound, DataLoss."""
        self.get(owner, file_id)
        return self._data(owner, file_id)

    def ids(self, owner: str) -> list[str]:
        return [name.removesuffix(".json") for name in names_in(self._folder(owner)) if FILE_ID.fullmatch(name.removesuffix(".json"))]

    def page(self, owner: str, *, after: str | None, limit: int, ascending: bool, purpose: str | None) -> Page[FileRecord]:
        """Returns a page of an owner's files. Damaged records are passed over."""

        def read(file_id: str) -> FileRecord | None:
            record = self.get(owner, file_id)
            return record if purpose in (None, record.purpose) else None

        return page_of(self.ids(owner), read, after=after, limit=limit, ascending=ascending)

    def delete(self, owner: str, file_id: str) -> None:
        """Raises NotFound. A batch that has begun with it goes on."""
        self.get(owner, file_id)
        self.remove(owner, file_id)

    def remove(self, owner: str, file_id: str) -> None:
        """Removes a file, which may be gone already."""
        self._delete(self._record(owner, file_id))
        self._delete(self._data(owner, file_id))

    def sweep(self, owner: str, now: float) -> None:
        """Files whose time is over, and what is left of uploads that broke off."""
        for name in names_in(self._root / owner / _UPLOADS):
            self._drop_old(self._root / owner / _UPLOADS / name, now)
        for name in names_in(self._folder(owner)):
            path = self._folder(owner) / name
            file_id, _, kind = name.rpartition(".")
            if kind != "json" or not FILE_ID.fullmatch(file_id):
                if not self._record(owner, file_id).exists():
                    self._drop_old(path, now)
                continue
            try:
                expires = self.get(owner, file_id).expires
            except (NotFound, DataLoss):
                continue
            if expires is not None and expires <= now:
                self.remove(owner, file_id)

    def _drop_old(self, path: Path, now: float) -> None:
        try:
            if now - path.stat().st_mtime > _ABANDONED_S:
                (self._disk.delete_folder if path.is_dir() else self._disk.delete)(path)
        except FileNotFoundError:
            pass

    def _delete(self, path: Path) -> None:
        try:
            found = path.stat()
        except FileNotFoundError:
            return
        self._disk.delete(path)
        # A batch that is made of it has it under another name.
        self._occupancy.changed(path, -1, -size_of(found) if found.st_nlink == 1 else 0)

    # ---- room --------------------------------------------------------------------------------------------------------------

    def has_room(self, owner: str, num_bytes: int = 1) -> bool:
        """Returns whether there is room for so many bytes more, of files, of what is still coming, and of batches with what they are made
        of."""
        if not self.config.max_owner_bytes:
            return True
        occupied = self._occupancy.of(self._root if self.config.one_account else self._root / owner)
        return occupied.num_bytes + num_bytes <= self.config.max_owner_bytes and occupied.num_files < MAX_OWNER_FILES

    def check_room(self, owner: str, num_bytes: int = 1) -> None:
        """Raises ResourceExhausted."""
        if not self.has_room(owner, num_bytes):
            whose = (
                "all files and batches here, as no API keys tell whose they are," if self.config.one_account else "your files and batches"
            )
            raise ResourceExhausted(
                f"{whose} may take {self.config.max_owner_bytes} bytes on disk and be {MAX_OWNER_FILES} files in all, and there is no "
                "room for more; delete some files (of those that a batch is made of, wait for its end too), or ask whoever runs this for "
                "more (--max-owner-bytes)"
            )

    def _folder(self, owner: str) -> Path:
        return self._root / owner / "files"

    def _record(self, owner: str, file_id: str) -> Path:
        return self._folder(owner) / f"{file_id}.json"

    def _data(self, owner: str, file_id: str) -> Path:
        return self._folder(owner) / f"{file_id}.data"


def names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
