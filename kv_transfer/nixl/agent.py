"""One NIXL agent and the one thread that talks to it.

    event loop ── start_read ─▶ commands ─▶ thread: post, poll, land, poll      A call of the library may block (a connection, a copy
    event loop ◀─ future ────────────────────────────────────┘                  through host memory), and an agent is not safe for several
                                                                                threads.
While nothing is on its way, the thread wakes a few hundred times a second to let the library answer peers that connect. The library's own
progress thread would do that by spinning on a core. No call that pickles is used: descriptors are built from integers on either side,
metadata is the library's own format, notifications are not sent.

A read is never released before it has ended: the library cannot stop one, and would let go of memory that is still written.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kv_transfer.nixl.endpoint import Descriptors, NixlEndpoint
from kv_transfer.nixl.memory import Landing, Region
from twostep.errors import SetupError, TwostepError, Unavailable
from twostep.extras import install

log = logging.getLogger(__name__)

_IDLE_WAKE_S = 0.005
# How often reads are asked for: a few hundred MB over NVLink take 1-2 ms. Never without a pause: a thread that waits for Python's lock
# would not get it.
_EAGER_S = 0.005
_EAGER_POLL_S = 10e-6
_POLL_S = 200e-6
_PR_SET_TIMERSLACK = 29
_MAX_PEERS = 256
_CLOSE_S = 10.0


class NixlRead:
    """One read, from the event loop that wants it to the agent's thread that does it, and to its end.

    waiting ──▶ reading ──▶ landing ──▶ ended          `abandon` before it lands: the read goes on, and nothing lands
    """

    def __init__(self, source: NixlEndpoint, far: Descriptors, near: Descriptors, near_memory: str, landing: Landing | None) -> None:
        self.source, self.far = source, far
        self.near, self.near_memory = near, near_memory
        self.landing = landing
        # Ends when nothing of the read, nor of its landing, can be written any more; fails with Unavailable where the peer or the path
        # is gone, and with what the landing raised.
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # it cannot be cancelled
        # Why the landing could not be prepared: nothing lands.
        self.unprepared: Exception | None = None
        self.handle: Any = None
        self.posted_at = 0.0
        self._lock = threading.Lock()
        self._abandoned = False
        self._landing_begun = False

    def abandon(self) -> bool:
        """Gives it up. Returns True if nothing will land, though the read itself may go on up to `ended`; False if it is landing, or has:
        `ended` comes within milliseconds."""
        with self._lock:
            self._abandoned = not self._landing_begun
            return self._abandoned

    def may_land(self) -> bool:
        """Returns whether a read may write. The agent's thread asks once, before it lets anything land."""
        with self._lock:
            self._landing_begun = self.landing is not None and not self._abandoned
            return self._landing_begun

    @property
    def is_landing(self) -> bool:
        return self._landing_begun


class NixlAgent:
    """`start` and `close` block, `start_read` does not; all are safe from any thread."""

    def __init__(self, name: str, regions: list[Region], *, enter_thread: Callable[[], None], backend_params: dict[str, str]) -> None:
        """`enter_thread` runs in the agent's thread before anything else there (a GPU's context must be current in it)."""
        self.name = name
        self.metadata = b""
        self._regions = regions
        self._enter_thread = enter_thread
        self._backend_params = backend_params
        self._commands: queue.SimpleQueue[NixlRead | None] = queue.SimpleQueue()
        self._on_way: list[NixlRead] = []
        self._peers: OrderedDict[str, bytes] = OrderedDict()  # their metadata, which the first read from each loads
        # Peers whose reads failed: forgotten once their last read has ended, and connected to anew when asked for again.
        self._failed: set[str] = set()
        self._agent: Any = None
        # What the library raises, known once it is imported.
        self._library_errors: tuple[type[Exception], ...] = ()
        self._closing = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Registers the regions. Raises SetupError (no library, no backend, memory that cannot be registered)."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="kv-nixl", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join()
            self._thread = None
            raise

    @property
    def running(self) -> bool:
        return not self._closing and self._thread is not None

    def start_read(self, read: NixlRead) -> None:
        """Copies each far region into the near one beside it, then lets it land. Does not block; see NixlRead.ended."""
        with self._lock:
            if not self.running:
                read.ended.set_exception(Unavailable("the nixl transport is closed; try another worker"))
            else:
                self._commands.put(read)

    def close(self) -> None:
        """Waits for what is on its way, 10 s at most. What has not ended then is left to the end of the process."""
        with self._lock:
            self._closing = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commands.put(None)
            thread.join()

    # ---- the thread -------------------------------------------------------------------------------------------------------

    def _run(self, started: Future[None]) -> None:
        try:
            self._enter_thread()
            _set_timer_slack()
            self._set_up()
        except BaseException as error:  # noqa: BLE001 - start raises it
            self._agent = None
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._serve()
        except Exception:
            log.exception("the nixl transport has failed and is closed; it comes back with the worker's next start")
        finally:
            self._leave()

    def _set_up(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            # Optional, and not to be imported before something asks for it.
            from nixl import _api as api  # noqa: PLC0415
            from nixl import _bindings as bindings  # noqa: PLC0415
        except ImportError as error:
            raise SetupError(f"the nixl transport needs the nixl package ({error}); {install('nixl')}") from error
        self._library_errors = tuple(value for name, value in vars(bindings).items() if name.endswith("Error"))
        start_errors: tuple[type[Exception], ...] = (*self._library_errors, RuntimeError)
        try:
            self._agent = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend("UCX", self._backend_params)
            for region in self._regions:
                self._agent.register_memory([(region.address, region.num_bytes, region.device, "")], region.memory)
            self.metadata = self._agent.get_agent_metadata()
        except start_errors as error:
            raise SetupError(f"nixl does not start: {error!r}; its own log (NIXL_LOG_LEVEL=DEBUG, UCX_LOG_LEVEL=info) says more") from error

    def _serve(self) -> None:
        closes_at: float | None = None
        while True:
            wanted = self._next_command()
            if wanted is not None:
                self._begin(wanted)
            elif self._closing and closes_at is None:
                closes_at = time.monotonic() + _CLOSE_S
            self._on_way = [read for read in self._on_way if not self._ended(read)]
            self._forget_failed()
            if closes_at is not None and (not self._on_way or time.monotonic() > closes_at):
                return

    def _next_command(self) -> NixlRead | None:
        if not self._on_way:
            with contextlib.suppress(queue.Empty):
                return self._commands.get(timeout=_IDLE_WAKE_S)
            self._agent.get_new_notifs()  # lets the library work for peers
            return None
        with contextlib.suppress(queue.Empty):
            return self._commands.get_nowait()
        youngest = max(read.posted_at for read in self._on_way)
        time.sleep(_EAGER_POLL_S if time.monotonic() - youngest < _EAGER_S else _POLL_S)
        return None

    def _begin(self, read: NixlRead) -> None:
        try:
            self._load_peer(read.source)
            near = self._agent.get_xfer_descs(read.near, read.near_memory)
            far = self._agent.get_xfer_descs(read.far, read.source.memory)
            read.handle = self._agent.initialize_xfer("READ", near, far, read.source.agent)
            read.posted_at = time.monotonic()
            state = self._agent.transfer(read.handle)
        except Exception as error:  # noqa: BLE001 - the caller raises it; the thread must live
            self._fail(read, error)
            return
        if read.landing is not None:
            # While the bytes are on their way.
            try:
                read.landing.prepare()
            except Exception as error:  # noqa: BLE001 - the caller raises it, once the read has ended
                read.unprepared = error
        if not self._settled(read, state):
            self._on_way.append(read)

    def _ended(self, read: NixlRead) -> bool:
        if read.is_landing:
            return self._has_landed(read)
        try:
            state = self._agent.check_xfer_state(read.handle)
        except self._library_errors as error:
            self._fail(read, error)
            return True
        return self._settled(read, state)

    def _settled(self, read: NixlRead, state: str) -> bool:
        """Goes on from a state that the library gives. Returns True once the read has ended."""
        if state == "PROC":
            return False
        if state != "DONE":
            self._fail(read, Unavailable(f"reading from {read.source.agent} over nixl failed (the library says no more); prefill again"))
            return True
        self._release(read)
        if not read.may_land():
            read.ended.set_result(None)
            return True
        return self._has_landed(read, begin=True)

    def _has_landed(self, read: NixlRead, *, begin: bool = False) -> bool:
        assert read.landing is not None
        try:
            if begin:
                if read.unprepared is not None:
                    raise read.unprepared
                read.landing.begin()
            if not read.landing.done():
                return False
        except Exception as error:  # noqa: BLE001 - the caller raises it
            read.ended.set_exception(error)
            return True
        read.ended.set_result(None)
        return True

    def _fail(self, read: NixlRead, error: Exception) -> None:
        """Ends the read. What the library raises, or we say of a peer, is taken for the peer's failure."""
        self._release(read)
        if isinstance(error, (*self._library_errors, TwostepError)):
            self._failed.add(read.source.agent)
        if isinstance(error, self._library_errors):
            error = Unavailable(f"reading from {read.source.agent} over nixl failed ({error}); prefill again")
        read.ended.set_exception(error)

    def _release(self, read: NixlRead) -> None:
        handle, read.handle = read.handle, None
        if handle is not None:
            with contextlib.suppress(*self._library_errors):
                self._agent.release_xfer_handle(handle)

    # ---- peers --------------------------------------------------------------------------------------------------------------

    def _load_peer(self, source: NixlEndpoint) -> None:
        """Loads the peer's metadata where it is not known. Raises Unavailable, and what the library raises."""
        if source.agent == self.name:
            return
        busy = {read.source.agent for read in self._on_way}
        if source.agent in self._failed:
            raise Unavailable(f"earlier reads from {source.agent} over nixl failed and are still ending; prefill again")
        if self._peers.get(source.agent) == source.metadata:
            self._peers.move_to_end(source.agent)
            return
        if source.agent in busy:
            raise Unavailable(f"{source.agent} says that it is somewhere else now, but reads from it are on their way; prefill again")
        self._forget(source.agent)
        for idle in [name for name in self._peers if name not in busy][: max(0, len(self._peers) - _MAX_PEERS + 1)]:
            self._forget(idle)
        loaded = self._agent.add_remote_agent(source.metadata)
        loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
        if loaded != source.agent:
            self._agent.remove_remote_agent(loaded)
            raise Unavailable(f"the nixl endpoint of {source.agent} has the metadata of {loaded}; prefill again")
        self._peers[source.agent] = source.metadata

    def _forget_failed(self) -> None:
        """Forgets a peer that failed, not before the last read from it has ended: the library would say of the others that they are
        unknown, not that they ended."""
        if self._failed:
            for name in self._failed - {read.source.agent for read in self._on_way}:
                self._failed.discard(name)
                self._forget(name)

    def _forget(self, name: str) -> None:
        if self._peers.pop(name, None) is not None:
            with contextlib.suppress(*self._library_errors):
                self._agent.remove_remote_agent(name)

    def _leave(self) -> None:
        with self._lock:
            self._closing = True
        left, self._on_way = self._on_way, []
        for read in left:
            if read.ended.done():
                continue  # in the same round as what broke
            # Keeps the handle, and with it the agent and the registered memory, to the end of the process.
            _abandoned.append((self._agent, read))
            read.ended.set_exception(Unavailable("the nixl transport was closed while this read was on its way; prefill again"))
        while not self._commands.empty():  # nothing is added any more
            wanted = self._commands.get()
            if wanted is not None:
                wanted.ended.set_exception(Unavailable("the nixl transport is closed; try another worker"))
        for name in list(self._peers):
            if not left:
                self._forget(name)
        self._agent = None


# Reads that never ended, with all they use: a late write must find its memory.
_abandoned: list[tuple[Any, NixlRead]] = []


def _set_timer_slack() -> None:
    """Lets this thread sleep as briefly as it asks: without it Linux makes 60 µs of a sleep of 10."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)
