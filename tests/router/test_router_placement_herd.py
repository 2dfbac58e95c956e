"""Several routers with late views: nobody starves, nobody is run over, and the hit rate of going where the cache is stays."""

from __future__ import annotations

import dataclasses

import pytest
from placement_simulation import GPU, World, affinity, by_lot, simulate

from router.placing.placement import MeanLoad, place
from router.workers.pool import LoadMeter
from twostep.cluster.records import WorkerLoad

# Deterministic: a seed, a simulated clock. About 0.85 of what the prefill workers could do without a cache is 60 requests/s.
WORLDS = {
    "one router": World(num_routers=1),
    "four routers": World(num_routers=4),
    "sixteen routers": World(num_routers=16),
    "another seed": World(num_routers=8, seed=7),
    "heavy": World(rate=120.0),
    "few hits": World(num_prefixes=500, rate=80.0),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "heavy" else pytest.mark.system) for name in WORLDS])
def test_load_is_spread_no_worker_starves_and_hits_are_kept(name: str) -> None:
    world = WORLDS[name]
    ours, herd = simulate(world, place), simulate(world, affinity)
    mean = len(ours.ttfts) / world.num_prefill
    assert ours.spread < 1.6
    assert min(ours.prefill_requests) > mean / 2
    assert max(ours.decode_requests) < 1.1 * len(ours.ttfts) / world.num_decode
    assert ours.hit_rate > 0.9 * herd.hit_rate
    # Going where the cache is leaves workers idle and lets queues grow; nothing that is late does that here.
    assert herd.spread > ours.spread * 1.4
    assert ours.ttft(0.95) < herd.ttft(0.95) / 2
    assert max(ours.peak_seqs) < 0.6 * max(herd.peak_seqs)


@pytest.mark.parametrize("num_routers", [4, *(pytest.param(num, marks=pytest.mark.system) for num in (1, 16))])
def test_late_views_are_better_than_none(num_routers: int) -> None:
    """A router that draws by lot is never misled. Sixteen that look, each with a sixteenth of what happens, must do better than that."""
    world = World(num_routers=num_routers, rate=100.0, num_prefixes=100)
    ours, drawn = simulate(world, place), simulate(world, by_lot)
    assert ours.ttft(0.95) < 0.8 * drawn.ttft(0.95)
    assert ours.ttft(0.5) < 0.8 * drawn.ttft(0.5)
    assert ours.hit_rate > 1.4 * drawn.hit_rate
    assert max(ours.peak_seqs) <= max(drawn.peak_seqs)


@pytest.mark.system
def test_the_work_is_split_by_speed() -> None:
    half = dataclasses.replace(GPU, fixed_s=2 * GPU.fixed_s, per_row_s=2 * GPU.per_row_s)
    outcome = simulate(World(num_prefill=3, num_prefixes=100_000, hot=0.0, rate=35.0, curves=(GPU, GPU, half)), place)
    assert outcome.hit_rate < 0.01
    fast, slow = min(outcome.prefill_requests[:2]), outcome.prefill_requests[2]
    assert 0.2 * fast < slow < 0.8 * fast


# ---- the meter ----------------------------------------------------------------------------------------------------------


def test_a_meter_tells_ones_own_part_from_the_others_however_late_the_record() -> None:
    meter = LoadMeter(0.0)
    assert meter.mean is None
    # For 30 s a queue of 1000 tokens is there half of the time; each record shows, a second late, what was there then.
    for tick in range(60):
        now = tick * 0.5
        meter.queue((1000 if tick % 2 else 0) - meter.queued_tokens, now)
        late = 1000 if (tick - 2) % 2 else 0
        meter.observe(WorkerLoad(num_queued_tokens=late, num_running=3, num_reserved=1), 4, now + 0.25)
    mean = meter.mean
    assert mean is not None
    assert mean.queued_tokens == pytest.approx(500, rel=0.2)
    assert mean.own_queued_tokens == pytest.approx(mean.queued_tokens, rel=0.2)
    assert (mean.num_seqs, mean.own_num_seqs) == (pytest.approx(4), pytest.approx(4))


def test_a_meter_weighs_queues_by_how_long_they_lasted_and_forgets() -> None:
    meter = LoadMeter(0.0)
    meter.observe(WorkerLoad(), 0, 0.5)
    meter.queue(8000, 0.6)
    meter.queue(-8000, 0.7)
    meter.observe(WorkerLoad(), 0, 1.0)
    assert meter.mean is not None
    assert 0 < meter.mean.own_queued_tokens < 1600
    assert meter.recent_tokens(0.7) > meter.recent_tokens(1.0) > meter.recent_tokens(2.0) > 8000 / 3
    for tick in range(3, 80):
        meter.observe(WorkerLoad(), 0, tick * 0.5)
    assert meter.mean.own_queued_tokens == pytest.approx(0, abs=1)
    assert meter.queued_tokens == 0
    assert meter.recent_tokens(40.0) < 1
    # The first look is believed at once, and looks at one instant are no division by nothing.
    fresh = LoadMeter(5.0)
    fresh.observe(WorkerLoad(num_queued_tokens=700, num_running=2), 1, 5.0)
    assert fresh.mean == MeanLoad(queued_tokens=700, own_queued_tokens=0.0, num_seqs=2, own_num_seqs=1)
    fresh.observe(WorkerLoad(num_queued_tokens=100, num_running=2), 1, 65.0)
    assert fresh.mean.queued_tokens == pytest.approx(100, abs=1)


def test_a_meter_tells_batch_prompts_apart() -> None:
    meter = LoadMeter(0.0)
    meter.queue(500, 1.0)
    meter.queue(4000, 1.0, batch=True)
    assert (meter.queued_tokens, meter.batch_tokens, meter.recent_tokens(1.0)) == (4500, 4000, 500)
    meter.observe(WorkerLoad(num_queued_tokens=9000, num_queued_batch_tokens=8000), 1, 2.0)
    assert meter.mean is not None
    assert meter.mean.batch_tokens == 8000
    meter.queue(-4000, 2.0, batch=True)
    meter.queue(-500, 2.0)
    assert (meter.queued_tokens, meter.batch_tokens) == (0, 0)
