"""An engine on a thread of this process, as its edge uses it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from twostep.engine.batch import Runner
from twostep.engine.draft_model import DraftModel
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.proposer import Proposer
from twostep.engine.types import EngineRequest, EngineStats, FailureKind, PrefixDelta, Reservation, SequenceFailure, StepOutput
from twostep.errors import InternalError, InvalidRequest, NotFound
from twostep.settings.speculative import SpeculativeConfig
from twostep.step_curve import StepCurve
from twostep.worker.config import WorkerConfig
from twostep.worker.engine_loop import EngineLoop, LoopSink, StepSink
from twostep.worker.engine_port import EngineEvents, EngineFacts, EngineLook
from twostep.worker.model import ServedModel
from twostep.worker.preparation import Preparation

log = logging.getLogger(__name__)


def _proposer(model: ServedModel, config: WorkerConfig) -> Proposer | None:
    """Returns what drafts for the engine; None: none is asked for, or the engine has it itself."""
    if model.has_head:
        from twostep.model.runner.head_proposer import HeadProposer  # noqa: PLC0415
        from twostep.model.runner.model_runner import ModelRunner  # noqa: PLC0415

        assert isinstance(model.runner, ModelRunner)
        return HeadProposer(model.runner)
    return None if model.draft is None else DraftModel(model.draft, max_num_seqs=config.max_num_seqs)


class LocalEngine:
    """See EnginePort. `engine` and `runner` are there for whoever is in this process, too: transports, and tests."""

    pid = 0

    def __init__(self, config: WorkerConfig, model: ServedModel) -> None:
        """Raises SetupError."""
        self.runner: Runner = model.runner
        self.engine = Engine(
            model.runner,
            EngineConfig(
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                max_waiting=config.max_waiting,
                hash_unit=config.hash_unit,
                host_cache_bytes=int(config.prefix_cache_space * 2**30),
                max_step_s=(config.max_step_ms or 0.0) / 1e3,
                ageing_s=config.ageing,
                speculative=SpeculativeConfig.parse(config.speculative_config) if config.speculative_config else None,
            ),
            proposer=_proposer(model, config),
        )
        if config.prefix_cache_space and not self.engine.num_host_blocks:
            log.warning("--prefix-cache-space %g keeps nothing: it holds no block, or the model keeps states", config.prefix_cache_space)
        self.engine.set_curve(model.curve)
        self.facts = EngineFacts(
            name=model.name,
            layout=model.layout,
            shape=model.runner.kv_shape,
            max_model_len=model.runner.max_model_len,
            marks_layers=model.runner.marks_layers,
            num_host_blocks=self.engine.num_host_blocks,
            eos_token_ids=model.eos_token_ids,
            curve=model.curve,
            gpu_ids=model.gpu_ids,
            captured_bytes=model.captured.num_bytes,
        )
        self._ranks = model.ranks
        self._preparation = Preparation(model.grammar_compiler(), model.runner.kv_shape.block_size)
        self._events: EngineEvents | None = None
        self._loop: EngineLoop | None = None

    def start(self, events: EngineEvents) -> None:
        self._events = events
        self.run(LoopSink(events))

    def run(self, sink: StepSink) -> None:
        """Does as `start`, for whoever takes what the engine's threads have by itself."""
        self._loop = EngineLoop(self.engine, sink)
        self._loop.start()
        if self._ranks is not None:
            self._ranks.watch(self._loop.fail)

    @property
    def has_ranks(self) -> bool:
        """Returns whether the model has processes besides this one."""
        return self._ranks is not None

    def serving(self) -> None:
        if "triton" in sys.modules:
            # It needs Triton, which only a GPU's runner has loaded.
            from twostep.model.kernels.late_compiles import report_compiles  # noqa: PLC0415

            report_compiles()

    async def stop(self) -> None:
        if self._loop is not None:
            await self._loop.stop()
        self._preparation.close()

    def alive(self, stall_timeout_s: float) -> bool:
        return self._loop is None or self._loop.alive(stall_timeout_s)

    @property
    def max_num_batched_tokens(self) -> int:
        return self.engine.max_num_batched_tokens

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def take_prefix_delta(self) -> PrefixDelta:
        return self.engine.take_prefix_delta()

    async def prepared(self, request: EngineRequest) -> EngineRequest:
        """Returns the request as the engine takes it. Raises InvalidRequest, ResourceExhausted and SetupError."""
        return await self._preparation.of(request)

    async def submit(self, request: EngineRequest, *, hold: bool = False, mark_layers: Sequence[int] = ()) -> None:
        self.engine.submit(await self.prepared(request), hold=hold, mark_layers=mark_layers)

    async def reserve(self, request: EngineRequest) -> Reservation:
        return self.engine.reserve(await self.prepared(request))

    def commit(self, seq_id: str, output_ids: Sequence[int], *, exact: bool = True, confirmed: bool = True) -> None:
        if (failure := self.refusal_of(seq_id, output_ids, exact=exact, confirmed=confirmed)) is not None:
            assert self._events is not None
            output = StepOutput(step=self.engine.steps, failures=[failure])
            asyncio.get_running_loop().call_soon(self._events.on_step, output)

    def refusal_of(self, seq_id: str, output_ids: Sequence[int], *, exact: bool, confirmed: bool) -> SequenceFailure | None:
        """Commits. Returns why the engine refused, which has ended the sequence; None: it did not."""
        try:
            self.engine.commit(seq_id, output_ids, exact=exact, confirmed=confirmed)
        except NotFound:
            # It has ended, and that was told, or was asked for.
            return None
        except InvalidRequest as error:
            self.engine.cancel(seq_id)
            return SequenceFailure(seq_id=seq_id, message=error.message, kind=FailureKind.REQUEST)
        return None

    def confirm(self, seq_id: str) -> None:
        self.engine.confirm(seq_id)

    def cancel(self, seq_id: str) -> None:
        self.engine.cancel(seq_id)

    def mark_layers(self, seq_id: str, mark_layers: Sequence[int]) -> None:
        self.engine.mark_layers(seq_id, mark_layers)

    def set_curve(self, curve: StepCurve | None) -> None:
        self.engine.set_curve(curve)

    async def reconfigure(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> bool:
        return await asyncio.to_thread(self.engine.reconfigure, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)

    async def generations(self, block_ids: Sequence[int]) -> Sequence[int]:
        return self.engine.generations(block_ids)

    async def look(self, *, check_integrity: bool) -> EngineLook:
        error = ""
        if check_integrity:
            try:
                # In a thread: walking a large pool takes milliseconds that the event loop does not have.
                await asyncio.to_thread(self.engine.check_integrity)
            except InternalError as found:
                error = found.message
        return EngineLook(stats=self.engine.stats(), integrity_error=error)
