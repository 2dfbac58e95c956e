"""Settings and flags that were removed, and what replaces each; CHANGELOG.md lists them too.

A settings' name is refused as a flag, as a variable, as a key of a --config file and in the chart's `flags`.
"""

from __future__ import annotations

_CONSTANT = "it is a constant now, "

# Settings of the processes.
REMOVED: dict[str, str] = {
    "ageing": f"{_CONSTANT}10 s on routers and 30 s on workers",
    "batch-concurrency": "it is an eighth of --max-inflight",
    "client-write-timeout": f"{_CONSTANT}30 s",
    "decode-workers": "give --decode",
    "external-scaler-port": "give --port",
    "fake-vocab-size": f"{_CONSTANT}1000",
    "first-port": "give --port",
    "hash-unit": f"{_CONSTANT}64 tokens; --block-size must divide it",
    "kubernetes-dir": f"{_CONSTANT}/var/run/secrets/kubernetes.io/serviceaccount",
    "leader-lease": f"{_CONSTANT}15 s",
    "max-attempts": f"{_CONSTANT}3",
    "max-buffered-tokens": f"{_CONSTANT}1024",
    "max-concurrent-rpcs": f"{_CONSTANT}2048",
    "max-decode": "give --decode-max-workers",
    "max-file-bytes": f"{_CONSTANT}200 MiB",
    "max-inflight-prompt-tokens": "it is 8192 for each of --max-inflight",
    "max-prefill": "give --prefill-max-workers",
    "max-streams": f"{_CONSTANT}64",
    "max-utilization": f"{_CONSTANT}0.9",
    "min-decode": "give --decode-min-workers",
    "min-prefill": "give --prefill-min-workers",
    "object-store-bytes": "give --ray-store-bytes",
    "pod-health-port": "give --health-port",
    "preemption-mode": "what gives way is computed again, but for what --prefix-cache-space keeps",
    "prefill-workers": "give --prefill",
    "router-lease": f"{_CONSTANT}5 s",
    "staged-steps": f"{_CONSTANT}4",
    "stall-timeout": f"{_CONSTANT}120 s",
    "stream-lease": f"{_CONSTANT}5 s",
    "swap-space": "give --prefix-cache-space, which keeps sequences that give way, too",
    "switch-time": f"{_CONSTANT}0.1 s",
}

# Flags of commands alone.
REMOVED_FLAGS: dict[str, str] = {
    "arrivals": "--concurrency gives a closed loop, a trace without --rate its own times, all else Poisson arrivals",
    "batch-timeout-ms": f"{_CONSTANT}100 ms",
    "burstiness": "arrivals are Poisson's",
    "cached-share": "give cached=X in --workload",
    "cooldown": "it is as long as --warmup",
    "decode-gpu-hour-price": "give two prices, as --gpu-hour-price 2,3",
    "decode-gpus": "give those of prefill and decode workers, as --gpus 1+3",
    "edge-ms": "give --preset FILE with it",
    "hand-over-gb-per-s": "give --preset FILE with it",
    "hand-over-ms": "give --preset FILE with it",
    "hide-reasoning": "type /set reasoning hide",
    "json-object": 'give --json-schema \'{"type": "object"}\'',
    "long-share": f"{_CONSTANT}0.5",
    "max-in-flight": f"{_CONSTANT}10000",
    "max-slip-ms": f"{_CONSTANT}10 ms",
    "no-look-ahead": "give --preset FILE with it",
    "no-progress": "give --json, or send standard error elsewhere",
    "num-gpus": "give --gpus",
    "num-prefixes": "give it with the length, as --prefix-tokens 1024x8",
    "once": "give --interval 0",
    "prefill-gpus": "give those of prefill and decode workers, as --gpus 1+3",
    "prefix-zipf": "prefixes are all alike",
    "prompt": "give the text without a flag",
    "prompt-tokens": "give --input-tokens",
    "rates": "give them to --rate",
    "requests": "give --num-requests",
    "runtime-memory": "give --preset FILE with it",
    "shape": "give its name as --model",
    "stop-at-eos": "answers have the length that is asked for",
    "stop-early": "--sweep does so by itself",
    "sweep-points": f"{_CONSTANT}16",
    "sweep-resolution": f"{_CONSTANT}0.05",
    "title": "plots have the model's name",
    "warm-cache": "runs are kept apart",
}
