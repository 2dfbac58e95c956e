"""Whether more may be asked of the workers than routers tell. Pure.

A router that is cut off from Redis serves on, with the workers that it knows, and what is asked of it is missing in the load. So a router
that falls silent and had not said that it leaves may be one that died, or one like that. For the two minutes in which its windows are
still there it is known to be missing. After them its work tells: tokens that workers compute beyond those of the requests that are metered.
What is kept carries `hysteresis` more than these, so that anything below is covered; of four routers or more one may be missing.

While it is so, and for a cool-down after, nobody is taken away. It is no reason to ask for more: that is left to what waits at workers, to
the sequences that decode there, and to targets that are missed.
"""

from __future__ import annotations

from twostep.autoscaler.forecast import Forecast
from twostep.autoscaler.model import Observation, PolicyConfig


def unheard_since(config: PolicyConfig, before: float | None, forecast: Forecast, observation: Observation) -> float | None:
    """The instant at which load was known last to be missing. `before`: as of the decision before. None: it is not, and was not within the
    last cool-down."""
    now_s = observation.now_s
    if observation.traffic.silent_routers:
        return now_s
    if before is None or not 0 <= now_s - before <= config.cool_down_s + 2 * config.interval_s:
        return None
    told = forecast.uncached.now + forecast.output.now
    done = sum(worker.tokens_per_s for worker in observation.workers)
    return now_s if done > (1.0 + config.hysteresis) * told else before
