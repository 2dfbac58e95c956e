"""Absent and null keys of config.json count as for transformers, for every family and every key that its parser reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from forward_helpers import FAMILIES, SMALL

from twostep.checkpoint.fields import Fields
from twostep.errors import SetupError
from twostep.lab.plan.model import PlannedModel, model_of
from twostep.model.families.config import ModelConfig
from twostep.model.families.registry import ARCHITECTURES, parse_config

_T5 = {**dict.fromkeys(SMALL, ...), "d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 3, "num_heads": 6, "vocab_size": 211}
FILES = FAMILIES | {"t5": ("T5Config", _T5)}
# Whose own names, and bookkeeping: none of them says what a model computes.
_OF_THE_FILE = {"architectures", "dtype", "torch_dtype", "model_type"}
_OF_ROPE = ("rope_theta", "partial_rotary_factor", "rotary_emb_base", "rotary_pct", "rope_local_base_freq")
_PART = {"partial_rotary_factor": 0.5}
# config.json's keys of RoPE as transformers 4 saved them, or as people write them; ...: the parameters of the family's file.
ROPES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a base": {"rope_theta": 20000.0},
    "a base, no scaling": {"rope_theta": 20000.0, "rope_scaling": None},
    "no base": {"rope_theta": None},
    "no base but in the parameters": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 30000.0}},
    "empty parameters": {"rope_parameters": {}},
    "empty scaling": {"rope_scaling": {}},
    "base and scaling": {"rope_theta": 20000.0, "rope_scaling": ...},
    "scaling alone": {"rope_scaling": ...},
    "a base beside the parameters": {"rope_theta": 20000.0, "rope_parameters": ...},
    "a part": {"rope_theta": 20000.0, **_PART},
    "the whole": {"partial_rotary_factor": 1.0},
    "a part that is null": {"partial_rotary_factor": None},
    "a part beside the parameters": {**_PART, "rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}},
    "NeoX's names": {"rotary_emb_base": 20000, "rotary_pct": 0.5},
    "NeoX's names and others": {"rotary_emb_base": 20000, "rotary_pct": 0.5, "rope_theta": 500.0},
    "NeoX's names, null": {"rotary_emb_base": None, "rotary_pct": None},
}


@dataclass
class Reader:
    """Reads a config.json in a directory of its own."""

    directory: Path

    def write(self, config: dict[str, Any]) -> None:
        (self.directory / "config.json").write_text(json.dumps(config))

    def ours(self, config: dict[str, Any]) -> ModelConfig | str:
        """Returns what the model is made by, or why there is none."""
        self.write(config)
        try:
            return parse_config(self.directory)
        except SetupError as error:
            return str(error)

    def planned(self, config: dict[str, Any]) -> PlannedModel:
        return model_of(config, self.directory)

    def explicit(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the file that transformers makes of this one, in which every key is; None: it refuses it."""
        self.write(config)
        try:
            full = transformers.AutoConfig.from_pretrained(self.directory)
        except Exception:  # noqa: BLE001 - of a dozen kinds
            return None
        # transformers reads a Mistral with `layer_types` as another architecture of the same layers.
        named = {key: config[key] for key in _OF_THE_FILE & config.keys()}
        return json.loads(full.to_json_string(use_diff=False)) | named


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


def file_of(family: str) -> dict[str, Any]:
    """config.json with all keys."""
    config_class, extra = FILES[family]
    config = getattr(transformers, config_class)(**{key: value for key, value in (SMALL | extra).items() if value is not ...})
    (name,) = [name for name, kind in ARCHITECTURES.items() if kind.architecture == config.model_type]
    return json.loads(config.to_json_string(use_diff=False)) | {"architectures": [name], "dtype": "float32"}


def _noted(real: Callable[..., Any], found: dict[tuple[str, ...], None]) -> Callable[..., Any]:
    def method(fields: Fields, key: str, *rest: Any) -> Any:
        found[(*fields._prefix.split(".")[:-1], key)] = None
        return real(fields, key, *rest)

    return method


def keys_read(monkeypatch: pytest.MonkeyPatch, reader: Reader, config: dict[str, Any]) -> list[tuple[str, ...]]:
    """The paths of all keys that a parse looks at, whether they are there or not."""
    found: dict[tuple[str, ...], None] = {}
    with monkeypatch.context() as patch:
        for name in ("has", "peek", "take", "_required"):
            patch.setattr(Fields, name, _noted(getattr(Fields, name), found))
        assert isinstance(reader.ours(config), ModelConfig)
    return [path for path in found if path[-1] not in _OF_THE_FILE]


def parent_of(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    inner: Any = config
    for key in path[:-1]:
        inner = inner.get(key)
        if not isinstance(inner, dict):
            return None
    return inner


def changed(config: dict[str, Any], path: tuple[str, ...], *value: Any) -> dict[str, Any] | None:
    """Returns the file with another value there, or, without one, without the key; None: there is no such place."""
    config = deepcopy(config)
    inner = parent_of(config, path)
    if inner is None or (not value and path[-1] not in inner):
        return None
    inner.pop(path[-1], None)
    if value:
        inner[path[-1]] = value[0]
    return config


def matters(reader: Reader, config: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Returns whether another value of this key makes another model, or none."""
    inner = parent_of(config, path) or {}
    value = inner.get(path[-1])
    others = [not value] if isinstance(value, bool) else [2 * value + 1] if isinstance(value, (int, float)) else [True, 7, "other"]
    base = reader.ours(config)
    return any(reader.ours(other) != base for each in others if (other := changed(config, path, each)) is not None)


def complaint(reader: Reader, config: dict[str, Any], keys: set[str], *, absent: bool) -> str:
    """Returns how this file is read otherwise than by transformers; empty: it is not."""
    ours, full = reader.ours(config), reader.explicit(config)
    if full is None:
        return "" if isinstance(ours, str) else "transformers refuses it"
    wanted = reader.ours(full)
    if isinstance(ours, str):
        if not any(key in ours for key in keys):
            return f"refused without a key's name: {ours}"
        # A size that is absent is not guessed.
        return "" if absent or isinstance(wanted, str) else f"refused: {ours}"
    if isinstance(wanted, str):
        return f"written out it is refused: {wanted}"
    if ours != wanted:
        return f"written out it is {wanted}, and here {ours}"
    return "" if reader.planned(config) == reader.planned(full) else "plans differ"


def test_every_architecture_is_here() -> None:
    names = {name for family in FILES for name in file_of(family)["architectures"]}
    assert names == ARCHITECTURES.keys()


# One of each class of config; the others differ by few keys.
CLASSES = {config_class: family for family, (config_class, _) in reversed(FILES.items())}.values()
EACH = [family if family in CLASSES else pytest.param(family, marks=pytest.mark.system) for family in FILES]


@pytest.mark.parametrize("family", EACH)
def test_absent_and_null_keys(family: str, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    config = file_of(family)
    paths = keys_read(monkeypatch, reader, config)
    keys = {path[-1] for path in paths}
    wrong = {}
    for path in paths:
        for how, value in (("absent", ()), ("null", (None,))):
            other = changed(config, path, *value)
            said = "" if other is None else complaint(reader, other, keys, absent=not value)
            # Null may stand where nothing is read.
            if said and (said != "transformers refuses it" or matters(reader, config, path)):
                wrong[f"{'.'.join(path)} {how}"] = said
    assert not wrong, "\n".join(f"{key}: {said}" for key, said in wrong.items())


def _ropes(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    config = file_of(family)
    parameters = config.pop("rope_parameters", None)
    if parameters is None or "full_attention" in parameters:
        return
    rest = {key: value for key, value in parameters.items() if key not in _OF_ROPE}
    for name, rope in ROPES.items():
        if "NeoX" in name and "neox" not in family:
            continue
        yield name, config | {key: rest if value is ... else value for key, value in rope.items()}


@pytest.mark.parametrize("family", EACH)
def test_other_layouts_of_rope(family: str, reader: Reader) -> None:
    keys = {"rope_parameters", "rope_scaling", *_OF_ROPE}
    found = {name: complaint(reader, config, keys, absent=True) for name, config in _ropes(family)}
    assert not {name: said for name, said in found.items() if said}


def turning(config: ModelConfig) -> int:
    """Returns how many of a head's numbers RoPE rotates."""
    assert config.rope is not None
    return config.latent.rope if config.latent is not None else config.rope.dim or config.head_dim


@pytest.mark.parametrize("family", EACH)
def test_longrope_has_a_factor_for_each_pair(family: str, reader: Reader) -> None:
    config = file_of(family)
    base = reader.ours(config)
    assert isinstance(base, ModelConfig)
    if base.rope is None:
        return
    kind = ("full_attention",) if "full_attention" in config["rope_parameters"] else ()
    size = turning(base) // 2
    turned = {"partial_rotary_factor": 2 * size / base.head_dim} if base.rope.dim else {}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **turned}
    lists = {"short_factor": [1.0 + i for i in range(size)], "long_factor": [2.0 + i for i in range(size)]}

    def read(**changes: Any) -> ModelConfig | str:
        other = changed(config, ("rope_parameters", *kind), rope | lists | changes)
        assert other is not None
        return reader.ours(other)

    assert isinstance(read(), ModelConfig)
    for key, right in lists.items():
        for wrong in ([], [1.0], right[:-1], [*right, 1.0], 1.0, [right], [*right[:-1], None], [*right[:-1], 0.0], None):
            said = read(**{key: wrong})
            assert isinstance(said, str)
            assert key in said


def _lists(inner: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    for key, value in inner.items():
        if isinstance(value, dict):
            yield from _lists(value, (*path, key))
        # Any layers may be left dense.
        elif isinstance(value, list) and value and key not in ("architectures", "mlp_only_layers"):
            yield (*path, key), value


@pytest.mark.parametrize("family", EACH)
def test_lists_have_an_entry_for_each_layer_or_pair(family: str, reader: Reader) -> None:
    config = file_of(family)
    for path, right in _lists(config):
        for wrong in ([*right, right[0]], right[:-1], right[:1], right[0], [right]):
            other = changed(config, path, wrong)
            assert other is not None
            said = reader.ours(other)
            assert isinstance(said, str), (path, wrong)
            assert path[-1] in said
