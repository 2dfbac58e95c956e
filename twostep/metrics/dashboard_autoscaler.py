"""The dashboard's row of the autoscaler."""

from __future__ import annotations

from collections.abc import Sequence

from twostep.metrics.panel import Panel, S, W, areas, lines

AUTOSCALER: tuple[str, Sequence[Panel]] = (
    "Autoscaler",
    (
        lines(
            "Workers wanted and there",
            "none",
            "By role: what was decided last, what the load asks for by itself (without spare, bounds and cool-down), and what serves.",
            (f"max by (worker_role) (twostep_autoscaler_desired_workers{{{S}}})", "{{worker_role}} wanted"),
            (f"max by (worker_role) (twostep_autoscaler_needed_workers{{{S}}})", "{{worker_role}} needed"),
            (f"max by (worker_role) (twostep_autoscaler_workers{{{S}}})", "{{worker_role}} there"),
        ),
        lines(
            "Pods wanted and there",
            "none",
            "By Deployment: a worker that has changed its role counts for the Deployment that owns its pod.",
            (f"max by (worker_role) (twostep_autoscaler_desired_replicas{{{S}}})", "{{worker_role}} wanted"),
            (f"max by (worker_role) (twostep_autoscaler_pods{{{S}}})", "{{worker_role}} there or to come"),
        ),
        lines(
            "Cost",
            "none",
            "Of the pods wanted, an hour, by the prices that the autoscaler was told.",
            (f"max(twostep_autoscaler_cost_per_hour{{{S}}})", "an hour"),
        ),
        lines(
            "Attainment seen",
            "percentunit",
            "Share of answers within the targets that the deployment is scaled for, as the autoscaler sees it.",
            (f"max by (kind) (twostep_autoscaler_attainment_ratio{{{S}}})", "{{kind}}"),
            maximum=1.0,
        ),
        lines(
            "Load seen",
            "reqps",
            "Offered requests of all routers, refused ones included.",
            (f"max(twostep_autoscaler_requests_per_second{{{S}}})", "requests"),
        ),
        areas(
            "Decisions",
            "none",
            "By what they change, and those that a bound held back.",
            (f"sum by (kind) (increase(twostep_autoscaler_decisions_total{{{S}}}[{W}]))", "{{kind}}"),
            (f"sum by (reason) (increase(twostep_autoscaler_limited_total{{{S}}}[{W}]))", "held back by {{reason}}"),
        ),
        lines(
            "Leaders, answers",
            "none",
            "Replicas that decide (1, for a moment 0), replicas that answer KEDA, and the age of what they answer in minutes.",
            (f"sum(twostep_autoscaler_leader{{{S}}})", "leaders"),
            (f"sum(twostep_autoscaler_answering{{{S}}})", "answering"),
            (f"max(twostep_autoscaler_decision_age_seconds{{{S}}}) / 60", "age, minutes"),
        ),
        lines(
            "Turns",
            "none",
            "How often growing became shrinking or the other way round, by Deployment.",
            (f"sum by (worker_role) (increase(twostep_autoscaler_direction_changes_total{{{S}}}[{W}]))", "{{worker_role}}"),
        ),
        areas(
            "Role switches, marked pods, looks in vain",
            "none",
            "Changes of roles that were asked for; pods marked as those to go first; looks that led to no decision.",
            (f"sum by (status) (increase(twostep_autoscaler_switches_total{{{S}}}[{W}]))", "switches, {{status}}"),
            (f"sum by (status) (increase(twostep_autoscaler_pod_patches_total{{{S}}}[{W}]))", "pods, {{status}}"),
            (f"sum by (reason) (increase(twostep_autoscaler_skipped_total{{{S}}}[{W}]))", "in vain, {{reason}}"),
        ),
    ),
)
