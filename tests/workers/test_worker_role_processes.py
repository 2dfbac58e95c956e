"""A whole system of processes, KV through a real Ray: an operator gives workers other roles while clients ask, and workers die over it."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from twostep.sampling_params import SamplingParams
from twostep.text.model_card import ModelCard

sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("system", "streams")]
from running import System, Worker, running, wait_until
from whole_system import expected

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

WAIT_S = 120.0
COMMAND = [sys.executable, "-P", "-m", "twostep.cli", "role"]


def role_command(system: System, worker: Worker, *words: str) -> list[str]:
    """As an operator types it: `twostep up` has said where the secret is."""
    found = re.search(r" role HOST:PORT \S+ --secret-file (\S+) --target (\S+)", system.log.read_text())
    assert found is not None, system.log_tail()
    assert worker.address in system.log.read_text()
    return [*COMMAND, worker.address, *words, "--secret-file", found[1], "--target", found[2]]


def switch(system: System, worker: Worker, role: str) -> float:
    """Seconds that the switch took beside the drain."""
    # By force: these tests leave the system without a prefill worker for a while.
    words = role_command(system, worker, role, "--drain-timeout", "60", "--force")
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(rf"\S+ is a {role} worker now: drained in ([\d.]+) s, switched in ([\d.]+) s\.\n", done.stdout)
    assert found is not None, done.stdout
    return float(found[2])


class Load:
    """Clients that ask until the block ends; every answer is checked."""

    def __init__(self, system: System, vocab_size: int, *, num_clients: int = 4) -> None:
        self._system = system
        self._vocab_size = vocab_size
        self._num_clients = num_clients
        self._stop = threading.Event()
        self._answered: list[int] = []
        self._asking: list[Future[None]] = []

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(self._num_clients)
        self._asking = [self._pool.submit(self._ask, seed) for seed in range(self._num_clients)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for each in self._asking:
            each.result()

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        with self._system.client(max_retries=0) as client:
            while not self._stop.is_set():
                prompt = [rng.randrange(3, self._vocab_size) for _ in range(rng.randrange(1, 200))]
                count = rng.randrange(1, 60)
                answer = client.generate(token_ids=prompt, max_tokens=count, temperature=0.0, ignore_eos=True, timeout=WAIT_S).result()
                assert list(answer.token_ids) == expected(prompt, count, self._vocab_size)
                self._answered.append(count)

    def more(self, count: int) -> None:
        """Returns after so many more answers."""
        wanted = len(self._answered) + count

        def there() -> bool:
            for each in self._asking:
                if each.done():
                    each.result()
            return len(self._answered) >= wanted

        wait_until(there, timeout_s=WAIT_S, what=f"{count} more answers")


@pytest.fixture(scope="module")
def vocab_size(model_dir: Path) -> int:
    return ModelCard.load(model_dir).vocab_size


@pytest.fixture(scope="module")
def system(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Of all tests, since it takes long to start: each leaves its workers in the roles that they were started in."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TWOSTEP_FAKE_STEP_MS", "4")
        # Requests wait while there is no prefill worker, even if the next one must be started first, and a hand-over as long as it is held.
        environment.setenv("TWOSTEP_NO_WORKER_GRACE", str(WAIT_S))
        environment.setenv("TWOSTEP_LEASE_TTL", str(WAIT_S))
        with running(model_dir, tmp_path_factory.mktemp("up"), prefill=1, decode=2, extra=("--runner", "fake")) as system:
            yield system


def test_an_operator_moves_workers_between_the_roles_while_clients_ask(system: System, vocab_size: int, tmp_path: Path) -> None:
    (prefill,), (first, second) = system.workers("prefill_worker"), system.workers("decode_worker")
    agents = system.pids("kv_transfer.ray.agent")
    seconds = []
    with Load(system, vocab_size) as load:
        load.more(4)
        # Two prefill workers and one decode worker, then both where the other was, then nobody for prompts, then as it began.
        for worker, role, prefills in ((second, "prefill", 2), (prefill, "decode", 1), (second, "decode", 0), (prefill, "prefill", 1)):
            seconds.append(switch(system, worker, role))
            wait_until(lambda n=prefills: system.serves(n, 3 - n), timeout_s=WAIT_S, what=f"{prefills} prefill workers")
            if prefills:
                load.more(6)
    print("switches under load took", seconds, "beside their drains")
    print("switches of an idle worker took", [switch(system, first, role) for role in ("prefill", "decode")])
    # The KV agents are those of the start, which takes Ray seconds.
    assert system.pids("kv_transfer.ray.agent") == agents
    system.check_empty(timeout_s=WAIT_S)
    system.check_store_empty(timeout_s=WAIT_S)
    done = subprocess.run(role_command(system, first), capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert re.fullmatch(r"decode-[01] is a decode worker, ready, with 0 requests\.\n", done.stdout)
    wrong = tmp_path / "wrong"
    wrong.write_text("x" * 32)
    words = [*COMMAND, first.address, "prefill", "--secret-file", str(wrong)]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "--secret-file" in refused.stderr


@contextmanager
def held(worker: Worker) -> Iterator[None]:
    """It cannot drain: a hand-over waits there for its other half, until the worker ends, or the block."""
    request: dict[str, Any] = {"request_id": "held", "attempt": 1, "token_ids": [5] * 40, "num_prompt_tokens": 40}
    request["sampling"] = sampling_to_proto(SamplingParams(max_tokens=4, temperature=0.0))
    with grpc.insecure_channel(worker.address) as channel:
        signature = worker.signature(channel)
        if worker.module == "prefill_worker":
            call = prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.PrefillRequest(**request), timeout=WAIT_S, metadata=signature)
            assert next(call).HasField("accepted")
        else:
            stub = decode_pb2_grpc.DecodeStub(channel)
            call = stub.Stream(decode_pb2.StreamRequest(router_id="held"), timeout=WAIT_S, metadata=signature)
            call.initial_metadata()
            stub.Reserve(decode_pb2.ReserveRequest(router_id="held", **request), timeout=WAIT_S, metadata=signature)
        yield


@pytest.mark.parametrize("victim", ["decode_worker", "prefill_worker"])
def test_a_worker_that_dies_in_its_switch_costs_no_answer_and_comes_back_as_it_was_started(
    system: System, vocab_size: int, victim: str
) -> None:
    worker = system.workers(victim)[0]
    with Load(system, vocab_size) as load, held(worker):
        load.more(4)
        # The only prefill worker goes only by force.
        role = ["prefill"] if victim == "decode_worker" else ["decode", "--force"]
        words = role_command(system, worker, *role, "--drain-timeout", str(WAIT_S))
        operator = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: worker.stats().draining or operator.poll() is not None, timeout_s=WAIT_S, what="it drains")
        worker.kill()
        _, said = operator.communicate(timeout=WAIT_S)
        assert operator.returncode == 1
        assert said.startswith("twostep: "), said
        # Without a prefill worker, these are of the one that the supervisor has started again.
        load.more(8)
    wait_until(lambda: system.serves(1, 2), timeout_s=WAIT_S, what="the supervisor has started it again in its first role")
    system.check_empty(timeout_s=WAIT_S)
