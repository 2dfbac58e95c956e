"""RoPE's tables against transformers', for any parameters, beyond the original context."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from twostep.model.families.rope import LinearScaling, Llama3Scaling, Rope, Scaling, YarnScaling, rope_tables

factors = st.floats(1.0, 64.0)
originals = st.integers(64, 8192)
scalings = st.one_of(
    st.none(),
    st.builds(LinearScaling, factor=st.floats(0.25, 64.0)),
    st.builds(
        Llama3Scaling,
        factor=factors,
        low_freq_factor=st.floats(0.5, 2.0),
        high_freq_factor=st.floats(2.5, 8.0),
        original_max_position_embeddings=originals,
    ),
    st.builds(
        YarnScaling,
        factor=factors,
        original_max_position_embeddings=originals,
        beta_fast=st.floats(8.0, 64.0),
        beta_slow=st.floats(0.5, 8.0),
        attention_factor=st.none() | st.floats(0.5, 2.0),
        mscale=st.none() | st.floats(0.1, 2.0),
        mscale_all_dim=st.none() | st.floats(0.1, 2.0),
        truncate=st.booleans(),
    ),
)
NUM_POSITIONS = 10_000
KINDS = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}


def parameters(theta: float, scaling: Scaling | None) -> dict[str, object]:
    raw: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        raw |= {name: getattr(scaling, name) for name in scaling.__slots__} | {"rope_type": KINDS[type(scaling)]}
    return {key: value for key, value in raw.items() if value is not None}


@given(head_dim=st.sampled_from([4, 16, 24, 64, 80, 128]), theta=st.sampled_from([100.0, 1e4, 5e5, 1e6]), scaling=scalings)
def test_tables_are_transformers(head_dim: int, theta: float, scaling: Scaling | None) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=16384,
        rope_parameters=parameters(theta, scaling),
    )
    theirs = LlamaRotaryEmbedding(config)
    tables = rope_tables(Rope(theta=theta, scaling=scaling), head_dim, NUM_POSITIONS, "cpu")
    cos, sin = tables.cos, tables.sin
    assert cos.shape == sin.shape == (NUM_POSITIONS, head_dim // 2)
    for position in (0, 1, 63, 500, 4095, NUM_POSITIONS - 1):
        # Frequencies are float32 on both sides: some roundings of the angle are allowed for, and nothing else.
        slack = theirs.attention_scaling * (position * 5e-7 + 1e-6)
        angle = position * theirs.inv_freq.double()
        for ours, wanted in ((cos, angle.cos()), (sin, angle.sin())):
            assert float((ours[position] - wanted * theirs.attention_scaling).abs().max()) <= slack


def test_without_rope_nothing_turns() -> None:
    tables = rope_tables(None, 64, 100, "cpu")
    cos, sin = tables.cos, tables.sin
    assert cos.shape == sin.shape == (100, 0)
