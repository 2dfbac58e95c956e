"""Systems that tests of several files share: to start one takes longer than most of what is asked of it.

One runs at a time, until another one is asked for; tests that start their own ask for `alone`. Each test leaves what it gets whole and
empty. The files' names keep those that share one beside each other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from oracle import Oracle
from running import System, running

# Time for a killed worker or Ray to be back, in case a test that failed did not wait for it.
_MEND_S = 120.0
# Content is tested with these, not this machine's speed: a lookup of prefixes may take long, and workers that are alike look alike,
# whatever else ran while either would have measured itself.
_PATIENT = {"TWOSTEP_PREFIX_LOOKUP_TIMEOUT": "5", "TWOSTEP_CALIBRATE": "0"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Arguments of `running`."""

    prefill: int
    decode: int
    local_prefill: bool = False
    extra: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


AGGREGATED = Kind(
    prefill=0, decode=2, extra=("--max-num-batched-tokens", "48", "--served-model-name", "smollm2-135m-instruct"), env=_PATIENT
)
# Under the same name, with a worker that computes prompts for others.
NAMED_PAIR = Kind(prefill=1, decode=1, extra=("--served-model-name", "smollm2-135m-instruct"), env=_PATIENT)
PAIRS = Kind(prefill=2, decode=2, env=_PATIENT)
BOTH_WAYS = Kind(prefill=1, decode=2, local_prefill=True, env={**_PATIENT, "TWOSTEP_MAX_WAITING": "1"})


class Systems:
    """Keeps one system, with a small model in float32."""

    def __init__(self, model: Path, factory: pytest.TempPathFactory) -> None:
        self._model = model
        self._factory = factory
        self._stack = ExitStack()
        self._kind: Kind | None = None
        self._system: System | None = None

    def get(self, kind: Kind) -> System:
        if self._kind is not kind or self._system is None or not self._whole(self._system, kind):
            self.close()
            extra = ("--dtype", "float32", *kind.extra)
            self._system = self._stack.enter_context(
                running(
                    self._model,
                    self._factory.mktemp("system"),
                    prefill=kind.prefill,
                    decode=kind.decode,
                    local_prefill=kind.local_prefill,
                    extra=extra,
                    env=kind.env,
                )
            )
            self._kind = kind
        return self._system

    def close(self) -> None:
        self._kind = self._system = None
        self._stack.close()

    @staticmethod
    def _whole(system: System, kind: Kind) -> bool:
        give_up = time.monotonic() + _MEND_S
        while system.process.poll() is None and time.monotonic() < give_up:
            if system.is_whole(kind.prefill, kind.decode):
                return True
            time.sleep(0.1)
        return False


@pytest.fixture(scope="session")
def systems(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Systems]:
    systems = Systems(tiny_llama_dir, tmp_path_factory)
    yield systems
    systems.close()


@pytest.fixture(scope="session")
def oracle(tiny_llama_dir: Path) -> Oracle:
    """The oracle of the shared systems' model."""
    return Oracle(tiny_llama_dir)


@pytest.fixture
def aggregated(systems: Systems) -> System:
    """Two workers that do everything, in steps of 48 tokens, under the name that the pages use."""
    return systems.get(AGGREGATED)


@pytest.fixture
def named_pair(systems: Systems) -> System:
    """A worker of each role, under the name that the pages use."""
    return systems.get(NAMED_PAIR)


@pytest.fixture
def both_ways(systems: Systems) -> System:
    """One prefill worker and two decode workers that compute prompts too, one waiting at most: under load both ways are taken."""
    return systems.get(BOTH_WAYS)


@pytest.fixture
def pairs(systems: Systems) -> System:
    """Two workers of each role, so that one can die and the other takes over; every prompt is handed over."""
    return systems.get(PAIRS)


@pytest.fixture
def alone(systems: Systems) -> None:
    """No shared system runs beside the test's own."""
    systems.close()
