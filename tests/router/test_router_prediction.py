"""Tests of placement's predictions: closed forms against sums of steps, targets, and who is asked to compute a prompt."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from placement_simulation import GPU, LAYOUT, worker_record

from router.placing.placement import Candidate, Ground, MeanLoad, Placement, PlacementRequest, Snapshot, place
from twostep.cluster.prediction import TRANSPORT_RATES, kv_bytes, load_now, prompt_s, shares
from twostep.cluster.records import MeasuredHandOver, WorkerLoad
from twostep.request_class import RequestClass
from twostep.step_curve import StepWorkload

NAMES = itertools.count()


def worker(role: str, **options: Any) -> Candidate:
    """`seqs` of 2000 tokens each decode there, all of this router's; `queued`, `cached`: tokens."""
    seqs, queued = options.pop("seqs", 0), options.pop("queued", 0)
    load = WorkerLoad(num_running=seqs, num_context_tokens=2000 * seqs, num_free_blocks=10_000, num_queued_tokens=queued)
    name = options.pop("name", f"{role}-{next(NAMES)}")
    fields = {
        "num_blocks": 10_000,
        "max_num_seqs": 256,
        "max_model_len": 131_072,
        "transports": ("cuda_ipc",),
        "load": load,
        "curve": GPU,
        "step_tokens": 8192 if role == "prefill" else 2048,
    }
    cached = options.pop("cached", 0)
    mean = MeanLoad(queued_tokens=queued, own_queued_tokens=queued, num_seqs=seqs, own_num_seqs=seqs)
    return Candidate(
        record=worker_record(name, role=role, **(fields | options)),
        cached_tokens=cached,
        queued_tokens=queued,
        num_attempts=seqs,
        mean=mean,
    )


def placed(prefill: list[Candidate], decode: list[Candidate], **options: Any) -> Placement:
    demand = PlacementRequest(**({"request_id": "r", "num_tokens": 2600, "max_new_tokens": 128} | options))
    result = place(Snapshot(prefill=prefill, decode=decode), demand)
    assert isinstance(result, Placement), result
    return result


# ---- closed forms -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9000), st.integers(0, 5000), st.integers(1, 3000), st.integers(0, 300), st.sampled_from([0.0, 150.0, 1000.0]))
def test_a_prompt_in_closed_form_is_the_sum_of_its_steps(num_tokens: int, cached: int, room: int, decodes: int, knee: float) -> None:
    curve = dataclasses.replace(GPU, knee=knee)
    context = 900 * decodes
    pairs = ((cached + num_tokens) ** 2 - cached**2) / 2
    total, stall = prompt_s(curve, num_tokens, pairs, room, decodes=decodes, context=context)
    summed = curve.prefill_s(cached + num_tokens, cached, room + decodes, decodes=decodes, context=context)
    assert total == pytest.approx(summed)
    # The stall is what those who decode would not have waited without it.
    num_steps = -(-num_tokens // room)
    assert stall == pytest.approx(total - num_steps * curve.decode_step_s(decodes, context), abs=1e-12)
    assert stall >= 0


def test_a_step_with_prompts_and_decodes_takes_what_its_launch_takes_the_host() -> None:
    slow = dataclasses.replace(GPU, mixed_s=0.02)
    total, stall = prompt_s(slow, 100.0, 5000.0, 500, decodes=8.0, context=16_000.0)
    assert total == pytest.approx(0.02)
    assert stall == pytest.approx(0.02 - GPU.decode_step_s(8, 16_000))
    assert prompt_s(slow, 100.0, 5000.0, 500) == prompt_s(GPU, 100.0, 5000.0, 500), "alone it is not launched beside anybody"
    # So that a neighbour's pause is worth a hand-over.
    few = (worker("prefill"), worker("decode", seqs=12, local_prefill=True))
    many = (few[0], worker("decode", seqs=12, local_prefill=True, curve=slow))
    demand = PlacementRequest(request_id="r", num_tokens=64, max_new_tokens=128)
    chosen = [place(Snapshot(prefill=(p,), decode=(d,)), demand) for p, d in (few, many)]
    assert [isinstance(each, Placement) and each.prefill is not None for each in chosen] == [False, True]


def test_the_bytes_of_a_token() -> None:
    assert kv_bytes(LAYOUT, 1) == 2 * 32 * 8 * 128 * 2
    assert kv_bytes(dataclasses.replace(LAYOUT, num_kv_heads=4, tp_size=2), 1) == kv_bytes(LAYOUT, 1)
    assert kv_bytes(dataclasses.replace(LAYOUT, quantization="fp8"), 1) == 2 * 32 * 8 * (128 + 2)


def test_one_router_counts_what_it_knows_and_several_reckon_with_each_other() -> None:
    alone = shares([(worker("prefill"), MeanLoad(queued_tokens=4000, own_queued_tokens=4000, num_seqs=50, own_num_seqs=50))])
    assert (alone.tokens, alone.seqs) == (1.0, 1.0)
    assert load_now(700, mean_total=4000, share=alone.tokens) == 700
    half = shares([(worker("decode"), MeanLoad(num_seqs=n, own_num_seqs=own)) for n, own in ((100, 50), (99, 49))])
    assert half.seqs == pytest.approx(0.5)
    # Their mean, and when this one has sent more than its part of it, as much again for the others.
    assert load_now(0, mean_total=10, share=0.5) == 5
    assert load_now(20, mean_total=10, share=0.5) == 40


# ---- times --------------------------------------------------------------------------------------------------------------


def test_the_first_token_waits_for_the_queue_and_the_prompt_and_never_for_the_hand_over() -> None:
    idle = placed([worker("prefill")], [worker("decode")])
    assert idle.predicted_ttft_s == pytest.approx(GPU.prefill_s(2600, 0, 8192))
    behind = placed([worker("prefill", queued=8192)], [worker("decode", transports=("cuda_ipc",))])
    assert behind.predicted_ttft_s == pytest.approx(idle.predicted_ttft_s + GPU.prefill_s(8192, 0, 8192), rel=0.01)
    cached = placed([worker("prefill", cached=2048)], [worker("decode")])
    assert cached.predicted_ttft_s == pytest.approx(GPU.prefill_s(2600, 2048, 8192))
    by_ray = placed([worker("prefill", transports=("ray",))], [worker("decode", transports=("ray",))])
    assert by_ray.predicted_ttft_s == idle.predicted_ttft_s
    moved = 2600 * kv_bytes(LAYOUT, 1)
    slower = sum(
        sign * (r.latency_s + moved / r.bytes_per_s) for sign, r in ((1, TRANSPORT_RATES["ray"]), (-1, TRANSPORT_RATES["cuda_ipc"]))
    )
    assert by_ray.predicted_tpot_s - idle.predicted_tpot_s == pytest.approx(slower / 127)


def test_the_last_token_of_a_prompt_that_is_all_cached_is_computed() -> None:
    for cached in (2599, 2600):
        paired = placed([worker("prefill", cached=cached)], [worker("decode")])
        alone = placed([], [worker("decode", cached=cached, local_prefill=True)])
        assert paired.predicted_ttft_s == alone.predicted_ttft_s == pytest.approx(GPU.prefill_s(2600, 2599, 8192))


def test_the_time_per_token_is_the_step_with_one_sequence_more() -> None:
    busy = placed([worker("prefill")], [worker("decode", seqs=40)])
    step = GPU.decode_step_s(41, 40 * 2000 + 2600 + 64)
    assert step < busy.predicted_tpot_s < 1.1 * step


def test_a_faster_worker_takes_more() -> None:
    slow = dataclasses.replace(GPU, per_row_s=2 * GPU.per_row_s)
    fast = worker("prefill", name="fast", queued=2000)
    assert placed([worker("prefill", name="slow", curve=slow), fast], [worker("decode")]).prefill is fast.record
    longer = dataclasses.replace(fast, queued_tokens=4000)
    assert placed([slower := worker("prefill", name="slow", curve=slow), longer], [worker("decode")]).prefill is slower.record


def test_workers_that_have_not_measured_themselves_are_taken_for_their_neighbours() -> None:
    known, unknown = worker("prefill", name="p0", queued=4000), worker("prefill", name="p1", curve=None)
    result = placed([known, unknown], [worker("decode")])
    assert result.prefill is unknown.record
    assert result.predicted_ttft_s == pytest.approx(GPU.prefill_s(2600, 0, 8192))


# ---- targets ------------------------------------------------------------------------------------------------------------


def test_those_that_meet_the_targets_come_first() -> None:
    # The emptier decode worker cannot be reached within the time per token: it is slower.
    slow = dataclasses.replace(GPU, fixed_s=12e-3)
    decode = [worker("decode", name="d0", curve=slow), worker("decode", name="d1", seqs=100)]
    met = placed([worker("prefill")], decode, tpot_ms=20.0)
    assert met.meets_targets
    for target, winner in ((20.0, "d0"), (10.0, "d1")):
        chosen = placed(
            [worker("prefill")], [worker("decode", name="d0", curve=slow), worker("decode", name="d1", seqs=52)], tpot_ms=target
        )
        assert chosen.meets_targets, chosen
        if target == 10.0:
            assert chosen.decode.worker_id == winner


def test_drafts_keep_a_time_per_token_that_steps_alone_would_miss() -> None:
    """Without being told of them, a router would refuse the request for good, however many such answers the worker gives in time."""
    step = GPU.decode_step_s(1, 2600 + 64)

    def chosen(tokens_per_step: float, **options: Any) -> Placement:
        decode = worker("decode", local_prefill=True)
        load = dataclasses.replace(decode.record.load, tokens_per_step=tokens_per_step)
        decode = dataclasses.replace(decode, record=dataclasses.replace(decode.record, load=load))
        return placed([], [decode], tpot_ms=0.6e3 * step, **options)

    refused, taken = chosen(1.0), chosen(2.0)
    assert (refused.meets_targets, refused.attainable) == (False, False)
    assert (taken.meets_targets, taken.attainable) == (True, True)
    assert taken.predicted_tpot_s == pytest.approx(refused.predicted_tpot_s / 2)
    assert taken.predicted_gap_s == refused.predicted_gap_s, "the gap between two steps is as long as ever"
    assert not chosen(2.0, speculate=False).meets_targets


def test_where_drafts_pay_answers_are_sooner_over_and_load_counts_less() -> None:
    def decode(name: str, seqs: int, tokens_per_step: float = 1.0) -> Candidate:
        made = worker("decode", name=name, seqs=seqs)
        load = dataclasses.replace(made.record.load, tokens_per_step=tokens_per_step)
        return dataclasses.replace(made, record=dataclasses.replace(made.record, load=load))

    for tokens_per_step, winner in ((1.0, "d1"), (2.0, "d0")):
        assert placed([worker("prefill")], [decode("d0", 30, tokens_per_step), decode("d1", 20)]).decode.worker_id == winner


def test_a_queue_beyond_the_target_is_said_with_when_to_come_again() -> None:
    prefill = [worker("prefill", queued=30_000)]
    queued = GPU.prefill_s(8192, 0, 8192) * 30_000 / 8192
    missed = placed(prefill, [worker("decode")], ttft_ms=200.0)
    assert not missed.meets_targets
    assert missed.attainable
    assert missed.predicted_ttft_s > 0.2
    assert missed.retry_after_s == pytest.approx(missed.predicted_ttft_s - 0.2)
    assert missed.retry_after_s == pytest.approx(queued + GPU.prefill_s(2600, 0, 8192) - 0.2, rel=0.05)
    assert placed(prefill, [worker("decode")], ttft_ms=2000.0).meets_targets
    slow = placed([worker("prefill")], [worker("decode", seqs=100)], tpot_ms=8.0)
    assert slow.retry_after_s == pytest.approx(128 * (slow.predicted_tpot_s - 0.008))
    assert placed(prefill, [worker("decode")]).meets_targets
    assert placed(prefill, [worker("decode")]).retry_after_s == 0


def test_batch_prompts_hold_up_their_like_and_others_for_half_a_step_only() -> None:
    batch = {"batch_tokens": 30_000}
    behind = worker("prefill", queued=30_000)
    assert behind.mean is not None
    prefill = [dataclasses.replace(behind, **batch, mean=dataclasses.replace(behind.mean, **batch))]
    assert placed(prefill, [worker("decode")], request_class=RequestClass.BATCH).predicted_ttft_s > 0.6
    for request_class in (RequestClass.INTERACTIVE, RequestClass.STANDARD):
        urgent = placed(prefill, [worker("decode")], request_class=request_class, ttft_ms=200.0)
        assert urgent.meets_targets
        under_way = GPU.prefill_s(4096, 0, 8192)
        assert urgent.predicted_ttft_s == pytest.approx(under_way + GPU.prefill_s(2600, 0, 8192), rel=0.05)
    # Other routers' too.
    others = dataclasses.replace(prefill[0], queued_tokens=0, batch_tokens=0, mean=MeanLoad(queued_tokens=30_000, **batch))
    assert placed([others], [worker("decode")], ttft_ms=200.0).meets_targets
    assert not placed([others], [worker("decode")], ttft_ms=200.0, request_class=RequestClass.BATCH).meets_targets


def test_what_no_worker_could_do_even_idle_is_said() -> None:
    hopeless = placed([worker("prefill")], [worker("decode")], ttft_ms=10.0)
    assert (hopeless.meets_targets, hopeless.attainable) == (False, False)
    assert not placed([worker("prefill")], [worker("decode", seqs=3)], tpot_ms=1.0).attainable
    local = placed([], [worker("decode", local_prefill=True, seqs=30)], ttft_ms=10.0)
    assert (local.prefill, local.meets_targets, local.attainable) == (None, False, False)


def test_a_longer_queue_with_a_target_is_left_for_whoever_has_none() -> None:
    decode = [worker("decode", name="d0", local_prefill=True, seqs=8)]
    prefill = [worker("prefill", queued=30_000)]
    # Without a target the eight others are spared; with one, the only way to keep it is taken.
    assert placed(prefill, decode, num_tokens=2600, request_class=RequestClass.BATCH).prefill is not None
    assert placed(prefill, decode, num_tokens=2600, ttft_ms=200.0).prefill is None


# ---- prompts computed on decode workers ---------------------------------------------------------------------------------


def test_a_short_uncached_suffix_stays_on_the_decode_worker_and_a_long_one_does_not() -> None:
    # Among many decodes steps are long: then an idle prefill worker gives the first token sooner, and one with a queue does not.
    for seqs, queued in ((1, 0), (16, 0), (60, 1000)):
        for cached, local in ((2600 - 64, True), (2600 - 128, True), (0, False), (1024, False)):
            decode = [worker("decode", cached=cached, seqs=seqs, local_prefill=True)]
            result = placed([worker("prefill", cached=cached, queued=queued)], decode)
            assert (result.prefill is None) == local, (seqs, cached)


def test_only_decode_workers_that_offer_it_compute_prompts() -> None:
    assert placed([worker("prefill", queued=50_000)], [worker("decode", cached=2560)]).prefill is not None


def test_a_queue_before_the_prefill_workers_makes_local_prompts_longer() -> None:
    def longest(queued: int) -> int:
        sizes = (64, 128, 256, 512, 1024, 2048)
        decode = [worker("decode", local_prefill=True, seqs=24)]
        return max((n for n in sizes if placed([worker("prefill", queued=queued)], decode, num_tokens=n).prefill is None), default=0)

    assert 128 <= longest(0) < longest(2_500) < longest(20_000)


def test_what_was_promised_to_those_that_decode_makes_local_prompts_slower() -> None:
    free = worker("decode", local_prefill=True, seqs=20)
    step = GPU.decode_step_s(20, 40_000)
    ttfts = []
    for max_step_s in (0.0, step + 10e-3, step + 4e-3, step / 2):
        load = dataclasses.replace(free.record.load, max_step_s=max_step_s)
        paced = dataclasses.replace(free, record=dataclasses.replace(free.record, load=load))
        ttfts.append(placed([], [paced]).predicted_ttft_s)
    assert ttfts == sorted(ttfts)
    assert ttfts[0] == pytest.approx(GPU.prefill_s(2600, 0, 2048, decodes=20, context=40_000) + step / 2)
    # 180 rows hidden below the knee and 4 ms of others make chunks of about 380 tokens; where there is no time at all, of 32.
    assert ttfts[2] == pytest.approx(GPU.prefill_s(2600, 0, 400, decodes=20, context=40_000) + step / 2, rel=0.1)
    assert ttfts[3] == pytest.approx(GPU.prefill_s(2600, 0, 52, decodes=20, context=40_000) + step / 2, rel=0.1)
    # Long prompts go elsewhere then, and short ones still do not.
    prefill = worker("prefill", queued=4000)
    assert placed([prefill], [paced]).prefill is not None


def test_without_prefill_workers_all_is_computed_where_it_decodes() -> None:
    decode = [worker("decode", local_prefill=True, name=f"d{i}", seqs=n, queued=q) for i, (n, q) in enumerate([(30, 0), (2, 0), (2, 9000)])]
    result = placed([], decode)
    assert result.prefill is None
    assert result.decode.worker_id == "d1"
    expected = GPU.prefill_s(2600, 0, 2048, decodes=2, context=4000) + GPU.decode_step_s(2, 4000) / 2
    assert result.predicted_ttft_s == pytest.approx(expected)


@given(
    seqs=st.integers(0, 200),
    queued=st.integers(0, 60_000),
    cached=st.integers(0, 2599),
    num_tokens=st.integers(2600, 20_000),
    ttft=st.none() | st.floats(1, 5000),
    tpot=st.none() | st.floats(1, 100),
)
def test_more_load_never_predicts_less_and_what_meets_a_target_is_within_it(
    seqs: int, queued: int, cached: int, num_tokens: int, ttft: float | None, tpot: float | None
) -> None:
    def at(extra_seqs: int, extra_tokens: int, **targets: Any) -> Placement:
        return placed(
            [worker("prefill", queued=queued + extra_tokens, cached=cached)],
            [worker("decode", seqs=seqs + extra_seqs)],
            num_tokens=num_tokens,
            **targets,
        )

    first, later, fuller = at(0, 0, ttft_ms=ttft, tpot_ms=tpot), at(0, 500), at(5, 0)
    assert later.predicted_ttft_s > first.predicted_ttft_s > 0
    assert fuller.predicted_tpot_s > first.predicted_tpot_s > 0
    within = (ttft is None or first.predicted_ttft_s * 1e3 <= ttft) and (tpot is None or first.predicted_tpot_s * 1e3 <= tpot)
    assert first.meets_targets == within
    assert (first.retry_after_s > 0) == (not within)
    assume(within)
    assert first.attainable


def test_the_step_with_decodes_counts_rows_once() -> None:
    """The knee hides rows of prompts and of decodes together."""
    total, stall = prompt_s(GPU, 150, 0.0, 1000, decodes=100, context=0)
    assert total == pytest.approx(GPU.step_s(StepWorkload(prompt_tokens=150, decodes=100)))
    assert stall == pytest.approx(50 * GPU.per_row_s)


# ---- workers of both roles ----------------------------------------------------------------------------------------------

busy = st.fixed_dictionaries(
    {
        "seqs": st.integers(0, 200),
        "queued": st.integers(0, 40_000),
        "cached": st.integers(0, 3000),
        "role": st.sampled_from(["prefill", "decode"]),
    }
)


def of_both(number: int, role: str, **options: Any) -> Candidate:
    """`load`: what its record tells beside what `worker` fills in."""
    load = options.pop("load", {})
    found = worker(role, name=f"w{number}", both_roles=True, local_prefill=True, **options)
    record = dataclasses.replace(found.record, load=dataclasses.replace(found.record.load, **load))
    return dataclasses.replace(found, record=record)


PROMISED = {"tpot_s": 0.02, "max_step_s": 0.018}


@given(
    fleet=st.lists(busy, min_size=1, max_size=6),
    num_tokens=st.integers(1, 8000),
    answer=st.integers(1, 600),
    ttft=st.none() | st.floats(1, 2000),
    tpot=st.none() | st.floats(1, 100),
    bound=st.sampled_from([0.0, 0.01, 0.02]),
)
def test_a_fleet_is_never_worse_than_each_worker_alone(
    fleet: list[dict[str, Any]], num_tokens: int, answer: int, ttft: float | None, tpot: float | None, bound: float
) -> None:
    load = {"max_step_s": bound, "prompt_tokens_per_s": 20_000.0}
    workers = [of_both(n, load=load, **each) for n, each in enumerate(fleet)]
    demand = PlacementRequest(request_id="r", num_tokens=num_tokens, max_new_tokens=answer, ttft_ms=ttft, tpot_ms=tpot)
    free = place(Snapshot(prefill=workers, decode=workers), demand)
    alone = place(Snapshot(prefill=[], decode=workers), demand)
    assert isinstance(free, Placement)
    assert isinstance(alone, Placement)
    # Whatever is taken costs no more than the best worker alone, and a move gains something.
    assert free.cost <= alone.cost
    assert free.prefill is None or (free.cost < alone.cost and free.prefill.worker_id != free.decode.worker_id)
    assert {way.prefill is None for way in free.compared} >= {True}
    # What is said of it is what the costs say.
    taken, *others = free.compared
    assert (taken.cost, taken.prefill) == (free.cost, None if free.prefill is None else free.prefill.worker_id)
    match free.ground:
        case Ground.ONLY_WAY:
            assert not others
        case Ground.NEAR:
            assert taken.prefill is None
            assert 0 < taken.cost - others[0].cost < 1e3
        case Ground.CHEAPER:
            assert 0 <= others[0].cost - taken.cost < 1e3
        case Ground.UNFIT:
            assert others[0].cost - taken.cost >= 1e3


def test_an_idle_system_moves_nothing_and_a_busy_decode_worker_keeps_short_prompts() -> None:
    idle = [of_both(0, "prefill"), of_both(1, "decode")]
    for num_tokens in (64, 512, 2600):
        assert placed(idle, idle, num_tokens=num_tokens).prefill is None
    working = [of_both(0, "prefill", queued=8000, load={"prompt_tokens_per_s": 30_000.0}), of_both(1, "decode", seqs=30, load=PROMISED)]
    short = placed(working, working, num_tokens=64, tpot_ms=20.0)
    assert (short.prefill, short.decode.worker_id) == (None, "w1")


def test_each_ground_is_given() -> None:
    """One worker alone; a queue that grows on the prefill worker; a target that only the pair keeps."""
    alone = placed([], [of_both(1, "decode")])
    assert (alone.ground, alone.path) == (Ground.ONLY_WAY, "local")
    slow = of_both(1, "decode", seqs=30, queued=1000, load=PROMISED)
    ways = [placed([of_both(0, "prefill", queued=queued)], [slow]) for queued in range(0, 8000, 40)]
    assert [(ground.name, path) for (ground, path), _ in itertools.groupby((way.ground, way.path) for way in ways)] == [
        ("CHEAPER", "handed_over"),
        ("NEAR", "local"),
        ("CHEAPER", "local"),
    ]
    moved = ways[0]
    assert moved.computing.worker_id == "w0"
    promised = placed([of_both(0, "prefill")], [slow], ttft_ms=1e3 * moved.predicted_ttft_s + 1)
    assert (promised.ground, promised.path) == (Ground.UNFIT, "handed_over")


def test_a_measured_hand_over_is_believed() -> None:
    measured = MeasuredHandOver(transport="cuda_ipc", seconds=0.3, num_bytes=2600 * kv_bytes(LAYOUT, 1))
    slow = worker("decode", seqs=5)
    load = dataclasses.replace(slow.record.load, hand_overs=(measured,))
    slow = dataclasses.replace(slow, record=dataclasses.replace(slow.record, load=load))
    before = placed([worker("prefill")], [worker("decode", seqs=5)])
    after = placed([worker("prefill")], [slow])
    assert after.predicted_tpot_s - before.predicted_tpot_s > 0.25 / 127
    assert after.predicted_gap_s > 0.3
    only = placed([worker("prefill")], [slow], gap_ms=100.0)
    assert (only.meets_targets, only.attainable) == (False, False)
    assert placed([worker("prefill")], [slow], gap_ms=500.0).meets_targets
