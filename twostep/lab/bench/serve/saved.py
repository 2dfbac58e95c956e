"""Reads the requests of earlier runs: of --save-requests, and of vLLM's results, which know what the client saw alone."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.record import RequestRecord


def read_runs(path: Path) -> list[tuple[str, list[RequestRecord]]]:
    """Returns each run's name and requests: one for each rate of the file. Raises InvalidRequest naming the file and what it lacks."""
    runs: dict[str, list[RequestRecord]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rate = row["request_rate" if "itls" in row else "rate"]
            found = runs.setdefault(path.stem if rate in (None, "inf") else f"{path.stem}: {rate:.4g} requests/s", [])
            found += _of_vllm(row) if "itls" in row else [RequestRecord.from_json(row)]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error!r}); give a file of `twostep bench serve --save-requests`, or of `vllm bench serve "
            "--save-result --save-detailed`"
        ) from error
    if not any(runs.values()):
        raise InvalidRequest(f"{path} has no requests; give a file of `twostep bench serve --save-requests`")
    return list(runs.items())


def _of_vllm(result: Mapping[str, Any]) -> list[RequestRecord]:
    """Its lists have an entry for each request, in any order. Older versions do not tell when one began: all at once, then."""
    begins: Sequence[float] = result.get("start_times") or [0.0] * len(result["ttfts"])
    start = min(begins, default=0.0)
    records = []
    for index, (ttft, itls, begin) in enumerate(zip(result["ttfts"], result["itls"], begins, strict=True)):
        sent, error = begin - start, result["errors"][index]
        times = array("d", accumulate([sent + ttft, *itls])) if not error else array("d")
        num_tokens = array("I", [1] * len(times))
        if times:
            # A message may carry several tokens, and none says how many.
            num_tokens[-1] += max(0, result["output_lens"][index] - len(times))
        records.append(
            RequestRecord(
                index=index,
                session=index,
                scheduled_s=sent,
                sent_s=sent,
                ended_s=times[-1] if times else sent,
                prompt_tokens=result["input_lens"][index],
                max_tokens=result["output_lens"][index],
                times_s=times,
                num_tokens=num_tokens,
                error="error" if error else "",
                message=str(error),
            )
        )
    return sorted(records, key=lambda record: record.sent_s)
