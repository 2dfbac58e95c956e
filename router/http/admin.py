"""Lets operators change a running router, on a port of its own (--admin-port): nothing of it can be reached through the others.

    GET    /admin/keys              all API keys, with what they have used; never the keys themselves, nor their hashes
    POST   /admin/keys              makes one: {"name", "tenant", "requests_per_minute", ...}; `key` in the answer is told this once
    GET    /admin/keys/{id}         one
    PATCH  /admin/keys/{id}         changes what is given: limits, "disabled", "expires", ...
    DELETE /admin/keys/{id}         revokes it
    GET    /admin/status            the deployment as this router sees it: twostep.v1.ClusterStatus
    POST   /admin/workers/{id}/role {"role": "prefill" | "decode", "drain_timeout_s": 30}: answers when the worker serves it
    GET    /admin/log-level         {"level"}
    POST   /admin/log-level         {"level": "debug" | "info" | "warning" | "error"}, of this router until it ends
    POST   /admin/drain             this router takes nothing new, lets what runs end, and exits

Each call shows the admin key: `authorization: Bearer KEY`.
"""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from router.access.account import Account
from router.access.control import Access
from router.http.bodies import BODIES, json_body
from router.http.connections import at_work
from router.http.errors import Handler, errors
from router.http.origins import ORIGINS, Origins, same_site
from router.http.server import Listener
from router.status.board import StatusBoard
from router.status.status import what_ends
from router.workers.pool import WorkerPool
from twostep.errors import Incompatible, InvalidRequest, NotFound, SetupError, Unauthenticated
from twostep.keys.api_keys import Key, admin_keys, is_one_of, make_key
from twostep.keys.secret import MIN_SECRET_BYTES, DeploymentSecret
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.worker_role import switch_role
from twostep.settings.tls import TlsFiles

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 << 10
_MAX_DRAIN_S = 3600.0
_LEVELS = ("debug", "info", "warning", "error")
# Made by the router, and never anybody's to say.
_OURS = frozenset({"id", "hash", "created"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Administration:
    """Holds what the handlers work on. Each of `keys` opens the port; `secret` and `tls` are the deployment's; `drain` begins a drain."""

    keys: tuple[str, ...]
    access: Access
    board: StatusBoard
    pool: WorkerPool
    secret: DeploymentSecret
    tls: TlsFiles
    drain: Callable[[], None]


ADMINISTRATION: web.AppKey[Administration] = web.AppKey("administration", Administration)

routes = web.RouteTableDef()


def make_admin_app(administration: Administration, origins: Origins) -> web.Application:
    app = web.Application(middlewares=[at_work, errors, same_site, _let_in], client_max_size=_MAX_BODY_BYTES)
    app[ADMINISTRATION] = administration
    app[ORIGINS] = origins
    app.add_routes(routes)
    return app


@web.middleware
async def _let_in(request: web.Request, handler: Handler) -> web.StreamResponse:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not is_one_of(key.strip(), request.app[ADMINISTRATION].keys):
        raise Unauthenticated(
            "this port wants the admin key as `authorization: Bearer KEY`: what stands in the router's --admin-key-file, or where it has "
            "none, what follows from the deployment's secret; `twostep keys` sends it when it is given --admin-key-file or --secret-file"
        )
    with request.app[BODIES].arriving(request, caller=request.remote or "", most=_MAX_BODY_BYTES):
        response = await handler(request)
    response.headers["Cache-Control"] = "no-store"
    return response


# ---- keys -------------------------------------------------------------------------------------------------------------------


@routes.get("/admin/keys")
async def list_keys(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_account_fields(each) for each in request.app[ADMINISTRATION].access.accounts()]})


@routes.post("/admin/keys")
async def create_key(request: web.Request) -> web.Response:
    access = request.app[ADMINISTRATION].access
    wanted = await _object(request)
    secret_key, made = make_key()
    key = _changed(made, wanted)
    await access.put(key)
    log.info("API key %s was made", key.id)
    return web.json_response({"key": secret_key, **key.to_dict()}, status=201)


@routes.get("/admin/keys/{id}")
async def get_key(request: web.Request) -> web.Response:
    return web.json_response(_account_fields(_account(request)))


@routes.patch("/admin/keys/{id}")
async def change_key(request: web.Request) -> web.Response:
    wanted = await _object(request)
    key = _changed(_account(request).key, wanted)
    await request.app[ADMINISTRATION].access.put(key)
    log.info("API key %s was changed: %s", key.id, ", ".join(sorted(wanted)))
    return web.json_response(_account_fields(_account(request)))


@routes.delete("/admin/keys/{id}")
async def revoke_key(request: web.Request) -> web.Response:
    key_id = request.match_info["id"]
    await request.app[ADMINISTRATION].access.remove(key_id)
    log.info("API key %.64s was revoked", key_id)
    return web.json_response({"id": key_id, "deleted": True})


def _account(request: web.Request) -> Account:
    return request.app[ADMINISTRATION].access.account(request.match_info["id"])


def _changed(key: Key, wanted: dict[str, Any]) -> Key:
    """Raises BadKey, InvalidRequest."""
    if ours := sorted(_OURS & set(wanted)):
        raise InvalidRequest(f"{ours[0]} is not yours to say; leave it out")
    return Key.from_dict(json.loads(key.to_json()) | wanted)


def _account_fields(account: Account) -> dict[str, Any]:
    return {**account.key.to_dict(), "usage": account.usage()}


# ---- the deployment and this router --------------------------------------------------------------------------------------------


@routes.get("/admin/status")
async def status(request: web.Request) -> web.Response:
    return web.json_response(request.app[ADMINISTRATION].board.status_json())


@routes.post("/admin/workers/{id}/role")
async def set_role(request: web.Request) -> web.Response:
    administration, worker_id = request.app[ADMINISTRATION], request.match_info["id"]
    wanted = await _object(request)
    role, drain_s = wanted.get("role"), wanted.get("drain_timeout_s", 30.0)
    if role not in ("prefill", "decode"):
        raise InvalidRequest("role: give prefill or decode")
    if isinstance(drain_s, bool) or not isinstance(drain_s, int | float) or not 0 <= drain_s <= _MAX_DRAIN_S:
        raise InvalidRequest(f"drain_timeout_s: give seconds from 0 to {_MAX_DRAIN_S:g}")
    address = next((record.address for record in administration.pool.records() if record.worker_id == worker_id), None)
    if address is None:
        raise NotFound(f"there is no worker {worker_id[:64]!r}; GET /admin/status lists those that there are")
    if not wanted.get("force") and (ends := what_ends(administration.pool.records(), worker_id, role)):
        raise Incompatible(f'{ends}; start one first, or send "force": true')
    log.info("worker %s is asked to take the %s role", worker_id, role)
    async with channel_to_worker(address, administration.secret, caller="admin port", tls=administration.tls) as channel:
        change = await switch_role(channel, administration.secret, role=role, drain_timeout_s=float(drain_s))
    fields = {"worker_id": worker_id, "role": change.role, "epoch": change.epoch, "drain_s": change.drain_s, "switch_s": change.switch_s}
    return web.json_response(fields)


@routes.get("/admin/log-level")
async def log_level(request: web.Request) -> web.Response:
    return web.json_response({"level": logging.getLevelName(logging.getLogger().level).lower()})


@routes.post("/admin/log-level")
async def set_log_level(request: web.Request) -> web.Response:
    level = (await _object(request)).get("level")
    if level not in _LEVELS:
        raise InvalidRequest(f"level: give one of {', '.join(_LEVELS)}")
    logging.getLogger().setLevel(level.upper())
    log.warning("the log's level is %s from now on", level)
    return web.json_response({"level": level})


@routes.post("/admin/drain")
async def drain(request: web.Request) -> web.Response:
    log.warning("this router drains, and ends: it was asked to")
    request.app[ADMINISTRATION].drain()
    return web.json_response({"draining": True}, status=202)


async def _object(request: web.Request) -> dict[str, Any]:
    """Returns the body, a JSON object. Raises InvalidRequest, HttpError 415."""
    try:
        found = json.loads(await json_body(request))
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not JSON; send an object") from None
    if not isinstance(found, dict):
        raise InvalidRequest("the body is not a JSON object; send one")
    return found


# Operators are few.
_KEEPALIVE_S, _MAX_CONNECTIONS = 15.0, 64


def admin_listener(
    administration: Administration, *, host: str, port: int, tls: ssl.SSLContext | None, allowed_hosts: Collection[str] = ()
) -> Listener:
    app = make_admin_app(administration, Origins(host=host, allowed_hosts=allowed_hosts))
    return Listener(app, host=host, port=port, flag="--admin-port", tls=tls, max_connections=_MAX_CONNECTIONS, keepalive_s=_KEEPALIVE_S)


def load_admin_keys(path: Path | None, secret: DeploymentSecret) -> tuple[str, ...]:
    """Returns the key in --admin-key-file, else those that follow from the deployment's secret. Raises SetupError."""
    if path is None:
        return admin_keys(secret)
    try:
        key = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--admin-key-file {path}: {error}; give a readable file with one line of ASCII") from error
    if len(key) < MIN_SECRET_BYTES or not key.isprintable() or " " in key:
        wanted = f"give {MIN_SECRET_BYTES} characters or more without spaces, for example of `openssl rand -hex 32`"
        raise SetupError(f"--admin-key-file {path} holds no key: {wanted}")
    return (key,)
