"""API keys as they are kept: pure.

A key is `ts-` and 32 random bytes, told once, when it is made; kept is its SHA-256. Slow hashes (bcrypt, argon2) are for what people think
of: 256 random bits cannot be found by trying, however fast one tries, and a slow hash would cost every request its milliseconds.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from twostep.errors import InvalidRequest
from twostep.keys.secret import DeploymentSecret, purpose_key
from twostep.request_class import RequestClass

KEY_PREFIX = "ts-"
MAX_KEYS = 100_000
# Longer ones are nobody's: they are not even hashed.
MAX_KEY_CHARS = 512
_MAX_NAME_CHARS = 128
_MAX_ID_CHARS = 64
_MAX_LIMIT = 1 << 50
# 9999-12-31T23:59:59Z: what is later, or before 1970, could be written but not read again.
_MAX_INSTANT = 253_402_300_799
_LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_concurrent")


class BadKey(InvalidRequest):
    """A record of a key that cannot be used as it is. The message says what is wrong, and never what a key or its hash is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits what a key may use. 0: no limit. Tokens are those of prompts and answers; `max_concurrent` are requests served at once by one
    router."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tokens_per_day: int = 0
    max_concurrent: int = 0


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """`hash`: SHA-256 of the key, in hex. `tenant` empty: the key's own id. `most_urgent`: the class that its requests may have at best;
    those that name none get it if it is batch. `speaks_for_tenants`: its holder, a gateway for instance, says whose its requests are.
    `created` and `expires` are Unix seconds, `expires` 0: never."""

    id: str
    hash: str = field(repr=False)
    name: str = ""
    tenant: str = ""
    most_urgent: RequestClass = RequestClass.INTERACTIVE
    limits: Limits = UNLIMITED
    speaks_for_tenants: bool = False
    created: float = 0.0
    expires: float = 0.0
    disabled: bool = False

    @property
    def whose(self) -> str:
        """The tenant: keys of different tenants share neither cached prefixes nor turns."""
        return self.tenant or self.id

    def __post_init__(self) -> None:
        """Raises BadKey."""
        _named("id", self.id, _MAX_ID_CHARS)
        if not self.id or any(char in self.id for char in " /\\"):
            raise BadKey("id: give letters, digits, - and _")
        if len(self.hash) != 64 or set(self.hash) - set("0123456789abcdef"):
            raise BadKey("hash: give the key's SHA-256 as 64 hexadecimal digits")
        _named("name", self.name, _MAX_NAME_CHARS)
        _named("tenant", self.tenant, _MAX_NAME_CHARS)
        for name in _LIMITS:
            value = getattr(self.limits, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_LIMIT:
                raise BadKey(f"{name}: give a whole number, 0 for no limit")

    # ---- as it is kept, and told to operators ----------------------------------------------------------------------------

    def to_json(self) -> str:
        """One line, as files and Redis have it."""
        return json.dumps(self.to_dict() | {"hash": self.hash}, separators=(",", ":"))

    def to_dict(self) -> dict[str, Any]:
        """Without the hash: nobody who looks needs it."""
        return {
            "id": self.id,
            "name": self.name,
            "tenant": self.tenant,
            "most_urgent": self.most_urgent.name.lower(),
            **{name: getattr(self.limits, name) for name in _LIMITS},
            "speaks_for_tenants": self.speaks_for_tenants,
            "created": _written(self.created),
            "expires": _written(self.expires) if self.expires else None,
            "disabled": self.disabled,
        }

    @classmethod
    def from_json(cls, text: str | bytes) -> Key:
        """Raises BadKey."""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            raise BadKey("this is not JSON; write one object, as `twostep keys create` does") from None
        if not isinstance(record, dict):
            raise BadKey("this is not a JSON object; write one, as `twostep keys create` does")
        return cls.from_dict(record)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Key:
        """Raises BadKey, also for fields that are not known: a limit with a misspelt name would be none."""
        known = {*(each.name for each in fields(cls)), *_LIMITS} - {"limits"}
        if unknown := sorted(set(record) - known):
            raise BadKey(f"{str(unknown[0])[:64]!r}: no such field; there are {', '.join(sorted(known))}")
        texts: dict[str, Any] = {name: record.get(name) or "" for name in ("id", "hash", "name", "tenant")}
        flags: dict[str, Any] = {name: record.get(name) or False for name in ("speaks_for_tenants", "disabled")}
        for given, kind, wanted in ((texts, str, "a string"), (flags, bool, "true or false")):
            if wrong := [name for name, value in given.items() if not isinstance(value, kind)]:
                raise BadKey(f"{wrong[0]}: give {wanted}")
        most_urgent, limits = class_named(record.get("most_urgent") or "interactive"), limits_of(record)
        created, expires = (instant(name, record.get(name)) for name in ("created", "expires"))
        return cls(**texts, **flags, created=created, expires=expires, most_urgent=most_urgent, limits=limits)


def limits_of(record: Mapping[str, Any]) -> Limits:
    return Limits(**{name: record.get(name) or 0 for name in _LIMITS})


def class_named(name: object) -> RequestClass:
    try:
        return RequestClass[str(name).upper()]
    except KeyError:
        raise BadKey("most_urgent: give interactive, standard or batch") from None


def instant(name: str, value: object) -> float:
    """Unix seconds of a number, or of a time as ISO 8601 has it (without a zone: UTC). None and empty: 0."""
    if value is None or value == "":
        return 0.0
    seconds = -1.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value if 0 <= value <= _MAX_INSTANT else -1.0
    elif isinstance(value, str):
        try:
            parsed = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            seconds = (parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)).timestamp()
    if not 0 <= seconds <= _MAX_INSTANT:
        raise BadKey(f"{name}: give a time like 2027-01-31T12:00:00Z, from 1970 to 9999")
    return float(seconds)


def _written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _named(what: str, value: str, max_chars: int) -> None:
    if len(value) > max_chars or not value.isprintable():
        raise BadKey(f"{what}: give at most {max_chars} printable characters")


# ---- making and finding them ------------------------------------------------------------------------------------------------


def make_key(**options: Any) -> tuple[str, Key]:
    """A new key: what its holder is told, once, and what is kept. `options` are fields of Key. Raises BadKey."""
    told = KEY_PREFIX + secrets.token_urlsafe(32)
    record = Key(id=f"key-{secrets.token_hex(6)}", hash=hash_of(told), created=float(int(time.time())), **options)
    return told, record


def hash_of(told: str) -> str:
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()


def system_keys(secret: DeploymentSecret) -> tuple[str, ...]:
    """Returns the keys that a router accepts from processes of the deployment, that of its own secret first. They allow everything a key
    can, without limits, and the holder of the deployment's secret may use them too."""
    return tuple("ts-system-" + purpose_key(each, "twostep.system-key.v1").hex() for each in secret.accepted)


def system_key(secret: DeploymentSecret) -> str:
    """Returns the one to show."""
    return system_keys(secret)[0]


def admin_keys(secret: DeploymentSecret) -> tuple[str, ...]:
    """Returns the keys that open a router's --admin-port, unless the port was given a key of its own; that of its own secret first."""
    return tuple("ts-admin-" + purpose_key(each, "twostep.admin-key.v1").hex() for each in secret.accepted)


def admin_key(secret: DeploymentSecret) -> str:
    """Returns the one to show."""
    return admin_keys(secret)[0]


def is_one_of(given: str, keys: Iterable[str]) -> bool:
    """In constant time."""
    raw = given.encode("utf-8", "surrogatepass")
    return len(given) <= MAX_KEY_CHARS and sum(hmac.compare_digest(raw, key.encode()) for key in keys) > 0


class KeyTable:
    """Keys by their hashes. What a lookup's time could tell is how a hash begins, and whoever guesses keys cannot choose their hashes; the
    hash that is found is compared in constant time all the same."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self.by_id: dict[str, Key] = {key.id: key for key in keys}
        self._by_hash = {key.hash: key for key in self.by_id.values()}

    def find(self, told: str) -> Key | None:
        if len(told) > MAX_KEY_CHARS:
            return None
        digest = hash_of(told)
        key = self._by_hash.get(digest)
        return key if key is not None and hmac.compare_digest(key.hash, digest) else None
