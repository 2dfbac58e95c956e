"""Plain values to protobuf and back, where router and workers meet. Neither torch nor the engine is needed here."""

from __future__ import annotations

import dataclasses

from twostep.errors import InvalidRequest
from twostep.pooling import Pooling, PoolingParams
from twostep.request_class import RequestClass
from twostep.rpc.v1 import inference_pb2, prefill_pb2
from twostep.sampling_params import Grammar, GrammarKind, SamplingParams

# Plain numbers, copied as they are. Stop strings never leave the router.
_OTHERS = ("stop", "stop_token_ids", "logprobs", "grammar", "logit_bias", "prompt_logprobs")
_NUMBERS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in _OTHERS)
# Set by every router since 0.1. A field that came later is unset where the router is older: it has the dataclass's default then, so that
# routers and workers a minor version apart go on working together. Nothing is added here.
_REQUIRED = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("ignore_eos", "min_tokens"),
)


_CLASSES = {
    inference_pb2.REQUEST_CLASS_INTERACTIVE: RequestClass.INTERACTIVE,
    inference_pb2.REQUEST_CLASS_STANDARD: RequestClass.STANDARD,
    inference_pb2.REQUEST_CLASS_BATCH: RequestClass.BATCH,
}
_CLASS_NUMBERS = {known: number for number, known in _CLASSES.items()}


def class_from_proto(number: inference_pb2.RequestClass.ValueType) -> RequestClass:
    """One that is unset, or not known here, is standard."""
    return _CLASSES.get(number, RequestClass.STANDARD)


def class_to_proto(request_class: RequestClass) -> inference_pb2.RequestClass.ValueType:
    return _CLASS_NUMBERS[request_class]


_POOLING_KINDS = {Pooling.LAST: prefill_pb2.POOLING_LAST, Pooling.MEAN: prefill_pb2.POOLING_MEAN}


def pooling_to_proto(params: PoolingParams) -> prefill_pb2.PoolingParams:
    return prefill_pb2.PoolingParams(kind=_POOLING_KINDS[params.kind], dimensions=params.dimensions, normalize=params.normalize)


def pooling_from_proto(proto: prefill_pb2.PoolingParams) -> PoolingParams:
    """Raises InvalidRequest for a kind that is not known here."""
    kind = next((kind for kind, number in _POOLING_KINDS.items() if number == proto.kind), None)
    if kind is None:
        raise InvalidRequest(f"pooling.kind is {int(proto.kind)}; give one of {', '.join(map(str, _POOLING_KINDS.values()))}")
    return PoolingParams(kind=kind, dimensions=proto.dimensions, normalize=proto.normalize)


def sampling_to_proto(params: SamplingParams) -> inference_pb2.SamplingParams:
    """Resolved parameters for a worker; `stop` is left out."""
    proto = inference_pb2.SamplingParams(stop_token_ids=params.stop_token_ids, **{name: getattr(params, name) for name in _NUMBERS})
    if params.logprobs is not None:
        proto.logprobs = params.logprobs
    if params.prompt_logprobs is not None:
        proto.prompt_logprobs = params.prompt_logprobs
    proto.logit_bias.update(params.logit_bias)
    if params.grammar is not None:
        proto.grammar.CopyFrom(grammar_to_proto(params.grammar))
    return proto


def sampling_from_proto(proto: inference_pb2.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest if a field is missing or out of range."""
    missing = [name for name in _REQUIRED if not proto.HasField(name)]  # type: ignore[arg-type]  # names come from the dataclass
    if missing:
        raise InvalidRequest(f"sampling lacks {', '.join(missing)}; the router sends every field but `stop`")
    if proto.stop:
        raise InvalidRequest("sampling.stop is for routers; a worker takes stop_token_ids only")
    return SamplingParams(
        stop_token_ids=tuple(proto.stop_token_ids),
        logprobs=proto.logprobs if proto.HasField("logprobs") else None,
        logit_bias=tuple(sorted(proto.logit_bias.items())),
        prompt_logprobs=proto.prompt_logprobs if proto.HasField("prompt_logprobs") else None,
        grammar=grammar_from_proto(proto.grammar) if proto.HasField("grammar") else None,
        **{name: getattr(proto, name) for name in _NUMBERS if proto.HasField(name)},  # type: ignore[arg-type]  # as above
    )


def grammar_to_proto(grammar: Grammar) -> inference_pb2.Grammar:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return inference_pb2.Grammar(json_schema=grammar.text)
        case GrammarKind.JSON_OBJECT:
            return inference_pb2.Grammar(json_object=True)
        case GrammarKind.REGEX:
            return inference_pb2.Grammar(regex=grammar.text)
        case GrammarKind.LARK:
            return inference_pb2.Grammar(lark=grammar.text)


def grammar_from_proto(proto: inference_pb2.Grammar) -> Grammar:
    """Raises InvalidRequest if none is given, or it is empty or too long."""
    kind = proto.WhichOneof("kind")
    if kind is None or (kind == "json_object" and not proto.json_object):
        raise InvalidRequest("grammar is empty; set json_schema, json_object (true), regex or lark, or leave the grammar out")
    return Grammar(GrammarKind(kind), "" if kind == "json_object" else getattr(proto, kind))
