"""Engines that stand still after some steps: what a test does to an answer under way does not race with its end."""

from __future__ import annotations

import math
import threading
from typing import Any

from twostep.engine.batch import Batch, InFlight, Runner


class Brake:
    """Of all workers of a system; to be used from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._most = math.inf
        self._taken: dict[Runner, int] = {}
        self.num_steps = 0

    def hold_after(self, num_steps: int) -> None:
        """Each worker takes so many steps from now on, and no more until `open`."""
        with self._changed:
            self._most = num_steps
            self._taken = dict.fromkeys(self._taken, 0)

    def open(self) -> None:
        with self._changed:
            self._most = math.inf
            self._changed.notify_all()

    def on(self, runner: Runner) -> Runner:
        """The same runner, with this brake on it."""
        launch = runner.launch
        self._taken[runner] = 0

        def launch_when_free(batch: Batch) -> InFlight:
            with self._changed:
                self._changed.wait_for(lambda: self._taken[runner] < self._most)
                self._taken[runner] += 1
                self.num_steps += 1
            return launch(batch)

        changed: Any = runner
        changed.launch = launch_when_free
        return runner
