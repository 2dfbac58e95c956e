"""Which pods a Deployment that shrinks should lose first: `controller.kubernetes.io/pod-deletion-cost` on them, and who said so.

Kubernetes takes the pods of least cost first; one without the annotation costs 0. So those that should go get negative costs, the first the
least, and those that should not get none. Marks come before the decision is told to anybody, so that nothing shrinks without them, and so
before Redis' check of the lease. They have their own: each mark, a cleared one too, leaves the leader's lease ("{token}:{holder}") there:

    read      an empty patch; its answer has the pod's lease and resourceVersion. A larger token than one's own, or one's own token with
              another holder: outranked, nothing is written
    write     with that resourceVersion, which makes the API server refuse (409) if anything has changed since: read again

The answer to a write has the next resourceVersion. Once a leader has been at a pod, one with a smaller token, however long it was stopped
and wherever in this, cannot write to it any more. Each round has a deadline and a bound on calls at once; what failed is tried again in the
next one. It needs the verb `patch` on `pods`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from twostep.errors import SetupError

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
# Who has written the other one last: "{token}:{holder}" of a lease.
LEASE_ANNOTATION = "autoscaler.twostep/lease"
# What the first to go costs; those after it one more each.
FIRST_COST = -1000
_ATTEMPTS = 3
_RETRY_S = 0.2
_CALL_S = 2.0
_AT_ONCE = 8
# Names come from Redis and go into paths.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LEASE = re.compile(r"([0-9]{1,15}):(.*)", re.DOTALL)
# The metadata of a pod will do as an answer.
_ACCEPT = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
_MERGE_PATCH = "application/merge-patch+json"
_OK, _GONE = 200, 404
_FORBIDDEN = (401, 403)
# Somebody else has written meanwhile; too much at once.
_PASSING = (409, 429)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchResult:
    """Counts the pods of one round: those that were marked or cleared, and those that could not be. `outranked`: the token of a lease that
    bars this one from a pod; 0: there was none."""

    done: int = 0
    failed: int = 0
    outranked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkLease:
    """In whose name pods are marked: the lease in Redis."""

    token: int
    holder: str

    def __str__(self) -> str:
        return f"{self.token}:{self.holder}"

    def outranked_by(self, text: str) -> int:
        """The token in a pod's annotation, if this lease may not write over it; else 0. What is no lease bars nobody."""
        found = _LEASE.fullmatch(text)
        token = int(found[1]) if found is not None else 0
        return token if token > self.token or (token == self.token and text != str(self)) else 0


@dataclass(frozen=True, slots=True)
class _Seen:
    """A pod as the API server answered last. `cost` None: no annotation."""

    cost: str | None
    lease: str
    version: str


class PodMarks:
    """`url` of the API server, `directory` of the service account: `token` (read for each round, since it changes), `ca.crt`, `namespace`.
    apply() as often as there is a decision; close() ends nothing that matters."""

    def __init__(self, url: str, directory: Path, *, namespace: str = "", retry_s: float = _RETRY_S, call_s: float = _CALL_S) -> None:
        """Raises SetupError if no namespace is known."""
        self._url = url
        self._directory = directory
        self._namespace = namespace or _text(directory / "namespace")
        if not _NAME.fullmatch(self._namespace):
            raise SetupError(f"{self._namespace!r} is no namespace; give --pod-namespace, or --kubernetes-api none to mark no pods")
        self._retry_s = retry_s
        self._call_s = call_s
        # By pod, as it was when it was written to last; None: it is gone. Pods that are not in here may have any annotation.
        self._seen: dict[str, _Seen | None] = {}
        self._complained = ""

    async def apply(self, victims: Sequence[str], others: Collection[str], *, lease: MarkLease, timeout_s: float) -> PatchResult:
        """Marks the pods of `victims`, the first to go first, and clears those of `others`. Raises nothing: what fails is logged."""
        wanted: dict[str, str | None] = {name: str(FIRST_COST + number) for number, name in enumerate(victims)}
        wanted |= {name: None for name in others if name not in wanted}
        self._seen = {name: seen for name, seen in self._seen.items() if name in wanted}
        changes = {name: cost for name, cost in wanted.items() if not self._is_done(name, cost, lease)}
        if not changes:
            return PatchResult()
        barred: list[int] = []
        try:
            async with asyncio.timeout(timeout_s):
                await self._patch_all(changes, lease, barred)
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            self._complain(f"{str(error) or type(error).__name__}")
        done = sum(self._is_done(name, cost, lease) for name, cost in changes.items())
        return PatchResult(done=done, failed=len(changes) - done, outranked=max(barred, default=0))

    def forget(self) -> None:
        """Another replica led meanwhile: the next round begins with nothing known."""
        self._seen = {}

    def _is_done(self, name: str, cost: str | None, lease: MarkLease) -> bool:
        if name not in self._seen:
            return False
        seen = self._seen[name]
        return seen is None or (seen.cost == cost and seen.lease == str(lease))

    async def _patch_all(self, changes: Mapping[str, str | None], lease: MarkLease, barred: list[int]) -> None:
        # Whoever should go is marked first: the time may not suffice for all.
        ordered = sorted(changes.items(), key=lambda each: (each[1] is None, int(each[1] or 0), each[0]))
        room = asyncio.Semaphore(_AT_ONCE)
        authority = self._directory / "ca.crt"
        tls = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
        headers = {"Authorization": f"Bearer {_text(self._directory / 'token')}", "Content-Type": _MERGE_PATCH, "Accept": _ACCEPT}
        timeout = aiohttp.ClientTimeout(total=self._call_s)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls), headers=headers, timeout=timeout) as session:

            async def patch(name: str, cost: str | None) -> bool:
                async with room:
                    # Of whom one pod says that another leads, the others say so too.
                    return not barred and await self._patch(session, name, cost, lease, barred)

            if all(await asyncio.gather(*(patch(name, cost) for name, cost in ordered))):
                self._complained = ""

    async def _patch(self, session: aiohttp.ClientSession, name: str, cost: str | None, lease: MarkLease, barred: list[int]) -> bool:
        if not _NAME.fullmatch(name):
            self._complain(f"{name!r:.80} is no name of a pod")
            return False
        url = f"{self._url}/api/v1/namespaces/{self._namespace}/pods/{name}"
        why = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._retry_s * 2**attempt)
            try:
                # Of a call whose answer nobody hears, by an error or the round's deadline, it is not known whether it has come about.
                seen = self._seen.pop(name, None)
                if seen is None:
                    status, seen = await self._call(session, url, {})
                    if seen is not None and (token := lease.outranked_by(seen.lease)):
                        barred.append(token)
                        return False
                if seen is not None:
                    annotations = {ANNOTATION: cost, LEASE_ANNOTATION: str(lease)}
                    body = {"metadata": {"resourceVersion": seen.version, "annotations": annotations}}
                    status, seen = await self._call(session, url, body)
            except (OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                why = str(error) or type(error).__name__
                continue
            if seen is not None or status == _GONE:  # a pod that is gone needs no mark
                self._seen[name] = seen
                return True
            why = f"HTTP {status} for {name}"
            if status in _FORBIDDEN:
                why += f"; the service account needs the verb patch on pods in {self._namespace}"
            if status < 500 and status not in _PASSING:
                break
        self._complain(why)
        return False

    async def _call(self, session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> tuple[int, _Seen | None]:
        """The status, and the pod if it is 200. Raises ValueError for an answer that is no pod."""
        async with session.patch(url, data=json.dumps(body), allow_redirects=False) as response:
            if response.status != _OK:
                return response.status, None
            try:
                metadata = (await response.json(content_type=None))["metadata"]
                annotations = metadata.get("annotations") or {}
                seen = _Seen(annotations.get(ANNOTATION), str(annotations.get(LEASE_ANNOTATION, "")), str(metadata["resourceVersion"]))
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError("the API server's answer is no pod; is --kubernetes-api its address?") from error
            return response.status, seen

    def _complain(self, why: str) -> None:
        if why != self._complained:
            self._complained = why
            log.warning("pods cannot be marked as those to go first (%s): Kubernetes chooses by itself until they can", why)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
