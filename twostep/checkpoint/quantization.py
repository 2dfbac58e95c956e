"""Which linear layers of a checkpoint are quantized, and how, as its files say. Torch-free.

Strict, as config.json's reading is: a method, a key or a combination that cannot be honoured is refused by name. Each method's keys are
read by a function of its own (_METHODS); what they have in common is the table of formats in linear_format.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from twostep.checkpoint.directory import has_file, read_json
from twostep.checkpoint.fields import Fields
from twostep.checkpoint.linear_format import AWQ, GPTQ, GPTQ_V2, MXFP4, PACKED, PLAIN, PLAIN_BLOCKS, Activations, LinearFormat
from twostep.errors import SetupError

HEAD = "lm_head"
_ANY_LINEAR = "Linear"  # the class that all layers here are of
_REGEX = "re:"
_MAX_PATTERN_CHARS = 200
# Patterns come from a stranger: with so many parts that may be of any length, and none repeated as a whole, a match ends soon.
_MAX_ENDLESS = 5
_ENDLESS = re.compile(r"[*+}]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_MAX_GROUP = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatGroup:
    """Layers of one format: named as a whole, by a pattern (`re:`), or all of them (`Linear`)."""

    targets: tuple[str, ...]
    format: LinearFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Which layers are quantized, and how; `groups` is empty only while it is read. `ignored` is written as targets are, and goes before
    them. `stored`: the files hold them so; else they are quantized as they are read."""

    method: str
    groups: tuple[FormatGroup, ...]
    ignored: tuple[str, ...]
    stored: bool = True

    @property
    def experts_only(self) -> bool:
        """Returns whether no layer but experts is quantized."""
        return all(target == _EXPERTS for group in self.groups for target in group.targets)

    def format_of(self, layer: str) -> LinearFormat | None:
        """Returns the format of a linear layer of this name; None: it is not quantized. A whole name goes before patterns, and those
        before `Linear`, as compressed-tensors has it."""
        if any(_matches(each, layer) for each in self.ignored):
            return None
        found = [(_rank(target), group.format) for group in self.groups for target in group.targets if _matches(target, layer)]
        return min(found, key=lambda one: one[0])[1] if found else None


# Groups of columns that a layer's width may be a multiple of, the best first; of no such width the last group is short.
_INT4_GROUPS = (128, 64, 32)
# The output layer decides between tokens that are close: 8 bits at least.
_INT8_ROWS = LinearFormat(storage=PLAIN, is_float=False, bits=8, block=(1, 0))
_FP8_ROWS = LinearFormat(storage=PLAIN, is_float=True, bits=8, block=(1, 0), activations=Activations(is_float=True, dynamic=True))
# What chooses experts is never quantized (families/experts.py).
_ROUTERS = rf"{_REGEX}.*\.(?:gate|router|shared_expert_gate)$"
_EXPERTS = rf"{_REGEX}.*\.experts\."
_INT4 = LinearFormat(storage=PACKED, is_float=False, bits=4, block=(1, _INT4_GROUPS[0]))


def quantization_at_load(name: str) -> Quantization:
    """What `--quantization` means, one of QUANTIZATIONS but none."""
    format, head = {"fp8": (_FP8_ROWS, None), "int8": (_INT8_ROWS, _INT8_ROWS), "int4": (_INT4, _INT8_ROWS)}[name]
    groups = [FormatGroup(targets=(_ANY_LINEAR,), format=format)]
    groups += [] if head is None else [FormatGroup(targets=(HEAD,), format=head)]
    ignored = (_ROUTERS,) if head is not None else (_ROUTERS, HEAD)
    return Quantization(method=name, groups=tuple(groups), ignored=ignored, stored=False)


def check_unquantized(stored: Quantization | None, name: str) -> None:
    """Raises SetupError if a checkpoint that holds `stored` cannot be put into what `--quantization` names."""
    if stored is not None:
        raise SetupError(
            f"--quantization {name} is for unquantized checkpoints, and this one is {stored.method} already: leave it out, or take the "
            "unquantized model"
        )


def fitting(format: LinearFormat, columns: int) -> LinearFormat:
    """Returns `format`, of quantization_at_load, with groups that a layer of so many columns consists of."""
    if format.block != _INT4.block:
        return format
    group = next((group for group in _INT4_GROUPS if not columns % group), _INT4_GROUPS[-1])
    return replace(format, block=(1, group))


def _rank(target: str) -> tuple[int, str]:
    return (2 if target == _ANY_LINEAR else 1 if target.startswith(_REGEX) else 0), target


def _matches(target: str, layer: str) -> bool:
    if target.startswith(_REGEX):
        return _compiled(target.removeprefix(_REGEX)).match(layer) is not None
    return target in (_ANY_LINEAR, layer)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


# ---- where it is said -------------------------------------------------------------------------------------------------------

# Files beside config.json that older tools write, and the method that is meant where they name none.
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def read_quantization(model_dir: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Returns what config.json (`config`) and the files beside it say of weights; None: they are not quantized, whatever is said of KV
    (kv_scheme.py). Raises SetupError, naming file and key, for what is not known, cannot be honoured, or contradicts itself."""
    found: list[tuple[Fields, Quantization]] = []
    for key in QUANTIZATION_KEYS:
        if (raw := config.get(key)) is not None:
            if not isinstance(raw, dict):
                Fields(model_dir / "config.json", {}).refuse(key, raw, "it must be a JSON object")
            found.append(_parse(model_dir / "config.json", f"{key}.", raw, "compressed-tensors" if key == QUANTIZATION_KEYS[1] else ""))
    for name, method in QUANTIZATION_FILES.items():
        if has_file(path := model_dir / name):
            raw = read_json(path)
            inner = raw.get("quantization")
            found.append(_parse(path, "", inner if method == "modelopt" and isinstance(inner, dict) else raw, method))
    if not found:
        return None
    first = found[0][1]
    for fields, other in found[1:]:
        if [group.format for group in other.groups] != [group.format for group in first.groups]:
            why = f"but {found[0][0].path.name} says {_said(first)}; keep the one that is right"
            fields.refuse("quant_method", _said(other), why)
    return first if first.groups else None


def _said(quantization: Quantization) -> str:
    return "; ".join(str(group.format) for group in quantization.groups) or "that weights are not quantized"


def _parse(path: Path, prefix: str, raw: dict[str, Any], default: str) -> tuple[Fields, Quantization]:
    fields = Fields(path, raw, prefix=prefix, harmless=_HARMLESS)
    method = fields.take("quant_method", None) or default
    if not isinstance(method, str) or method not in _METHODS:
        fields.refuse("quant_method", method, f"supported are {', '.join(_METHODS)}: use another quantization of the model")
    quantization = _METHODS[method](fields)
    fields.refuse_rest()
    return fields, quantization


# ---- FP8, as vLLM and transformers have it, and ModelOpt's ------------------------------------------------------------------


def _fp8(fields: Fields) -> Quantization:
    ignored = (*_modules(fields, "ignored_layers"), *_modules(fields, "modules_to_not_convert"))
    scheme = _choice(fields, "activation_scheme", ("dynamic", "static"))
    fields.expect("fmt", "e4m3", default="e4m3")
    fields.expect("is_checkpoint_fp8_serialized", True, default=True)
    fields.take("kv_cache_scheme", None)  # of kv_scheme.py
    size = fields.take("weight_block_size", None)
    if size is None:
        return _one("fp8", _FP8_STATIC if scheme == "static" else _FP8_DYNAMIC, ignored)
    block = _block(fields, "weight_block_size", size)
    if scheme == "static":
        fields.refuse("activation_scheme", scheme, "it contradicts weight_block_size, whose activations are dynamic; fix one of the two")
    activations = Activations(is_float=True, dynamic=True, group=block[1])
    return _one("fp8", LinearFormat(storage=PLAIN_BLOCKS, is_float=True, bits=8, block=block, activations=activations), ignored)


def _modelopt(fields: Fields) -> Quantization:
    kv = [fields.take(key, None) for key in ("kv_cache_quant_algo", "kv_cache_scheme")]  # of kv_scheme.py
    ignored = (*_modules(fields, "exclude_modules"), *_modules(fields, "ignore"))
    fields.take("config_groups", None)  # repeats the algorithm
    if any(kv) and fields.peek("quant_algo") is None:
        return Quantization(method="modelopt", groups=(), ignored=())
    fields.expect("quant_algo", "FP8", default=None)
    return _one("modelopt", _FP8_STATIC, ignored)


_FP8_DYNAMIC = LinearFormat(storage=PLAIN, is_float=True, bits=8, block=(0, 0), activations=Activations(is_float=True, dynamic=True))
_FP8_STATIC = LinearFormat(storage=PLAIN, is_float=True, bits=8, block=(0, 0), activations=Activations(is_float=True, dynamic=False))


# ---- AWQ and GPTQ -----------------------------------------------------------------------------------------------------------


def _awq(fields: Fields) -> Quantization:
    _either(fields, "bits", "w_bit", 4)
    fields.expect("zero_point", True, default=True)
    version = fields.take("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        fields.refuse("version", version, "only the layout of gemm is supported; use such a quantization of the model")
    group = _group_size(fields, "q_group_size" if fields.has("q_group_size") else "group_size")
    format = LinearFormat(storage=AWQ, is_float=False, bits=4, block=(1, group), symmetric=False)
    return _one("awq", format, _modules(fields, "modules_to_not_convert"))


def _gptq(fields: Fields) -> Quantization:
    bits = fields.take("bits", None)
    if bits not in (4, 8):
        fields.refuse("bits", bits, "4 and 8 are supported; use such a quantization of the model")
    fields.expect("pack_dtype", "int32", default="int32")
    fields.expect("dynamic", None, default=None)
    layout = fields.take("checkpoint_format", None) or "gptq"
    if fields.take("format", layout) != layout or layout not in ("gptq", "gptq_v2"):
        fields.refuse("checkpoint_format", layout, "gptq and gptq_v2 are supported, the same as `format` says")
    format = LinearFormat(
        storage=GPTQ if layout == "gptq" else GPTQ_V2,
        is_float=False,
        bits=int(bits),
        block=(1, _group_size(fields, "group_size")),
        symmetric=fields.boolean("sym", True, null=True),
        ordered=fields.boolean("desc_act", False, null=False),
    )
    inside = fields.take("modules_in_block_to_quantize", None)
    targets: tuple[str, ...] = (_ANY_LINEAR,)
    if inside:
        flat = [name for each in inside for name in (each if isinstance(each, list) else [each])] if isinstance(inside, list) else [None]
        targets = tuple(_module(fields, "modules_in_block_to_quantize", name) for name in flat)
    ignored = _modules(fields, "modules_to_not_convert")
    if fields.boolean("lm_head", False, null=False):
        return Quantization(method="gptq", groups=(FormatGroup(targets=(*targets, HEAD), format=format),), ignored=ignored)
    return _one("gptq", format, ignored, targets)


def _mxfp4(fields: Fields) -> Quantization:
    format = LinearFormat(storage=MXFP4, is_float=True, bits=4, block=(1, 32))
    return _one("mxfp4", format, _modules(fields, "modules_to_not_convert"), (_EXPERTS,))


# ---- compressed-tensors -----------------------------------------------------------------------------------------------------

_PLAIN_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
_FORMATS = ("pack-quantized", *_PLAIN_FORMATS)


def _compressed_tensors(fields: Fields) -> Quantization:
    kv = fields.take("kv_cache_scheme", None)  # of kv_scheme.py
    status = fields.take("quantization_status", None)
    if status not in (None, "compressed"):
        fields.refuse("quantization_status", status, "only compressed weights are supported; save the model compressed")
    sparsity = fields.take("sparsity_config", None)
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        fields.refuse("sparsity_config", sparsity, "sparse weights are not supported; use a dense quantization of the model")
    default = fields.take("format", None)
    groups = fields.take("config_groups", None)
    if not isinstance(groups, dict) or not (groups or kv):
        fields.refuse("config_groups", groups, "it must name at least one group of layers, where KV alone is not quantized")
    ignored = _targets(fields, "ignore", fields.take("ignore", None) or [], names_only=True)
    return Quantization(
        method="compressed-tensors",
        groups=tuple(_group(fields, f"config_groups.{name}", group, default) for name, group in groups.items()),
        ignored=ignored,
    )


def _inner(fields: Fields, key: str, raw: Any) -> Fields:
    if not isinstance(raw, dict):
        fields.refuse(key, raw, "it must be a JSON object")
    return fields.inner(key, raw)


def _group(outer: Fields, key: str, raw: Any, default: Any) -> FormatGroup:
    fields = _inner(outer, key, raw)
    targets = _targets(fields, "targets", fields.take("targets", None))
    layout = fields.take("format", None) or default
    if layout not in _FORMATS:
        fields.refuse("format", layout, f"supported are {', '.join(_FORMATS)}: use such a quantization of the model")
    fields.expect("output_activations", None, default=None)
    weights = _inner(fields, "weights", fields.take("weights", None))
    inputs = fields.take("input_activations", None)
    activations = None if inputs is None else _activations(_inner(fields, "input_activations", inputs))
    packed = layout == "pack-quantized"
    kind, bits = _number_kind(weights, (4, 8) if layout != "float-quantized" else (8,))
    if (packed and kind == "float") or (layout, kind) in (("int-quantized", "float"), ("float-quantized", "int")):
        weights.refuse("type", kind, f"it contradicts the format {layout}; fix one of the two")
    block, strategy = _weight_block(weights)
    symmetric = weights.boolean("symmetric", True, null=True)
    if not symmetric and (kind == "float" or strategy == "block" or (packed and strategy == "tensor")):
        weights.refuse("symmetric", symmetric, f"there are no zero points with type {kind} and strategy {strategy} in {layout}")
    weights.expect("dynamic", False, default=False)
    order = weights.take("actorder", None)
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        weights.refuse("actorder", order, "group, weight and null are supported")
    ordered = packed and order in (True, "group", "dynamic")
    weights.refuse_rest()
    fields.refuse_rest()
    format = LinearFormat(
        storage=PACKED if packed else PLAIN,
        is_float=kind == "float",
        bits=bits,
        block=block,
        symmetric=symmetric,
        ordered=ordered,
        activations=activations,
    )
    return FormatGroup(targets=targets, format=format)


def _number_kind(fields: Fields, bits: tuple[int, ...]) -> tuple[str, int]:
    kind = _choice(fields, "type", ("int", "float"), default="int")
    given = fields.take("num_bits", 8)
    allowed = (8,) if kind == "float" else bits
    if given not in allowed or isinstance(given, bool):
        fields.refuse("num_bits", given, f"supported with type {kind} are {' and '.join(map(str, allowed))}")
    return kind, int(given)


def _weight_block(fields: Fields) -> tuple[tuple[int, int], str]:
    size, strategy, structure = fields.take("group_size", None), fields.take("strategy", None), fields.take("block_structure", None)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy not in ("tensor", "channel", "group", "block"):
        fields.refuse("strategy", strategy, "supported for weights are tensor, channel, group and block")
    if (size in (None, -1)) == (strategy == "group"):
        fields.refuse("group_size", size, f"it contradicts the strategy {strategy}; fix one of the two")
    if (structure is None) == (strategy == "block"):
        fields.refuse("block_structure", structure, f"it contradicts the strategy {strategy}; fix one of the two")
    if strategy == "group":
        return (1, _group_size(fields, "group_size", size)), strategy
    if strategy == "block":
        if isinstance(structure, str):
            structure = [int(side) if side.isdecimal() and len(side) < 8 else side for side in structure.split("x")]
        return _block(fields, "block_structure", structure), strategy
    return (int(strategy == "channel"), 0), strategy


def _activations(fields: Fields) -> Activations:
    kind, _ = _number_kind(fields, (8,))
    strategy = _choice(fields, "strategy", ("tensor", "token", "group"), default="tensor")
    dynamic, symmetric = fields.take("dynamic", False), fields.boolean("symmetric", True, null=True)
    if not isinstance(dynamic, bool):
        fields.refuse("dynamic", dynamic, "true and false are supported")
    if not dynamic and (strategy != "tensor" or not symmetric):
        fields.refuse("dynamic", dynamic, "static activations are supported with strategy tensor, symmetric")
    if not symmetric and kind == "float":
        fields.refuse("symmetric", symmetric, "floats have no zero points")
    size = fields.take("group_size", None)
    if (size in (None, -1)) == (strategy == "group"):
        fields.refuse("group_size", size, f"it contradicts the strategy {strategy}; fix one of the two")
    fields.take("actorder", None)
    fields.take("block_structure", None)
    fields.refuse_rest()
    group = _group_size(fields, "group_size", size) if strategy == "group" else 0
    return Activations(is_float=kind == "float", dynamic=dynamic, group=group, symmetric=symmetric)


def _targets(fields: Fields, key: str, raw: Any, *, names_only: bool = False) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(each, str) for each in raw) or not (raw or names_only):
        fields.refuse(key, raw, "it must be a list of names")
    for target in raw:
        pattern = target.removeprefix(_REGEX)
        if target.startswith(_REGEX):
            if len(pattern) > _MAX_PATTERN_CHARS or len(_ENDLESS.findall(pattern)) > _MAX_ENDLESS or _REPEATED_GROUP.search(pattern):
                fields.refuse(key, target, f"such a pattern may take forever; at most {_MAX_ENDLESS} repetitions, none of a group")
            try:
                _compiled(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                fields.refuse(key, target, f"it is no regular expression ({error})")
        elif not names_only and target not in (_ANY_LINEAR, HEAD) and "." not in target:
            fields.refuse(key, target, "only Linear layers, whole names and re: patterns are supported")
    return tuple(raw)


# ---- what the methods have in common ----------------------------------------------------------------------------------------

# What was done to quantize, and how others may run it. The layers' numbers do not depend on it.
# fmt: off
_HARMLESS = frozenset({
    "act_group_aware", "autoround_version", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "global_compression_ratio",
    "max_input_length", "meta", "method", "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_to_fuse", "mse", "observer", "observer_kwargs", "pad_token_id", "producer", "quantizer", "static_groups", "tokenizer",
    "true_sequential", "use_cuda_fp16", "use_exllama", "version", "zp_dtype",
})
# fmt: on


def _one(method: str, format: LinearFormat, ignored: Iterable[str], targets: tuple[str, ...] = (_ANY_LINEAR,)) -> Quantization:
    """One format in all layers but the output layer, which these methods leave alone."""
    return Quantization(method=method, groups=(FormatGroup(targets=targets, format=format),), ignored=(*ignored, HEAD))


def _modules(fields: Fields, key: str) -> tuple[str, ...]:
    """Modules, each with all that is in it, as targets."""
    names = fields.take(key, None) or []
    if not isinstance(names, list):
        fields.refuse(key, names, "it must be a list of names")
    return tuple(_module(fields, key, name) for name in names)


def _module(fields: Fields, key: str, name: Any) -> str:
    if not isinstance(name, str) or len(name) > _MAX_PATTERN_CHARS or name.count("*") > _MAX_ENDLESS - 2:
        fields.refuse(key, name, "it must be the name of a module")
    inner = fnmatch.translate(name).removeprefix("(?s:").removesuffix(r")\Z") if "*" in name else re.escape(name)
    return rf"{_REGEX}(?:.*\.)?{inner}(?:\..*)?$"


def _choice(fields: Fields, key: str, choices: tuple[str, ...], default: str | None = None) -> str:
    value = fields.take(key, default)
    if value is None:
        value = default
    if value not in choices:
        fields.refuse(key, value, f"supported are {', '.join(choices)}")
    return str(value)


def _either(fields: Fields, one: str, other: str, only: int) -> None:
    fields.expect(one if fields.has(one) else other, only, default=None)


def _group_size(fields: Fields, key: str, *given: Any) -> int:
    """Columns; 0: all (-1 in the file)."""
    value = given[0] if given else fields.take(key, None)
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or 0 < value <= _MAX_GROUP):
        fields.refuse(key, value, "it must be a positive whole number, or -1 for whole rows")
    return max(0, value)


def _block(fields: Fields, key: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(n, int) and 0 < n <= _MAX_GROUP for n in value):
        fields.refuse(key, value, "it must be two positive whole numbers, of rows and columns")
    rows, columns = value
    return rows, columns


_METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
