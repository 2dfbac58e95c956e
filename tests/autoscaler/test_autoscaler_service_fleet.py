"""Workers' records and routers' totals as the policy sees them, flags, and what the autoscaler exports."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scraping import scrape
from service_harness import SECRET, Scene, ToldLoad, count_of, decision, eventually, worker

from twostep.autoscaler.collect import traffic_of
from twostep.autoscaler.config import AutoscalerConfig, parse_config
from twostep.autoscaler.fleet import Fleet, owner_of
from twostep.autoscaler.model import PolicyConfig, Role, Traffic
from twostep.autoscaler.switches import last_of_role
from twostep.cluster.demand import Demand, DemandTotals
from twostep.cluster.records import NO_OWNER, WorkerLoad
from twostep.cluster.scaling import ScalingRecord
from twostep.errors import InvalidRequest
from twostep.keys.secret import secret_check
from twostep.metrics import autoscaler as families
from twostep.metrics.catalogue import declared
from twostep.worker.config import parse_config as worker_flags

COLD: dict[Role, float] = {"prefill": 60.0, "decode": 10.0}


def fleet() -> Fleet:
    return Fleet(secret_check(SECRET), COLD)


# ---- workers ----------------------------------------------------------------------------------------------------------------


def test_a_view_says_what_the_record_says() -> None:
    load = WorkerLoad(num_running=3, num_reserved=2, num_waiting=4, num_queued_tokens=500, num_context_tokens=900, tokens_per_s=12.5)
    record = worker(
        "a", "decode", pod_owner="prefill", load=load, step_tokens=256, num_blocks=77, max_num_seqs=9, draining=True, ready=False
    )
    (view,) = fleet().views([record], 100.0)
    assert (view.role, view.owner, view.pod_name, view.ready, view.draining) == ("decode", "prefill", "pod-a", False, True)
    assert (view.num_running, view.num_waiting, view.queued_tokens, view.context_tokens, view.tokens_per_s) == (5, 4, 500, 900, 12.5)
    assert (view.step_tokens, view.num_blocks, view.max_num_seqs, view.block_size) == (256, 77, 9, 16)
    assert view.curve == record.curve


def test_who_owns_it_whether_it_serves_and_whether_it_may_switch() -> None:
    assert {owner_of(worker("a", "decode", pod_owner=owner)) for owner in ("", "router")} == {"decode"}
    assert owner_of(worker("a", "decode", pod_owner=NO_OWNER)) is None
    for options, ready in (({}, True), ({"not_ready_reason": "no KV transport works"}, False)):
        (view,) = fleet().views([worker("a", "decode", transports=(), **options)], 1.0)
        assert (view.ready, view.can_switch) == (ready, False)


def test_those_that_were_there_already_have_been_since_their_epoch_and_others_since_they_were_seen() -> None:
    seen = fleet()
    at_s = 2_000_000.0
    first = [worker("old", "prefill", epoch=1_500_000_000_000), worker("odd", "prefill", epoch=7_000_000_000_000)]
    assert [view.started_s for view in seen.views(first, at_s)] == [at_s, 1_500_000.0], "an epoch of the future begins now"
    later = [*first, worker("new", "decode", epoch=1_600_000_000_000)]
    assert [view.started_s for view in seen.views(later, at_s + 15)] == [at_s + 15, at_s, 1_500_000.0]
    again = [*first, worker("new", "decode", epoch=1_600_000_000_001)]
    assert seen.views(again, at_s + 30)[0].started_s == at_s + 30, "another life"


def test_pods_to_come_count_for_a_while_and_those_that_go_no_more() -> None:
    seen = fleet()
    two = [worker("a", "prefill"), worker("b", "decode"), worker("c", "decode", draining=True)]
    assert seen.pods(two, None, 0.0) == {"prefill": 1, "decode": 1}
    assert seen.pods(two, None, 0.0, switching={"c"}) == {"prefill": 1, "decode": 2}, "it only changes its role"
    asked = {"prefill": 3, "decode": 1}
    assert seen.pods(two, asked, 10.0)["prefill"] == 3
    assert seen.pods(two, asked, 159.0)["prefill"] == 3
    assert seen.pods(two, asked, 161.0)["prefill"] == 1, "twice the cold start and a little"
    assert seen.pods(two, {"prefill": 4, "decode": 1}, 170.0)["prefill"] == 4, "asked for anew"
    assert seen.pods(two, {"prefill": 1, "decode": 1}, 180.0)["prefill"] == 1
    assert seen.pods(two, {"prefill": 0, "decode": 1}, 190.0)["prefill"] == 1, "it is there until it goes"


def test_workers_that_do_not_belong_here_are_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    seen = fleet()
    strangers = [worker("a", "router"), worker("b", "prefill", secret_check="other")]
    for _ in range(2):
        assert not any(seen.take(record.worker_id, record) for record in strangers)
    assert seen.take("c", worker("d", "prefill")) is None
    assert seen.take("d", worker("d", "prefill")) == worker("d", "prefill")
    assert len(caplog.records) == 3


def test_a_worker_that_routers_refuse_for_its_version_is_a_pod_that_serves_nobody(caplog: pytest.LogCaptureFixture) -> None:
    seen, near, far = fleet(), worker("near", "decode", version="0.2.0"), worker("far", "decode", version="0.9.0")
    for _ in range(2):
        counted = [taken for record in (near, far) if (taken := seen.take(record.worker_id, record)) is not None]
    assert counted[0] == near
    assert [view.ready for view in seen.views(counted, 1.0)] == [False, True]
    assert seen.pods(counted, {"decode": 2}, 1.0) == {"prefill": 0, "decode": 2}
    assert last_of_role(counted[0], counted), "nobody is asked to leave its role to that one"
    (said,) = (record.getMessage() for record in caplog.records)
    assert "0.9.0" in said
    assert "upgrade the autoscaler" in said
    assert seen.take("far", worker("far", "decode", version="0.1.4")) == worker("far", "decode", version="0.1.4")


# ---- load -------------------------------------------------------------------------------------------------------------------


def test_lengths_are_those_of_late_or_of_before() -> None:
    recent = DemandTotals(requests=20, prompt_tokens=2000, refused=5, ttft_total=4, ttft_met=3, promised=5)
    kept = recent + DemandTotals(started=10, started_prompt_tokens=1000, cached_tokens=250, ended=10, output_tokens=500)
    seen = traffic_of(Demand(recent=recent, seconds=10.0, kept=kept, queued=7, num_routers=2), Traffic())
    assert seen == Traffic(
        requests_per_s=2.0,
        prompt_tokens=100.0,
        cached_tokens=25.0,
        output_tokens=50.0,
        refused_per_s=0.5,
        queued_requests=7,
        ttft_met=0.75,
        tpot_met=None,
        prompt_scv=seen.prompt_scv,
        promised=0.25,
    )
    quiet = traffic_of(Demand(seconds=10.0, num_routers=1), seen)
    assert (quiet.requests_per_s, quiet.prompt_tokens, quiet.cached_tokens, quiet.output_tokens) == (0.0, 100.0, 25.0, 50.0)
    assert (quiet.ttft_met, quiet.prompt_scv) == (None, seen.prompt_scv)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4000), min_size=8, max_size=20))
def test_how_unlike_prompts_are_is_their_variance_over_the_square_of_their_mean(computed: list[int]) -> None:
    totals = DemandTotals(
        started=len(computed), started_prompt_tokens=sum(computed), uncached_squares=sum(each**2 for each in computed), requests=1
    )
    mean = sum(computed) / len(computed)
    variance = sum((each - mean) ** 2 for each in computed) / len(computed)
    assert traffic_of(Demand(recent=totals, seconds=1.0), Traffic()).prompt_scv == pytest.approx(variance / mean**2, abs=1e-6)


# ---- decisions in Redis -------------------------------------------------------------------------------------------------


def test_a_decision_is_read_as_it_was_written_and_one_of_a_newer_version_too() -> None:
    counts = {"prefill": 2, "decode": 3}
    record = decision(
        *(4, 2), asked=counts, asked_for=counts, victims=("p1",), switches={"d1": "prefill"}, reason="r", limit="surge", memory="{}"
    )
    assert ScalingRecord.from_json(record.to_json()) == record
    assert ScalingRecord.from_json(record.to_json()[:-1] + ',"more":1}') == record
    for wrong in (b"", b"[]", b"{}", record.to_json().replace('"replicas":{"prefill":2', '"replicas":{"prefill":-2')):
        with pytest.raises(InvalidRequest):
            ScalingRecord.from_json(wrong)
    assert dataclasses.replace(record, token=5, number=1).order > record.order


# ---- flags -----------------------------------------------------------------------------------------------------------------


def test_every_flag_is_a_variable_and_the_defaults_are_the_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert parse_config([]) == AutoscalerConfig()
    monkeypatch.setenv("TWOSTEP_PREFILL_MAX_WORKERS", "17")
    monkeypatch.setenv("TWOSTEP_SWITCH_ROLES", "0")
    monkeypatch.setenv("TWOSTEP_MAX_COST", "99.5")
    found = parse_config(["--decode-price", "2.5", "--target-ttft-ms", "300", "--hpa-tolerance", "0"])
    assert (found.prefill.max_workers, found.switch_roles, found.max_cost, found.decode.price) == (17, False, 99.5, 2.5)
    policy = found.policy()
    assert (policy.prefill.max_workers, policy.switching, policy.max_cost, policy.decode.price_per_gpu_hour) == (17, False, 99.5, 2.5)
    assert (policy.ttft_ms, found.hpa_tolerance) == (300.0, 0.0)
    assert (AutoscalerConfig().policy().max_cost, AutoscalerConfig().policy().max_workers) == (None, None)
    assert parse_config(["--max-workers", "6"]).policy().max_workers == 6
    targets = AutoscalerConfig()
    assert targets.policy() == PolicyConfig(ttft_ms=targets.target_ttft_ms, tpot_ms=targets.target_tpot_ms), "the policy's own defaults"


def test_keda_may_come_without_a_certificate_and_workers_may_not() -> None:
    flags = ["--tls-cert", "c", "--tls-key", "k", "--tls-ca", "a"]
    assert parse_config(flags).front_tls == parse_config(flags).tls
    one = parse_config([*flags, "--tls-client-auth", "none"])
    assert (one.front_tls.ca, one.front_tls.cert, one.tls.ca) == (None, Path("c"), Path("a"))


def test_the_api_server_is_the_clusters_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert parse_config([]).kubernetes_api == "https://10.0.0.1:6443"
    assert parse_config(["--kubernetes-api", "none"]).kubernetes_api == ""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert parse_config([]).kubernetes_api == "https://[fd00::1]:6443"


def test_workers_are_their_own_deployments_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_flags("decode", ["--runner", "fake"]).pod_owner == "decode"
    monkeypatch.setenv("TWOSTEP_POD_OWNER", "prefill")
    assert worker_flags("decode", ["--runner", "fake"]).pod_owner == "prefill"


@pytest.mark.parametrize(
    "flags",
    [
        ["--prefill-min-workers", "3", "--prefill-max-workers", "2"],
        ["--max-cost", "0.5"],
        ["--max-workers", "1"],
        ["--attainment", "1"],
        ["--scale-to-zero-after", "60"],
        ["--interval", "0"],
        ["--hpa-tolerance", "0.9"],
        ["--kubernetes-api", "10.0.0.1"],
        ["--stale-after", "1"],
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(flags)
    said = capsys.readouterr().err.rsplit("error:", 1)[1]
    assert flags[0].lstrip("-") in said or flags[0].lstrip("-").replace("-", "_") in said


# ---- metrics ----------------------------------------------------------------------------------------------------------------


async def test_it_exports_what_it_sees_and_decides(scene: Scene) -> None:
    await scene.writer.workers(worker("p", "prefill"), worker("d", "decode"))
    async with scene.running(metrics_port=0) as autoscaler:
        await eventually(lambda: count_of(autoscaler.metrics.skipped, "demand") > 0, "a look in vain")
        before = await asyncio.to_thread(scrape, autoscaler.metrics_port)
        assert (before("twostep_autoscaler_leader"), before("twostep_autoscaler_answering")) == (1, 0)
        assert before("twostep_autoscaler_desired_replicas") is None
        await scene.load(ToldLoad(requests=10, prompt_tokens=3000, ttft_met=0.5))
        autoscaler.controller.wake()
        await eventually(lambda: autoscaler.board.record is not None, "a decision")
        record = autoscaler.board.answer()
        seen = await asyncio.to_thread(scrape, autoscaler.metrics_port)
        for role in ("prefill", "decode"):
            for name, value in (("desired_replicas", record.replicas), ("desired_workers", record.wanted), ("pods", record.pods)):
                assert seen(f"twostep_autoscaler_{name}", worker_role=role) == value[role]
            assert seen("twostep_autoscaler_workers", worker_role=role) == record.pods[role] == 1
            assert (seen("twostep_autoscaler_needed_workers", worker_role=role) or 0) >= 1
        assert seen("twostep_autoscaler_cost_per_hour") == sum(record.replicas.values())
        assert seen("twostep_autoscaler_requests_per_second") == 10
        assert seen("twostep_autoscaler_attainment_ratio", kind="ttft") == 0.5
        assert seen("twostep_autoscaler_decisions_total", kind="up") == 1
        assert (seen("twostep_autoscaler_leader"), seen("twostep_autoscaler_answering")) == (1, 1)
        assert seen("twostep_process_info", role="autoscaler") == 1
        assert {family.name for family in declared(families) if not family.labels} <= seen.families
