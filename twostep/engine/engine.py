"""The single-process engine: pool, scheduler and runner in one. Prefill and decode workers are edges around it; alone, it is
the oracle that the distributed system is compared with.

Thread rules: every method may be called from any thread and returns at once (a lock guards the bookkeeping and is never held
while the runner works), but `step` and `settle_launched` are called by one thread only and block for one step of the device.

A step:

  0. draft    a draft model computes tokens that may come next, without the lock (drafts.py)
  1. plan     under the lock: running decodes and prompts, which take blocks as they grow, then preempted sequences and waiting prompts;
              batch ones get what the others leave (step_plan.py), and give way for them (scheduler.py)
  2. launch   without the lock: the batch is queued on the device (step_launcher.py)
  3. result   without the lock: others submit, reserve, commit and cancel meanwhile
  4. settle   under the lock: count what was computed, make full blocks findable, append and report tokens, free what ended

With look-ahead, step n+1 is planned and launched before the result of step n is waited for, so that the device goes from one to the
next without the host:

    device   ──── n ────────────┬──── n+1 ──────────┬──── n+2 ───
    host     plan, launch n+1   │ settle n, deliver, plan, launch n+2     what n samples is carried to n+1 on the device

The launch waits as long as the running step is sure to take (pacing.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from twostep.engine.batch import KvShape, Runner
from twostep.engine.block_manager import BlockManager
from twostep.engine.block_pool import BlockPool
from twostep.engine.config import EngineConfig
from twostep.engine.constrained import ConstrainedSequences, NextMask
from twostep.engine.drafts import Drafting
from twostep.engine.host_copies import HostCopies
from twostep.engine.host_tier import HostLoad, HostTier
from twostep.engine.pacing import UNSEEN_S, Pacing
from twostep.engine.prompt_lookup import PromptLookup
from twostep.engine.proposer import Proposer, WantedDrafts
from twostep.engine.scheduler import Scheduler
from twostep.engine.self_test import SICK, SelfTest
from twostep.engine.sequence import EngineSequence, SequenceState, make_sequence
from twostep.engine.step_launcher import LaunchedStep, MarkedStep, StepLauncher
from twostep.engine.types import EngineRequest, EngineStats, PrefixDelta, Reservation, SequenceFailure, StepOutput
from twostep.errors import InternalError, InvalidRequest, NotFound, SetupError
from twostep.settings.speculative import NGRAM
from twostep.step_curve import StepCurve

__all__ = ["Engine", "EngineConfig", "PrefixDelta"]

# How much one launch says of how long launches take, and what the first may seem to take.
_LAUNCH_RATE, _LEAST_LAUNCH_S = 1 / 16, 1e-3


class Engine:
    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        proposer: Proposer | None = None,
    ) -> None:
        """`clock` gives seconds, and `sleep` lets some pass. `proposer` drafts tokens where `config` asks for drafts; None: as that says.
        Raises SetupError for bounds that make no sense together."""
        shape = runner.kv_shape
        _check(config, shape)
        self._runner = runner
        self._depth = 2 if (runner.overlaps if config.look_ahead is None else config.look_ahead) else 1
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._pool = BlockPool(
            shape.num_blocks,
            block_size=shape.block_size,
            hash_unit=config.hash_unit,
            has_states=bool(shape.num_state_blocks),
            num_groups=shape.num_groups,
        )
        # It knows of no states, without which the prefixes of a model that has them are of no use; an encoder has no prefixes.
        num_rows = 0 if shape.num_state_blocks or shape.has_encoder else config.host_cache_bytes // shape.block_bytes
        self._tier = HostTier(self._pool, num_rows, block_bytes=shape.block_bytes, ahead_share=config.host_ahead_share)
        blocks = self._blocks = BlockManager(self._pool, self._tier, shape, hash_unit=config.hash_unit)
        drafting = None
        if config.speculative is not None:
            if shape.num_state_blocks:
                # It cannot forget the drafts that were not accepted.
                raise SetupError("this model's layers keep states, with which no tokens are drafted; leave --speculative-config out")
            if proposer is None and config.speculative.method != NGRAM:
                raise SetupError(f"method {config.speculative.method} needs a model, and this engine has none; give method {NGRAM}")
            drafting = Drafting(
                proposer or PromptLookup(config.speculative), config.speculative.num_speculative_tokens, ahead=self._depth > 1
            )
        self._drafting = drafting
        self._constrained = ConstrainedSequences(drafting)
        self._scheduler = Scheduler(blocks, self._constrained, config, drafting, reads_shared_once=runner.reads_shared_once)
        # The one lock, over pool and scheduler; notified when there is work.
        self._changed = threading.Condition()
        self.host_copies = HostCopies(runner, self._tier, self._changed, self._on_loaded)
        self._launcher = StepLauncher(runner, blocks.tables, clock)
        self._steps = 0
        self._launched: deque[LaunchedStep] = deque()
        self._self_test = SelfTest(runner.vocab_size)
        self._pacing = Pacing()
        self._ended_at = 0.0
        self._end_seen = True
        # What a launch takes the host, on the whole: as long the device waits where the step before is waited for.
        self._launch_s = 0.0
        # After the step settled last there was more to do.
        self._goes_on = False
        self._expert_imbalance = 0.0
        # Since when there is work without a finished step; None: idle.
        self._busy_since: float | None = None

    def reconfigure(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> bool:
        """Sets other bounds; the pool, and what is findable in it, stays. Only while nothing is here, not even in a launched step:
        otherwise False, and nothing changes. Raises SetupError for bounds that make no sense together."""
        config = replace(self._config, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        _check(config, self._runner.kv_shape)
        with self._changed:
            if not self._scheduler.idle:
                return False
            self._scheduler.reconfigure(config)
            self._config = config
        return True

    # ---- work in ----------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, *, hold: bool = False, mark_layers: Sequence[int] = ()) -> None:
        """Queues a prompt. `hold=False`: prefill and decode, or pool, here to the end; when the pool runs out it may have to give way to
        more urgent or older ones for a while. `hold=True` (prefill role): it never gives way; after the first token is sampled the sequence
        leaves the batch and keeps its blocks until `release`, also if that token ended the request. `mark_layers`, of one with `hold`:
        after how many layers of its steps it is to be told that they are done, ascending (see follow_layers).

        Raises ResourceExhausted (queue full), InvalidRequest (it can never fit the pool or the context; a duplicate seq_id).
        """
        assert hold or not mark_layers
        assert not (hold and request.pooling), "a vector is all that is left of a pooled prompt"
        self._check_served(request)
        sequence = self._make(request, hold=hold, state=SequenceState.WAITING)
        sequence.mark_layers = mark_layers
        with self._changed:
            self._scheduler.submit(sequence, self._clock())
            self._note_work()

    def mark_layers(self, seq_id: str, mark_layers: Sequence[int]) -> None:
        """Changes what it was submitted with, for the steps to come. Of a sequence that has ended it says nothing."""
        with self._changed:
            if (sequence := self._scheduler.live(seq_id)) is not None:
                sequence.mark_layers = mark_layers

    def block_ids(self, seq_id: str) -> Sequence[int]:
        """Returns the blocks of what was given of a sequence, in the order in which they are handed over (twostep/block_order.py), then
        those of its state; none while it waits. Blocks of the first num_computed_tokens // block_size columns do not change any more
        (before that, a computed block may be exchanged for one of the same prefix); those of the last one of a held sequence do not either.
        Of one without `hold` the first may be others' by now, where there are windows. Raises NotFound."""
        with self._changed:
            sequence = self._scheduler.live(seq_id)
            if sequence is None:
                raise NotFound(f"{seq_id} is not here; it ended or was cancelled")
            return self._blocks.handed_over(sequence)

    def generations(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Returns of each block a uint32, one more each time the pool gives it to new content: while a sequence owns a block its generation
        does not change, and who read the block without owning it compares."""
        with self._changed:
            return [self._pool.generation(block) for block in block_ids]

    def release(self, seq_id: str) -> bool:
        """Gives back a held sequence's blocks (full ones stay findable as cached prefix); one submitted with `hold` that is not
        held yet is cancelled. Idempotent; False: nothing held."""
        with self._changed:
            sequence = self._scheduler.live(seq_id)
            return sequence is not None and sequence.hold and self._end(sequence)

    def reserve(self, request: EngineRequest) -> Reservation:
        """Decode role: takes blocks for request.token_ids, now, sharing those that hold a cached prefix. Decoding takes more as it goes.
        Raises ResourceExhausted (no room now beside what others will need; with `retry_after_s` if batch sequences give way for it, which
        takes a step), InvalidRequest (with max_tokens it can never fit; a
        duplicate seq_id)."""
        self._check_served(request)
        sequence = self._make(request, hold=False, state=SequenceState.RESERVED)
        with self._changed:
            try:
                return self._scheduler.reserve(sequence, self._clock())
            finally:
                self._note_work()

    def commit(self, seq_id: str, output_ids: Sequence[int], *, exact: bool = True, confirmed: bool = True) -> None:
        """Notes that the reserved blocks now hold the KV of all of the request's token_ids, and `output_ids` (at least one) were sampled
        after them elsewhere: decode from the next step on. The KV of `output_ids` is computed here, and the first token reported is the
        one after them. The reservation's block ids are not the caller's any more.
        Not `exact`: this is not the KV that this engine would have computed, so neither it nor what is computed after it ever stands
        under the prompt's prefix hashes. Not `confirmed`: it has yet to be found out whether this is the right KV. The sequence decodes,
        but nothing of it becomes a cached prefix before `confirm`, and its tokens must not be sent; `cancel` undoes it.

        Raises NotFound if the reservation was cancelled, InvalidRequest if `output_ids` are none, no tokens, or ended the
        request already (nothing is left to decode: the reservation stays, cancel it)."""
        ids = [int(token) for token in output_ids]
        if any(not 0 <= token < self._runner.vocab_size for token in ids):
            raise InvalidRequest(f"output_ids of {seq_id} must be from 0 to {self._runner.vocab_size - 1}, the model's vocabulary")
        with self._changed:
            self._scheduler.commit(seq_id, ids, self._clock(), exact=exact, confirmed=confirmed)
            self._note_work()

    def confirm(self, seq_id: str) -> None:
        """Notes, after a commit that was not confirmed, that the KV is the right one. Idempotent; a sequence that has ended needs it no
        more."""
        with self._changed:
            self._scheduler.confirm(seq_id)

    def cancel(self, seq_id: str) -> bool:
        """Ends a sequence in whatever state, and frees its blocks (after the launched steps that it is in). No output of it is
        reported after this returns. Idempotent; False: not here."""
        with self._changed:
            sequence = self._scheduler.live(seq_id)
            return self._self_test.forget(seq_id) if sequence is None else self._end(sequence)

    def follow_layers(self, on_marked: Callable[[MarkedStep], None]) -> None:
        """Gives `on_marked` each launched step that tells of its layers, on the engine's thread: it must not block. Only
        prompts submitted with `mark_layers` are marked."""
        self._launcher.on_marked = on_marked

    def set_curve(self, curve: StepCurve | None) -> None:
        """Says how long steps take here, from now on: that bounds mixed steps in time (EngineConfig.max_step_s), and how long a launch
        waits for arrivals. None: nothing bounds steps."""
        with self._changed:
            self._scheduler.curve = self._pacing.curve = curve

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def wait_for_work(self, timeout_s: float) -> bool:
        """Blocks the engine's thread until something can be stepped; False: the time is up."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._scheduler.has_work
                    or (self._tier.has_loads and not self.host_copies.by_itself)  # copies that no other thread makes
                    or self.host_copies.failure is not None
                    or self._self_test.sick
                ),
                timeout_s,
            )

    def step(self) -> StepOutput:
        """Launches what can be and settles the oldest launched step. Without work, returns an empty output. If the runner raises, the
        step's sequences end as `failures` and the engine goes on; the error is logged. A sequence whose row has no token fails alone, a
        step or two later: once it is known that others have one (self_test.py). Raises InternalError where it can go on no more."""
        if self.host_copies.failure is not None:
            raise InternalError(f"the thread that copies prefixes ended: {self.host_copies.failure!r}; restart the worker")
        if self._self_test.sick:
            raise InternalError(f"{SICK}; restart the worker, and look at its GPU if it happens again")
        while self._may_launch():
            self._prepare_drafts()
            due = self._clock()
            # A runner that computes when it is asked for the result is not running meanwhile: each wait would be measured as a longer step.
            if self._launched and self._runner.overlaps:
                running = self._launched[-1]
                began = self._began_at(running, due)
                prompts = running.workload.prompt_tokens > 0 or self._scheduler.has_waiting
                wait_s = self._pacing.wait_s(running.workload, due - began, prompts=prompts)
                self._sleep(wait_s)
                due += wait_s
            started = self._clock()
            if not self._launch():
                break
            launched, now = self._launched[-1], self._clock()
            launched.launch_s = now - started
            # One that took very long says little of the next.
            self._launch_s += _LAUNCH_RATE * (min(launched.launch_s, 2 * self._launch_s + _LEAST_LAUNCH_S) - self._launch_s)
            # Who gets the processor or the interpreter late is to be called earlier.
            self._pacing.launched(now - due, prompts=launched.workload.prompt_tokens > 0)
        return self._settle() if self._launched else StepOutput(step=self._steps, failures=self._take_failures())

    def settle_launched(self) -> list[StepOutput]:
        """Settles what is launched and launches nothing more."""
        outputs = []
        while self._launched:
            outputs.append(self._settle())
        return outputs

    def _may_launch(self) -> bool:
        if not self._launched:
            return True
        # After a launch that failed nothing is carried from it: it is settled first.
        if len(self._launched) >= self._depth or self._launched[-1].failed:
            return False
        with self._changed:
            return not self._scheduler.drafts_next(self._launch_s)

    def _launch(self) -> bool:
        """Plans a step and launches it. Returns False where there is nothing to plan now."""
        self.host_copies.copy_all()
        work = None
        while work is None:
            since = self._clock()
            with self._changed:
                work = self._scheduler.plan(since, self._free_at(since))
                self._note_work()
                if work is not None:
                    self._steps += 1
                step = self._steps
            # A sequence that was let in may wait for blocks from the host.
            if work is None and not self.host_copies.copy_all():
                return False
        self._launched.append(self._launcher.launch(work, step=step, since=since))
        return True

    def _prepare_drafts(self) -> None:
        """Lets a draft model compute while nothing else is on the device, and before the step begins: it is no part of the step's time."""
        if self._drafting is None or not self._drafting.computes:
            return
        wanted, most_rows = list[WantedDrafts](), 0
        # Behind a running step, the tokens to go on from are not known.
        if not self._launched:
            with self._changed:
                wanted, most_rows = self._scheduler.drafts_wanted(self._clock())
        self._drafting.prepare(wanted, most_rows)

    def _began_at(self, running: LaunchedStep, now: float) -> float:
        """Returns when the device began with it: a runner that computes when it is asked for the result does not before that."""
        return max(running.since, self._ended_at) if self._runner.overlaps else now

    def _free_at(self, now: float) -> float:
        """Returns when the device likely begins with what is launched next: reckoned from the end that was seen last, since what steps take
        less than foretold would add up, and every promise seem broken."""
        curve = self._pacing.curve
        if curve is None or not self._launched:
            return now
        running = self._launched[-1]
        return max(now, self._began_at(running, now) + curve.step_s(running.workload))

    def _settle(self) -> StepOutput:
        launched = self._launched[0]
        work = launched.work
        collected = self._launcher.collect(launched)
        sampled, ended_at = collected.sampled, collected.ended_at
        self._launched.popleft()
        with self._changed:
            result = self._scheduler.fail(work, collected.message) if sampled is None else self._scheduler.settle(work, sampled)
            result, probes = self._self_test.settle(result)
            for probe in probes:
                # They hold a block each for a step, and a request waits for what they say.
                sequence = self._make(probe, hold=False, state=SequenceState.WAITING)
                self._scheduler.submit(sequence, self._clock(), first=True)
            failures = self._constrained.take_failures()
            self._busy_since = None
            self._note_work()
            since = max(launched.since, self._ended_at)
            if self._goes_on and sampled is not None:
                self._learn_slowness(launched, ended_at - self._ended_at, len(result.tokens))
            self._goes_on = self._busy_since is not None
            begin_seen, self._end_seen = self._end_seen or launched.since > self._ended_at, collected.blocked_s >= UNSEEN_S
            self._ended_at = ended_at
            if sampled is not None:
                if sampled.expert_imbalance is not None:
                    self._expert_imbalance = sampled.expert_imbalance
                self._pacing.settled(launched.workload, ended_at - since, collected.blocked_s)
        return StepOutput(
            step=launched.step,
            tokens=result.tokens,
            progress=result.progress,
            failures=[*result.failures, *failures],
            scores=result.scores,
            pooled=result.pooled,
            workload=launched.workload,
            duration_s=ended_at - since,
            ended_at=ended_at,
            launch_s=launched.launch_s,
            timed=not self._runner.overlaps or (begin_seen and self._end_seen),
        )

    def _learn_slowness(self, launched: LaunchedStep, seconds: float, num_tokens: int) -> None:
        """Notes that a step came so long after the one before it, after which there was more to do at once, and gave so many tokens."""
        work, workload, curve = launched.work, launched.workload, self._pacing.curve
        if self._drafting is None or curve is None or not self._runner.overlaps:
            return
        # Models and heads are tried by what they take.
        if work.num_decodes and not self._drafting.computes:
            # A prompt's first token is none of theirs.
            num_tokens -= sum(work.sampled[work.num_decodes :])
            self._drafting.looking.learn(work.num_decodes, num_tokens, seconds, curve.step_s(work.without_drafts))
        if workload.prompt_tokens:
            return
        drafted, waited = any(work.drafts), launched.since > self._ended_at
        # Those of a model take time that is reckoned apart.
        if (drafted and not self._drafting.computes) or not waited:
            foretold_s = curve.step_s(workload) + waited * self._launch_s
            self._drafting.slowness.learn(work.num_decodes, seconds, foretold_s, drafted=drafted)

    # ---- looking in -------------------------------------------------------------------------------------------------

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of a step at most."""
        return self._config.max_num_batched_tokens

    @property
    def steps(self) -> int:
        """Returns how many steps were launched, without a pass over what is here."""
        return self._steps

    def stats(self) -> EngineStats:
        with self._changed:
            since = self._busy_since
            stalled_s = 0.0 if since is None else self._clock() - since
            stats = self._scheduler.stats(steps=self._steps, stalled_s=stalled_s)
            return replace(stats, expert_imbalance=self._expert_imbalance)

    @property
    def makes_masks(self) -> bool:
        """Returns whether the next token of some sequence waits for its mask, which is being made."""
        with self._changed:
            return self._constrained.waiting

    def take_prefix_delta(self) -> PrefixDelta:
        """Returns what changed in the sets of findable prefixes, in the pool and in the host tier, since the last call. Net: a hash added
        and removed appears in neither. The lists are bounded by pool and tier, however rarely this is called."""
        with self._changed:
            host_added, host_removed = self._tier.take_change()
            return replace(self._pool.take_delta(), host_added=host_added, host_removed=host_removed)

    def cached_prefixes(self) -> Sequence[bytes]:
        """Returns all findable prefix hashes at hash_unit boundaries: what all deltas add up to."""
        with self._changed:
            return self._pool.findable()

    def host_prefixes(self) -> Sequence[bytes]:
        """Returns the same for the host tier."""
        with self._changed:
            return self._tier.findable()

    @property
    def num_host_blocks(self) -> int:
        """Blocks that the host tier may hold."""
        return self._tier.num_rows

    def check_integrity(self) -> None:
        """Raises InternalError if the pool's counts, lists and owners do not add up: each block is free, cached or owned by
        exactly the sequences that list it. From any thread, at any time."""
        with self._changed:
            self._scheduler.check_integrity()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _check_served(self, request: EngineRequest) -> None:
        if self._runner.kv_shape.has_encoder:
            _check_encoded(request)
        if request.pooling is None and not self._runner.generates:
            raise InvalidRequest(
                "this model's checkpoint has no output layer (lm_head), so that it gives no tokens; ask for embeddings (/v1/embeddings)"
            )

    def _make(self, request: EngineRequest, *, hold: bool, state: SequenceState) -> EngineSequence:
        """Makes a sequence, without the lock: hashing a long prompt takes about a millisecond."""
        return make_sequence(
            request,
            hold=hold,
            state=state,
            vocab_size=self._runner.vocab_size,
            max_model_len=self._runner.max_model_len,
            block_size=self._runner.kv_shape.block_size,
            prefix_caching=self._config.enable_prefix_caching,
            has_encoder=self._runner.kv_shape.has_encoder,
        )

    def _end(self, sequence: EngineSequence) -> bool:
        self._scheduler.end(sequence)
        self._note_work()
        return True

    def _note_work(self) -> None:
        """Is called after every change, under the lock: starts or stops the stall clock, and wakes the engine's thread and that of the
        copies."""
        self._constrained.make_masks(self._on_masks)
        has_work = self._scheduler.has_work
        if has_work or self._tier.has_copies:
            self._changed.notify_all()
        if not has_work and not self._tier.num_loading and not self._constrained.waiting:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = self._clock()

    def _on_masks(self, sequences: Sequence[EngineSequence], results: Sequence[NextMask]) -> None:
        with self._changed:
            self._scheduler.take_masks(sequences, results)
            self._note_work()

    def _on_loaded(self, load: HostLoad, ok: bool) -> None:
        """Takes what was copied from the host tier. Under the lock."""
        self._scheduler.loaded(load, ok=ok)
        self._note_work()

    def _take_failures(self) -> Sequence[SequenceFailure]:
        with self._changed:
            failures = self._constrained.take_failures()
            if failures:
                self._note_work()
            return failures


def _check(config: EngineConfig, shape: KvShape) -> None:
    """Raises SetupError for bounds that make no sense together, or with this model."""
    config.check(shape.block_size)
    if shape.has_encoder and config.max_num_batched_tokens <= config.max_num_seqs:
        raise SetupError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} with --max-num-seqs {config.max_num_seqs} leaves no room for a "
            "prompt, which this model's encoder reads in one step; raise the first, or lower the second"
        )


def _check_encoded(request: EngineRequest) -> None:
    """Raises InvalidRequest for what a model with an encoder cannot do."""
    if request.num_prompt_tokens < 2:
        raise InvalidRequest("the prompt has one token, with which the decoder begins; give the encoder's tokens before it")
    if request.pooling is not None:
        raise InvalidRequest("this model has an encoder, of which no embeddings are made; ask another model for them")
    if request.sampling.prompt_logprobs is not None:
        raise InvalidRequest("this model's encoder reads the prompt, whose tokens have no log probabilities; leave prompt_logprobs out")
