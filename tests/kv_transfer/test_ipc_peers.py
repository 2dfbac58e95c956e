"""Endpoints as text, processes that end, and peers' pools that are opened once and closed when they are gone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.cuda_ipc.endpoint import IpcEndpoint, ProcessId, _start_time
from kv_transfer.cuda_ipc.peers import IpcPeers, PeerPool
from twostep.errors import ResourceExhausted, Unavailable

OWN = ProcessId.own()
ENDPOINT = IpcEndpoint(
    process=OWN,
    life="a",
    gpu="0b6e8f9e-0000-1111-2222-333344445555",
    pool_handle=bytes(range(64)),
    pool_offset=512,
    num_blocks=100,
    block_bytes=1 << 21,
    probe_handle=bytes(range(64, 128)),
    probe_offset=0,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """Addresses instead of memory."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.error: Unavailable | None = None

    def open(self, endpoint: IpcEndpoint) -> tuple[PeerPool, Callable[[], None]]:
        if self.error is not None:
            raise self.error
        self.opened.append(endpoint.life)
        return PeerPool(len(self.opened), 0), lambda: self.closed.append(endpoint.life)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@given(
    st.builds(
        IpcEndpoint,
        process=st.builds(
            ProcessId,
            boot_id=st.from_regex(r"[0-9a-f-]{36}", fullmatch=True),
            pid_namespace=st.from_regex(r"[0-9]{0,10}", fullmatch=True),
            pid=st.integers(1, 2**22),
            start_time=st.integers(0, 2**40),
        ),
        life=st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
        gpu=st.just("") | st.uuids().map(str),
        pool_handle=st.binary(min_size=0, max_size=64),
        pool_offset=st.integers(0, 2**40),
        num_blocks=st.integers(0, 2**31),
        block_bytes=st.integers(0, 2**31),
        probe_handle=st.binary(min_size=0, max_size=64),
        probe_offset=st.integers(0, 2**40),
    )
)
def test_endpoints_travel_as_text(endpoint: IpcEndpoint) -> None:
    text = str(endpoint)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 500
    assert IpcEndpoint.parse(text) == endpoint


@given(st.text(max_size=80) | st.builds(lambda i, c: str(ENDPOINT)[:i] + c + str(ENDPOINT)[i + 1 :], st.integers(0, 300), st.characters()))
def test_other_text_is_unavailable_or_another_endpoint(text: str) -> None:
    try:
        IpcEndpoint.parse(text)
    except Unavailable:
        pass


@pytest.mark.parametrize(
    "text",
    [
        "",
        str(ENDPOINT).replace("cuda_ipc:1:", "cuda_ipc:2:"),
        str(ENDPOINT).replace("cuda_ipc", "nixl"),
        str(ENDPOINT) + ":",
        str(ENDPOINT).replace(":512:", ":-512:"),
        str(ENDPOINT).replace(":512:", ":x:"),
        str(ENDPOINT).replace(":512:", f":{1 << 64}:"),
        str(ENDPOINT) + "0" * 5000,
    ],
)
def test_damaged_text_is_unavailable(text: str) -> None:
    with pytest.raises(Unavailable):
        IpcEndpoint.parse(text)


def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.DEVNULL)


def id_of(process: subprocess.Popen[bytes]) -> ProcessId:
    return replace(OWN, pid=process.pid, start_time=_start_time(process.pid) or 0)


def test_a_process_is_seen_to_end_and_never_mistaken_for_a_later_one() -> None:
    with child() as running:
        process = id_of(running)
        assert OWN.gone(OWN) is False
        assert process.gone(OWN) is False
        assert replace(process, start_time=process.start_time - 1).gone(OWN) is True
        assert replace(process, boot_id="another host").gone(OWN) is None
        assert replace(process, pid_namespace="1").gone(OWN) is None
        running.kill()
        # Its remains count as gone before anybody has waited for it.
        end = time.monotonic() + 60
        while not process.gone(OWN):
            assert time.monotonic() < end
            time.sleep(0.01)
    assert process.gone(OWN) is True


def test_a_pool_is_opened_once_and_closed_when_its_process_is_gone(driver: Driver) -> None:
    with child() as running:
        endpoint = replace(ENDPOINT, process=id_of(running))
        peers = IpcPeers(driver, OWN, idle_s=0.0)
        with peers.pool_of(endpoint) as one, peers.pool_of(endpoint) as two:
            assert one == two
        peers.sweep()
        assert (driver.opened, driver.closed) == (["a"], [])
        with peers.pool_of(endpoint):
            running.kill()
            running.wait()
            peers.sweep()
            assert driver.closed == []  # a read is under way
            with pytest.raises(Unavailable, match="ended"), peers.pool_of(endpoint):
                pass
        peers.sweep()
        assert (driver.closed, peers.num_open) == (["a"], 0)


def test_a_pool_whose_process_cannot_be_seen_is_closed_when_idle(driver: Driver) -> None:
    clock = Clock()
    peers = IpcPeers(driver, OWN, idle_s=10.0, clock=clock)
    hidden = replace(ENDPOINT, process=replace(OWN, pid_namespace="1"))
    with peers.pool_of(hidden):
        clock.now = 100.0
        peers.sweep()
    clock.now = 109.0
    peers.sweep()
    assert peers.num_open == 1
    clock.now = 111.0
    peers.sweep()
    assert (driver.closed, peers.num_open) == (["a"], 0)


def test_the_longest_unused_makes_room(driver: Driver) -> None:
    peers = IpcPeers(driver, OWN, max_peers=2)
    one, two, three = (replace(ENDPOINT, life=life) for life in "abc")
    for endpoint in (one, two, one):
        with peers.pool_of(endpoint):
            pass
    with peers.pool_of(three):
        assert driver.closed == ["b"]
        with peers.pool_of(one), pytest.raises(ResourceExhausted), peers.pool_of(two):
            pass
    peers.close()
    assert sorted(driver.closed) == ["a", "b", "c"]


def test_a_pool_that_does_not_open_leaves_nothing(driver: Driver) -> None:
    peers = IpcPeers(driver, OWN)
    driver.error = Unavailable("no")
    with pytest.raises(Unavailable), peers.pool_of(ENDPOINT):
        pass
    assert peers.num_open == 0
    driver.error = None
    with peers.pool_of(ENDPOINT) as pool:
        assert pool.pool == 1
    with pytest.raises(Unavailable, match="two"), peers.pool_of(replace(ENDPOINT, block_bytes=8)):
        pass


def test_many_threads_open_it_once(driver: Driver) -> None:
    peers = IpcPeers(driver, OWN)
    barrier = threading.Barrier(8)

    def use() -> None:
        barrier.wait()
        for _ in range(50):
            with peers.pool_of(ENDPOINT):
                peers.sweep()

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.opened == ["a"]
    peers.close()
    assert driver.closed == ["a"]
