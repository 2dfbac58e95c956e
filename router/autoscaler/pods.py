"""Which pods a Deployment that shrinks should lose first: `controller.kubernetes.io/pod-deletion-cost` on them, and nothing else.

Kubernetes takes the pods of least cost first; one without the annotation costs 0. So those that should go get negative costs, the first the
least, and those that should not get none. A replica that has just come to lead does not know what its predecessor has marked: it clears the
mark of every other pod once.

The right to patch pods is all that this needs (verb `patch` on `pods`, in the workers' namespace). Each round has a deadline and a bound on
calls at once; what failed is tried again in the next one. Off the cluster there is nothing to mark.
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

import aiohttp

from twostep.errors import SetupError

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
# What the first to go costs; those after it one more each.
FIRST_COST = -1000
_ATTEMPTS = 3
_RETRY_S = 0.2
_CALL_S = 2.0
_AT_ONCE = 8
# Names come from Redis and go into paths.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_MERGE_PATCH = "application/merge-patch+json"
_FORBIDDEN = (401, 403)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchResult:
    """Of one round: pods that were marked or cleared, and those that could not be."""

    done: int = 0
    failed: int = 0


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
        # By pod, as the API server was told; None: no annotation. Pods that are not in here may have any.
        self._told: dict[str, int | None] = {}
        self._complained = ""

    async def apply(self, victims: Sequence[str], others: Collection[str], *, timeout_s: float) -> PatchResult:
        """Marks the pods of `victims`, the first to go first, and clears those of `others`. Raises nothing: what fails is logged."""
        wanted: dict[str, int | None] = {name: FIRST_COST + number for number, name in enumerate(victims)}
        wanted |= {name: None for name in others if name not in wanted}
        self._told = {name: cost for name, cost in self._told.items() if name in wanted}
        changes = {name: cost for name, cost in wanted.items() if name not in self._told or self._told[name] != cost}
        if not changes:
            return PatchResult()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._patch_all(changes)
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            self._complain(f"{str(error) or type(error).__name__}")
            return PatchResult(failed=sum(1 for name in changes if name not in self._told or self._told[name] != changes[name]))

    def forget(self) -> None:
        """Another replica led meanwhile: the next round begins with nothing known."""
        self._told = {}

    async def _patch_all(self, changes: Mapping[str, int | None]) -> PatchResult:
        # Whoever should go is marked first: the time may not suffice for all.
        ordered = sorted(changes.items(), key=lambda each: (each[1] is None, each[1] or 0, each[0]))
        room = asyncio.Semaphore(_AT_ONCE)
        headers = {"Authorization": f"Bearer {_text(self._directory / 'token')}", "Content-Type": _MERGE_PATCH}
        timeout = aiohttp.ClientTimeout(total=self._call_s)
        async with aiohttp.ClientSession(connector=self._connector(), headers=headers, timeout=timeout) as session:

            async def patch(name: str, cost: int | None) -> bool:
                async with room:
                    return await self._patch(session, name, cost)

            done = await asyncio.gather(*(patch(name, cost) for name, cost in ordered))
        if all(done):
            self._complained = ""
        return PatchResult(done=sum(done), failed=len(done) - sum(done))

    async def _patch(self, session: aiohttp.ClientSession, name: str, cost: int | None) -> bool:
        if not _NAME.fullmatch(name):
            self._complain(f"{name!r:.80} is no name of a pod")
            return False
        url = f"{self._url}/api/v1/namespaces/{self._namespace}/pods/{name}"
        body = json.dumps({"metadata": {"annotations": {ANNOTATION: None if cost is None else str(cost)}}})
        why = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._retry_s * 2**attempt)
            try:
                async with session.patch(url, data=body, allow_redirects=False) as response:
                    if response.status in (200, 404):  # a pod that is gone needs no mark
                        self._told[name] = cost
                        return True
                    why = f"HTTP {response.status} for {name}"
                    if response.status in _FORBIDDEN:
                        why += f"; the service account needs the verb patch on pods in {self._namespace}"
                    if response.status < 500 and response.status != 429:
                        break
            except (OSError, aiohttp.ClientError, TimeoutError) as error:
                why = str(error) or type(error).__name__
        self._complain(why)
        return False

    def _connector(self) -> aiohttp.TCPConnector:
        authority = self._directory / "ca.crt"
        if not self._url.startswith("https:"):
            return aiohttp.TCPConnector()
        context = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
        return aiohttp.TCPConnector(ssl=context)

    def _complain(self, why: str) -> None:
        if why != self._complained:
            self._complained = why
            log.warning("pods cannot be marked as those to go first (%s): Kubernetes chooses by itself until they can", why)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
