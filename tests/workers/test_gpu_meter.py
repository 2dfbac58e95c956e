"""Figures of GPUs are told while the driver tells, missing while it does not, and nobody waits for it."""

from __future__ import annotations

import threading
from typing import Any, cast

from worker_harness import until

from twostep.cluster.records import GpuLoad
from twostep.worker.gpu_meter import GpuMeter, Nvml

_BUSY = GpuLoad(memory_used=3, memory_total=8, utilization=0.5)


class Driver:
    """`stuck`: it answers when that is set."""

    def __init__(self) -> None:
        self.away = False
        self.stuck: threading.Event | None = None
        self.asked: list[str] = []

    def load(self, uuid: str) -> GpuLoad:
        self.asked.append(uuid)
        if self.stuck is not None:
            self.stuck.wait(60)
        if self.away:
            raise OSError(15, "the GPU is lost")
        return _BUSY


async def test_figures_are_those_of_now_or_none() -> None:
    driver, now = Driver(), [100.0]
    meter = GpuMeter(("a", "b"), lambda: cast(Nvml, driver), every_s=0.01, clock=lambda: now[0])
    assert meter.loads == ()
    meter.start()
    await until(lambda: meter.loads == (_BUSY, _BUSY))
    driver.away = True
    asked = len(driver.asked)
    await until(lambda: len(driver.asked) > asked + 2)
    assert meter.loads == (_BUSY, _BUSY)
    now[0] += 10
    assert meter.loads == ()
    driver.away = False
    await until(lambda: meter.loads == (_BUSY, _BUSY))
    # One that answers no more keeps nobody waiting, neither for figures nor for the end.
    driver.stuck = threading.Event()
    asked = len(driver.asked)
    await until(lambda: len(driver.asked) > asked)
    now[0] += 10
    assert meter.loads == ()
    meter.close()
    driver.stuck.set()


async def test_without_gpus_or_a_driver_there_are_no_figures() -> None:
    def missing() -> Any:
        tried.set()
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    tried = threading.Event()
    for ids in ((), ("a",)):
        meter = GpuMeter(ids, missing, every_s=0.01)
        meter.start()
        await until(lambda ids=ids: tried.is_set() or not ids)
        assert meter.loads == ()
        meter.close()
    assert tried.is_set()
