"""Defines the autoscaler's decision as it lies in Redis. Torch-free and protobuf-free.

twostep:v1:autoscaler:lease      string "{token}:{autoscaler id}", expires unless renewed: who leads
twostep:v1:autoscaler:token      integer: of the last lease that was given out; grows with each
twostep:v1:autoscaler:decision   string: ScalingRecord as a signed JSON object, written by the leader alone, expires
                                 DECISION_TTL_S after

Any replica answers from the decision, and a new leader goes on from the memory in it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, FiniteFloat

from twostep.cluster.signed import Signer
from twostep.cluster.stored import read_stored
from twostep.errors import InvalidRequest, Unauthenticated

LEASE_KEY = "twostep:v1:autoscaler:lease"
TOKEN_KEY = "twostep:v1:autoscaler:token"
DECISION_KEY = "twostep:v1:autoscaler:decision"
# Long after it answers nobody any more, its memory is still worth something.
DECISION_TTL_S = 3600
# A decision about thousands of workers has some hundred kilobytes: readers take no more.
MAX_DECISION_BYTES = 1 << 20

_ROLES = ("prefill", "decode")


def _known(counts: Mapping[str, int]) -> Mapping[str, int]:
    return {role: counts[role] for role in _ROLES if role in counts}


Counts = Annotated[Mapping[str, Annotated[int, Field(ge=0, le=100_000)]], AfterValidator(_known)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRecord:
    """One decision. By role of the Deployment: `replicas` that it is to have, `pods` that it was thought to have when that was decided. By
    role of the worker: `wanted`. `token` and `number` order decisions: a later leader's token is larger."""

    token: int
    number: int  # of the leader's decisions, from 1
    leader: str
    at_s: FiniteFloat  # by Redis' clock
    interval_s: FiniteFloat  # until the next one
    replicas: Counts
    pods: Counts
    wanted: Counts
    # Pods that are asked for instead, where whoever scales does not move for so few more; see twostep/autoscaler/hpa.py.
    asked: Counts = field(default_factory=dict)
    asked_for: Counts = field(default_factory=dict)  # what was wanted when that was asked for
    victims: tuple[str, ...] = ()  # worker ids, those that should go first
    switches: Mapping[str, str] = field(default_factory=dict)  # worker id -> role
    reason: str = ""
    limit: str = ""
    memory: Any = None  # of the policy, as JSON
    stale_s: FiniteFloat = 0.0  # age from which its autoscaler answers nobody from it; 0: one that does not tell

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> ScalingRecord:
        """Fields beyond those known here are left out. Raises InvalidRequest for anything that is no decision."""
        try:
            record = read_stored(cls, text)
            if not len(record.replicas) == len(record.pods) == len(record.wanted) == len(_ROLES):
                raise ValueError("a role is missing")
            return record
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"not a decision of an autoscaler: {error}; upgrade whoever reads or wrote it") from error

    @classmethod
    def from_redis(cls, text: bytes, signer: Signer) -> ScalingRecord:
        """Reads the record as its leader wrote it. Raises InvalidRequest, also for what no member of the deployment wrote."""
        try:
            return cls.from_json(signer.read_object(text))
        except Unauthenticated as error:
            raise InvalidRequest(
                f"{DECISION_KEY}: {error.message}; give all processes the same --secret-file, and upgrade the autoscaler"
            ) from error

    @property
    def order(self) -> tuple[int, int]:
        """Returns a pair to compare decisions by: the later decision has the larger one."""
        return self.token, self.number
