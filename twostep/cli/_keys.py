"""`twostep keys`: API keys of a file, or of a running router through its admin port."""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from twostep.cli._keys_flags import LIMITS
from twostep.errors import InvalidRequest, NotFound, SetupError, TwostepError, Unauthenticated, Unavailable
from twostep.keys.api_key_file import put_in_file, read_file, remove_from_file
from twostep.keys.api_keys import Key, admin_key, make_key
from twostep.keys.secret import load_secret
from twostep.settings.tls import PLAINTEXT, TlsFiles

_FIELDS = ("name", "tenant", "most_urgent", *LIMITS, "expires", "speaks_for_tenants", "disabled")
_TIMEOUT_S = 15.0
_MAX_ANSWER_BYTES = 64 << 20

Record = Mapping[str, Any]


def run(args: argparse.Namespace) -> int:
    place = _place(args)
    fields = {name: value for name in _FIELDS if (value := getattr(args, name, None)) is not None}
    if args.action == "create":
        made = place.create(fields)
        if args.json:
            print(json.dumps(made))
        else:
            # The key alone on standard output: it may go straight to where it is kept.
            print(made["key"])
            print(f"{made['id']} was made. This is the only time that the key is shown.", file=sys.stderr)
    elif args.action == "change":
        if not fields:
            raise InvalidRequest("nothing to change was given; `twostep keys change --help` lists what there is")
        changed = place.change(args.id, fields)
        print(json.dumps(changed) if args.json else f"{args.id}: {_limits(changed)}, {_state(changed)}")
    elif args.action == "list":
        found = place.list()
        print(json.dumps(found) if args.json else _table(found))
    else:
        place.revoke(args.id)
        print(json.dumps({"id": args.id, "deleted": True}) if args.json else f"{args.id} is revoked.")
    return 0


def _place(args: argparse.Namespace) -> _File | _Router:
    if args.api_keys_file is not None and args.admin:
        raise InvalidRequest("--api-keys-file and --admin contradict each other; give one of them")
    if args.api_keys_file is not None:
        return _File(args.api_keys_file)
    if not args.admin:
        raise InvalidRequest("say where the keys are: --api-keys-file FILE, or --admin http://HOST:PORT for a router's --admin-port")
    return _Router(args.admin, key=_admin_key(args), tls=TlsFiles(ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key))


def _admin_key(args: argparse.Namespace) -> str:
    if args.admin_key_file is None:
        return admin_key(load_secret(args.secret_file, of_running=True))
    try:
        key: str = args.admin_key_file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--admin-key-file {args.admin_key_file}: {error}; give the router's") from error
    return key


class _File:
    """Routers that use the file see changes within a second or two."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, fields: Record) -> Record:
        """With `key`, which nobody is told again."""
        told, made = make_key()
        key = _merged(made, fields)
        self._write(key)
        return {"key": told, **key.to_dict()}

    def change(self, key_id: str, fields: Record) -> Record:
        found = next((key for key in self._read() if key.id == key_id), None)
        if found is None:
            raise self._missing(key_id)
        key = _merged(found, fields)
        self._write(key)
        return key.to_dict()

    def list(self) -> Sequence[Record]:
        return [key.to_dict() for key in self._read()]

    def revoke(self, key_id: str) -> None:
        try:
            found = remove_from_file(self._path, key_id)
        except OSError as error:
            raise self._failed(error) from error
        if not found:
            raise self._missing(key_id)

    def _read(self) -> Sequence[Key]:
        try:
            return read_file(self._path)
        except OSError as error:
            raise self._failed(error) from error

    def _write(self, key: Key) -> None:
        try:
            put_in_file(self._path, key)
        except OSError as error:
            raise self._failed(error) from error

    def _missing(self, key_id: str) -> TwostepError:
        return NotFound(f"there is no key {key_id!r} in {self._path}; `twostep keys list` shows those that there are")

    def _failed(self, error: OSError) -> TwostepError:
        return SetupError(f"{self._path}: {error.strerror or error}; give a file that can be read and written")


def _merged(key: Key, fields: Record) -> Key:
    return Key.from_dict(json.loads(key.to_json()) | dict(fields))


class _Router:
    def __init__(self, url: str, *, key: str, tls: TlsFiles) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidRequest(f"--admin {url!r} is no URL; give http://HOST:PORT")
        self._base = f"{parts.scheme}://{parts.netloc}"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        if parts.scheme == "http" and tls != PLAINTEXT:
            raise InvalidRequest(f"--tls-ca, --tls-cert and --tls-key are for TLS, and {self._base} is without; give https://HOST:PORT")
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=_context(tls)))
        self._opener = urllib.request.build_opener(*handlers)

    def create(self, fields: Record) -> Record:
        return self._ask("POST", "/admin/keys", fields)

    def change(self, key_id: str, fields: Record) -> Record:
        return self._ask("PATCH", f"/admin/keys/{quote(key_id, safe='')}", fields)

    def list(self) -> Sequence[Record]:
        found: Sequence[Record] = self._ask("GET", "/admin/keys")["data"]
        return found

    def revoke(self, key_id: str) -> None:
        self._ask("DELETE", f"/admin/keys/{quote(key_id, safe='')}")

    def _ask(self, method: str, path: str, body: Record | None = None) -> Record:
        data = None if body is None else json.dumps(dict(body)).encode()
        request = urllib.request.Request(self._base + path, data=data, headers=self._headers, method=method)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                found: Record = json.loads(answer.read(_MAX_ANSWER_BYTES))
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error.status or 0, error.read(_MAX_ANSWER_BYTES)) from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            tls = "; --tls-cert and --tls-key if it asks for a certificate" if self._base.startswith("https:") else ""
            raise Unavailable(f"no router answers at {self._base} ({reason}); give the URL of its --admin-port as --admin{tls}") from error
        except (ValueError, http.client.HTTPException) as error:
            raise Unavailable(f"what answers at {self._base} is no router's admin port; give another --admin") from error


def _context(tls: TlsFiles) -> ssl.SSLContext:
    if (tls.cert is None) != (tls.key is None):
        raise SetupError("--tls-cert and --tls-key go together: give both or neither")
    try:
        context = ssl.create_default_context(cafile=None if tls.ca is None else str(tls.ca))
    except (OSError, ssl.SSLError) as error:
        raise SetupError(f"--tls-ca {tls.ca}: {error}; give a readable PEM file") from error
    if tls.cert is not None:
        try:
            context.load_cert_chain(tls.cert, tls.key)
        except (OSError, ssl.SSLError) as error:
            raise SetupError(f"--tls-cert {tls.cert}, --tls-key {tls.key}: {error}; give readable PEM files that fit together") from error
    return context


def _refused(status: int, body: bytes) -> TwostepError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP status {status}; is this a router's --admin-port?"
    kinds: dict[int, type[TwostepError]] = {401: Unauthenticated, 404: NotFound, 503: Unavailable}
    return kinds.get(status, InvalidRequest)(message)


# ---- for people -------------------------------------------------------------------------------------------------------------


def _table(records: Sequence[Record]) -> str:
    if not records:
        return "There are no keys."
    head = ("ID", "NAME", "TENANT", "LIMITS", "STATE", "TOKENS TODAY")
    rows = [
        (
            record["id"],
            record["name"] or "-",
            record["tenant"] or "its own",
            _limits(record),
            _state(record),
            f"{record['usage']['tokens_this_day']:,}" if "usage" in record else "",
        )
        for record in records
    ]
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _limits(record: Record) -> str:
    units = {"requests_per_minute": "requests/min", "tokens_per_minute": "tokens/min", "tokens_per_day": "tokens/day"}
    told = [f"{record[name]:,} {unit}" for name, unit in units.items() if record[name]]
    if record["max_concurrent"]:
        told.append(f"{record['max_concurrent']:,} at once")
    if record["most_urgent"] != "interactive":
        told.append(f"{record['most_urgent']} at best")
    return ", ".join(told) or "none"


def _state(record: Record) -> str:
    over = record["expires"] and datetime.fromisoformat(record["expires"]) <= datetime.now(UTC)
    told = "disabled" if record["disabled"] else "expired" if over else "enabled"
    if record["expires"]:
        told += f", {'ended' if over else 'expires'} {record['expires']}"
    return told + (", speaks for tenants" if record["speaks_for_tenants"] else "")
