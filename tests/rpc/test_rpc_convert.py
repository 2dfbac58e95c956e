"""Sampling parameters on their way from router to worker."""

from __future__ import annotations

import dataclasses
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.errors import InvalidRequest
from twostep.rpc.convert import sampling_from_proto, sampling_to_proto
from twostep.rpc.v1 import inference_pb2
from twostep.sampling_params import MAX_GRAMMAR_CHARS, Grammar, GrammarKind, SamplingParams


def single(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers that the wire's single precision holds exactly."""
    return st.floats(low, high, width=32)


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, (1 << 31) - 1),
    temperature=single(0.0, 100.0),
    top_k=st.integers(0, 1 << 31),
    top_p=single(0.0078125, 1.0),
    min_p=single(0.0, 1.0),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    repetition_penalty=single(0.015625, 100.0),
    frequency_penalty=single(-2.0, 2.0),
    presence_penalty=single(-2.0, 2.0),
    stop_token_ids=st.lists(st.integers(0, (1 << 32) - 1), max_size=64).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 10),
    logprobs=st.none() | st.integers(0, 20),
    grammar=st.none()
    | st.just(Grammar(GrammarKind.JSON_OBJECT))
    | st.builds(
        Grammar,
        st.sampled_from([GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK]),
        st.text(st.characters(codec="utf-8"), min_size=1),
    ),
)


def test_every_field_of_the_message_is_a_parameter() -> None:
    assert set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name) == {field.name for field in dataclasses.fields(SamplingParams)}


@given(params)
def test_what_a_worker_gets_is_what_the_router_meant(meant: SamplingParams) -> None:
    wire = inference_pb2.SamplingParams.FromString(sampling_to_proto(meant).SerializeToString())
    assert sampling_from_proto(wire) == meant


@given(st.floats(0.01, 10.0))
def test_doubles_arrive_as_the_nearest_single(temperature: float) -> None:
    got = sampling_from_proto(sampling_to_proto(SamplingParams(max_tokens=1, temperature=temperature)))
    assert got.temperature == struct.unpack("<f", struct.pack("<f", temperature))[0]


def test_stop_strings_stay_in_the_router() -> None:
    assert not sampling_to_proto(SamplingParams(max_tokens=1, stop=("x",))).stop
    wire = sampling_to_proto(SamplingParams(max_tokens=1))
    wire.stop.append("x")
    with pytest.raises(InvalidRequest, match="stop"):
        sampling_from_proto(wire)


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "seed", "min_tokens", "ignore_eos"])
def test_a_missing_field_is_named(field: str) -> None:
    wire = sampling_to_proto(SamplingParams(max_tokens=1))
    wire.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=field):
        sampling_from_proto(wire)


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", math.nan), ("top_p", 0.0), ("max_tokens", 0), ("min_p", math.inf), ("top_k", -1)]
)
def test_values_out_of_range_are_refused(field: str, value: float) -> None:
    wire = sampling_to_proto(SamplingParams(max_tokens=1))
    setattr(wire, field, value)
    with pytest.raises(InvalidRequest, match=field):
        sampling_from_proto(wire)


@pytest.mark.parametrize("wire", [inference_pb2.Grammar(), inference_pb2.Grammar(json_object=False), inference_pb2.Grammar(regex="")])
def test_a_grammar_that_says_nothing_is_refused(wire: inference_pb2.Grammar) -> None:
    sampling = sampling_to_proto(SamplingParams(max_tokens=1))
    sampling.grammar.CopyFrom(wire)
    with pytest.raises(InvalidRequest, match="grammar"):
        sampling_from_proto(sampling)


@pytest.mark.parametrize("kind", [GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK])
def test_a_grammar_has_a_largest_size(kind: GrammarKind) -> None:
    Grammar(kind, "a" * MAX_GRAMMAR_CHARS[kind])
    with pytest.raises(InvalidRequest, match="at most"):
        Grammar(kind, "a" * (MAX_GRAMMAR_CHARS[kind] + 1))
