"""From flags of `twostep bench serve` to the target and the load."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math

from twostep.errors import InvalidRequest, SetupError
from twostep.lab.bench.serve import lengths
from twostep.lab.bench.serve.arrivals import Arrivals
from twostep.lab.bench.serve.grpc_target import GrpcOptions, GrpcTarget
from twostep.lab.bench.serve.load import ServeLoad, TraceTimes, Users
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.bench.serve.runner import Extent
from twostep.lab.bench.serve.target import LoadTarget, TargetModel
from twostep.lab.bench.serve.traces import RequestTrace, read_sharegpt, read_trace
from twostep.lab.bench.serve.workloads import MAX_TURNS, MixedPrompts, MultiTurn, Quoting, RandomPrompts, SharedPrefixPrompts, Workload
from twostep.settings.tls import TlsFiles

_TRACES = ("mooncake", "azure")
# Mean prompt and answer where --input-tokens and --output-tokens are not given.
_DEFAULT_LENGTHS = {
    "fixed": (512, 128),
    "normal": (2600, 128),
    "mixed": (0, 128),
    "shared-prefix": (128, 128),
    "quoting": (1024, 256),
    "multi-turn": (128, 128),
}
_DEFAULT_DURATION_S = 60.0
# Requests that are under way at once; more are errors. It keeps a rate that no server can hold from filling this process' memory.
_MAX_IN_FLIGHT = 10_000
# Share of long prompts in the workload `mixed`.
_LONG_SHARE = 0.5
_ABOVE_0 = (*("input_tokens", "output_tokens", "trace_speed", "duration", "num_requests", "concurrency", "timeout"),)
_AT_LEAST_0 = (*("warmup", "think_time", "spread", "max_model_len", "vocab_size", "temperature"),)


def check_flags(args: argparse.Namespace) -> None:
    """Checks what can be told before anything is connected to. Raises InvalidRequest."""
    for names, least in ((_ABOVE_0, "above 0"), (_AT_LEAST_0, "of 0 or more")):
        for name in names:
            value = getattr(args, name)
            if value is not None and not (math.isfinite(value) and (value > 0 or (value == 0 and names is _AT_LEAST_0))):
                raise InvalidRequest(f"--{name.replace('_', '-')} {value:g}: give a number {least}")
    _arrivals(args)
    _prefix(args.prefix_tokens)
    if args.workload in _TRACES and args.dataset_path is None:
        raise _no_dataset(args.workload)
    if args.workload == "multi-turn":
        _turns(args.turns)


def target_of(args: argparse.Namespace, targets: LatencyTargets) -> LoadTarget:
    """Connects to nothing yet."""
    if args.target.startswith(("http://", "https://")):
        if args.send_targets or args.request_class or args.tenant:
            raise InvalidRequest("--send-targets, --request-class and --tenant are Twostep's own: give host:port of a router as --target")
        return _openai_target(args)
    if args.extra_body or args.tokenizer:
        raise InvalidRequest("--extra-body and --tokenizer are for servers over HTTP: give http://… as --target, or leave them out")
    return GrpcTarget(
        GrpcOptions(
            targets=tuple(t.strip() for t in args.target.split(",")),
            model=args.model,
            api_key=args.api_key,
            tls=TlsFiles(ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key),
            timeout_s=args.timeout,
            temperature=args.temperature,
            ignore_eos=True,
            vocab_size=args.vocab_size,
            request_class=args.request_class,
            ttft_ms=targets.ttft_ms if args.send_targets else None,
            tpot_ms=targets.tpot_ms if args.send_targets else None,
            tenant=args.tenant,
            cold=True,
        )
    )


def _openai_target(args: argparse.Namespace) -> LoadTarget:
    if importlib.util.find_spec("aiohttp") is None:
        raise SetupError("an http target needs aiohttp; pip install 'twostep[bench]'")
    # Needs aiohttp.
    from twostep.lab.bench.serve.openai_target import OpenAIOptions, OpenAITarget  # noqa: PLC0415

    try:
        extra = json.loads(args.extra_body or "{}")
    except ValueError as error:
        raise InvalidRequest(f"--extra-body is not JSON ({error}); give an object, as in '{{\"top_p\": 0.9}}'") from error
    if not isinstance(extra, dict):
        raise InvalidRequest("--extra-body is no JSON object; give one, as in '{\"top_p\": 0.9}'")
    options = OpenAIOptions(
        url=args.target,
        api=args.api,
        model=args.model,
        api_key=args.api_key,
        tokenizer_dir=args.tokenizer,
        timeout_s=args.timeout,
        temperature=args.temperature,
        ignore_eos=True,
        extra_body=extra,
        max_model_len=args.max_model_len,
    )
    return OpenAITarget(options)


async def load_of(args: argparse.Namespace, target: LoadTarget, served: TargetModel) -> ServeLoad:
    """Reads the data set, if there is one. Raises InvalidRequest for flags that contradict each other."""
    workload, arrivals = await _workload(args, target, served), _arrivals(args)
    return ServeLoad(
        workload=workload, arrivals=arrivals, extent=_extent(args, arrivals, workload), seed=args.seed, max_model_len=args.max_model_len
    )


def rates_of(args: argparse.Namespace) -> list[float]:
    """Returns the rates of --rate, one run for each; none: it was not given."""
    try:
        return [float(rate) for rate in args.rate.split(",")] if args.rate else []
    except ValueError as error:
        raise InvalidRequest(f"--rate {args.rate!r}: give a number, or several with commas between them, as in 4,6,8") from error


def _arrivals(args: argparse.Namespace) -> Arrivals | Users | TraceTimes:
    rates = rates_of(args)
    if args.concurrency is not None:
        if rates:
            raise InvalidRequest("users that wait for their answers have no rate: leave out --rate or --concurrency")
        return Users(args.concurrency)
    if args.workload in _TRACES and not rates:
        return TraceTimes(args.trace_speed or 1.0)
    if args.trace_speed is not None:
        raise InvalidRequest("--trace-speed is for a trace's own times: leave out --rate and --concurrency")
    return Arrivals(kind="poisson", rate=rates[0] if rates else 1.0)


def _extent(args: argparse.Namespace, arrivals: Arrivals | Users | TraceTimes, workload: Workload) -> Extent:
    """A trace at its own times is run to its end unless something else is said."""
    if args.num_requests is not None and args.duration is not None:
        raise InvalidRequest("--num-requests and --duration both end the run: give one of the two")
    duration, num_requests = args.duration or 0.0, args.num_requests or 0
    if args.duration is None and args.num_requests is None:
        if isinstance(arrivals, TraceTimes) and isinstance(workload, RequestTrace):
            num_requests = len(workload.requests)
        else:
            duration = _DEFAULT_DURATION_S
    return Extent(
        duration_s=duration,
        num_requests=num_requests,
        warmup_s=args.warmup,
        cooldown_s=args.warmup,
        max_in_flight=_MAX_IN_FLIGHT,
    )


async def _workload(args: argparse.Namespace, target: LoadTarget, served: TargetModel) -> Workload:
    name, spread, prefix = args.workload, args.spread / 100, _prefix(args.prefix_tokens)
    if args.dataset_path is not None and name not in ("sharegpt", *_TRACES):
        raise InvalidRequest(f"--dataset-path is for sharegpt, {' and '.join(_TRACES)}: give one of these as --workload")
    mean_prompt, mean_output = _DEFAULT_LENGTHS.get(name, (0, 0))
    mean_prompt, mean_output = args.input_tokens or mean_prompt, args.output_tokens or mean_output
    fixed_output: lengths.Lengths | None = lengths.Fixed(args.output_tokens) if args.output_tokens else None
    match name:
        case "fixed":
            return RandomPrompts(prompt=lengths.Fixed(mean_prompt), output=lengths.Fixed(mean_output))
        case "normal":
            return RandomPrompts(prompt=lengths.Normal(mean_prompt, spread), output=lengths.Normal(mean_output, spread))
        case "mixed":
            output = lengths.Normal(mean_output, spread)
            return MixedPrompts(long=lengths.LONG_PROMPT, short=lengths.SHORT_PROMPT, output=output, long_share=_LONG_SHARE)
        case "document":
            return RandomPrompts(prompt=lengths.DOCUMENT_PROMPT, output=fixed_output or lengths.DOCUMENT_OUTPUT)
        case "shared-prefix":
            return SharedPrefixPrompts(
                prefix_tokens=1024 if prefix is None else prefix[0],
                num_prefixes=1 if prefix is None else prefix[1],
                suffix=lengths.Normal(mean_prompt, spread),
                output=lengths.Normal(mean_output, spread),
            )
        case "quoting":
            return Quoting(prompt=lengths.Normal(mean_prompt, spread), output=lengths.Normal(mean_output, spread))
        case "multi-turn":
            return MultiTurn(
                turns=_turns(args.turns),
                message=lengths.Normal(mean_prompt, spread),
                output=lengths.Normal(mean_output, spread),
                system_tokens=prefix[0] if prefix is not None else 0,
                think_s=args.think_time,
                max_total_tokens=args.max_model_len or served.max_model_len,
            )
        case "sharegpt" if args.dataset_path is None:
            return RandomPrompts(prompt=lengths.SHAREGPT_PROMPT, output=fixed_output or lengths.SHAREGPT_OUTPUT)
    if args.dataset_path is None:
        raise _no_dataset(name)
    if name == "sharegpt":
        return await read_sharegpt(args.dataset_path, target.tokenize, output_tokens=args.output_tokens, seed=args.seed)
    return read_trace(args.dataset_path, name)


def _prefix(text: str | None) -> tuple[int, int] | None:
    """Returns the length of shared prefixes and how many there are; None: neither was told. Raises InvalidRequest."""
    if text is None:
        return None
    length, _, number = text.partition("x")
    if not length.isdecimal() or not (number or "1").isdecimal() or not int(number or 1):
        raise InvalidRequest(f"--prefix-tokens {text}: give a number, or 1024x8 for eight different prefixes")
    return int(length), int(number or 1)


def _no_dataset(workload: str) -> InvalidRequest:
    return InvalidRequest(f"--workload {workload} is read from a file: give it as --dataset-path")


def _turns(text: str) -> lengths.Lengths:
    low, _, high = text.partition(":")
    try:
        turns = lengths.Uniform(int(low), int(high or low))
    except ValueError as error:
        raise InvalidRequest(f"--turns {text!r}: give a number, or the least and the most with a colon between them") from error
    if turns.high > MAX_TURNS:
        raise InvalidRequest(f"--turns {text!r}: conversations have {MAX_TURNS} turns at most")
    return turns
