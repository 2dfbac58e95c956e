"""Routers that die at any moment: every request of a batch is answered at least once, unless routers die of it, and has one line in what
comes out."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.batches.disk import Disk, Threads
from router.batches.files import BatchConfig, FileStore, Occupancy
from router.batches.journal import NO_USAGE, AnswerRecord
from router.batches.records import BatchRequest, BatchStatus, owner_of
from router.batches.run import Answered, BatchRun
from router.batches.store import BatchStore
from twostep.errors import InvalidRequest, NotFound, ResourceExhausted
from twostep.metrics.batches import BatchMetrics, BatchState
from twostep.metrics.registry import MetricsRegistry

IDS = [f"request {index}" for index in range(7)]
REFUSED = {IDS[2], IDS[5]}
TENANT = "a tenant"
OWNER = owner_of(TENANT)
ENDPOINT = "/v1/completions"


class PowerCut(RuntimeError):
    pass


class MortalDisk(Disk):
    """Does `lives` changes, then half of one, then nothing."""

    def __init__(self, lives: int | None = None) -> None:
        self._lives = lives

    def die(self) -> None:
        self._lives = -1

    def _live(self) -> bool:
        """False: this is the one that is done by half."""
        if self._lives is None:
            return True
        self._lives -= 1
        if self._lives < -1:
            raise PowerCut
        return self._lives >= 0

    def _live_or_die(self) -> None:
        if not self._live():
            raise PowerCut

    def make_folder(self, path: Path) -> None:
        self._live_or_die()
        super().make_folder(path)

    def write(self, path: Path, data: bytes) -> None:
        if not self._live():
            path.with_name(f".{path.name}.left").write_bytes(data[: len(data) // 2])
            raise PowerCut
        super().write(path, data)

    def create(self, path: Path, data: bytes) -> None:
        if not self._live():
            super().create(path, data[: len(data) // 2])
            raise PowerCut
        super().create(path, data)

    def append(self, path: Path, data: bytes) -> None:
        if not self._live():
            super().append(path, data[: len(data) // 2])
            raise PowerCut
        super().append(path, data)

    def rename(self, path: Path, to: Path) -> None:
        self._live_or_die()
        super().rename(path, to)

    def link(self, path: Path, to: Path) -> None:
        self._live_or_die()
        super().link(path, to)

    def delete(self, path: Path) -> None:
        self._live_or_die()
        super().delete(path)


class Answers:
    """Counts what is asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    @asynccontextmanager
    async def answer(self, asked: BatchRequest, body: bytes, request_id: str) -> AsyncIterator[Answered]:
        prompt = json.loads(body)["prompt"]
        self.asked[prompt] += 1
        await asyncio.sleep(0)
        if prompt in REFUSED:
            raise InvalidRequest("not this one")
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        yield Answered(body=json.dumps({"text": prompt, "usage": usage}).encode(), usage=usage)

    def failure(self, error: Exception) -> tuple[int, bytes]:
        return 400, json.dumps({"error": str(error)}).encode()

    def ready(self) -> bool:
        return True


def config_of(root: Path, *, max_owner_bytes: int = 0, one_account: bool = False) -> BatchConfig:
    sizes = {"max_file_bytes": 1 << 20, "max_line_bytes": 1 << 16, "max_owner_bytes": max_owner_bytes}
    return BatchConfig(root=root, served="m", concurrency=3, lifetime_s=1e9, one_account=one_account, **sizes)


def store_of(root: Path, lives: int | None = None) -> BatchStore:
    disk = MortalDisk(lives)
    return BatchStore(disk, FileStore(config_of(root), disk))


def make_input(store: BatchStore) -> str:
    lines = [{"custom_id": each, "method": "POST", "url": ENDPOINT, "body": {"prompt": each}} for each in IDS]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    upload = store.files.begin_upload(OWNER)
    store.files.append_upload(OWNER, upload, content)
    return store.files.keep(OWNER, upload, store.files.new_record(filename="in", num_bytes=len(content), purpose="batch", lives_s=None)).id


def asked_for(input_file_id: str, number: int = 0) -> BatchRequest:
    return BatchRequest(
        id=f"batch_{number:032x}",
        tenant=TENANT,
        key_id="",
        served="m",
        endpoint=ENDPOINT,
        input_file_id=input_file_id,
        completion_window="24h",
        created=1,
        expires=1 << 40,
    )


async def run_once(store: BatchStore, batch_id: str, answers: Answers, threads: Threads) -> bool:
    """False: the power was cut."""
    run = BatchRun(
        store,
        threads,
        store.get(OWNER, batch_id).asked,
        endpoints=answers,
        held=lambda: True,
        gate=asyncio.Semaphore(3),
        alone=asyncio.Lock(),
        look_s=0.01,
        metrics=BatchMetrics(MetricsRegistry(), lambda: BatchState(num_open=0, running={})),
    )
    try:
        await run.run()
    except PowerCut:
        return False
    return True


def lines_of(store: BatchStore, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    with store.files.open_content(OWNER, file_id) as file:
        return [json.loads(each) for each in file]


def check_answers(root: Path, batch_id: str, answers: Answers, *, orphans: bool, num_deaths: int = 0) -> None:
    """Two deaths may cost one request its answer."""
    store = store_of(root)
    stored = store.get(OWNER, batch_id)
    assert stored.state is not None
    assert stored.state.status is BatchStatus.COMPLETED
    done, failed = lines_of(store, stored.state.output_file_id), lines_of(store, stored.state.error_file_id)
    lost = {each["custom_id"] for each in failed if (each["error"] or {}).get("code") == "router_lost"}
    assert len(lost) <= num_deaths // 2
    wrong = REFUSED | lost
    assert [each["custom_id"] for each in done] == [each for each in IDS if each not in wrong], "each once, in the input's order"
    assert [each["custom_id"] for each in failed] == [each for each in IDS if each in wrong]
    assert all(each["response"]["body"]["text"] == each["custom_id"] for each in done)
    assert (stored.state.total, stored.state.tally.completed, stored.state.tally.failed) == (7, len(done), len(failed))
    assert (stored.state.tally.input_tokens, stored.state.tally.output_tokens) == (3 * len(done), 2 * len(done))
    assert set(answers.asked) | lost == set(IDS)
    assert store.open_batches() == {}, "nobody looks for it any more"
    assert not list((root / OWNER / "batches" / batch_id).glob("*.log"))
    if not orphans:
        wanted = {stored.asked.input_file_id, stored.state.output_file_id, stored.state.error_file_id}
        assert set(store.files.ids(OWNER)) == wanted, "what dead runs published is gone"


@pytest.fixture(autouse=True)
def _no_power_cuts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@contextmanager
def one_batch() -> Iterator[tuple[Path, BatchStore, str, Threads]]:
    """A folder with one batch in it that nobody has begun, its store, and threads to run it with."""
    threads = Threads()
    try:
        with tempfile.TemporaryDirectory() as folder:
            store = store_of(Path(folder))
            store.prepare()
            yield Path(folder), store, store.create(asked_for(make_input(store))).asked.id, threads
    finally:
        threads.close()


@settings(max_examples=25)
@given(st.lists(st.integers(0, 30), max_size=4))
@example([0, 1, 2, 3, 4, 5])
@example([12, 12, 12])
def test_every_request_has_one_line_whenever_routers_die(lives: list[int]) -> None:
    asyncio.run(_routers_that_die(lives))


async def _routers_that_die(lives: Sequence[int]) -> None:
    answers = Answers()
    with one_batch() as (root, store, batch_id, threads):
        ended, done = False, 0
        for each in lives:
            ended = await run_once(store_of(root, each), batch_id, answers, threads)
            state = store.get(OWNER, batch_id).state
            if state is not None:
                assert state.tally.completed >= done, "clients see no step back"
                done = state.tally.completed
        # Nobody looks for a batch whose marker is gone; a run that finds one that is over leaves it so.
        if not ended or OWNER in store.open_batches().values():
            assert await run_once(store, batch_id, answers, threads)
        check_answers(root, batch_id, answers, orphans=False, num_deaths=len(lives))


class Deadly(Answers):
    """The router dies of one request whenever it is asked."""

    def __init__(self, deadly: str, disk: MortalDisk) -> None:
        super().__init__()
        self._deadly, self.disk = deadly, disk

    @asynccontextmanager
    async def answer(self, asked: BatchRequest, body: bytes, request_id: str) -> AsyncIterator[Answered]:
        async with super().answer(asked, body, request_id) as answer:
            if json.loads(body)["prompt"] == self._deadly:
                self.disk.die()
            yield answer


@pytest.mark.parametrize("deadly", [IDS[0], IDS[3], IDS[6]])
async def test_a_request_that_kills_routers_is_failed_by_name_and_the_others_are_answered(deadly: str) -> None:
    answers = Deadly(deadly, MortalDisk())
    with one_batch() as (root, store, batch_id, threads):
        for num_deaths in range(3):
            answers.disk = MortalDisk()
            lived = await run_once(BatchStore(answers.disk, FileStore(config_of(root), answers.disk)), batch_id, answers, threads)
            assert lived is (num_deaths == 2)
        check_answers(root, batch_id, answers, orphans=False, num_deaths=2)
        state = store.get(OWNER, batch_id).state
        assert state is not None
        errors = {each["custom_id"]: each["error"] for each in lines_of(store, state.error_file_id)}
        assert errors[deadly]["code"] == "router_lost"
        assert answers.asked[deadly] == 2


async def test_a_router_that_leaves_a_batch_has_not_died_of_it() -> None:
    class Slow(Answers):
        def __init__(self) -> None:
            super().__init__()
            self.begun, self.go_on = asyncio.Event(), False

        @asynccontextmanager
        async def answer(self, asked: BatchRequest, body: bytes, request_id: str) -> AsyncIterator[Answered]:
            self.begun.set()
            if not self.go_on:
                await asyncio.Event().wait()
            async with super().answer(asked, body, request_id) as answer:
                yield answer

    answers = Slow()
    with one_batch() as (root, store, batch_id, threads):
        for _ in range(3):
            answers.begun.clear()
            run = asyncio.create_task(run_once(store, batch_id, answers, threads))
            await answers.begun.wait()
            run.cancel()
            await asyncio.wait((run,))
        answers.go_on = True
        assert await run_once(store, batch_id, answers, threads)
        check_answers(root, batch_id, answers, orphans=False)


@settings(max_examples=25)
@given(st.lists(st.one_of(st.none(), st.integers(0, 30)), min_size=2, max_size=4))
def test_runs_that_do_not_know_of_each_other_do_no_harm(lives: list[int | None]) -> None:
    """As after a router that stood still for longer than its lease."""

    async def work() -> None:
        answers = Answers()
        with one_batch() as (root, store, batch_id, threads):
            # One that ends takes away what the others read: they fail, and that is all.
            await asyncio.gather(*(run_once(store_of(root, each), batch_id, answers, threads) for each in lives), return_exceptions=True)
            await run_once(store, batch_id, answers, threads)
            check_answers(root, batch_id, answers, orphans=True)

    asyncio.run(work())


@pytest.mark.parametrize("lives", range(9))
def test_a_batch_is_there_with_its_marker_or_not_at_all(lives: int, tmp_path: Path) -> None:
    store = store_of(tmp_path)
    store.prepare()
    asked = asked_for(make_input(store))
    try:
        store_of(tmp_path, lives).create(asked)
    except PowerCut:
        pass
    try:
        store.get(OWNER, asked.id)
    except NotFound:
        # A marker alone is forgotten in time.
        store.forget_marker(asked.id, 1e12)
        store.sweep(1e8)
        assert store.open_batches() == {}
    else:
        assert store.open_batches() == {asked.id: OWNER}


@pytest.mark.parametrize("lives", range(8))
def test_a_file_is_there_whole_or_not_at_all(lives: int, tmp_path: Path) -> None:
    store_of(tmp_path).prepare()
    dying = store_of(tmp_path, lives)
    try:
        make_input(dying)
    except PowerCut:
        assert store_of(tmp_path).files.ids(OWNER) == []
    else:
        assert lives >= 4
    store = store_of(tmp_path)
    there = store.files.ids(OWNER)
    store.sweep(time.time())
    assert store.files.ids(OWNER) == there
    store.sweep(1e12)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], "what is left is swept"


def test_what_is_kept_is_its_users_alone(tmp_path: Path) -> None:
    root = tmp_path / "new" / "batches"
    disk = Disk()
    for _ in range(2):
        disk.make_folder(root / "owner" / "files")
    for write in (disk.write, disk.create, disk.create_whole, disk.append):
        write(root / "owner" / "files" / write.__name__, b"a prompt")
    for again in (disk.create, disk.create_whole):
        with pytest.raises(FileExistsError):
            again(root / "owner" / "files" / "create", b"another's")
    kept = list(root.parent.rglob("*"))
    assert len(kept) == 3 + 4
    for path in (root.parent, *kept):
        assert path.stat().st_mode & 0o077 == 0, path
    assert abs(disk.now(root) - time.time()) < 60.0, "the volume's time"
    assert len(list(root.parent.rglob("*"))) == len(kept)


def bounded(root: Path, clock: list[float], **options: Any) -> BatchStore:
    disk = Disk()
    store = BatchStore(disk, FileStore(config_of(root, **options), disk, occupancy=Occupancy(lambda: clock[0])))
    store.prepare()
    return store


def send(files: FileStore, num_bytes: int, owner: str = OWNER) -> str:
    upload = files.begin_upload(owner)
    files.append_upload(owner, upload, b"x" * num_bytes)
    record = files.new_record(filename="in", purpose="batch", lives_s=None, num_bytes=num_bytes)
    return files.finish_upload(owner, upload, record).id


def test_an_owners_bytes_are_bounded_however_they_come(tmp_path: Path) -> None:
    clock = [0.0]
    # Records take some too.
    store = bounded(tmp_path, clock, max_owner_bytes=10_300_000)
    files = store.files
    one, other = files.begin_upload(OWNER), files.begin_upload(OWNER)
    files.append_upload(OWNER, one, b"x" * 6_000_000)
    with pytest.raises(ResourceExhausted):
        files.append_upload(OWNER, other, b"x" * 6_000_000)  # both at once
    files.append_upload(OWNER, other, b"x" * 4_000_000)
    record = partial(files.new_record, filename="in", purpose="batch", lives_s=None)
    kept = files.finish_upload(OWNER, one, record(num_bytes=6_000_000)).id
    with pytest.raises(ResourceExhausted):
        files.append_upload(OWNER, other, b"x" * 2_000_000)  # one after the other, but begun before
    files.drop_upload(other)
    asked = store.create(asked_for(kept)).asked
    files.delete(OWNER, kept)
    for _ in range(2):
        with pytest.raises(ResourceExhausted):
            send(files, 5_000_000)  # what a batch still needs is there, whatever it is called
        for path in (tmp_path / OWNER / "uploads").iterdir():
            files.drop_upload(path)
        clock[0] += 1000.0
    send(files, 4_000_000)
    # Another router's, and what a batch has answered: known soon, if not at once.
    store.begin_run(OWNER, asked.id)
    store.record(OWNER, asked.id, 1, [AnswerRecord("a", True, NO_USAGE, b"x" * 300_000)])
    clock[0] += 1000.0
    assert not files.has_room(OWNER)
    with pytest.raises(ResourceExhausted):
        files.begin_upload(OWNER)
    with pytest.raises(ResourceExhausted):
        store.create(asked_for(files.ids(OWNER)[0]))
    assert files.begin_upload(owner_of("another")), "it is each one's own bound"
    store.close(OWNER, asked.id)
    clock[0] += 1000.0
    assert files.begin_upload(OWNER)


def test_batches_that_are_not_over_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.batches.store.MAX_OPEN", 2)
    store = store_of(tmp_path)
    store.prepare()
    file_id = make_input(store)
    for number in range(2):
        store.create(asked_for(file_id, number))
    with pytest.raises(ResourceExhausted):
        store.create(asked_for(file_id, 2))


def test_small_files_count_for_what_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def most(files: FileStore) -> int:
        for num_sent in range(1000):
            try:
                send(files, 1)
            except ResourceExhausted:
                return num_sent
            clock[0] += 1000.0
        raise AssertionError("there is no bound")

    assert 20 < most(bounded(tmp_path / "blocks", clock, max_owner_bytes=400_000).files) < 100, "each takes a block, and its record one"
    monkeypatch.setattr("router.batches.files.MAX_OWNER_FILES", 20)
    assert 5 < most(bounded(tmp_path / "files", clock, max_owner_bytes=1 << 40).files) <= 10


async def test_a_batch_whose_answers_find_no_room_waits_for_some(tmp_path: Path) -> None:
    looks: list[bool] = []

    class Full(FileStore):
        """Until it was asked often."""

        def has_room(self, owner: str, num_bytes: int = 1) -> bool:
            looks.append(len(looks) > 20)
            assert looks[-1] or not answers.asked
            return looks[-1]

    disk, threads, answers = Disk(), Threads(), Answers()
    store = store_of(tmp_path)
    store.prepare()
    batch_id = store.create(asked_for(make_input(store))).asked.id
    full = BatchStore(disk, Full(config_of(tmp_path, max_owner_bytes=1), disk))
    assert await run_once(full, batch_id, answers, threads)
    assert looks.count(False) > 20
    check_answers(tmp_path, batch_id, answers, orphans=False)
    threads.close()


def test_a_file_more_costs_the_same_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = bounded(tmp_path, [0.0], max_owner_bytes=1 << 40).files
    send(files, 1)
    looked: list[str] = []
    scandir = os.scandir

    def counted(folder: str) -> Any:
        looked.append(str(folder))
        return scandir(folder)

    monkeypatch.setattr("os.scandir", counted)
    for _ in range(30):
        send(files, 1)
    assert not looked


def test_without_keys_a_name_gives_no_room(tmp_path: Path) -> None:
    files = bounded(tmp_path, [0.0], max_owner_bytes=1_000_000, one_account=True).files
    send(files, 900_000, owner_of("a"))
    with pytest.raises(ResourceExhausted):
        send(files, 200_000, owner_of("b"))
