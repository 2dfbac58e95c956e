"""Tensor parallelism: right tokens through the whole engine, and step times of one GPU beside several.

    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_parallel.py check --sizes 1 2 4
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_parallel.py speed --sizes 1 2 4
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_parallel.py speed --model llama-3.1-70b --sizes 4 --decode 1 16 64 128
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_parallel.py check --quantization fp8 int8 int4      formats, as they are made at load
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_parallel.py check --checkpoints DIR... --base DIR          quantized ones of a model
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_parallel.py check speed --model qwen3-30b-a3b --experts    whole experts on each rank
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_parallel.py check speed --tiny --sizes 1 2          a dry run on the CPU

Each number of GPUs is a process of its own. All of them start at once where their memory allows it, and are measured one after the other.

check   a small random model with steps of prompts beside decodes. float32: the tokens of the CPU's single-process engine, greedy and drawn,
        near-ties counted, blocks read and written whole, logprobs beside one GPU's. bfloat16: how far each greedy token's logit lies below
        the largest, by the CPU in float32 on the same tokens, as a share of the logits' standard deviation. Of quantized weights:
        how many answers are one GPU's (where inputs are rounded, too, the smallest difference becomes a step of theirs), and its log
        probabilities and KV beside several's
speed   dummy weights in bfloat16, medians in ms. decode: between consecutive tokens on the host, step n + 1 launched before n is collected,
        contexts from 1024 on. mixed, prefill: from the launch until the tokens are on the host, after a pause
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_engine import BLOCK_SIZE, CONTEXT, batch_of, tables_for

from twostep.engine.batch import Batch, InFlight, Runner
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.lab.bench.shapes import SHAPES, TINY_LLAMA
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.runner.parallel_runner import ParallelRunner
from twostep.model.step.pool_sizing import PoolSizing
from twostep.process.log import setup_logging
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser

_ROOT = Path(__file__).resolve().parents[1]
_CASE, _GO = "--case", "go\n"
_CLOSE_S = 12.0
# Of the check's engines. Prompts are cut, and stand beside decodes in most steps.
CHECK_BUDGET, CHECK_SEQS, CHECK_BLOCKS = 256, 16, 1024
# Below the largest logit of float32, as a share of the standard deviation of a row's logits.
BF16_TOLERANCE = 0.1
# Of what a format costs one device's KV, beside the model without: two roundings of the same size differ by 1.4 times that.
QUANTIZED_SHARE = 1.5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process: so many devices from the first on, and what it has to do there."""

    what: str  # "float32", "bfloat16": the check; else the shape whose steps are measured
    size: int
    device: str
    model_dir: str
    one_shot: bool
    decode: Sequence[int]
    mixed: Sequence[Sequence[int]]
    prefill: Sequence[int]
    steps: int
    sized: bool
    seed: int = 0
    quantization: str = "none"
    base: str = ""  # the model of which model_dir is a quantized checkpoint
    experts: bool = False  # whole ones on each rank

    @property
    def title(self) -> str:
        kind = f"{self.size} GPU{'s' if self.size > 1 else ''}{'' if self.one_shot else ', NCCL'}{', experts' if self.experts else ''}"
        if self.base:
            return f"{kind}, {Path(self.model_dir).name}"
        return kind if self.quantization == "none" else f"{kind}, {self.quantization}"

    @property
    def quantized(self) -> bool:
        return bool(self.base) or self.quantization != "none"


# ---- a process: makes a runner, says so, and does its part when it is told ---------------------------------------------------------


def serve(case: Case) -> None:
    steps: Counter[str] = Counter()
    if case.device.startswith("cuda"):
        _count_steps(steps)
    began = time.perf_counter()
    runner = _runner(case)
    ready_s = time.perf_counter() - began
    # Of rank 0's device, of which others may hold a part.
    free = 0.0 if case.device == "cpu" else torch.cuda.mem_get_info(torch.device(case.device))[0] / 2**30
    _say(ready_s=round(ready_s, 1), free_gib=round(free, 2), blocks=runner.kv_shape.num_blocks)
    if sys.stdin.readline() != _GO:
        return
    if case.what in ("float32", "bfloat16"):
        _say(answers=_answers(runner, case))
        if case.size > 1 and (case.what == "float32" or case.quantized):
            _say(**_beside_one(runner, case))
        _say(steps=steps)
    else:
        for name, milliseconds in _times(runner, case):
            _say(case=name, ms=milliseconds)
        _say(steps=steps)
    if isinstance(runner, ParallelRunner):
        closing = threading.Thread(target=runner.close, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        _say(closed=not closing.is_alive())


def _runner(case: Case) -> ModelRunner | ParallelRunner:
    check = case.what in ("float32", "bfloat16")
    most = CHECK_SEQS if check else max(max(case.decode), *(decodes + 1 for decodes, _ in case.mixed), 1)
    num_blocks: int | PoolSizing = CHECK_BLOCKS
    if not check:
        num_blocks = max(most * _blocks_of(CONTEXT + case.steps + 8), 2 * _blocks_of(max(case.prefill)))
        if case.sized:
            num_blocks = PoolSizing(utilization=0.85, max_num_batched_tokens=max(case.prefill), max_num_seqs=most)
    options: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "dtype": case.what if check else "auto",
        "load_format": "auto" if check else "dummy",
        "max_num_seqs": most,
        "max_graph_tokens": CHECK_BUDGET if check else 2048,
        "max_model_len": None if check else 16384,
        "device": case.device,
        "quantization": case.quantization,
        "enable_expert_parallel": case.experts,
    }
    if case.size == 1:
        return ModelRunner(case.model_dir, **options)
    return ParallelRunner(case.model_dir, size=case.size, one_shot=case.one_shot, step_timeout_s=60.0, **options)


def _count_steps(steps: Counter[str]) -> None:
    """Counts those of this process that a graph serves, and those that none does."""
    from twostep.model.runner.step_graphs import StepGraphs  # noqa: PLC0415

    replayed = StepGraphs.logits

    def counted(self: StepGraphs, batch: Batch) -> torch.Tensor | None:
        logits = replayed(self, batch)
        kind = "decode" if len(batch.token_ids) == len(batch.seq_lens) else "with prompts"
        steps[f"{kind}, {'eager' if logits is None else 'captured'}"] += 1
        return logits

    StepGraphs.logits = counted  # type: ignore[method-assign]


def _requests(seed: int, vocab_size: int, count: int = 32) -> list[EngineRequest]:
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        prompt = rng.integers(3, vocab_size, int(rng.integers(1, 500))).tolist()
        params = SamplingParams(max_tokens=int(rng.integers(4, 40)), temperature=0.8 * (i % 2), top_p=0.95, seed=i, ignore_eos=True)
        requests.append(EngineRequest(seq_id=f"s{i}", token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params))
    return requests


def _answers(runner: Runner, case: Case) -> list[list[int]]:
    engine = Engine(runner, EngineConfig(max_num_batched_tokens=CHECK_BUDGET, max_num_seqs=CHECK_SEQS, max_waiting=64))
    return [[token.token_id for token in tokens] for tokens in generate(engine, _requests(case.seed, runner.vocab_size))]


def _beside_one(several: Runner, case: Case) -> dict[str, object]:
    """The same steps by one device, launched kernel by kernel: KV, blocks read and written whole, logprobs. Differences are the
    largest; with quantized weights the largest log probability's as a share of that, and KV's norm as a share of KV's, with what the format
    costs one device, `cost`, in the same way."""
    options: dict[str, Any] = {"dtype": case.what, "num_blocks": CHECK_BLOCKS, "block_size": BLOCK_SIZE, "device": case.device}
    one = ModelRunner(case.model_dir, quantization=case.quantization, **options)
    exact = ModelRunner(case.base or case.model_dir, **options)
    tables = tables_for(one, 3, 300)
    blocks = tables.ravel().tolist()
    kv, back = (np.zeros((len(blocks), one.kv_shape.block_bytes), np.uint8) for _ in range(2))
    for runner in (one, several, exact):
        runner.write_blocks(blocks, kv)
    vocab, errors, largest = one.vocab_size, list[float](), 1.0
    for i, (starts, counts) in enumerate((([0, 0, 0], [200, 17, 1]), ([200, 17, 1], [1, 100, 1]), ([201, 117, 2], [1, 1, 1]))):
        batch = batch_of(starts, counts, tables, seed=i, vocab=vocab)
        batch = replace(batch, sampling=[replace(row, params=replace(row.params, logprobs=20)) for row in batch.sampling])
        a, b, _ = (runner.launch(batch).result() for runner in (one, several, exact))
        if not case.quantized:
            assert list(a.token_ids) == list(b.token_ids), (a.token_ids, b.token_ids)
        for x, y in zip(a.top_logprobs, b.top_logprobs, strict=True):
            there = {top.token_id: top.logprob for top in y}
            errors += [abs(top.logprob - there[top.token_id]) for top in x[:15] if top.token_id in there]
            if case.quantized:
                largest = max(largest, *(abs(top.logprob) for top in x))
    one.read_blocks(blocks, kv)
    several.read_blocks(blocks, back)
    want, got = (torch.tensor(each).view(getattr(torch, case.what)).float() for each in (kv, back))
    difference = float((want - got).abs().max()) if not case.quantized else float((want - got).norm() / want.norm())
    exact.read_blocks(blocks, kv)
    unquantized = torch.tensor(kv).view(getattr(torch, case.what)).float()
    cost = float((want - unquantized).norm() / want.norm())
    several.write_blocks(blocks, kv)
    several.read_blocks(blocks, back)
    return {"logprobs": max(errors) / largest, "kv": difference, "cost": cost, "whole": bool(np.array_equal(kv, back))}


def _times(runner: Runner, case: Case) -> Iterator[tuple[str, float]]:
    for count in case.decode:
        yield f"decode {count}", statistics.median(decode_ms(runner, count, case.steps))
    for decodes, tokens in case.mixed:
        yield f"mixed {decodes} + {tokens}", _step_ms(runner, [CONTEXT - 1] * decodes + [0], [1] * decodes + [tokens])
    for tokens in case.prefill:
        yield f"prefill {tokens}", _step_ms(runner, [0], [tokens])


def decode_ms(runner: Runner, batch: int, steps: int) -> list[float]:
    tables = tables_for(runner, batch, CONTEXT + steps + 8)
    work = [batch_of([CONTEXT - 1 + step] * batch, [1] * batch, tables, seed=step) for step in range(steps + 5)]
    rows = np.arange(batch, dtype=np.int32)
    times: list[float] = []
    before: InFlight | None = None
    last = time.perf_counter()
    for step in work:
        now = runner.launch(step if before is None else replace(step, carried=rows))
        if before is not None:
            before.result()
        before = now
        here = time.perf_counter()
        times.append((here - last) * 1e3)
        last = here
    assert before is not None
    before.result()
    return times[5:]


def _step_ms(runner: Runner, starts: Sequence[int], counts: Sequence[int], repeats: int = 10) -> float:
    work = batch_of(starts, counts, tables_for(runner, len(starts), max(CONTEXT, *counts)))
    times = []
    for _ in range(repeats + 2):
        time.sleep(0.02)
        began = time.perf_counter()
        runner.launch(work).result()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[2:])


def _blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def _say(**words: object) -> None:
    print(json.dumps(words), flush=True)


# ---- who starts and judges them -----------------------------------------------------------------------------------------------------


class CaseProcess:
    """Returns what a process has said so far; it is killed at the deadline."""

    def __init__(self, case: Case, deadline: float) -> None:
        self.case = case
        self.said: list[dict[str, Any]] = []
        self._deadline = deadline
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as this
        words = [sys.executable, "-P", str(Path(__file__).resolve()), _CASE, json.dumps(asdict(case))]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=_ROOT)
        self._changed = threading.Condition()
        self._ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed, suppress(ValueError):
                self.said.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def ready(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self.said or self._ended, max(0.0, self._deadline - time.monotonic()))
            return bool(self.said)

    def go(self) -> None:
        """Returns at its end, or at the deadline."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(_GO)
            self._process.stdin.flush()
        with self._changed:
            self._changed.wait_for(lambda: self._ended, max(0.0, self._deadline - time.monotonic()))

    def end(self) -> str:
        """Kills it if it has not ended. Returns what was wrong, empty if nothing was."""
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(10 if self._ended else 0)
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        text = self._log.read()
        for line in text.splitlines():
            # Warnings, errors, and what the pool's size was worked out from.
            if line[12:16] in (" W r", " E r") or "memory of" in line or "steps captured" in line:
                print(f"    {line[:230]}", flush=True)
        if self.found("closed") is False:
            print(f"    {self.case.title}: did not close within {_CLOSE_S:g} s", flush=True)
        if not code and code is not None and self.found("steps") is not None:
            return ""
        return f"{self.case.what}, {self.case.title}: {'too late' if code is None else f'ended with {code}'}\n{text[-3000:]}"

    def found(self, key: str) -> Any:
        return next((words[key] for words in self.said if key in words), None)


class CaseGroups:
    """Groups of processes: those of one start at once, the first group's now."""

    def __init__(self, groups: Sequence[Sequence[Case]], deadline: float) -> None:
        self._groups, self._deadline = groups, deadline
        self._first = [CaseProcess(case, deadline) for case in groups[0]]

    def run(self) -> list[CaseProcess]:
        """Returns all of them, ended."""
        processes: list[CaseProcess] = []
        for n, group in enumerate(self._groups):
            begun = [CaseProcess(case, self._deadline) for case in group] if n else self._first
            # Nothing is measured while another one still loads or captures.
            there = [process for process in begun if process.ready()]
            for process in there:
                print(f"{process.case.what}, {process.case.title}: {json.dumps(process.said[0])}", flush=True)
            for process in begun:
                if process in there:
                    process.go()
                if trouble := process.end():
                    print(trouble, flush=True)
            processes += begun
        return processes


def check(args: argparse.Namespace, directory: Path, deadline: float) -> Callable[[], bool]:
    """Starts it; returns what waits for the end, and says whether all was right."""
    sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "tests" / "system")]
    from oracle import Oracle  # noqa: PLC0415
    from tiny_models import save_tiny_model  # noqa: PLC0415

    size: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512} if args.tiny else {"hidden_size": 1024, "intermediate_size": 2048}
    fields = size | {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.05}
    if SHAPES[args.model].get("num_experts"):
        fields |= {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96 if args.tiny else 256, "head_dim": 32}
    cases = [
        replace(_case(args, dtype, size, str(checkpoint), "none"), base=str(args.base))
        for checkpoint in args.checkpoints
        for dtype in args.dtypes
        for size in args.sizes
    ]
    for quantization in [] if args.checkpoints else args.quantization:
        for dtype in ("float32", "bfloat16") if quantization == "none" else ("bfloat16",):
            model_dir = directory / f"{dtype}-{quantization}"
            model = save_tiny_model(model_dir, SHAPES[args.model]["model_type"], dtype=getattr(torch, dtype), **fields)
            cases += [_case(args, dtype, size, str(model), quantization) for size in args.sizes]
    groups = CaseGroups([cases], deadline)
    return lambda: _judged(groups.run(), Oracle)


def _judged(processes: Sequence[CaseProcess], oracle: Callable[[Path], Any]) -> bool:
    good = True
    print(f"{'':24}{'answers':>9}{'equal':>7}{'near-ties':>11}{'wrong':>7}   steps")
    for model, dtype in dict.fromkeys((process.case.model_dir, process.case.what) for process in processes):
        mine = [process for process in processes if (process.case.model_dir, process.case.what) == (model, dtype)]
        first = mine[0].found("answers")
        judge: Any = None
        if not mine[0].case.quantized:
            judge = oracle(Path(model)) if dtype == "float32" else ModelRunner(model, dtype="float32", num_blocks=64, block_size=BLOCK_SIZE)
        for process in mine:
            answers = process.found("answers")
            if answers is None or first is None:
                good = False
                continue
            if judge is None:
                counts = Counter("equal" if answer == other else "other" for answer, other in zip(answers, first, strict=True))
            else:
                work = _requests(process.case.seed, judge.vocab_size)
                counts = Counter(map(_compared if dtype == "float32" else _within, [judge] * len(work), work, answers))
            good &= not counts["wrong"] and process.found("steps") is not None
            print(
                f"{process.case.what + ', ' + process.case.title:24}{len(answers):9}{counts['equal']:7}{counts['near-tie']:11}"
                f"{counts['wrong']:7}   {process.found('steps')}",
                flush=True,
            )
            if process.found("kv") is not None:
                beside = {key: process.found(key) for key in ("logprobs", "kv", "cost", "whole")}
                near = (
                    beside["kv"] < QUANTIZED_SHARE * beside["cost"]
                    if process.case.quantized
                    else max(beside["logprobs"], beside["kv"]) < 1e-3
                )
                good &= beside["whole"] and near
                print(f"{'':24}beside one device: {beside}", flush=True)
    return good


def _compared(judge: Any, request: EngineRequest, got: Sequence[int]) -> str:
    want = judge.answer(request.token_ids, request.sampling)
    if want == got:
        return "equal"
    params = request.sampling
    options = {"max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p, "seed": params.seed}
    try:
        judge.compare(request.token_ids, options | {"ignore_eos": True}, got)
    except AssertionError as error:
        print(f"wrong: {error}", flush=True)
        return "wrong"
    return "near-tie"


def _within(judge: ModelRunner, request: EngineRequest, got: Sequence[int]) -> str:
    """Teacher-forced; what was drawn is not looked at."""
    if request.sampling.temperature:
        return "drawn"
    tokens, first = [*request.token_ids, *got[:-1]], len(request.token_ids) - 1
    batch = batch_of([0], [len(tokens)], np.arange(_blocks_of(len(tokens)), dtype=np.int32)[None])
    batch = replace(batch, token_ids=np.asarray(tokens, np.int64), sample_rows=np.arange(first, len(tokens)))
    logits = judge.forward(batch)
    below = (logits.max(-1).values - logits[torch.arange(len(got)), torch.tensor(got)]) / logits.std(-1)
    worst = float(below.max())
    if worst > BF16_TOLERANCE:
        print(f"wrong: a token's logit lies {worst:.3f} standard deviations below the largest", flush=True)
        return "wrong"
    return "near-tie" if worst > 0 else "equal"


def speed(args: argparse.Namespace, directory: Path, deadline: float) -> Callable[[], bool]:
    """As `check`."""
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA if args.tiny else SHAPES[args.model]))
    cases = [_case(args, args.model, size, str(directory), quantization) for quantization in args.quantization for size in args.sizes]
    if args.nccl:
        cases += [replace(case, one_shot=False) for case in cases if case.size > 1]
    if args.experts:
        cases += [replace(case, experts=False) for case in cases if case.experts]
    # Three of the 8B shape on four cards, one of which has parts of two of them.
    together = args.tiny or (args.model == "llama-3.1-8b" and torch.cuda.device_count() >= 4 and not args.nccl)
    groups = CaseGroups([cases] if together else [[case] for case in cases], deadline)
    return lambda: _told(args.model, groups.run())


def _told(model: str, processes: Sequence[CaseProcess]) -> bool:
    times = [{words["case"]: words["ms"] for words in process.said if "case" in words} for process in processes]
    print(f"{model}, ms:{'':12}" + "".join(f"{process.case.title:>20}" for process in processes))
    for name in dict.fromkeys(name for each in times for name in each):
        cells = [(each.get(name), times[0].get(name)) for each in times]
        print(f"{name:24}" + "".join(_cell(value, base) for value, base in cells), flush=True)
    for process in processes:
        print(f"{process.case.title}: {process.found('steps')}", flush=True)
    return all(process.found("steps") is not None for process in processes)


def _cell(value: float | None, base: float | None) -> str:
    return f"{'-':>20}" if value is None else f"{value:12.2f}" + (f" (x{value / base:.2f})".rjust(8) if base else " " * 8)


def _case(args: argparse.Namespace, what: str, size: int, model_dir: str, quantization: str) -> Case:
    count = 0 if args.tiny else torch.cuda.device_count()
    return Case(
        what=what,
        size=size,
        # The last ones: the first is the single GPU's, whose pool is the largest.
        device="cpu" if args.tiny else f"cuda:{0 if size == 1 else count - size}",
        model_dir=model_dir,
        one_shot=True,
        decode=args.decode,
        mixed=[[int(number) for number in words.split("+")] for words in args.mixed],
        prefill=args.prefill,
        steps=args.steps,
        sized=not args.tiny and args.model != "llama-3.1-8b",
        seed=args.seed,
        quantization=quantization,
        experts=args.experts and size > 1,
    )


@contextmanager
def _ended_at(deadline: float) -> Iterator[None]:
    """The judge, too, has an end."""
    timer = threading.Timer(max(0.0, deadline + 60 - time.monotonic()), _give_up)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def _give_up() -> None:
    print("the judging took too long", flush=True)
    os._exit(1)


def main() -> None:
    if sys.argv[1:2] == [_CASE]:
        setup_logging(process="rank-0")
        serve(Case(**json.loads(sys.argv[2])))
        sys.stdout.flush()
        # As a worker ends: NCCL's own end may wait for ranks that are gone.
        os._exit(0)
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("check", "speed"))
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--mixed", nargs="*", default=["128+192"], help="decodes + tokens of a prompt")
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each kind")
    parser.add_argument("--quantization", nargs="+", default=["none"], choices=("none", "fp8", "int8", "int4"))
    parser.add_argument(
        "--checkpoints", type=Path, nargs="+", default=[], help="of `check`: quantized ones of --base, instead of --quantization"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"), help="of --checkpoints")
    parser.add_argument("--base", type=Path, help="the model without quantization")
    parser.add_argument("--experts", action="store_true", help="expert parallelism; `speed` has tensor parallelism beside it")
    parser.add_argument("--nccl", action="store_true", help="measure sums by NCCL alone, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--deadline", type=float, default=150.0, help="seconds that each part may take")
    args = parser.parse_args()
    if args.checkpoints and not args.base:
        parser.error("--checkpoints needs --base, the model that they were made of")
    if not args.tiny:
        print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    parts: dict[str, Callable[[argparse.Namespace, Path, float], Callable[[], bool]]] = {"check": check, "speed": speed}
    began, good = time.monotonic(), True
    with tempfile.TemporaryDirectory(prefix="ts-") as name, ExitStack() as stack:
        # What is measured starts beside the check, but where it sizes its pool by what memory is free.
        beside = args.tiny or args.model == "llama-3.1-8b"
        begun = []
        for n, part in enumerate(args.parts):
            (directory := Path(name) / str(n)).mkdir()
            deadline = time.monotonic() + args.deadline
            begun.append((part, parts[part](args, directory, deadline)))
            stack.enter_context(_ended_at(deadline + (args.deadline if beside else 0)))
            if beside and n < len(args.parts) - 1:
                continue
            while begun:
                part, finish = begun.pop(0)
                good &= finish()
                print(f"{part}: after {time.monotonic() - began:.0f} s", flush=True)
    print("all right" if good else "NOT all right; see above")
    sys.exit(not good)


if __name__ == "__main__":
    main()
