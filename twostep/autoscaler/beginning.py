"""Whether the first decision can be made: the one that has none before it to go on from. Pure.

Workers register when they serve. While a deployment comes up, or comes up again with a Redis that has lost everything, its Deployments have
pods that nobody here knows of: they load their model. Who decided then by the few that are there would end the others before they came.
Until there is a decision KEDA keeps what there is. Pods that begin together come within a cold start, so that is waited for:

    each role has a worker that serves; without one there is nothing to reckon with either
    the first of them began a cold start ago; or the load needs more than are there, which is asked for at once

At the latest after as long as pods count that were asked for and do not come: twice a cold start and 30 s.
"""

from __future__ import annotations

from twostep.autoscaler.fleet import longest_start_s
from twostep.autoscaler.model import ROLES, Decision, Observation, PolicyConfig


def why_wait(config: PolicyConfig, observation: Observation, decision: Decision, *, oldest_s: float | None, since_s: float) -> str:
    """Why `decision` is not to be the first one; "": it is. `oldest_s`: the instant at which the oldest worker began; None: there are none.
    `since_s`: of the first look."""
    now_s, cold_start_s = observation.now_s, max(config.pool(role).cold_start_s for role in ROLES)
    if now_s - since_s >= longest_start_s(cold_start_s):
        return ""
    missing = [role for role in ROLES if not any(w.role == role and w.ready and not w.draining for w in observation.workers)]
    if missing:
        return f"no {' and no '.join(missing)} worker serves yet, and how many are coming up is not known"
    if any(decision.needed.get(role, 0) > observation.pods.get(role, 0) for role in ROLES):
        return ""
    if oldest_s is None or now_s - oldest_s < cold_start_s:
        return "workers have only just come up, and others may be about to; the first of them began less than a cold start ago"
    return ""
