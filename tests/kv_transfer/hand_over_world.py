"""A source, its readers and what lies between them, for the model test: real pools, real machines, memory and messages that are made up.

Memory is a tag for each block. A chunk's checksum is the tuple of its tags; a transport that reads the source's own memory may find a
false match (the test draws it), so that nothing but the commit's rules keeps a stale reader out.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kv_transfer import lease as source_side
from kv_transfer import reader as events
from kv_transfer.lease import Action, Commit, Lease, LeaseState, LeaseTable, Tick, Transition
from kv_transfer.reader import BlockSpan, Reader
from kv_transfer.ticket import Ticket
from kv_transfer.transport import ChunkInfo
from twostep.engine.block_pool import BlockPool
from twostep.errors import Cancelled, DataLoss, InvalidRequest, ResourceExhausted, TwostepError, Unavailable
from twostep.keys.secret import DeploymentSecret

TTL_S = 10.0
SOURCE_BLOCKS = 9
TARGET_BLOCKS = 16
Tag = tuple[object, ...]


SECRET = DeploymentSecret(b"of a deployment")


@dataclass(frozen=True, eq=False, kw_only=True)
class Prompt:
    """A ticket and its blocks: `tags[i]` is what the i-th shall hold, in memory that is read in place or copied out; all but the last are
    full and may be shared."""

    ticket: Ticket
    one_sided: bool
    tags: tuple[Tag, ...]


@dataclass(eq=False, kw_only=True)
class Job:
    """One prompt on the source."""

    prompt: Prompt
    lease: Lease
    blocks: list[int]
    per_chunk: int
    infos: list[ChunkInfo] = field(default_factory=list)
    num_computed: int = 0
    stop_asked: bool = False
    drop_asked: bool = False
    num_releases: int = 0


@dataclass(eq=False, kw_only=True)
class Fetch:
    chunk: ChunkInfo
    read: list[Tag] = field(default_factory=list)
    cancelled: bool = False


@dataclass(eq=False, kw_only=True)
class Puller:
    """One reader: a watch stream that keeps its order, fetches on their way, and targets in the decode worker's pool."""

    prompt: Prompt
    machine: Reader
    targets: list[int]
    stream: list[events.Event] = field(default_factory=list)
    watching: bool = False  # the source serves its watch
    num_sent: int = 0
    fetches: dict[int, Fetch] = field(default_factory=dict)
    ahead: bool = False  # the engine decodes with the targets, whatever the source may answer
    in_engine: bool = False
    num_frees: int = 0


@dataclass(frozen=True, kw_only=True)
class ToSource:
    """An RPC of a reader; `asks`: its answer matters."""

    puller: Puller
    event: source_side.FetchProgress | source_side.Commit | source_side.Abort | None  # None: Watch
    asks: bool = False


@dataclass(frozen=True, kw_only=True)
class ToReader:
    puller: Puller
    event: events.Event


def checksum(tags: Sequence[Tag]) -> int:
    return zlib.crc32(repr(list(tags)).encode())


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.epoch = 1
        self.serial = 0
        self.memory: list[Tag] = [("nothing",)] * SOURCE_BLOCKS
        self.target_memory: list[Tag] = [("nothing",)] * TARGET_BLOCKS
        self.target_pool = BlockPool(TARGET_BLOCKS, block_size=1, hash_unit=1)
        self.prompts: list[Prompt] = []
        self.pullers: list[Puller] = []
        self.soup: list[ToSource | ToReader] = []
        self.churned: list[list[int]] = []
        self.seen: Counter[str] = Counter()
        # The engine's answer to the next commit.
        self.engine_error: TwostepError | None = None
        self._start_life()

    def _start_life(self) -> None:
        self.pool = BlockPool(SOURCE_BLOCKS, block_size=1, hash_unit=1)
        # So few are remembered that ids come again.
        self.table = LeaseTable(max_leases=3, max_remembered=1)
        self.jobs: dict[str, Job] = {}
        self.objects: dict[tuple[str, int], tuple[Tag, ...]] = {}

    def generations(self, blocks: Sequence[int]) -> list[int]:
        return [self.pool.generation(block) for block in blocks]

    # ---- the source ---------------------------------------------------------------------------------------------------------

    def open(self, request_id: str, content: tuple[int, ...], *, one_sided: bool, per_chunk: int) -> None:
        self.serial += 1
        tags: list[Tag] = [content[: i + 1] for i in range(len(content))]
        tags.append(("tail", self.serial))
        found = self.pool.lookup([repr(tag).encode() for tag in tags[:-1]])
        self.pool.share(found)
        try:
            blocks = [*found, *self.pool.allocate(len(tags) - len(found))]
        except ResourceExhausted:
            self.pool.free(found)
            return
        ticket = Ticket(
            worker_id="p", address="", epoch=self.epoch, request_id=request_id, attempt=1, layout="", expires_unix_ms=self.serial
        ).signed(SECRET)
        try:
            lease = self.table.open(ticket, now=self.now, ttl_s=TTL_S, max_life_s=40.0)
        except (InvalidRequest, ResourceExhausted):
            self.pool.free(blocks)
            return
        prompt = Prompt(ticket=ticket, one_sided=one_sided, tags=tuple(tags))
        self.jobs[lease.lease_id] = Job(prompt=prompt, lease=lease, blocks=blocks, per_chunk=per_chunk, num_computed=len(found))
        self.prompts.append(prompt)

    def open_again(self, job: Job) -> None:
        """The same id for another prompt of the same length, as soon as the first is forgotten."""
        self._drop_if_ended(job.lease.lease_id)
        if job.lease.ticket.epoch == self.epoch:
            self.open("another", (), one_sided=False, per_chunk=1)
            another = f"p/{self.epoch}/another/1"
            if another in self.jobs:
                self.apply(self.jobs[another], source_side.Abort("done"))
                self._drop_if_ended(another)
        content = tuple(2 for _ in job.prompt.tags[1:])
        self.open(job.lease.ticket.request_id, content, one_sided=job.prompt.one_sided, per_chunk=job.per_chunk)

    def _drop_if_ended(self, lease_id: str) -> None:
        job = self.jobs.get(lease_id)
        if job is not None and job.drop_asked:
            self.drop(job)

    def settle(self, job: Job, transition: Transition) -> None:
        job.lease = transition.lease
        for action in transition.actions:
            match action:
                case Action.CANCEL_PUBLISHER:
                    job.stop_asked = True
                case Action.RELEASE_BLOCKS:
                    assert not job.lease.publishing
                    job.num_releases += 1
                    self.pool.free(job.blocks)
                case Action.DROP_OBJECTS:
                    job.drop_asked = True
        if job.lease.finished:
            assert job.num_releases == 1
            del self.jobs[job.lease.lease_id]
        self._serve_watches()

    def apply(self, job: Job, event: source_side.Event) -> None:
        self.settle(job, self.table.apply(job.lease.lease_id, event, now=self.now))

    def publish_some(self, job: Job) -> None:
        """One more step of a publisher that behaves: starts, computes and publishes a chunk, ends, or stops when asked to."""
        lease = job.lease
        if not lease.publishing:
            if lease.state is source_side.LeaseState.RESERVED:
                self.apply(job, source_side.PublisherStarted(copies_out=not job.prompt.one_sided))
        elif job.stop_asked:
            self.apply(job, source_side.PublisherStopped())
        elif len(job.infos) == -(-len(job.prompt.tags) // job.per_chunk):
            self.apply(job, source_side.PublisherStopped(len(job.infos)))
        else:
            self._publish_chunk(job)

    def _publish_chunk(self, job: Job) -> None:
        index = len(job.infos)
        first = index * job.per_chunk
        end = min(first + job.per_chunk, len(job.prompt.tags))
        for i in range(job.num_computed, end):
            self.memory[job.blocks[i]] = job.prompt.tags[i]
            if i < len(job.prompt.tags) - 1:
                job.blocks[i] = self.pool.register(job.blocks[i], repr(job.prompt.tags[i]).encode(), i)
        job.num_computed = max(job.num_computed, end)
        blocks = tuple(job.blocks[first:end])
        generations = tuple(self.generations(blocks))
        tags = tuple(self.memory[block] for block in blocks)
        assert tags == job.prompt.tags[first:end]
        one_sided = job.prompt.one_sided
        info = ChunkInfo.of(index, first, blocks, None, num_bytes=len(blocks), checksum=checksum(tags))
        if one_sided:
            info = replace(info, source_blocks=blocks, generations=generations)
        else:
            self.objects[job.lease.lease_id, index] = tags
        job.infos.append(info)
        self.apply(job, source_side.ChunkPublished(index, info.source_blocks, info.generations))

    def drop(self, job: Job) -> None:
        for key in [key for key in self.objects if key[0] == job.lease.lease_id]:
            del self.objects[key]
        self.apply(job, source_side.Freed())

    def _serve_watches(self) -> None:
        """Watch streams say what there is to say, then end."""
        for puller in self.pullers:
            if not puller.watching:
                continue
            job = self.jobs.get(puller.prompt.ticket.lease_id)
            if job is None or job.prompt is not puller.prompt or job.lease.state.ended:
                puller.watching = False
                puller.stream.append(events.SourceLost(Unavailable("the lease ended; prefill again")))
                continue
            for info in job.infos[puller.num_sent :]:
                puller.stream.append(events.ChunkAnnounced(info))
            puller.num_sent = len(job.infos)
            if job.lease.num_chunks is not None:
                puller.watching = False
                puller.stream.append(events.CompleteCame(job.lease.num_chunks, (1,)))

    def restart(self) -> None:
        """Another life of the source over the same memory. All it held is gone; the watches break."""
        self.epoch += 1
        self._start_life()
        self.churned.clear()
        for puller in self.pullers:
            if puller.watching:
                puller.watching = False
                puller.stream.append(events.SourceLost(Unavailable("the connection broke")))

    def churn(self, count: int) -> None:
        """Other sequences of the source take blocks and write to them."""
        if count <= self.pool.num_available:
            self.serial += 1
            blocks = self.pool.allocate(count)
            self.churned.append(blocks)
            for block in blocks:
                self.memory[block] = ("other", self.serial)

    def received(self, message: ToSource) -> None:
        """As prefill_worker.hand_over receives it."""
        puller, ticket = message.puller, message.puller.prompt.ticket
        job = self.jobs.get(ticket.lease_id)
        if message.event is None:
            self._watched(puller, job)
            return
        refusal, kind = "", "asked and accepted"
        try:
            ticket.verify(SECRET, worker_id="p", epoch=self.epoch, layout="", now_unix_ms=0)
            event = message.event
            if isinstance(event, Commit):
                event = replace(event, now_in_pool=tuple(self.generations(self.table.blocks_to_compare(ticket))))
            answer = self.table.acknowledge(ticket, event, now=self.now)
        except TwostepError as error:
            refusal, kind = error.message, f"refused: {type(error).__name__}"
        else:
            if answer.refusal:
                refusal, kind = answer.refusal, f"refused: {answer.state.name if answer.transition else 'unknown'}"
            if job is not None and answer.transition is not None:
                mine, lives = puller.prompt is job.prompt, not job.lease.state.ended
                if lives and answer.state is LeaseState.COMMITTED:
                    assert mine, "a lease is committed by a reader of another one"
                assert not (lives and mine and refusal), "a lease kept its blocks and yet lost them"
                self.settle(job, answer.transition)
        if message.asks:
            self.seen[kind] += 1
            self.soup.append(ToReader(puller=puller, event=events.SourceAnswered(refusal)))

    def _watched(self, puller: Puller, job: Job | None) -> None:
        # The very ticket, not merely its lease's id, which may have come again.
        if job is None or job.prompt is not puller.prompt or job.lease.state.ended:
            puller.stream.append(events.SourceLost(Unavailable("the lease of this ticket has ended; prefill again")))
            return
        puller.watching, puller.num_sent = True, 0
        span = BlockSpan(0, len(job.prompt.tags))
        wanted = BlockSpan(0, len(puller.prompt.tags))
        one_sided = job.prompt.one_sided
        puller.stream.append(events.ManifestCame(published=span, wanted=wanted, num_layers=1, one_sided=one_sided))
        self.apply(job, source_side.FetchProgress())

    # ---- the readers --------------------------------------------------------------------------------------------------------

    def attach(self, prompt: Prompt) -> None:
        if len(prompt.tags) > self.target_pool.num_available:
            return
        self.serial += 1
        machine = Reader(reader_id=self.serial, deadline=self.now + 40.0, max_fetching=2)
        puller = Puller(prompt=prompt, machine=machine, targets=self.target_pool.allocate(len(prompt.tags)))
        self.pullers.append(puller)
        self.soup.append(ToSource(puller=puller, event=None))

    def react(self, puller: Puller, event: events.Event) -> None:
        step = events.advance(puller.machine, event, self.now)
        puller.machine = step.reader
        for action in step.actions:
            self._execute(puller, action)
        if puller.machine.finished and not puller.in_engine:
            assert not puller.fetches
            assert puller.num_frees == 1

    def _execute(self, puller: Puller, action: events.Action) -> None:
        match action:
            case events.StartFetch(chunk):
                assert chunk.index not in puller.fetches
                puller.fetches[chunk.index] = Fetch(chunk=chunk)
            case events.CancelFetches():
                for fetch in puller.fetches.values():
                    fetch.cancelled = True
            case events.RenewLease():
                self.soup.append(ToSource(puller=puller, event=source_side.FetchProgress()))
            case events.AskSource(reader, blocks, generations):
                assert not puller.fetches, "nothing is read any more once the source was asked"
                self.soup.append(ToSource(puller=puller, event=Commit(reader, blocks, generations), asks=True))
            case events.DecodeAhead():
                if (error := self._engine_says()) is not None:
                    self.react(puller, events.GivenUp(error))
                    return
                # The engine writes behind them from here on; that they are right is for the source to say.
                assert not puller.fetches
                assert puller.num_frees == 0
                puller.ahead = True
            case events.TellSource(committed, reason):
                # As the message says it: who reads, and what, is for those that ask.
                self.soup.append(ToSource(puller=puller, event=Commit() if committed else source_side.Abort(reason)))
            case events.CommitToEngine():
                self._commit(puller)
            case events.FreeTargets():
                self._free(puller)

    def _commit(self, puller: Puller) -> None:
        assert not puller.fetches
        held = tuple(self.target_memory[block] for block in puller.targets)
        assert held == puller.prompt.tags, f"stale: {held} is committed where {puller.prompt.tags} was published"
        assert puller.ahead == puller.prompt.one_sided
        error = self._engine_says()
        puller.in_engine = error is None
        self.seen["committed, read where it lay" if puller.prompt.one_sided else "committed, copied out"] += error is None
        self.react(puller, events.EngineAnswered(error))

    def _engine_says(self) -> TwostepError | None:
        error, self.engine_error = self.engine_error, None
        return error

    def _free(self, puller: Puller) -> None:
        assert not puller.fetches, "a fetch may still write"
        puller.num_frees += 1
        assert puller.num_frees == 1
        self.target_pool.free(puller.targets)

    def engine_ends(self, puller: Puller) -> None:
        """The committed sequence is decoded to its end."""
        puller.in_engine = False
        self._free(puller)

    def fetch_some(self, puller: Puller, fetch: Fetch, *, false_match: bool) -> None:
        """Reads one block more. What reads the source's memory itself cannot be stopped; the copy of an object can."""
        chunk, copied_out = fetch.chunk, not puller.prompt.one_sided
        place = len(fetch.read)
        if copied_out:
            stored = self.objects.get((puller.prompt.ticket.lease_id, chunk.index))
            if stored is None or fetch.cancelled or len(stored) != chunk.num_blocks:
                del puller.fetches[chunk.index]
                self.react(puller, events.FetchEnded(chunk.index, Cancelled("cancelled") if fetch.cancelled else Unavailable("gone")))
                return
            fetch.read.append(stored[place])
        else:
            fetch.read.append(self.memory[chunk.source_blocks[place]])
        self.target_memory[puller.targets[chunk.first_block + place]] = fetch.read[-1]
        if len(fetch.read) < chunk.num_blocks:
            return
        del puller.fetches[chunk.index]
        matches = checksum(fetch.read) == chunk.checksum
        self.seen["torn or stale bytes"] += not matches
        error: TwostepError | None = None
        if fetch.cancelled:
            error = Cancelled("cancelled")
        elif not matches and (copied_out or not false_match):
            error = DataLoss(f"chunk {chunk.index} does not match its checksum")
        self.react(puller, events.FetchEnded(chunk.index, error))

    # ---- all together -------------------------------------------------------------------------------------------------------

    def forward(self, who: str = "all") -> list[Callable[[bool], None]]:
        """Returns what "all", the "source" or the "readers" can go on with now; each call is told whether a false match shall be found."""
        calls: list[Callable[[bool], None]] = []
        for job in self.jobs.values() if who != "readers" else ():
            if job.lease.publishing or job.lease.state is source_side.LeaseState.RESERVED:
                calls.append(lambda _, job=job: self.publish_some(job))
            if job.drop_asked:
                calls.append(lambda _, job=job: self.drop(job))
        for puller in self.pullers if who != "source" else ():
            if puller.stream:
                calls.append(lambda _, puller=puller: self.react(puller, puller.stream.pop(0)))
            for fetch in puller.fetches.values():
                calls.append(lambda match, p=puller, f=fetch: self.fetch_some(p, f, false_match=match))
            if puller.in_engine:
                calls.append(lambda _, puller=puller: self.engine_ends(puller))
        for place in range(len(self.soup)) if who == "all" else ():
            calls.append(lambda _, place=place: self.deliver(place))
        return calls

    def deliver(self, place: int, *, keep: bool = False) -> None:
        """`keep`: it will come a second time."""
        message = self.soup[place] if keep else self.soup.pop(place)
        if isinstance(message, ToSource):
            self.received(message)
        else:
            self.react(message.puller, message.event)

    def lose(self, place: int) -> None:
        """A reader that waits for an answer notices at some time."""
        message = self.soup.pop(place)
        if (isinstance(message, ToSource) and message.asks) or isinstance(message, ToReader):
            self.react(message.puller, events.AskFailed("no answer"))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for transition in self.table.sweep(self.now):
            self.settle(self.jobs[transition.lease.lease_id], transition)
        for puller in self.pullers:
            self.react(puller, Tick())

    def end(self) -> None:
        """All stop, and everything on its way arrives or ends."""
        for puller in self.pullers:
            self.react(puller, events.GivenUp(Cancelled("it ends")))
        for job in list(self.jobs.values()):
            self.apply(job, source_side.Abort("stop"))
        for blocks in self.churned:
            self.pool.free(blocks)
        self.churned.clear()
        while calls := self.forward():
            calls[-1](False)

    def check(self) -> None:
        owners = [job.blocks for job in self.jobs.values() if not job.num_releases]
        self.pool.check_integrity([*owners, *self.churned])
        self.target_pool.check_integrity([puller.targets for puller in self.pullers if not puller.num_frees])
        for job in self.jobs.values():
            if not job.num_releases:
                computed = tuple(self.memory[block] for block in job.blocks[: job.num_computed])
                assert computed == job.prompt.tags[: job.num_computed], "what a lease holds was written to"
        taken = [block for puller in self.pullers if not puller.num_frees for block in puller.targets]
        assert len(taken) == len(set(taken)), "targets have two owners"
