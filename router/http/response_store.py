"""Answers of /v1/responses that later requests refer to. They lie in Redis, so that every router of the deployment has them.

    answer ends ─▶ keep ─▶ KeptValues, under the caller's API key, for --response-ttl
    next turn, by `previous_response_id` or `item_reference` ─▶ recall ─▶ the messages before it

A stored answer has the items of its own request and its own output; it names the answers before it. A turn that goes on with an answer
renews the whole conversation. Records are signed: who can write to Redis cannot put words into a conversation.

No request waits long for Redis: an answer that cannot be stored in time goes out all the same, with `store` false, and a request that needs
a stored answer gets 503. After a failure Redis is left alone for a second.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from json import dumps
from typing import NamedTuple, TypeVar

from redis.exceptions import RedisError

from router.http.errors import HttpError
from router.http.response_items import reference_of
from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.kept_values import KeptValues, TooLarge
from twostep.cluster.shared_connection import SharedConnection
from twostep.cluster.signed import RESPONSES, Signer
from twostep.cluster.stored import read_stored
from twostep.errors import DeadlineExceeded, Unauthenticated, Unavailable
from twostep.keys.secret import DeploymentSecret
from twostep.process.bounded_threads import BoundedThreads
from twostep.rpc.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)
T = TypeVar("T")

PREFIX = "twostep:v1:responses"
# Of all that one API key's answers may have of Redis, where keys are asked for.
KEY_SHARE = 1 / 8
MAX_VALUE_BYTES = 4 << 20
# Answers of one conversation, each stored by itself.
MAX_TURNS = 256
# Of answers that are being written or signed.
_MAX_PENDING_BYTES = 64 << 20
# Up to here one is written, or read, in well under a millisecond.
_INLINE_BYTES = 64 << 10
# For one exchange with Redis.
WAIT_S = 2.0
_PAUSE_S = 1.0
_LOOK_S = 10.0

_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")
_ITEM_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_(in)?([0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """`previous`: names of the answers before it, the oldest first. `fragments`: of its request's items, `num_input` of them, then of its
    own (a serialized Chat, in base64). `response`: the answer as JSON."""

    tenant: str
    previous: list[str]
    num_input: int
    fragments: str
    response: str

    def parts(self) -> list[pb.ChatMessage]:
        return list(pb.Chat.FromString(b64decode(self.fragments)).messages)


class Owner(NamedTuple):
    """Only requests with the same key and of the same tenant find an answer again."""

    key_id: str
    tenant: str


class Recalled(NamedTuple):
    """`names`: of all answers before this one. `before`: their fragments. `own`: those of the request, without references."""

    names: list[str]
    before: list[pb.ChatMessage]
    own: list[pb.ChatMessage]


def name_of(response_id: str) -> str | None:
    """Returns the name of an answer by its id; None: no id of this API looks like this."""
    found = _RESPONSE_ID.fullmatch(response_id)
    return None if found is None else found[1]


class ResponseStore:
    """run() until cancelled, then close()."""

    def __init__(
        self,
        redis: SharedConnection,
        secret: DeploymentSecret,
        *,
        ttl_s: float,
        total_bytes: int,
        most_recalled_bytes: int,
        is_known: Callable[[str], bool] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`redis`: closed with the store.  `most_recalled_bytes`: of one conversation. `is_known`: whether there is an API key of that id;
        None: no keys are asked for, and all callers are one owner."""
        self._redis, self._is_known, self._clock = redis, is_known, clock
        share = 1.0 if is_known is None else KEY_SHARE
        self._values = KeptValues(redis, PREFIX, ttl_s=ttl_s, total_bytes=total_bytes, owner_share=share)
        self._signer = Signer(secret, RESPONSES)
        self._most_recalled_bytes = most_recalled_bytes
        self._threads = BoundedThreads(1, "responses")
        self._num_pending_bytes = 0
        self._open_until = 0.0
        self._complained = ""
        # Keys that are gone, whose answers are not deleted yet.
        self._gone: set[str] = set()

    # ---- one answer ------------------------------------------------------------------------------------------------------

    async def get(self, owner: Owner, response_id: str) -> StoredResponse:
        """Raises HttpError 404, Unavailable."""
        name = name_of(response_id)
        found = (await self._read(owner, [name], renew=False))[0] if name else None
        if found is None:
            raise _missing(response_id)
        return found

    async def delete(self, owner: Owner, response_id: str) -> None:
        """Raises HttpError 404, Unavailable."""
        await self.get(owner, response_id)  # of this tenant
        name = name_of(response_id)
        if name is None or not await self._in_time(lambda: self._values.forget(owner.key_id, [name])):
            raise _missing(response_id)

    async def keep(
        self,
        owner: Owner,
        name: str,
        *,
        previous: list[str],
        num_input: int,
        fragments: pb.Chat,
        pieces: Iterator[str],
        num_bytes: int,
        seconds: float,
    ) -> bool:
        """Stores an answer of about so many bytes, whose JSON comes in `pieces`, within `seconds`. Returns whether it is stored; never
        raises for that."""
        num_bytes += fragments.ByteSize() * 4 // 3
        if num_bytes > MAX_VALUE_BYTES or self._num_pending_bytes + num_bytes > _MAX_PENDING_BYTES:
            return False
        if len(previous) >= MAX_TURNS or self._clock() < self._open_until or not self._may_store(owner):
            return False

        def encoded() -> bytes:
            record = StoredResponse(
                tenant=owner.tenant,
                previous=previous,
                num_input=num_input,
                fragments=b64encode(fragments.SerializeToString()).decode(),
                response="".join(pieces),
            )
            return self._signer.sign_value(dumps(asdict(record)), owner.key_id, name).encode()

        self._num_pending_bytes += num_bytes
        try:
            value = encoded() if num_bytes <= _INLINE_BYTES else await self._threads.run(encoded)
            return len(value) <= MAX_VALUE_BYTES and await self._in_time(lambda: self._values.keep(owner.key_id, name, value), seconds)
        except (Unavailable, DeadlineExceeded):
            return False
        finally:
            self._num_pending_bytes -= num_bytes

    # ---- conversations ---------------------------------------------------------------------------------------------------

    async def recall(self, owner: Owner, previous: str | None, own: Sequence[pb.ChatMessage], *, seconds: float) -> Recalled:
        """Reads what a request goes on with: the answer `previous` and all before it, and what the fragments `own` refer to. Each exchange
        with Redis may take `seconds`. Raises HttpError 400 and 404, Unavailable, DeadlineExceeded."""
        names, chain = list[str](), list[StoredResponse]()
        if previous is not None:
            name = name_of(previous)
            head = (await self._read(owner, [name], renew=True, seconds=seconds))[0] if name else None
            if name is None or head is None:
                raise _lost(f"Previous response with id {previous[:80]!r} not found: it was not stored, has expired, or was deleted")
            earlier = await self._read(owner, head.previous, renew=True, seconds=seconds) if head.previous else []
            chain = [each for each in earlier if each is not None]
            if len(chain) < len(earlier):
                raise _lost(f"an answer before {previous[:80]!r} has expired or was deleted")
            names, chain = [*head.previous, name], [*chain, head]
        return Recalled(names, [part for each in chain for part in each.parts()], await self._resolved(owner, own, seconds))

    async def _resolved(self, owner: Owner, own: Iterable[pb.ChatMessage], seconds: float) -> list[pb.ChatMessage]:
        own = list(own)
        ids = {i: item_id for i, part in enumerate(own) if (item_id := reference_of(part)) is not None}
        found = {i: _ITEM_ID.fullmatch(item_id) for i, item_id in ids.items()}
        names = list(dict.fromkeys(each[1] for each in found.values() if each is not None))
        records = dict(zip(names, await self._read(owner, names, renew=True, seconds=seconds) if names else [], strict=True))
        parts = {name: (record.num_input, record.parts()) for name, record in records.items() if record is not None}
        for i, item_id in ids.items():
            match = found[i]
            num_input, of_answer = parts.get(match[1], (0, [])) if match is not None else (0, [])
            at = -1 if match is None else int(match[3]) + (0 if match[2] else num_input)
            if match is None or not (0 <= at < num_input if match[2] else num_input <= at < len(of_answer)):
                message = (
                    f"Item with id {item_id[:80]!r} not found: its answer was not stored, has expired, or was deleted; send the item itself"
                )
                raise HttpError(404, message, param="input")
            own[i] = of_answer[at]
        return own

    # ---- its life --------------------------------------------------------------------------------------------------------

    def forget_key(self, key_id: str) -> None:
        """Deletes all answers of a key in the background; they cannot be read any more."""
        self._gone.add(key_id)

    async def run(self) -> None:
        """Deletes what belonged to keys that are gone, and follows what Redis has room for, until cancelled."""
        while True:
            try:
                await self._in_time(self._values.look)
                await self.purge()
            except Unavailable:
                pass  # logged, and tried again
            await asyncio.sleep(_PAUSE_S if self._gone else _LOOK_S)
            end_if_cancelled()

    async def purge(self) -> None:
        """Deletes what belonged to keys that are gone. A key that is back, as from a file that was empty for a moment, keeps it. Raises
        Unavailable."""
        for key_id in list(self._gone):
            if self._is_known is None or not self._is_known(key_id):
                await self._in_time(lambda key_id=key_id: self._values.forget(key_id))  # type: ignore[misc]
            self._gone.discard(key_id)

    async def close(self) -> None:
        self._threads.close()
        await self._redis.close()

    # ---- Redis -----------------------------------------------------------------------------------------------------------

    def _may_store(self, owner: Owner) -> bool:
        """A key may have been revoked while its answer was made."""
        return not owner.key_id or self._is_known is None or self._is_known(owner.key_id)

    async def _read(self, owner: Owner, names: Sequence[str], *, renew: bool, seconds: float = WAIT_S) -> list[StoredResponse | None]:
        most = self._most_recalled_bytes
        try:
            values = await self._in_time(lambda: self._values.recall(owner.key_id, names, most_bytes=most, renew=renew), seconds)
        except TooLarge as error:
            message = f"the stored conversation comes to {error.num_bytes} bytes and may come to {most}; begin another one"
            raise HttpError(400, message, param="previous_response_id") from error

        def decoded() -> list[StoredResponse | None]:
            return [None if value is None else self._decoded(owner, name, value) for name, value in zip(names, values, strict=True)]

        num_bytes = sum(len(value) for value in values if value is not None)
        return decoded() if num_bytes <= _INLINE_BYTES else await self._threads.run(decoded)

    def _decoded(self, owner: Owner, name: str, value: bytes) -> StoredResponse | None:
        try:
            found = read_stored(StoredResponse, self._signer.read_value(value, owner.key_id, name))
        except (Unauthenticated, ValueError) as error:
            log.warning("a stored response is passed over: %s", error)
            return None
        return found if found.tenant == owner.tenant else None

    async def _in_time(self, ask: Callable[[], Awaitable[T]], seconds: float = WAIT_S) -> T:
        """Raises Unavailable, and DeadlineExceeded where the caller has less time than Redis is given."""
        if self._clock() < self._open_until:
            raise self._away(self._complained)
        try:
            async with asyncio.timeout(min(seconds, WAIT_S)):
                answer = await ask()
        except (RedisError, OSError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and seconds < WAIT_S:
                message = "the request's deadline passed before Redis returned the stored answers; raise the deadline"
                raise DeadlineExceeded(message) from error
            self._open_until = self._clock() + _PAUSE_S
            reason = str(error) or "no answer in time"
            if self._complained != reason:
                self._complained = reason
                log.warning("responses cannot be stored or read (%s); answers go out without being stored", reason)
            raise self._away(reason) from error
        if self._complained:
            self._complained = ""
            log.warning("responses are stored again")
        return answer

    def _away(self, reason: str) -> Unavailable:
        return Unavailable(f"stored responses cannot be reached ({reason}); repeat later, or send the items so far as `input`")


def _missing(response_id: str) -> HttpError:
    return HttpError(404, f"Response with id {response_id[:80]!r} not found: it was not stored, has expired, or was deleted")


def _lost(message: str) -> HttpError:
    message = f"{message}; send the items so far as `input`"
    return HttpError(400, message, param="previous_response_id", code="previous_response_not_found")
