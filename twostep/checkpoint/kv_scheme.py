"""How a checkpoint wants its KV held: `kv_cache_scheme` of compressed-tensors and AutoFP8, `kv_cache_quant_algo` of ModelOpt.

Torch-free. The scales themselves are read by twostep/model/loading/kv_scales.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.checkpoint.directory import read_optional_json
from twostep.checkpoint.fields import Fields
from twostep.errors import SetupError

_KEYS = ("quantization_config", "compression_config")
_MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class KvScheme:
    """`format`: fp8 or int8. `static`: a layer's keys have one scale and its values another, or each head of them its own (`by_head`); the
    checkpoint has them. Else each vector has its own, which nobody needs to know before."""

    format: str
    static: bool
    by_head: bool = False

    def __str__(self) -> str:
        each = "a head's keys and one for its" if self.by_head else "a layer's keys and one for its"
        return f"{self.format}, {f'one scale for {each} values' if self.static else 'a scale for each vector'}"


def kv_format(asked: str, scheme: KvScheme | None) -> str:
    """Returns what --kv-cache-dtype comes to with this checkpoint: none, fp8, int8 or int4."""
    if asked == "auto":
        return "none" if scheme is None else scheme.format
    return "none" if asked == "exact" else asked


def read_kv_scheme(model_dir: Path, config: Mapping[str, Any]) -> KvScheme | None:
    """Returns what config.json (`config`) and ModelOpt's file beside it say; None: nothing. Raises SetupError, naming file and key, for
    what cannot be honoured or contradicts itself."""
    found = [scheme for fields in _places(model_dir, config) if (scheme := _parse(fields)) is not None]
    if len(set(found)) > 1:
        raise SetupError(f"{model_dir}: config.json and {_MODELOPT_FILE} say different things of the KV cache; keep the one that is right")
    return found[0] if found else None


def _places(model_dir: Path, config: Mapping[str, Any]) -> Iterator[Fields]:
    for key in _KEYS:
        if isinstance(raw := config.get(key), dict):
            yield Fields(model_dir / "config.json", raw, prefix=f"{key}.")
    inner = read_optional_json(model_dir / _MODELOPT_FILE).get("quantization")
    if isinstance(inner, dict):
        yield Fields(model_dir / _MODELOPT_FILE, inner, prefix="quantization.")


def _parse(fields: Fields) -> KvScheme | None:
    algorithm = fields.take("kv_cache_quant_algo", None)
    if algorithm not in (None, "FP8"):
        fields.refuse("kv_cache_quant_algo", algorithm, "FP8 and null are supported; use such a quantization of the model")
    given = KvScheme("fp8", static=True) if algorithm else None
    raw = fields.take("kv_cache_scheme", None)
    if raw is None:
        return given
    scheme = KvScheme("fp8", static=True) if raw == "static" else _scheme(fields, raw)
    if given not in (None, scheme):
        fields.refuse("kv_cache_scheme", raw, "it contradicts kv_cache_quant_algo; keep the one that is right")
    return scheme


def _scheme(outer: Fields, raw: Any) -> KvScheme:
    if not isinstance(raw, dict):
        outer.refuse("kv_cache_scheme", raw, "it must be a JSON object, or null")
    fields = outer.inner("kv_cache_scheme", raw)
    fields.expect("num_bits", 8, default=8)
    kind, strategy = fields.take("type", "float"), fields.take("strategy", "tensor")
    dynamic = fields.boolean("dynamic", False, null=False)
    if kind not in ("float", "int"):
        fields.refuse("type", kind, "float and int are supported")
    for key in ("group_size", "block_structure"):
        fields.expect(key, None, default=None)
    fields.expect("symmetric", True, default=True)
    if dynamic:
        return KvScheme("fp8" if kind == "float" else "int8", static=False)
    if strategy not in ("tensor", "attn_head"):
        fields.refuse("strategy", strategy, "static KV scales are supported of a layer's keys and of its values (tensor), or of each head")
    if kind != "float":
        fields.refuse("type", kind, "static KV scales are supported of 8-bit floats")
    return KvScheme("fp8", static=True, by_head=strategy == "attn_head")
