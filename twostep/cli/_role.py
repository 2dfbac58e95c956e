"""`twostep role`: which role a worker has; with a role: it drains and takes that one."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence

from twostep.client import AsyncClient, WorkerStatus
from twostep.errors import InvalidRequest, TwostepError, Unavailable
from twostep.keys.api_keys import system_key
from twostep.keys.secret import DeploymentSecret, load_secret
from twostep.rpc.call_signing import CallSigner, introduced
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import worker_pb2
from twostep.rpc.worker_role import switch_role, who_is
from twostep.settings.tls import TlsFiles

# How long a router may take to say who else there is.
_LOOK_S = 5.0


def run(args: argparse.Namespace) -> int:
    return asyncio.run(_run(args, load_secret(args.secret_file, of_running=True)))


async def _run(args: argparse.Namespace, secret: DeploymentSecret) -> int:
    async with open_channel(args.address, tls=TlsFiles(cert=args.tls_cert, key=args.tls_key, ca=args.tls_ca)) as unsigned:
        try:
            channel = await introduced(unsigned, CallSigner(secret, "twostep role"))
            worker = await who_is(channel)
        except Unavailable as error:
            raise Unavailable(
                f"no worker answers at {args.address} ({error.message}); give HOST:PORT as the worker's log or `twostep up` names it, and "
                "--tls-ca if it has TLS"
            ) from None
        if not args.role:
            _tell(worker, as_json=args.json)
            return 0
        if not args.force:
            await _check_others(args, secret, worker)
        change = await switch_role(channel, secret, role=args.role, drain_timeout_s=args.drain_timeout, worker=worker)
    if args.json:
        said = {"worker_id": worker.worker_id, "role": change.role, "epoch": change.epoch}
        print(json.dumps(said | {"drain_s": change.drain_s, "switch_s": change.switch_s}))
    elif change.epoch == worker.epoch:
        print(f"{worker.worker_id} is a {change.role} worker already.")
    else:
        print(f"{worker.worker_id} is a {change.role} worker now: drained in {change.drain_s:.2f} s, switched in {change.switch_s:.2f} s.")
    return 0


async def _check_others(args: argparse.Namespace, secret: DeploymentSecret, worker: worker_pb2.WorkerStats) -> None:
    """Raises InvalidRequest if nobody would do the work that the worker does now, or if no router tells."""
    if args.role == worker.role:
        return
    options = {"tls_ca": args.tls_ca, "tls_cert": args.tls_cert, "tls_key": args.tls_key}
    try:
        async with AsyncClient(args.target, api_key=system_key(secret), max_retries=0, **options) as client:
            status = await client.status(timeout=_LOOK_S)
    except TwostepError as error:
        raise InvalidRequest(
            f"whether others have the role of {worker.worker_id} is not known: {error.message}; say with --target where a router is, or "
            "give --force"
        ) from None
    if is_last(worker.worker_id, worker.role, status.workers):
        raise InvalidRequest(
            f"{worker.worker_id} is the last {worker.role} worker that serves, and no request would be answered without it; start another "
            "one first, or give --force"
        )


def is_last(worker_id: str, role: str, workers: Sequence[WorkerStatus]) -> bool:
    """Returns whether the deployment stands still without this worker in its role."""
    others = [each for each in workers if each.worker_id != worker_id and each.ready and not each.draining]
    if role == "prefill" and any(each.role == "decode" and each.local_prefill for each in others):
        # They compute prompts themselves.
        return False
    return all(each.role != role for each in others)


def _tell(worker: worker_pb2.WorkerStats, *, as_json: bool) -> None:
    state = "draining" if worker.draining else "ready" if worker.ready else "starting"
    if as_json:
        print(json.dumps({"worker_id": worker.worker_id, "role": worker.role, "epoch": worker.epoch, "state": state}))
    else:
        print(f"{worker.worker_id} is a {worker.role} worker, {state}, with {worker.num_sequences} requests.")
