"""After its router's stream broke, a decode worker sends every event once, in order, whatever was lost with it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.outbox import History, Outbox, StreamConnection
from decode_worker.pull import Puller
from decode_worker.sequences import Sequences, SequencesConfig
from twostep.cluster.records import LayoutRecord
from twostep.engine.batch import TopToken
from twostep.engine.types import EngineRequest, FinishReason, Reservation, SequenceFailure, StepOutput, StepTokens, TokenOutput
from twostep.errors import ResourceExhausted
from twostep.rpc.v1 import decode_pb2
from twostep.sampling_params import SamplingParams
from twostep.worker.engine_port import EnginePort

ROUTER = "r"
NUM_SEQUENCES = 3
# The sequence whose prompt is computed here: it begins with a FirstToken, at position 0, where the others' first tokens come another way.
LOCAL = 2


def token(position: int, *, last: bool = False, seq_id: str = "s/1") -> TokenOutput:
    top = (TopToken(token_id=position + 1, logprob=-2.0),) if position % 2 else ()
    return TokenOutput(
        seq_id=seq_id,
        token_id=1000 + position,
        position=position,
        logprob=-0.5 if top else None,
        top_logprobs=top,
        finish_reason=FinishReason.LENGTH if last else None,
    )


def at(next_position: int, *, committed: bool = False) -> decode_pb2.StreamPosition:
    return decode_pb2.StreamPosition(request_id="s", attempt=1, next_position=next_position, committed=committed)


def added(history: History, position: int) -> decode_pb2.DecodeEvent:
    event = decode_pb2.DecodeEvent()
    whole = token(position)
    history.add(whole if whole.top_logprobs else whole.token_id, position, event)
    return event


# ---- one history ---------------------------------------------------------------------------------------------------------


def test_a_history_gives_back_what_it_was_given_from_any_position_it_keeps() -> None:
    history = History(("s", 1), max_tokens=5)
    assert history.reaches(0)
    assert list(history.since(at(7))) == []
    told = [added(history, position) for position in range(4, 12)]
    history.commit(decode_pb2.Committed(transport="local"))
    assert [history.reaches(p) for p in (0, 6, 7, 12)] == [False, False, True, True]
    assert list(history.since(at(7, committed=True))) == told[3:]
    assert list(history.since(at(12, committed=True))) == []
    assert [e.WhichOneof("event") for e in history.since(at(11))] == ["committed", "token"]
    history.fail(decode_pb2.DecodeFailed(code="UNAVAILABLE"))
    assert [e.WhichOneof("event") for e in history.since(at(12, committed=True))] == ["failed"]


def test_ended_histories_are_bounded_in_number_and_time() -> None:
    outbox = Outbox(ROUTER, max_events=10, max_ended=2, on_lost=lambda _: ())
    histories = [outbox.begin((f"s{i}", 1), max_tokens=4) for i in range(4)]
    for history in histories[:3]:
        outbox.end(history)
    assert [outbox.history(h.attempt) is h for h in histories] == [False, True, True, True]
    ended_at = histories[2].ended_at
    assert ended_at is not None
    outbox.expire(ended_at + 1)
    assert outbox.history(("s1", 1)) is not None, "without a stream the next one may ask for them"
    connection = outbox.connect()
    outbox.expire(ended_at + 1)
    assert [outbox.history(h.attempt) is h for h in histories] == [False, False, False, True]
    outbox.disconnect(connection)


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 3)), max_size=30))
def test_what_waits_travels_together_in_order(steps: list[tuple[int, int]]) -> None:
    """Steps of so many events, after each of which so many messages are sent: where sending is the slower of both, each takes more."""

    async def run() -> None:
        outbox = Outbox(ROUTER, max_events=sum(count for count, _ in steps), max_ended=1, on_lost=lambda _: ())
        connection = outbox.connect()
        got: list[decode_pb2.StepEvents] = []
        number = 0
        for step, (count, num_sent) in enumerate(steps, 1):
            events = [decode_pb2.DecodeEvent(attempt=number + i) for i in range(count)]
            number += count
            assert outbox.put(decode_pb2.StepEvents(step=step, events=events, steps=[decode_pb2.StepRecord(step=step)]))
            for _ in range(num_sent):
                if not outbox.empty:
                    message = await outbox.next(connection)
                    assert message is not None
                    got.append(message)
                    assert message.step <= step
        outbox.close()
        while (message := await outbox.next(connection)) is not None:
            got.append(message)
        assert [event.attempt for message in got for event in message.events] == list(range(number))
        assert [record.step for message in got for record in message.steps] == list(range(1, len(steps) + 1)), "of each step once"
        assert all(message.step == message.steps[-1].step and message.sent_s for message in got)
        assert all(len(message.events) <= 1024 for message in got)
        # No two that would have gone together went apart, but for those that had to be sent before the later one was there.
        assert len(got) <= sum(num_sent for _, num_sent in steps) + 2 * number // 1024 + 1
        assert outbox.put(decode_pb2.StepEvents(events=[decode_pb2.DecodeEvent()] * number)), "there is room for as many as before"

    asyncio.run(run())


async def test_what_was_on_its_way_when_a_stream_broke_counts_as_not_sent() -> None:
    outbox = Outbox(ROUTER, max_events=10, max_ended=2, on_lost=lambda _: ())
    for messages, sent in (([], True), ([decode_pb2.StepEvents(events=[decode_pb2.DecodeEvent()])], False)):
        connection = outbox.connect()
        for message in messages:
            outbox.put(message)
            assert await outbox.next(connection) == message
        assert outbox.empty
        outbox.disconnect(connection)
        assert outbox.empty == sent, "a worker that drains waits for its router to come back"


def test_a_token_that_is_all_zeros_is_one() -> None:
    history, message = History(("s", 1), max_tokens=2), decode_pb2.StepEvents()
    history.add(0, 0, message.events.add())
    (told,) = decode_pb2.StepEvents.FromString(message.SerializeToString()).events
    assert told.HasField("token"), "nothing of it differs from what a message is without it"
    assert list(history.since(at(0))) == [told]


def test_the_first_token_of_a_prompt_computed_here_is_kept_apart_from_the_others() -> None:
    history = History(("s", 1), max_tokens=2)
    first = decode_pb2.DecodeEvent()
    history.begin(token(4), first, cached_tokens=16, queue_s=0.5, prefill_s=0.25)
    assert (first.first_token.cached_tokens, first.first_token.queue_s, first.first_token.prefill_s) == (16, 0.5, 0.25)
    told = [added(history, position) for position in (5, 6)]
    assert list(history.since(at(4))) == [first, *told], "whoever has not had it gets it, and whoever has does not"
    assert list(history.since(at(5))) == told
    told.append(added(history, 7))
    assert [history.reaches(p) for p in (4, 5, 6)] == [False, False, True]


# ---- all of a router's ---------------------------------------------------------------------------------------------------


class FreeEngine:
    """Blocks without end."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    async def reserve(self, request: EngineRequest) -> Reservation:
        return Reservation(seq_id=request.seq_id, block_ids=[0], num_cached_tokens=0)

    async def submit(self, request: EngineRequest) -> None:
        """Its tokens come when the test says so."""

    def cancel(self, seq_id: str) -> None:
        self.cancelled.append(seq_id)


class Wire:
    """A router at the other end of streams that break. `got`: what each request was told, as the router keeps it."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.got: dict[str, list[decode_pb2.DecodeEvent]] = {f"s{i}": [] for i in range(NUM_SEQUENCES)}
        self._under_way: deque[decode_pb2.StepEvents] = deque()
        self._stream: tuple[Outbox, StreamConnection] | None = None

    def open(self, *, without: str = "") -> None:
        positions = [self._position(name) for name in self.got if name != without]
        self._stream = self.sequences.connect(ROUTER, positions)

    def _position(self, name: str) -> decode_pb2.StreamPosition:
        num_tokens = sum(1 for e in self.got[name] if e.HasField("token") or e.HasField("first_token"))
        first = 0 if name == f"s{LOCAL}" else 1
        return decode_pb2.StreamPosition(request_id=name, attempt=1, next_position=first + num_tokens, committed=bool(first or num_tokens))

    async def send(self, count: int) -> None:
        """So many messages leave the worker; none of them has arrived."""
        if self._stream is None:
            return
        outbox, connection = self._stream
        for _ in range(count):
            if outbox.empty:
                return
            try:
                message = await outbox.next(connection)
            except ResourceExhausted:
                # It has fallen too far behind. What has left arrives, or is lost when it opens another one.
                self._stream = None
                return
            assert message is not None
            self._under_way.append(message)

    def arrive(self, count: int) -> None:
        for _ in range(min(count, len(self._under_way))):
            for event in self._under_way.popleft().events:
                self.got[event.request_id].append(event)

    def break_off(self) -> None:
        """Breaks the stream; what has not arrived is lost."""
        self._under_way.clear()
        if self._stream is not None:
            self._stream[0].disconnect(self._stream[1])
            self._stream = None


async def make(**limits: Any) -> tuple[Sequences, FreeEngine]:
    engine = FreeEngine()
    config = SequencesConfig(router_lease_s=60, **limits)
    layout = LayoutRecord(model_fingerprint="m", dtype="float32", block_size=4, num_layers=1, num_kv_heads=1, head_dim=4)
    sequences = Sequences(cast(EnginePort, engine), cast(Puller, None), config, secret=b"", layout=layout)
    for i in range(NUM_SEQUENCES):
        request = EngineRequest(seq_id=f"s{i}/1", token_ids=[1], num_prompt_tokens=1, sampling=SamplingParams(max_tokens=100))
        await sequences.reserve(request, request_id=f"s{i}", attempt=1, router_id=ROUTER, prefill_here=i == LOCAL)
    return sequences, engine


_ACTION = st.one_of(
    st.tuples(st.just("step"), st.sets(st.integers(0, NUM_SEQUENCES - 1), min_size=1)),
    st.tuples(st.sampled_from(["send", "arrive"]), st.integers(1, 4)),
    st.tuples(st.sampled_from(["break", "open"]), st.none()),
    st.tuples(st.sampled_from(["finish", "fail"]), st.integers(0, NUM_SEQUENCES - 1)),
)


@settings(max_examples=300)
@given(actions=st.lists(_ACTION, max_size=60), max_events=st.sampled_from([4, 8, 1000]), message_events=st.sampled_from([1, 3, 1024]))
def test_every_event_arrives_once_and_in_order_whatever_breaks(
    actions: list[tuple[str, Any]], max_events: int, message_events: int
) -> None:
    async def run() -> None:
        sequences, _ = await make(max_buffered_events=max_events)
        wire = Wire(sequences)
        counts, over = [0] * NUM_SEQUENCES, dict[int, str]()

        def step(members: set[int], *, last: bool = False) -> None:
            tokens = []
            for i in sorted(members - over.keys()):
                counts[i] += 1
                tokens.append(token(counts[i] - (i == LOCAL), last=last, seq_id=f"s{i}/1"))
            sequences.on_step(StepOutput(step=1, tokens=StepTokens.of(tokens)))

        async def turn(kind: str, value: Any) -> None:
            if kind == "step":
                step(value)
            elif kind == "send":
                await wire.send(value)
            elif kind == "arrive":
                wire.arrive(value)
            elif kind == "break":
                wire.break_off()
            elif kind == "open":
                wire.break_off()
                wire.open()
            elif kind == "finish" and value not in over:
                step({value}, last=True)
                over[value] = "finished"
            elif kind == "fail" and value not in over:
                sequences.on_step(StepOutput(step=1, failures=[SequenceFailure(seq_id=f"s{value}/1", message="scripted")]))
                over[value] = "failed"
            # A failure is told once its blocks are free, which takes turns of the loop.
            for _ in range(3):
                await asyncio.sleep(0)

        for kind, value in actions:
            await turn(kind, value)
        for i in range(NUM_SEQUENCES):
            await turn("finish", i)
        await turn("open", None)
        await wire.send(1000)
        wire.arrive(1000)
        for i in range(NUM_SEQUENCES):
            events = wire.got[f"s{i}"]
            told = [e.WhichOneof("event") for e in events][: counts[i]]
            assert told == [*(["first_token"] if i == LOCAL and counts[i] else []), *["token"] * counts[i]][: counts[i]]
            tokens = [e.token if e.HasField("token") else e.first_token.token for e in events[: counts[i]]]
            first = 0 if i == LOCAL else 1
            assert [t.position for t in tokens] == list(range(first, first + counts[i]))
            assert [t.token_id for t in tokens] == [1000 + t.position for t in tokens]
            assert [bool(t.finish_reason) for t in tokens].count(True) == (over[i] == "finished")
            assert sum(e.HasField("failed") for e in events) >= (over[i] == "failed")
            assert all(e.failed.message.startswith("scripted") for e in events if e.HasField("failed"))
            # Failures may be told again: the position says nothing of them, and a router's attempt fails once.
            assert all(e.HasField("failed") for e in events[counts[i] :])
        assert len(sequences) == 0
        await sequences.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode_worker.outbox._MESSAGE_EVENTS", message_events)
        asyncio.run(run())


async def test_what_the_router_does_not_name_is_dropped() -> None:
    sequences, engine = await make()
    wire = Wire(sequences)
    wire.open(without="s1")
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.cancelled == ["s1/1"]
    sequences.on_step(StepOutput(step=1, tokens=StepTokens.of(token(1, seq_id=f"s{i}/1") for i in range(NUM_SEQUENCES))))
    await wire.send(9)
    wire.arrive(9)
    assert [len(wire.got[f"s{i}"]) for i in range(NUM_SEQUENCES)] == [1, 0, 1]
    wire.break_off()
    await sequences.close()


@pytest.mark.parametrize("ended", [False, True])
async def test_a_router_that_is_too_far_behind_is_told_so(ended: bool) -> None:
    sequences, _ = await make(max_replay_tokens=3)
    wire = Wire(sequences)
    for position in range(1, 8):
        sequences.on_step(StepOutput(step=1, tokens=StepTokens.of([token(position, last=ended and position == 7, seq_id="s0/1")])))
    wire.open()
    for _ in range(5):
        await asyncio.sleep(0)
    await wire.send(9)
    wire.arrive(9)
    assert [(e.failed.code, e.failed.retryable) for e in wire.got["s0"]] == [("RESOURCE_EXHAUSTED", True)]
    assert wire.got["s1"] == []
    assert len(sequences) == 2
    wire.break_off()
    await sequences.close()


async def test_what_is_not_here_is_answered_unless_it_may_be_on_its_way() -> None:
    sequences, _ = await make()
    positions = [
        decode_pb2.StreamPosition(request_id="lost", attempt=2),
        decode_pb2.StreamPosition(request_id="coming", attempt=1, reserving=True),
    ]
    outbox, connection = sequences.connect("other", positions)
    message = await outbox.next(connection)
    assert message is not None
    assert [(e.request_id, e.attempt, e.failed.code, e.failed.retryable) for e in message.events] == [("lost", 2, "NOT_FOUND", True)]
    assert outbox.empty
    outbox.disconnect(connection)
    await sequences.close()
