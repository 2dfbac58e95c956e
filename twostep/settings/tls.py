"""The PEM files of one side of a connection."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twostep.errors import SetupError
from twostep.settings.table import FileKind, Settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles(Settings):
    """PEM files of one side. A server with `ca` asks its clients for certificates of that authority; a client without
    `ca` trusts the system's authorities. A client with `peer_name` wants a certificate of that name, whatever address it asks."""

    cert: Path | None = setting(None, "PEM certificate; with --tls-key it switches TLS on", file=FileKind.READ)
    key: Path | None = setting(None, "PEM key of --tls-cert", file=FileKind.READ)
    ca: Path | None = setting(None, "PEM authority that peers must be certified by", file=FileKind.READ)
    peer_name: str = setting(
        "", "name that workers' certificates must have, whatever address they are reached at; the address itself if not given"
    )

    @property
    def enabled(self) -> bool:
        return self.cert is not None or self.ca is not None

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        if (self.cert is None) != (self.key is None):
            raise SetupError("--tls-cert and --tls-key go together: give both or neither")
        return _read("--tls-cert", self.cert), _read("--tls-key", self.key), _read("--tls-ca", self.ca)


PLAINTEXT = TlsFiles()


def _read(flag: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SetupError(f"{flag} {path}: {error.strerror}; give a readable PEM file") from error
