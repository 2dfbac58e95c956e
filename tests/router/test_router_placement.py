"""Placement: who is chosen, who is not, and what is said when nobody can be."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from placement_simulation import worker_record

from router.placing.placement import Candidate, MeanLoad, NoPlacement, Placement, PlacementRequest, Shortage, Snapshot, place
from twostep.cluster.records import LayoutRecord, WorkerLoad

LAYOUT = LayoutRecord(model_fingerprint="m", dtype="bfloat16", block_size=16, num_layers=2, num_kv_heads=2, head_dim=8)


def candidate(name: str, *, cached: int = 0, queued: int = 0, attempts: int = 0, excluded: bool = False, **options: Any) -> Candidate:
    return Candidate(
        record=worker_record(name, **({"layout": LAYOUT} | options)),
        cached_tokens=cached,
        queued_tokens=queued,
        num_attempts=attempts,
        excluded=excluded,
    )


def demand(name: str = "r", num_tokens: int = 1000, max_new_tokens: int = 100) -> PlacementRequest:
    return PlacementRequest(request_id=name, num_tokens=num_tokens, max_new_tokens=max_new_tokens)


def chosen(prefill: list[Candidate], decode: list[Candidate], wanted: PlacementRequest | None = None) -> tuple[str, str]:
    placed = place(Snapshot(prefill=prefill, decode=decode), wanted or demand())
    assert isinstance(placed, Placement), placed
    assert placed.prefill is not None
    assert placed.prefill.worker_id in placed.reason
    return placed.prefill.worker_id, placed.decode.worker_id


def shortage(prefill: list[Candidate], decode: list[Candidate], wanted: PlacementRequest | None = None) -> NoPlacement:
    placed = place(Snapshot(prefill=prefill, decode=decode), wanted or demand())
    assert isinstance(placed, NoPlacement), placed
    return placed


def test_the_longest_cached_prefix_wins_on_both_sides() -> None:
    prefill = [candidate("p0"), candidate("p1", cached=512), candidate("p2", cached=256)]
    decode = [candidate("d0", cached=256), candidate("d1", cached=512), candidate("d2")]
    assert chosen(prefill, decode) == ("p1", "d1")


def test_a_long_queue_outweighs_a_cached_prefix_and_a_short_one_does_not() -> None:
    """A cached prefix is worth more than its own time: prompts behind it do not wait for it to be computed either."""
    cached = 512
    for queued, winner in ((cached, "p1"), (cached + cached // 3, "p1"), (cached * 3, "p0")):
        assert chosen([candidate("p0"), candidate("p1", cached=cached, queued=queued)], [candidate("d0")])[0] == winner


def test_other_routers_prompts_count_by_their_tokens_or_where_those_are_not_told_by_number() -> None:
    for busy in (WorkerLoad(num_running=2, num_waiting=3), WorkerLoad(num_queued_tokens=5000)):
        assert chosen([candidate("p0", load=busy), candidate("p1", load=WorkerLoad(num_queued_tokens=2000))], [candidate("d0")])[0] == "p1"
    # This router's own prompts there are not counted twice.
    own = MeanLoad(queued_tokens=900, own_queued_tokens=900)
    others = MeanLoad(queued_tokens=900, own_queued_tokens=0)
    prefill = [
        dataclasses.replace(candidate("p0", queued=100), mean=own),
        dataclasses.replace(candidate("p1", queued=100), mean=others),
    ]
    assert chosen([prefill[0], dataclasses.replace(prefill[1], mean=own, queued_tokens=200)], [candidate("d0")])[0] == "p0"
    assert chosen([dataclasses.replace(prefill[0], mean=MeanLoad()), prefill[1]], [candidate("d0")])[0] == "p0"


def test_the_less_loaded_decode_worker_is_taken_and_a_full_one_last() -> None:
    few = WorkerLoad(num_running=3, num_free_blocks=1000)
    many = WorkerLoad(num_running=30, num_free_blocks=1000)
    no_blocks = WorkerLoad(num_running=0, num_free_blocks=10)
    assert chosen([candidate("p0")], [candidate("d0", load=many), candidate("d1", load=few)])[1] == "d1"
    assert chosen([candidate("p0")], [candidate("d0", load=many), candidate("d1", load=no_blocks)])[1] == "d0"
    # Blocks for new tokens come with them: only the prompt's must be there now.
    enough = WorkerLoad(num_running=0, num_free_blocks=-(-1001 // LAYOUT.block_size))
    assert chosen([candidate("p0")], [candidate("d0", load=many), candidate("d1", load=enough)])[1] == "d1"
    full = candidate("d1", load=dataclasses.replace(few, num_running=64))
    assert chosen([candidate("p0")], [candidate("d0", load=dataclasses.replace(many, num_running=63)), full])[1] == "d0"
    # Heartbeats are late: a full one is still better than none.
    assert chosen([candidate("p0")], [full])[1] == "d1"
    # This router's own count comes before the heartbeat.
    assert chosen([candidate("p0")], [candidate("d0", attempts=9), candidate("d1", load=few)])[1] == "d1"


def test_not_ready_draining_and_excluded_workers_are_left_out() -> None:
    prefill = [candidate("p0", ready=False), candidate("p1", draining=True), candidate("p2", excluded=True), candidate("p3", queued=5000)]
    assert chosen(prefill, [candidate("d0")])[0] == "p3"
    missing = shortage(prefill[:2], [candidate("d0")])
    assert missing.shortage is Shortage.MISSING
    assert "no prefill worker is available (p0 is not ready, p1 is draining)" in missing.reason
    assert shortage(prefill[:3], [candidate("d0")]).shortage is Shortage.EXCLUDED
    both = shortage([], [])
    assert "no prefill worker" in both.reason
    assert "no decode worker" in both.reason


def test_blocks_of_another_size_are_cut_anew_where_they_pass_through_the_host() -> None:
    other = dataclasses.replace(LAYOUT, block_size=32)
    assert chosen([candidate("p0", layout=other)], [candidate("d0")]) == ("p0", "d0")
    # At a cost.
    assert chosen([candidate("p0", layout=other)], [candidate("d0"), candidate("d1", layout=other)]) == ("p0", "d1")
    both = ("nixl", "ray")
    assert chosen([candidate("p0", layout=other, transports=both)], [candidate("d0", transports=both)]) == ("p0", "d0")
    direct = shortage([candidate("p0", layout=other, transports=("nixl",))], [candidate("d0", transports=("nixl",))])
    assert direct.shortage is Shortage.NO_TRANSPORT


def test_numbers_are_converted_where_nothing_exact_has_room() -> None:
    for other in (dataclasses.replace(LAYOUT, dtype="float32"), dataclasses.replace(LAYOUT, quantization="int8")):
        assert chosen([candidate("p0", layout=other)], [candidate("d0")]) == ("p0", "d0")
        assert chosen([candidate("p0")], [candidate("d0", layout=other)]) == ("p0", "d0")
        # However long the queue before the exact pair, and however much of the prompt others have cached.
        cached, queued = candidate("p0", layout=other, cached=900), candidate("p1", queued=100_000)
        assert chosen([cached, queued], [candidate("d0", cached=900)]) == ("p1", "d0")
        # Blocks of another size hold the same numbers.
        cut = candidate("p1", layout=dataclasses.replace(LAYOUT, block_size=32))
        assert chosen([cached, cut], [candidate("d0")]) == ("p1", "d0")
        full = candidate("d0", load=WorkerLoad(num_running=64, num_free_blocks=1000))
        assert chosen([candidate("p0")], [full, candidate("d1", layout=other)]) == ("p0", "d1")
        assert chosen([candidate("p0")], [candidate("d0", excluded=True), candidate("d1", layout=other)]) == ("p0", "d1")
        direct = shortage([candidate("p0", layout=other, transports=("nixl",))], [candidate("d0", transports=("nixl",))])
        assert direct.shortage is Shortage.NO_TRANSPORT


def test_only_layouts_that_fit_and_common_transports_are_paired() -> None:
    other = dataclasses.replace(LAYOUT, num_layers=3)
    prefill = [candidate("p0", cached=900, layout=other), candidate("p1", queued=3000)]
    assert chosen(prefill, [candidate("d0")])[0] == "p1"
    assert chosen(prefill, [candidate("d0"), candidate("d1", layout=other)]) == ("p0", "d1")
    apart = shortage([candidate("p0", layout=other)], [candidate("d0")])
    assert apart.shortage is Shortage.INCOMPATIBLE
    assert "from p0 to d0, num_layers is 3 there and 2 here" in apart.reason
    odd = dataclasses.replace(LAYOUT, quantization="fp8", block_size=6)
    assert "no multiple of 4 here" in shortage([candidate("p0")], [candidate("d0", layout=odd)]).reason
    parts = dataclasses.replace(LAYOUT, num_kv_heads=1, tp_size=2)
    assert "KV is in 2 parts there and 1 here" in shortage([candidate("p0", layout=parts)], [candidate("d0")]).reason
    lossy = [dataclasses.replace(LAYOUT, quantization=name) for name in ("fp8", "int8")]
    assert chosen([candidate("p0", layout=lossy[0])], [candidate("d0"), candidate("d1", layout=lossy[0])]) == ("p0", "d1")
    nixl = [candidate("p0", transports=("nixl",), cached=900), candidate("p1", transports=("ray", "nixl"))]
    assert chosen(nixl, [candidate("d0", transports=("ray",))])[0] == "p1"
    assert chosen(nixl, [candidate("d0", transports=("ray",)), candidate("d1", transports=("nixl",), cached=10)]) == ("p0", "d1")


def test_two_workers_too_far_apart_are_no_pair() -> None:
    """Each is near enough to a router of 0.2."""
    old, new = candidate("p0", version="0.1.0"), candidate("d0", version="0.3.0")
    said = shortage([old], [new])
    assert said.shortage is Shortage.INCOMPATIBLE
    assert said.reason.startswith("prefill workers run 0.1.0 and decode workers 0.3.0, more than one minor version apart")
    middle = candidate("d1", version="0.2.4", load=WorkerLoad(num_free_blocks=1000, num_running=60))
    assert chosen([old], [new, middle]) == ("p0", "d1"), "however much there is to do"
    assert chosen([old, candidate("p1", version="0.3.1", queued=2000)], [new]) == ("p1", "d0")
    local = place(Snapshot(prefill=[old], decode=[candidate("d0", version="0.3.0", local_prefill=True)]), demand())
    assert isinstance(local, Placement)
    assert local.prefill is None


def test_a_missing_transport_is_named_with_the_workers_that_lack_it() -> None:
    lacking = shortage([candidate("p0", transports=()), candidate("p1", transports=())], [candidate("d0")])
    assert lacking.shortage is Shortage.NO_TRANSPORT
    assert "KV transport ray is not ready on p0, p1" in lacking.reason
    nowhere = shortage([candidate("p0", transports=())], [candidate("d0", transports=())])
    assert "no KV transport is ready on p0, d0" in nowhere.reason


def test_a_prompt_that_an_encoder_reads_goes_where_a_step_has_room_for_it() -> None:
    """On both sides: a decode worker computes it again after a preemption."""
    short, long = {"max_prompt_tokens": 500}, {"max_prompt_tokens": 1000}
    prefill = [candidate("p0", **short), candidate("p1", queued=5000, **long)]
    decode = [candidate("d0", **short), candidate("d1", **long)]
    assert chosen(prefill, decode) == ("p1", "d1")
    begun = dataclasses.replace(demand(num_tokens=1020, max_new_tokens=80), num_prompt_tokens=1000)
    assert chosen(prefill, decode, begun) == ("p1", "d1"), "an answer that was begun is not read by the encoder"
    for sides in ((prefill[:1], decode), (prefill, decode[:1])):
        told = shortage(*sides)
        assert told.shortage is Shortage.TOO_LARGE
        assert "999 tokens" in told.reason, "as clients count, without the token that the decoder begins with"
        assert "499 of one prompt" in told.reason
        assert "--max-num-batched-tokens" in told.reason
        assert "--max-num-seqs" in told.reason
    assert shortage(prefill, [decode[0], candidate("d1", excluded=True, **long)]).shortage is Shortage.EXCLUDED
    assert shortage(prefill, decode, demand(num_tokens=1001)).shortage is Shortage.TOO_LARGE
    both = [candidate("d0", local_prefill=True, **short), candidate("d1", local_prefill=True, **long)]
    alone = place(Snapshot(prefill=prefill[:1], decode=both), demand())
    assert isinstance(alone, Placement)
    assert (alone.prefill, alone.decode.worker_id) == (None, "d1")
    assert "999 of one prompt" in shortage(prefill[:1], both, demand(num_tokens=1001)).reason


def test_what_can_never_fit_says_how_much_there_is() -> None:
    small = [candidate("d0", num_blocks=50)]
    told = shortage([candidate("p0")], small)
    assert told.shortage is Shortage.TOO_LARGE
    assert "800" in told.reason
    short = shortage([candidate("p0", max_model_len=1000)], [candidate("d0")])
    assert short.shortage is Shortage.TOO_LARGE
    assert "context length is 1000" in short.reason
    # 1000 tokens and 100 more, of which a prefill worker has to hold the first.
    exact = [candidate("p0", max_model_len=1100, num_blocks=63)], [candidate("d0", max_model_len=1100, num_blocks=69)]
    assert chosen(*exact) == ("p0", "d0")
    for smaller in ({"num_blocks": 68}, {"max_model_len": 1099}):
        assert shortage(exact[0], [candidate("d0", **smaller)]).shortage is Shortage.TOO_LARGE
    for smaller in ({"num_blocks": 62}, {"max_model_len": 1099}):
        assert shortage([candidate("p0", **smaller)], exact[1]).shortage is Shortage.TOO_LARGE
    # Excluded workers count: waiting for them helps.
    assert shortage([candidate("p0")], [*small, candidate("d1", excluded=True)]).shortage is Shortage.EXCLUDED


def test_ties_are_spread_evenly_and_fall_the_same_way_for_the_same_request() -> None:
    prefill = [candidate(f"p{i}") for i in range(4)]
    decode = [candidate(f"d{i}") for i in range(4)]
    counts = Counter(chosen(prefill, decode, demand(f"request-{i}")) for i in range(800))
    assert len(counts) == 16
    for side in (0, 1):
        by_worker: Counter[str] = Counter()
        for pair, n in counts.items():
            by_worker[pair[side]] += n
        assert min(by_worker.values()) > 140
    assert len({chosen(prefill, decode, demand("same")) for _ in range(5)}) == 1
    # Workers that differ by next to nothing are equal: of three the better of the two that are drawn.
    near = [candidate(f"p{i}", queued=5000 + i) for i in range(3)]
    drawn = Counter(chosen(near, decode, demand(f"request-{i}"))[0] for i in range(100))
    assert drawn.keys() == {"p0", "p1"}
    assert 15 <= drawn["p1"] <= 55


OTHERS: tuple[tuple[str, Any], ...] = (("block_size", 32), ("dtype", "float32"), ("num_layers", 3))

workers = st.lists(
    st.builds(
        dict,
        cached=st.integers(0, 1200),
        queued=st.integers(0, 9000),
        attempts=st.integers(0, 70),
        excluded=st.booleans(),
        ready=st.booleans(),
        draining=st.booleans(),
        transports=st.sampled_from([(), ("ray",), ("nixl",), ("ray", "nixl")]),
        layout=st.sampled_from([LAYOUT, *(dataclasses.replace(LAYOUT, **{name: value}) for name, value in OTHERS)]),
        num_blocks=st.sampled_from([20, 70, 1000]),
    ),
    max_size=5,
)


@given(prefill=workers, decode=workers)
def test_whatever_the_workers_a_pair_is_valid_and_as_good_as_the_cheapest_and_none_is_missed(prefill: list[Any], decode: list[Any]) -> None:
    wanted = demand()
    sides = Snapshot(
        prefill=[candidate(f"p{i}", **o) for i, o in enumerate(prefill)], decode=[candidate(f"d{i}", **o) for i, o in enumerate(decode)]
    )

    def alone(p: Candidate, d: Candidate) -> Placement | NoPlacement:
        return place(Snapshot(prefill=[p], decode=[d]), wanted)

    pairs = [placed for p in sides.prefill for d in sides.decode if isinstance(placed := alone(p, d), Placement)]
    placed = place(sides, wanted)
    if isinstance(placed, NoPlacement):
        assert not pairs
        assert placed.reason
        return
    assert placed.prefill is not None
    common = set(placed.prefill.transports) & set(placed.decode.transports)
    assert common
    assert placed.prefill.layout == placed.decode.layout or ("ray" in common and placed.prefill.layout.dtype == placed.decode.layout.dtype)
    # Costs that differ by less than a twentieth of the load are equal.
    least = min(pair.cost for pair in pairs)
    assert least - 1e-6 <= placed.cost <= least + 0.05 * least % 1e9 + 1e-6
