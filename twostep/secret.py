"""The deployment secret: one file, the same on every process, that keys tickets and prefix hashes."""

from __future__ import annotations

from pathlib import Path

from twostep.errors import SetupError

MIN_SECRET_BYTES = 16


def load_secret(path: Path | None) -> bytes:
    """The file's bytes without white space at either end. Raises SetupError (not given, unreadable, too short)."""
    if path is None:
        raise SetupError("--secret-file is missing; make one with `openssl rand -hex 32 > secret` and give it to every process")
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise SetupError(f"--secret-file {path}: {error.strerror}; give a readable file") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise SetupError(
            f"--secret-file {path} holds {len(secret)} bytes; give at least {MIN_SECRET_BYTES}, for example `openssl rand -hex 32`"
        )
    return secret
