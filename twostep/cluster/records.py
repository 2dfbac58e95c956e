"""Defines the records that workers write about themselves in Redis, and their keys. Torch-free and protobuf-free.

twostep:v1:worker:{worker_id}          string: WorkerRecord as a signed JSON object (twostep/cluster/signed.py), expires HEARTBEAT_TTL_S
                                       after the last heartbeat; later where Redis is slow
twostep:v1:claim:{worker_id}           string: whose the name is (twostep/cluster/registration.py), expires with the record
twostep:v1:workers                     set of worker ids, added by every heartbeat (a reader takes out ids whose record has expired)
twostep:v1:epoch                       integer: the largest epoch that was given out (twostep/cluster/epochs.py)
twostep:v1:prefix:{worker_id}:{epoch}  set of prefix hashes (bytes) at hash-unit boundaries, expires PREFIX_TTL_S after
                                       the last heartbeat; a restart has a new epoch and so a new, empty set
twostep:v1:host-prefix:{worker_id}:{epoch}  the same for prefixes in the worker's host memory, below its pool
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat, with_config

from twostep.block_order import BlockOrder
from twostep.cluster.stored import read_stored
from twostep.errors import InvalidRequest
from twostep.step_curve import StepCurve
from twostep.version_skew import UNSAID

HEARTBEAT_S = 1.0
HEARTBEAT_TTL_S = 4.0
PREFIX_TTL_S = 30.0
# The index is bounded: a worker announces at most so many hashes, its most recent ones.
MAX_PREFIXES_PER_WORKER = 65536

WORKERS_KEY = "twostep:v1:workers"
WORKER_PREFIX = "twostep:v1:worker:"
# A reader takes in no more of one record, and of how many workers of one deployment.
MAX_RECORD_BYTES = 16 * 1024
MAX_WORKERS = 4096


def worker_key(worker_id: str) -> str:
    return f"{WORKER_PREFIX}{worker_id}"


def claim_key(worker_id: str) -> str:
    return f"twostep:v1:claim:{worker_id}"


def prefix_key(worker_id: str, epoch: int) -> str:
    return f"twostep:v1:prefix:{worker_id}:{epoch}"


def host_prefix_key(worker_id: str, epoch: int) -> str:
    return f"twostep:v1:host-prefix:{worker_id}:{epoch}"


def _finite(curve: StepCurve | None) -> StepCurve | None:
    if curve is not None and not all(map(math.isfinite, dataclasses.astuple(curve))):
        raise ValueError("a curve is finite")
    return curve


# What no worker means is refused: one record that is damaged must not keep a router from placing on the others.
Int = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Curve = Annotated[StepCurve | None, AfterValidator(_finite)]


# Planes of a block of most models.
KEYS_AND_VALUES = 2
# How a state's bytes lie in its blocks: by key head and column (twostep/model/step/state_columns.py). Whoever changes that counts this up.
STATE_LAYOUT = 1


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRecord:
    """twostep.v1.KvLayout as a plain value; twostep.cluster.convertible says which two workers can be paired. A field that this version
    does not know may change what the bytes mean: it is refused."""

    model_fingerprint: str
    dtype: str
    block_size: Annotated[Int, Field(ge=1)]
    num_layers: Int
    num_kv_heads: Int
    head_dim: Int
    tp_rank: Int = 0
    tp_size: Int = 1
    quantization: str = "none"
    num_planes: Int = KEYS_AND_VALUES  # or 1: latent attention's, whose keys are its values
    num_state_blocks: Int = 0  # those of a sequence's state, after its KV's
    # STATE_LAYOUT of its version. 0: there is no state, or it lies as in the first versions with states.
    state_layout: Int = 0
    # A block is of `num_layers` layers of one of so many groups, the last `num_windowed` of which have windows, with which no token reaches
    # further back than `reach` (twostep/block_order.py).
    num_groups: Annotated[Int, Field(ge=1)] = 1
    num_windowed: Int = 0
    reach: Int = 0

    def order(self, num_tokens: int) -> BlockOrder:
        """Returns how the blocks of so many tokens are handed over."""
        return BlockOrder(
            num_tokens=num_tokens,
            block_size=self.block_size,
            num_full=self.num_groups - self.num_windowed,
            num_windowed=self.num_windowed,
            reach=self.reach,
            num_state_blocks=self.num_state_blocks,
        )

    def num_tokens_in(self, num_blocks: int) -> int:
        """Returns how many tokens of one prompt so many blocks have room for: while it is computed it takes blocks of all groups."""
        return num_blocks // self.num_groups * self.block_size

    def blocks_of(self, num_tokens: float) -> float:
        """Returns about how many blocks a sequence of so many tokens keeps, in fractions."""
        in_reach = min(num_tokens, self.reach) if self.num_windowed else 0.0
        return (num_tokens * (self.num_groups - self.num_windowed) + in_reach * self.num_windowed) / self.block_size

    def said(self) -> dict[str, Any]:
        """Returns its fields by name, as they are written for others: what older versions do not know is left out where it is what they
        take for granted, and they refuse it where it is not."""
        named = dataclasses.asdict(self)
        if self.num_planes == KEYS_AND_VALUES:
            del named["num_planes"]
        if not self.num_state_blocks:
            del named["num_state_blocks"]
        if not self.state_layout:
            del named["state_layout"]
        for name, usual in (("num_groups", 1), ("num_windowed", 0), ("reach", 0)):
            if named[name] == usual:
                del named[name]
        return named


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """A GPU as its driver tells of it, whoever uses it. `utilization`: share of the last second or so in which anything ran there; None: it
    is not measured."""

    memory_used: Int
    memory_total: Int
    utilization: FiniteFloat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredHandOver:
    """Says what a hand-over by this transport takes, from the prompt's first token to the commit on the decode worker: the mean of the last
    ones, and of their bytes."""

    transport: str
    seconds: FiniteFloat
    num_bytes: FiniteFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    num_running: Int = 0
    num_waiting: Int = 0
    num_reserved: Int = 0
    num_held: Int = 0
    num_free_blocks: Int = 0  # that can be given out now, those with a cached prefix that nobody uses included
    num_queued_tokens: Int = 0  # prompt tokens that are here and not yet computed
    num_queued_batch_tokens: Int = 0  # those of batch requests among them
    num_context_tokens: Int = 0  # tokens of the running sequences, whose KV a decode step reads
    max_step_s: FiniteFloat = 0.0  # longest that a step which computes prompts may take now, for the sake of those that decode; 0: any time
    # A second, over the last ten: prompt tokens looked up in the prefix cache and those found there, KV bytes taken from prefill workers,
    # tokens computed.
    queried_tokens_per_s: FiniteFloat = 0.0
    hit_tokens_per_s: FiniteFloat = 0.0
    fetched_bytes_per_s: FiniteFloat = 0.0
    tokens_per_s: FiniteFloat = 0.0
    gpus: tuple[GpuLoad, ...] = ()  # in the order of its ranks; empty: a CPU, or the driver does not tell
    num_handing_over: Int = 0  # of the running ones, prompts that are computed for others
    prompt_tokens_per_s: FiniteFloat = 0.0  # of the tokens computed, those of prompts
    tpot_s: FiniteFloat = 0.0  # tightest time per token promised to those that decode now; 0: none was promised
    hand_overs: tuple[MeasuredHandOver, ...] = ()  # what lately came to it, by transport
    # Sequences a second, over the last ten: prompt and answer both computed here, KV handed over to others, and taken over from them.
    kept_per_s: FiniteFloat = 0.0
    handed_over_per_s: FiniteFloat = 0.0
    taken_over_per_s: FiniteFloat = 0.0
    # That drafts give a sequence in the time which the curve says of a step, of late.
    tokens_per_step: Annotated[FiniteFloat, Field(ge=1.0)] = 1.0

    @property
    def num_seqs(self) -> int:
        """Returns those that decode here, and are to."""
        return self.num_running - self.num_handing_over + self.num_reserved


# As `pod_owner`: of no Deployment that an autoscaler scales.
NO_OWNER = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    worker_id: str
    role: str  # "prefill" | "decode": what it is for, and all that it does unless `both_roles`
    address: str  # host:port of its gRPC server
    epoch: Int  # names one life of the worker; a later one's is larger (twostep/cluster/epochs.py)
    model: str  # name it is served under
    layout: LayoutRecord
    hash_unit: Int
    secret_check: str  # tells whether two processes have the same deployment secret, without telling it
    num_blocks: Int
    max_num_seqs: Int
    max_model_len: Int
    num_host_blocks: Int = 0  # that prefixes may take in host memory, below the pool; 0: none are kept there
    ready: bool = True
    draining: bool = False
    not_ready_reason: str = ""  # why nobody could be served there now, although it is ready itself: no KV transport works
    transports: tuple[str, ...] = ()  # those ready now
    load: WorkerLoad = field(default_factory=WorkerLoad)
    # How long its steps take; None: not measured yet.
    curve: Curve = None
    version: str = UNSAID  # twostep.__version__ of its process
    # Token budget of a step, and whether it takes prompts whose answers it decodes itself. An older router asks that of decode workers.
    step_tokens: Annotated[Int, Field(ge=1)] = 512
    local_prefill: bool = False
    # It takes work of either role, whichever it is for; False: older workers, and those with --fixed-roles.
    both_roles: bool = False
    max_step_s: FiniteFloat = 0.0  # longest that a step which computes prompts may take beside those who were promised nothing; 0: any time
    # The Kubernetes pod it runs in, and the role of the Deployment that the pod is counted for, which a change of roles leaves as it is, or
    # NO_OWNER.
    pod_name: str = ""
    pod_namespace: str = ""
    pod_owner: str = ""
    sampling: tuple[str, ...] = ()  # parameters that it knows and 0.1 did not (twostep/sampling_params.py)
    # Watch says what the decode worker holds (as a prefill worker, it listens to that; as a decode worker, it says it): Run need not wait
    # for Reserve.
    cached_at_watch: bool = False
    embeds: bool = False  # as a prefill worker, it takes Embed; 0.1 did not
    engine_pid: Int = 0  # of its engine's process; 0: the engine has none of its own
    # Longest prompt that it takes of a model whose encoder reads it in one step, the decoder's first token included; 0: of any length.
    max_prompt_tokens: Int = 0
    beat: Int = 0  # heartbeats of the life so far, this one included: tells a new one from a copy. 0: it does not count them

    @property
    def hands_over(self) -> bool:
        """Returns whether it computes prompts for other workers."""
        return self.role == "prefill" or self.both_roles

    @property
    def takes_over(self) -> bool:
        """Returns whether it decodes: what others hand over, and what it computes itself if it has `local_prefill`."""
        return self.role == "decode" or self.both_roles

    @property
    def serves(self) -> bool:
        """Returns whether requests can be placed on it now."""
        return self.ready and not self.not_ready_reason and not self.draining

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"layout": self.layout.said()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerRecord:
        """Reads a worker's record, without fields that this version does not know: workers can be upgraded before routers. Raises
        InvalidRequest for anything that is not a worker record."""
        try:
            return read_stored(cls, text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"not a worker record of this version: {error}; upgrade the worker or the router") from error
