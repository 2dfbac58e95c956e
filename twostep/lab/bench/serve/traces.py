"""Workloads out of files: the public formats of Mooncake's and Azure's traces, and ShareGPT's conversations."""

from __future__ import annotations

import asyncio
import csv
import json
import random
from array import array
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.content import PromptContent
from twostep.lab.bench.serve.workloads import BenchSession, ReplayedSessions, Text, one_turn

MOONCAKE_BLOCK = 512  # tokens that one hash id stands for
_MAX_CONVERSATIONS = 2000
_TOKENIZED_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line of a trace."""

    arrival_s: float  # from the trace's first request
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """Mooncake: one for each block of 512 tokens of the prompt, the last, maybe partial, included. Equal ids are equal text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """A workload: each request once, in the order of their times."""

    requests: tuple[TraceRequest, ...] = field(repr=False)

    @property
    def rate(self) -> float | None:
        """Requests per second; None: they all come at once."""
        span = self.requests[-1].arrival_s
        return (len(self.requests) - 1) / span if span > 0 else None

    def sessions(self, content: PromptContent, rng: random.Random) -> Iterator[BenchSession]:
        for request in self.requests:
            yield one_turn(prompt_of(request, content), request.output_tokens, request.arrival_s)


def prompt_of(request: TraceRequest, content: PromptContent) -> array[int]:
    """Blocks by their hash ids; what has none is of its own."""
    prompt: array[int] = array("I")
    for hash_id in request.hash_ids:
        left = request.input_tokens - len(prompt)
        if left <= 0:
            break
        prompt.extend(content.block(f"{hash_id}", min(MOONCAKE_BLOCK, left)))
    prompt.extend(content.draw(request.input_tokens - len(prompt)))
    return prompt


def read_trace(path: Path, form: Literal["mooncake", "azure"]) -> RequestTrace:
    """Mooncake: JSONL of timestamp (ms), input_length, output_length, hash_ids. Azure: CSV, or JSONL, of TIMESTAMP, ContextTokens,
    GeneratedTokens. Raises InvalidRequest naming the line."""
    found = []
    for number, row in _rows(path):
        try:
            found.append(_mooncake(row) if form == "mooncake" else _azure(row))
        except (KeyError, TypeError, ValueError) as error:
            what = "timestamp, input_length, output_length, hash_ids" if form == "mooncake" else "TIMESTAMP, ContextTokens, GeneratedTokens"
            raise InvalidRequest(f"{path}, line {number}: {error!r}; a {form} trace has {what}") from error
    if not found:
        raise InvalidRequest(f"{path} has no requests; give a {form} trace")
    found.sort(key=lambda r: r.arrival_s)
    first = found[0].arrival_s
    return RequestTrace(
        requests=tuple(
            TraceRequest(
                arrival_s=r.arrival_s - first,
                # Real traces have a few lines of 0 tokens: failed requests, which still came.
                input_tokens=max(1, r.input_tokens),
                output_tokens=max(1, r.output_tokens),
                hash_ids=r.hash_ids,
            )
            for r in found
        )
    )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines of JSONL or CSV, whichever it is, with their numbers from 1."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read ({error}); give a trace as --dataset-path") from error
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    if not first.lstrip().startswith("{"):
        yield from enumerate(csv.DictReader(lines), 2)
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidRequest(f"{path}, line {number} is no JSON ({error})") from error
        yield number, row


def _mooncake(row: dict[str, Any]) -> TraceRequest:
    return TraceRequest(
        arrival_s=float(row["timestamp"]) / 1e3,
        input_tokens=int(row["input_length"]),
        output_tokens=int(row["output_length"]),
        hash_ids=tuple(int(i) for i in row.get("hash_ids") or ()),
    )


def _azure(row: dict[str, Any]) -> TraceRequest:
    return TraceRequest(
        arrival_s=_seconds(row["TIMESTAMP"]), input_tokens=int(row["ContextTokens"]), output_tokens=int(row["GeneratedTokens"])
    )


def _seconds(stamp: str | float) -> float:
    """`2023-11-16 18:15:46.6805900` (seven digits), `2024-05-10 00:00:00.009930+00:00`, or a number of seconds."""
    if isinstance(stamp, int | float):
        return float(stamp)
    head, point, tail = stamp.strip().partition(".")
    digits = tail[: len(tail) - len(tail.lstrip("0123456789"))]
    when = datetime.fromisoformat(head + tail[len(digits) :])
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return when.timestamp() + (float(f"0.{digits}") if point and digits else 0.0)


async def read_sharegpt(
    path: Path,
    tokenize: Callable[[str], Awaitable[array[int]]],
    *,
    output_tokens: int | None,
    seed: str,
    max_conversations: int = _MAX_CONVERSATIONS,
) -> ReplayedSessions:
    """First question and first answer of each conversation, as vLLM's benchmark takes them: the question is the prompt, the answer's
    length the number of tokens asked for (or `output_tokens`). Of a large file, so many drawn by the seed. Those with fewer than 4
    tokens on a side are left out. Raises InvalidRequest."""
    pairs = sharegpt_pairs(path)
    if len(pairs) > max_conversations:
        pairs = random.Random(f"sharegpt/{seed}").sample(pairs, max_conversations)
    bound = asyncio.Semaphore(_TOKENIZED_AT_ONCE)

    async def ids(text: str) -> array[int]:
        async with bound:
            return await tokenize(text)

    prompts = await asyncio.gather(*(ids(prompt) for prompt, _ in pairs))
    answers = [array("I", [0] * output_tokens)] * len(pairs) if output_tokens else await asyncio.gather(*(ids(text) for _, text in pairs))
    items = [
        one_turn(Text(text, prompt), len(answer))
        for (text, _), prompt, answer in zip(pairs, prompts, answers, strict=True)
        if len(prompt) >= 4 and len(answer) >= 4
    ]
    if not items:
        raise InvalidRequest(f"{path} has no conversation with a question and an answer of 4 tokens or more")
    return ReplayedSessions(items=items, repeat=True)


def sharegpt_pairs(path: Path) -> list[tuple[str, str]]:
    """(question, answer) of each conversation in ShareGPT's JSON: a list of {"conversations": [{"from", "value"}, …]}."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        pairs = []
        for item in document:
            said = item.get("conversations") or item.get("conversation") or []
            if (
                len(said) >= 2
                and said[0].get("from", "human") in ("human", "user")
                and said[0]["value"].strip()
                and said[1]["value"].strip()
            ):
                pairs.append((said[0]["value"], said[1]["value"]))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror}); give ShareGPT's JSON file") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(
            f'{path} is not in ShareGPT\'s form, a list of {{"conversations": [{{"from", "value"}}, …]}} ({error!r})'
        ) from error
    return pairs
