"""The one place where API keys are verified, for gRPC and HTTP alike. Without a source of keys everybody may do everything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from router.access.account import Account, Identity
from router.access.share import UsageShare
from router.access.sources import KeySource, unreachable, why
from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.exchange import Use
from twostep.cluster.shared_clock import SharedClock
from twostep.errors import NotFound, SetupError, TwostepError, Unauthenticated
from twostep.keys.api_keys import Key, KeyTable, is_one_of, system_keys
from twostep.keys.secret import DeploymentSecret

log = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_S = 1.0
_READ_TIMEOUT_S = 5.0

_HOW = "send the header `authorization: Bearer KEY` (OpenAI's clients: api_key); whoever runs this makes keys with `twostep keys create`"


class Access:
    """start(), then run() until cancelled."""

    def __init__(
        self, source: KeySource | None, *, secret: DeploymentSecret, redis: Redis, router_id: str, clock: SharedClock | None = None
    ) -> None:
        """Shares what keys use through `redis`, wherever they come from."""
        self._source = source
        self._clock = clock or SharedClock()
        self._share = UsageShare(redis, router_id, self._clock, on_minute=self._on_minute, on_day=self._on_day)
        self._system = system_keys(secret)
        self._table = KeyTable()
        self._accounts: dict[str, Account] = {}
        self._complained = ""
        # Is called with the id of a key that is there no more.
        self.on_gone: Callable[[str], None] = lambda key_id: None
        # Accounts whose keys were not there at the last look, for the first time; and those whose keys may be useless at any time.
        self._gone: list[Account] = []
        self._passing: list[Account] = []
        # A look that began before a change must not end after the one behind it: a revoked key would be back for a moment.
        self._looking = asyncio.Lock()

    @property
    def enabled(self) -> bool:
        return self._source is not None

    # ---- who calls -------------------------------------------------------------------------------------------------------

    def identify(self, authorization: str | None, tenant: str | None = None, *, address: str = "") -> Identity:
        """`authorization` is the header's value; `tenant` what the caller says of itself, which counts only where callers are believed.
        Raises Unauthenticated."""
        if self._source is None:
            return Identity(tenant=tenant, address=address)
        scheme, _, given = (authorization or "").strip().partition(" ")
        given = given.strip()
        if not given or scheme.lower() != "bearer":
            raise Unauthenticated(f"no API key was given; {_HOW}")
        if is_one_of(given, self._system):
            return Identity(tenant=tenant, address=address)
        key = self._table.find(given)
        if key is None:
            raise Unauthenticated("this API key is not known here: it was mistyped or revoked; " + _HOW)
        return self._identity(key, tenant)

    def identity_of(self, key_id: str) -> Identity:
        """Returns the identity of whoever asked earlier with that key, for what is done in its name now. Empty: it was asked for without
        any. Raises Unauthenticated if it may not any more."""
        if self._source is None:
            return Identity()
        key = self._table.by_id.get(key_id)
        if key is None and key_id:
            raise Unauthenticated("the API key that asked for this was revoked; ask again with another")
        return Identity() if key is None else self._identity(key, None)

    def _useless(self, key: Key) -> Unauthenticated | None:
        """Returns why a key opens nothing now; None: it opens."""
        if key.disabled:
            return Unauthenticated("this API key is disabled; ask whoever runs this to enable it, or for another")
        if key.expires and self._clock.unix() >= key.expires:
            return Unauthenticated("this API key has expired; ask whoever runs this for another")
        return None

    def _identity(self, key: Key, tenant: str | None) -> Identity:
        if (useless := self._useless(key)) is not None:
            raise useless
        account = self._accounts[key.id]
        if key.speaks_for_tenants:
            return Identity(tenant=tenant, fallback=key.whose, account=account)
        return Identity(tenant=key.whose, fallback=key.whose, account=account)

    # ---- what the others use ---------------------------------------------------------------------------------------------

    def _on_minute(self, use: Use) -> None:
        key_id, kind = use.entry
        account = self._accounts.get(key_id)
        if account is not None:
            (account.elsewhere_requests if kind == "requests" else account.elsewhere_tokens)(use.amount)

    def _on_day(self, use: Use) -> None:
        account = self._accounts.get(use.entry[0])
        if account is not None:
            account.elsewhere_day(use.amount, use.age_s)

    # ---- which keys there are ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises SetupError if the keys cannot be read: nobody could be let in."""
        if self._source is None:
            return
        try:
            self._know(await self._read() or ())
        except (TwostepError, OSError, RedisError, TimeoutError) as error:
            raise SetupError(
                f"the keys of --api-keys-file or --api-keys cannot be read: {why(error)}; mend that, or make the first key with "
                "`twostep keys create`"
            ) from error
        # Whose keys are not known yet could not be told what they have used.
        await self._share.exchange(whole=True)
        log.info("%d API keys are known; requests without one are refused", len(self._table.by_id))

    async def run(self) -> None:
        """Follows the source and what other routers give, until cancelled."""
        if self._source is None:
            await asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._share.run())
            group.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            await self.refresh()
            end_if_cancelled()

    async def refresh(self) -> None:
        """Looks for changes now; never raises for what the source does or holds: the last keys that were read go on."""
        async with self._looking:
            try:
                keys = await self._read()
            except (TwostepError, OSError, RedisError, TimeoutError) as error:
                if self._complained != (reason := why(error)):
                    self._complained = reason
                    log.error("the API keys cannot be read (%s): those known until now go on", reason)
                return
            if self._complained:
                self._complained = ""
                log.warning("the API keys can be read again")
            gone, self._gone = self._gone, []
            if keys is not None:
                self._know(keys)
                log.info("%d API keys are known now", len(self._table.by_id))
            self._end_answers(gone)

    async def put(self, key: Key) -> None:
        """Stores a key, new or changed. It is known here at once, and to the others within a second or two. Raises TwostepError."""
        await self._change(lambda source: source.put(key))

    async def remove(self, key_id: str) -> None:
        """Raises TwostepError: not found, or nothing could be changed."""
        if not await self._change(lambda source: source.remove(key_id)):
            raise NotFound(f"there is no API key {key_id[:64]!r}; list them to see which there are")
        self._end_answers(self._gone)

    def accounts(self) -> Sequence[Account]:
        """Returns all accounts, in the order in which their keys were made."""
        return sorted(self._accounts.values(), key=lambda account: (account.key.created, account.key.id))

    def accounts_of(self, tenants: Collection[str]) -> Sequence[Account]:
        """Returns these tenants' accounts, of keys that are in force, in no particular order."""
        return [each for each in self._accounts.values() if each.key.whose in tenants and not each.key.disabled]

    def is_known(self, key_id: str) -> bool:
        return key_id in self._accounts

    def account(self, key_id: str) -> Account:
        """Raises NotFound."""
        try:
            return self._accounts[key_id]
        except KeyError:
            raise NotFound(f"there is no API key {key_id[:64]!r}; list them to see which there are") from None

    async def _change(self, change: Callable[[KeySource], Awaitable[T]]) -> T:
        if self._source is None:
            raise NotFound("this router asks for no API keys; start it with --api-keys-file FILE or --api-keys redis")
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                changed = await change(self._source)
        except (OSError, RedisError, TimeoutError) as error:
            raise unreachable(error) from error
        await self.refresh()
        return changed

    async def _read(self) -> Sequence[Key] | None:
        assert self._source is not None, "there is nothing to follow"
        async with asyncio.timeout(_READ_TIMEOUT_S):
            return await self._source.read()

    def _end_answers(self, gone: Iterable[Account]) -> None:
        """Ends the answers under way for keys that open nothing any more. `gone`: accounts whose keys are missing since before the last
        look; a file that is written is empty for a moment."""
        for account in gone:
            if account.key.id not in self._accounts:
                account.end(Unauthenticated("this API key was revoked; ask whoever runs this for another"))
                self.on_gone(account.key.id)
        for account in self._passing:
            if (useless := self._useless(account.key)) is not None:
                account.end(useless)

    def _know(self, keys: Iterable[Key]) -> None:
        table = KeyTable(keys)
        accounts: dict[str, Account] = {}
        for key in table.by_id.values():
            account = self._accounts.get(key.id)
            if account is None:
                account = Account(key, self._share.used)
            elif account.key != key:
                account.change(key)
            accounts[key.id] = account
        unknown, gone = accounts.keys() - self._accounts.keys(), self._accounts.keys() - accounts.keys()
        self._gone += [self._accounts[key_id] for key_id in gone]
        self._passing = [account for account in accounts.values() if account.key.disabled or account.key.expires]
        self._table, self._accounts = table, accounts
        if unknown:
            # Others may have served them already; and a file that was empty for a moment is no new day.
            self._share.recall(unknown)
