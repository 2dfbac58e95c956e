"""The one key of a router that was started with --api-key-file or TWOSTEP_API_KEY: without limits, and read once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twostep.errors import InvalidRequest, SetupError
from twostep.keys.api_keys import MAX_KEY_CHARS, Key, hash_of

_ID = "api-key"
_FIXED = (
    "this router has one key, that of --api-key-file or TWOSTEP_API_KEY; for keys that can be changed start it with --api-keys-file FILE "
    "or --api-keys redis"
)


class OwnKey:
    """A KeySource of one key that never changes."""

    def __init__(self, told: str) -> None:
        self._keys: Sequence[Key] | None = [Key(id=_ID, hash=hash_of(told), name="the router's own")]

    async def read(self) -> Sequence[Key] | None:
        keys, self._keys = self._keys, None
        return keys

    async def put(self, key: Key) -> None:
        raise InvalidRequest(_FIXED)

    async def remove(self, key_id: str) -> bool:
        raise InvalidRequest(_FIXED)


def own_key_of(path: Path | None, variable: str) -> OwnKey | None:
    """Returns the source with the key of the file's first line, else of the variable; None: neither was given. Raises SetupError."""
    where, told = "TWOSTEP_API_KEY", variable
    if path is not None:
        where = f"--api-key-file {path}"
        try:
            told = path.read_text().partition("\n")[0]
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"{where} cannot be read ({error}); give a file whose first line is the key") from error
    elif not variable:
        return None
    told = told.strip()
    if not 0 < len(told) <= MAX_KEY_CHARS or not told.isprintable():
        raise SetupError(f"{where} holds {len(told)} characters; give a key of 1 to {MAX_KEY_CHARS} printable ones")
    return OwnKey(told)
