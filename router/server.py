"""A router as one object: all its parts, put together here, started and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Mapping
from typing import Any

from router.access.control import Access
from router.access.own_key import own_key_of
from router.access.sources import source_of
from router.batches.files import BatchConfig
from router.batches.service import DAY_S, Batches
from router.config import RouterConfig
from router.grpc.service import InferenceService, KeyGate, StatusService
from router.http.admin import Administration, admin_listener, load_admin_keys
from router.http.batches import BatchEndpoints
from router.http.body_parser import BodyParser
from router.http.front import Front
from router.http.response_store import ResponseStore
from router.http.server import HttpServer, Listener, ssl_context
from router.placing.log import PlacementLog
from router.placing.placement import Placement, PlacementRequest, place
from router.prompting.grammar_check import GrammarChecker
from router.prompting.prompt import PromptReader
from router.prompting.render_process import setup_of
from router.prompting.renderer import Renderer
from router.request.cleanup import Cleanup
from router.request.targets import Targets
from router.serving.dispatch import Dispatcher
from router.serving.hold_back import hold_back_of
from router.serving.inference import Inference
from router.status.board import StatusBoard
from router.status.request_book import RequestBook
from router.status.scaling_watch import ScalingWatch
from router.waiting.demand_meter import DemandMeter
from router.waiting.fair_queue import Quota
from router.waiting.queues import Admission, WorkerQueue
from router.waiting.quota_share import QuotaShare
from router.workers.pool import WorkerPool
from router.workers.prefix_index import PrefixIndex
from router.workers.registry import Deployment, Registry, Vouching
from twostep.checkpoint.embedding_format import EmbeddingFormat, is_made_for_embeddings
from twostep.checkpoint.fingerprint import dummy_fingerprint, model_fingerprint
from twostep.cluster.connection import connect, wait_for_redis
from twostep.cluster.shared_clock import SharedClock
from twostep.cluster.shared_connection import SharedConnection
from twostep.cluster.signed import DECISIONS, DEMAND, RECORDS, Signer
from twostep.errors import SetupError
from twostep.keys.exposure import open_door
from twostep.keys.secret import load_secret, secret_check
from twostep.metrics.process import package_version, register_process
from twostep.metrics.registry import MetricsRegistry
from twostep.metrics.router import RouterGauges, RouterMetrics
from twostep.metrics.server import MetricsServer
from twostep.process.open_files import make_room
from twostep.process.start_tracing import start_tracer
from twostep.process.tracing import TRACES_FLUSH_S
from twostep.request_class import RequestClass
from twostep.rpc.call_signing import CallSigner
from twostep.rpc.channel import compression_of
from twostep.rpc.collector import collect_in_quiet_moments
from twostep.rpc.health import READINESS
from twostep.rpc.server import GrpcServer, ServerConfig
from twostep.rpc.v1 import inference_pb2_grpc, status_pb2_grpc
from twostep.text.chat_format import ChatFormat
from twostep.text.chat_template import check_syntax, unknown_control_tokens
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import TokenBytes, Tokenizer

log = logging.getLogger(__name__)

_TICK_S = 0.25
_MAX_TOKENS_TOLD = 16
# An event loop that has not come round for so long is stuck: liveness fails and the process is restarted.
_STUCK_S = 10.0


class Router:
    """start(), then drain(). Constructing it reads the model directory and the secret, and raises SetupError for either."""

    def __init__(self, config: RouterConfig) -> None:
        """Needs a running event loop."""
        self.config = config
        self.router_id = config.router_id or f"router-{uuid.uuid4().hex[:12]}"
        # Set when an operator asks for it over the admin port: the process that runs the router drains it then.
        self.drain_asked = asyncio.Event()
        self._draining = self._able = False
        self._last_tick = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._secret = load_secret(config.secret_file, former=config.former_secret_file)
        self._admin_keys = load_admin_keys(config.admin_key_file, self._secret)
        self._card = ModelCard.load(config.model, config.architecture)
        if config.chat_template is not None:
            self._card = self._card.with_chat_template(config.chat_template)
        check_syntax(self._card)
        self._embedding = EmbeddingFormat.load(config.model)
        self._for_embeddings = is_made_for_embeddings(config.model)
        self._tokenizer = Tokenizer.load(config.model, self._card.eos_token_ids)
        self._chat_format = ChatFormat.of(self._card, reasoning_parser=config.reasoning_parser, tool_call_parser=config.tool_call_parser)
        log.info("chats are read with %s", self._chat_format)
        log.info("answers end with %s", self._card.described_ends)
        if unknown := unknown_control_tokens(self._card, self._tokenizer):
            log.warning(
                "this model's chat template writes %s, which its tokenizer does not have: the model reads them as plain text, and a client "
                "can write them, too. If it was trained with them as tokens, bring the tokenizer.json that goes with the template",
                ", ".join(unknown[:_MAX_TOKENS_TOLD]) + (f" and {more} more" if (more := len(unknown) - _MAX_TOKENS_TOLD) > 0 else ""),
            )
        if self._chat_format.tool_calls is not None and not self._chat_format.shows_tools:
            log.warning(
                "this model's chat template has no place for tools: it never reads the `tools` and the earlier calls of a chat; "
                "calls come only where they are forced (tool_choice), or leave --tool-call-parser %s out",
                config.tool_call_parser,
            )
        fingerprint_of = dummy_fingerprint if config.load_format == "dummy" else model_fingerprint
        self._fingerprint = fingerprint_of(config.model, architecture=config.architecture)
        self._redis, self._index_redis, self._response_redis = (connect(config.redis_url) for _ in range(3))
        self._clock = SharedClock()

        # Who serves: the workers, and what they hold.
        self.cleanup = Cleanup()
        self.pool = WorkerPool(
            router_id=self.router_id,
            signer=CallSigner(self._secret, self.router_id),
            cleanup=self.cleanup,
            tls=config.tls,
            stream_lease_s=config.stream_lease,
            compression=compression_of(config.grpc_compression),
        )
        deployment = Deployment(
            model_fingerprint=self._fingerprint,
            secret_check=secret_check(self._secret),
            signer=Signer(self._secret, RECORDS),
            hash_unit=config.hash_unit,
        )
        vouching = Vouching(self._secret, self.pool.channel_of, self.pool.open_to)
        self.registry = Registry(self._redis, deployment, lives=vouching.lives, on_poll=self.pool.sync)
        self._index = PrefixIndex(
            SharedConnection(self._index_redis), self._secret, config.hash_unit, timeout_s=config.prefix_lookup_timeout
        )

        # For whom: clients, and the queues that they wait in.
        source = source_of(config.api_keys_file, config.api_keys, self._redis, self._secret)
        source = source or own_key_of(config.api_key_file, config.api_key)
        self.access = Access(source, secret=self._secret, redis=self._redis, router_id=self.router_id, clock=self._clock)
        quota = self._quota = Quota(
            weights=config.tenant_weights, max_inflight=config.tenant_max_inflight, max_waiting=config.tenant_max_waiting
        )
        self.quota_share = QuotaShare(self._redis, self.router_id, self._on_usage_elsewhere, self._clock)
        self.admission = Admission(
            max_inflight=config.max_inflight,
            max_waiting=config.max_waiting,
            max_prompt_tokens=config.max_inflight_prompt_tokens,
            quota=quota,
            ageing_s=config.ageing,
            on_charge=self.quota_share.charge,
        )
        self.book = RequestBook(quota)
        self.worker_queue = WorkerQueue(quota, ageing_s=config.ageing)

        # What is measured.
        self._metrics_registry = MetricsRegistry()
        self.tracer = start_tracer(config.otlp_endpoint, role="router", instance=self.router_id, version=package_version())
        register_process(self._metrics_registry, "router", self.tracer)
        self._metrics_server = MetricsServer.beside(
            self._metrics_registry, host=config.host, port=config.grpc_port, metrics_port=config.metrics_port
        )
        self._metrics = RouterMetrics(self._metrics_registry, self._state)
        targets = Targets(ttft_s=config.target_ttft_ms / 1e3, tpot_s=config.target_tpot_ms / 1e3)
        self.demand = DemandMeter(self._redis, self.router_id, Signer(self._secret, DEMAND), targets, self._num_waiting, self._clock)
        self._scaling = ScalingWatch(self._redis, Signer(self._secret, DECISIONS))

        # How a request is served, whatever protocol it comes by.
        self._placement_log = None if config.placement_log is None else PlacementLog(config.placement_log)
        self._grammars = GrammarChecker(config.model, self._chat_format, quota=quota)
        client_tokens = config.special_tokens_in_messages == "tokens"
        self._renderer = Renderer(setup_of(self._card, self._chat_format, None if client_tokens else self._tokenizer), quota=quota)
        self._hold_back = hold_back_of(
            config.hold_back,
            window=config.hold_back_chars,
            timeout_s=config.hold_back_timeout,
            fail_open=config.hold_back_failure == "open",
        )
        self.inference = self._request_service()

        # The fronts.
        self.board = StatusBoard(
            self._metrics,
            self.pool,
            router_id=self.router_id,
            model=self.inference.model_name,
            state=self._state,
            ready=self._ready,
            draining=lambda: self._draining,
            refusals=lambda: self.registry.refusals,
            decision=lambda: self._scaling.seen,
            on_look=self.book.tick,
        )
        self._server = self._grpc_server()
        self.batches = self._open_batches()
        self.responses = self._open_responses()
        self._http = None if config.port == -1 else self._http_server()
        self._admin = None if config.admin_port == -1 else self._admin_server()

    # ---- its parts ------------------------------------------------------------------------------------------------------

    def _request_service(self) -> Inference:
        config = self.config
        prompts = PromptReader(
            self._tokenizer,
            self._card,
            self._renderer,
            default_max_tokens=config.default_max_tokens,
            chat_format=self._chat_format,
            grammars=self._grammars,
            quota=self._quota,
            lowercase_embedded=self._embedding.lowercase,
        )
        dispatcher = Dispatcher(
            self.pool,
            self._index,
            self.cleanup,
            self.worker_queue,
            place if self._placement_log is None else self._placement_log.place,
            max_attempts=config.max_attempts,
            no_worker_grace_s=config.no_worker_grace,
            staged_steps=config.staged_steps,
        )
        return Inference(
            config,
            fingerprint=self._fingerprint,
            max_model_len=self._card.max_model_len,
            prompts=prompts,
            admission=self.admission,
            dispatcher=dispatcher,
            pool=self.pool,
            metrics=self._metrics,
            tracer=self.tracer,
            hold_back=self._hold_back,
            embedding=self._embedding,
            demand=self.demand,
            book=self.book,
        )

    def _grpc_server(self) -> GrpcServer:
        config = self.config
        server_config = ServerConfig(
            host=config.host,
            port=config.grpc_port,
            health_port=config.health_port,
            tls=config.front_tls,
            # Room to answer those that are refused, and for health checks.
            max_concurrent_rpcs=config.max_inflight + config.max_waiting + 256,
            max_connections=config.max_connections,
            compression=compression_of(config.grpc_compression),
        )
        server = GrpcServer(server_config, alive=self.alive, admit=[KeyGate(self.access).admit])
        service = InferenceService(self.inference, self.access)
        server.add(service, inference_pb2_grpc.add_InferenceServicer_to_server, "twostep.v1.Inference")
        server.add(StatusService(self.board), status_pb2_grpc.add_StatusServicer_to_server, "twostep.v1.Status")
        return server

    def _http_server(self) -> HttpServer:
        config = self.config
        front = Front(
            inference=self.inference,
            access=self.access,
            tokenizer=self._tokenizer,
            token_bytes=TokenBytes(self._tokenizer),
            card=self._card,
            chat_format=self._chat_format,
            metrics=self._metrics_registry,
            board=self.board,
            book=self.book,
            trace_url=config.trace_url,
            admin_keys=self._admin_keys,
            alive=self.alive,
            ready=self._ready,
            started_unix_s=int(time.time()),
            max_body_bytes=config.max_body_bytes,
            allowed_origins=config.allowed_origins,
            tracer=self.tracer,
            batches=self.batches,
            parser=BodyParser(self._quota),
            responses=self.responses,
        )
        if self.batches is not None:
            self.batches.answer_with(BatchEndpoints(front))
        return HttpServer(
            front,
            host=config.host,
            port=config.port,
            tls=config.front_tls,
            max_connections=config.max_connections,
            write_timeout_s=config.client_write_timeout,
            allowed_hosts=config.allowed_hosts,
        )

    def _admin_server(self) -> Listener:
        config = self.config
        administration = Administration(
            keys=self._admin_keys,
            access=self.access,
            board=self.board,
            pool=self.pool,
            secret=self._secret,
            tls=config.tls,
            drain=self.drain_asked.set,
        )
        return admin_listener(
            administration,
            host=config.admin_host,
            port=config.admin_port,
            tls=ssl_context(config.front_tls),
            allowed_hosts=config.allowed_hosts,
        )

    def _open_batches(self) -> Batches | None:
        config = self.config
        if config.batch_dir is None:
            return None
        if config.port == -1:
            raise SetupError("--batch-dir and --port -1 contradict each other: batches are asked for over HTTP; leave one of them out")
        batch_config = BatchConfig(
            root=config.batch_dir,
            served=self.inference.model_name,
            concurrency=config.batch_concurrency,
            max_file_bytes=config.max_file_bytes,
            max_line_bytes=config.max_body_bytes,
            max_owner_bytes=config.max_owner_bytes,
            lifetime_s=config.file_retention_days * DAY_S,
            one_account=not self.access.enabled,
        )
        return Batches(batch_config, redis=self._redis, router_id=self.router_id, metrics=self._metrics_registry, clock=self._clock)

    def _open_responses(self) -> ResponseStore | None:
        config = self.config
        if not config.response_ttl or config.port == -1:
            return None
        # Over a connection of its own: long answers on their way delay nothing else.
        store = ResponseStore(
            SharedConnection(self._response_redis),
            self._secret,
            ttl_s=config.response_ttl,
            total_bytes=config.response_bytes,
            most_recalled_bytes=config.max_body_bytes,
            is_known=self.access.is_known if self.access.enabled else None,
        )
        self.access.on_gone = store.forget_key
        return store

    # ---- its life -------------------------------------------------------------------------------------------------------

    @property
    def grpc_port(self) -> int:
        return self._server.port

    @property
    def health_port(self) -> int:
        return self._server.health_port

    @property
    def http_port(self) -> int:
        """0: no HTTP is served."""
        return 0 if self._http is None else self._http.port

    @property
    def admin_port(self) -> int:
        """0: there is none."""
        return 0 if self._admin is None else self._admin.port

    @property
    def metrics_port(self) -> int:
        """0: no metrics are served."""
        return 0 if self._metrics_server is None else self._metrics_server.port

    async def warm(self) -> None:
        """Prepares what else the first chat would wait for. Raises SetupError for a chat template that cannot be compiled within bounds."""
        await self._renderer.start()

    async def start(self) -> None:
        """Returns once it listens. Raises SetupError: no Redis, port taken, too few files may be open."""
        try:
            # So many on either front.
            num_fronts = 1 if self._http is None else 2
            make_room(num_fronts * self.config.max_connections, f"--max-connections {self.config.max_connections}")
            if self._metrics_server is not None:
                self._metrics_server.start()
            await wait_for_redis(self._redis, self.config.redis_start_timeout)
            await self.registry.exchange()
            await self.access.start()
            await self._index.open()
            for part in (self.batches, self._server, self._http, self._admin):
                if part is not None:
                    await part.start()
        except BaseException:
            await self._close()
            raise
        # While any request is there, something goes on.
        collecting = collect_in_quiet_moments(lambda: time.monotonic_ns() if self.admission.num_inflight else 0)
        running = [self.registry.run(), self.quota_share.run(), self.demand.run(), self.access.run(), self.inference.cut_stuck_clients()]
        running += [] if self.batches is None else [self.batches.run()]
        running += [] if self.responses is None else [self.responses.run()]
        for work in (*running, self._tick(), self._scaling.run(), self.board.run(), collecting):
            self._keep(work)
        config, model = self.config, self.inference.model_name
        log.info("router %s serves %s on %s:%d, HTTP on %d", self.router_id, model, config.host, self.grpc_port, self.http_port)
        if warning := open_door(
            config.host,
            {"gRPC": self.grpc_port, "HTTP": self.http_port},
            asks_for_keys=config.asks_for_keys,
            asks_for_certificates=config.front_tls.ca is not None,
        ):
            log.warning(warning)

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new, lets what runs end for `grace_s`, then frees all of it everywhere."""
        self._draining = True
        self._server.health.set(READINESS, False)
        self.admission.close()
        self.board.close()
        http = self._http.drain(grace_s) if self._http is not None else asyncio.sleep(0)
        batches = self.batches.drain(grace_s) if self.batches is not None else asyncio.sleep(0)
        await asyncio.gather(self._server.drain(grace_s), http, batches)
        if self._http is not None:
            await self._http.close()
        await self.cleanup.drain(2.0)
        await self._close()

    async def _close(self) -> None:
        if self._admin is not None:
            await self._admin.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for part in (self.batches, self.responses, self._index, self.pool, self._grammars, self._renderer):
            if part is not None:
                await part.close()
        self.inference.prompts.close()
        if self._hold_back is not None:
            self._hold_back.close()
        await self._redis.aclose()
        await self._index_redis.aclose()
        await self._response_redis.aclose()
        for writer in (self._metrics_server, self._placement_log):
            if writer is not None:
                await asyncio.to_thread(writer.close)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close, TRACES_FLUSH_S)

    def _ready(self) -> bool:
        return self._able and not self._draining

    def alive(self) -> bool:
        """Returns whether the event loop turns and all tasks that keep the router going still run."""
        return time.monotonic() - self._last_tick < _STUCK_S

    def _num_waiting(self) -> int:
        """Requests that wait for workers are admitted already, but are shown as waiting."""
        return self.admission.num_waiting + self.worker_queue.num_queued

    def _on_usage_elsewhere(self, tokens: Mapping[tuple[RequestClass, str], int]) -> None:
        self.admission.elsewhere(tokens)
        self.worker_queue.elsewhere(tokens)

    def _state(self) -> RouterGauges:
        """Returns the figures of its metrics. Called from any thread."""
        roles = [record.role for record in self.pool.records() if record.ready and not record.draining]
        return RouterGauges(
            num_running=max(0, self.admission.num_inflight - self.worker_queue.num_queued),
            num_waiting=self._num_waiting(),
            num_streams=sum(link.stream.open for link in list(self.pool.decode.values())),
            workers={role: roles.count(role) for role in ("prefill", "decode")},
            num_refused=len(self.registry.refusals),
            load_ratio=self.board.work.ratio,
            registry_connected=self.registry.connected,
            stalled_s=max(0.0, time.monotonic() - self._last_tick),
        )

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a task that never ends by itself. If it does, that is a bug, and liveness must show it."""
        task = asyncio.create_task(work)
        self._tasks.append(task)

        def ended(done: asyncio.Task[None]) -> None:
            if not done.cancelled():
                log.error("a task that keeps the router going has ended: the router is to be restarted", exc_info=done.exception())
                self._last_tick = float("-inf")

        task.add_done_callback(ended)

    async def _tick(self) -> None:
        """Progress of the event loop, for liveness; whether a request could be placed now, for readiness."""
        probes = [PlacementRequest(request_id="", num_tokens=1, max_new_tokens=1)]
        if self._for_embeddings:
            probes.append(PlacementRequest(request_id="", num_tokens=1, max_new_tokens=0, embeds=True))
        while True:
            if self._last_tick > float("-inf"):
                self._last_tick = time.monotonic()
            if not self._draining:
                snapshot = self.pool.snapshot()
                self._able = any(isinstance(place(snapshot, probe), Placement) for probe in probes)
                self._server.health.set(READINESS, self._able)
            await asyncio.sleep(_TICK_S)
