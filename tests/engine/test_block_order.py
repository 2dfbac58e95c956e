"""The order in which blocks are handed over: numbers of tokens become numbers of blocks, on either side alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twostep.block_order import BlockOrder, num_out_of_reach
from twostep.cluster.records import LayoutRecord
from twostep.engine.batch import KvShape


@given(
    num_tokens=st.integers(1, 300),
    block_size=st.integers(1, 20),
    num_full=st.integers(0, 3),
    num_windowed=st.integers(0, 3),
    reach=st.integers(1, 90),
    num_state_blocks=st.integers(0, 3),
)
def test_what_is_in_reach_is_counted_column_by_column(
    num_tokens: int, block_size: int, num_full: int, num_windowed: int, reach: int, num_state_blocks: int
) -> None:
    order = BlockOrder(
        num_tokens=num_tokens,
        block_size=block_size,
        num_full=num_full,
        num_windowed=num_windowed,
        reach=reach,
        num_state_blocks=num_state_blocks,
    )
    places = list(order.places())
    assert order.count == len(places) + num_state_blocks
    assert places == sorted(places, key=lambda place: (place[1], place[0]))
    for column in range(order.num_columns + 1):
        assert order.before(column) == sum(1 for _, other in places if other < column)
    # The next token is at position num_tokens, and sees those from num_tokens + 1 - reach on.
    wanted = {(group, column) for group in range(num_full) for column in range(-(-num_tokens // block_size))}
    for group in range(num_full, num_full + num_windowed):
        wanted |= {(group, token // block_size) for token in range(max(0, num_tokens + 1 - reach), num_tokens)}
    assert wanted <= set(places)
    # Where nothing is in reach but the next token itself, the block that it is written to is there.
    assert len(set(places) - wanted) <= num_windowed


def test_one_group_is_in_the_order_of_its_tokens() -> None:
    order = BlockOrder(num_tokens=37, block_size=4)
    assert list(order.places()) == [(0, column) for column in range(10)]
    assert [order.before(column) for column in (0, 3, 10)] == [0, 3, 10]
    assert num_out_of_reach(37, reach=10, block_size=4) == 7


def test_pools_and_layouts_have_one_order() -> None:
    sizes = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 4, "dtype": "float32", "block_size": 4}
    groups = {"num_groups": 3, "num_windowed": 2, "reach": 21}
    shape = KvShape(num_blocks=9, **sizes, **groups)  # type: ignore[arg-type]
    layout = LayoutRecord(model_fingerprint="m", **sizes, **groups)  # type: ignore[arg-type]
    assert shape.order(60) == layout.order(60)
    assert layout.num_tokens_in(31) == 40
    assert layout.blocks_of(40) == 10 + 2 * 21 / 4
