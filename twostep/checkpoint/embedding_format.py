"""What a model directory says of its model's embeddings: sentence-transformers' files, and config.json's word on cutting.

    modules.json                 the parts in order: a Transformer, a Pooling, perhaps a Normalize
    1_Pooling/config.json        which hidden states the vector is made of
    sentence_bert_config.json    how long an input may be, and whether it is lowercased

Without the first two it is the last token's state, of length 1, as decoders that are trained for it have it. Torch-free: routers read it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.checkpoint.directory import has_file, read_json, read_optional_json, read_text
from twostep.errors import InvalidRequest, SetupError
from twostep.pooling import Pooling

MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
TRANSFORMER = "sentence_bert_config.json"
# Keys of config.json that say to what lengths a vector may be cut.
MATRYOSHKA_KEYS = ("is_matryoshka", "matryoshka_dimensions")
_MAX_JSON_BYTES = 1 << 20
_MAX_WIDTH = 1 << 20
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
# By the names that newer files have for them, and behind `pooling_mode_` in older ones.
_POOLINGS = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN, "mean_tokens": Pooling.MEAN}
_SUPPORTED = "only lasttoken and mean_tokens are supported"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFormat:
    """`width`: numbers of a vector, as the model gives it; 0: config.json does not say. `cut_to`: the lengths it may be cut to; empty: any
    that is shorter, or None: it is trained for no other. `max_tokens` of an input; None: as many as the model reads.
    `lowercase`: inputs are lowercased."""

    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    width: int = 0
    cut_to: tuple[int, ...] | None = None
    max_tokens: int | None = None
    lowercase: bool = False

    @classmethod
    def load(cls, model_dir: Path) -> EmbeddingFormat:
        """Raises SetupError, naming the file and the key, for what would give other vectors than are made here."""
        config_path = model_dir / "config.json"
        config = read_json(config_path)
        modules = _modules(model_dir)
        return cls(
            pooling=_pooling(model_dir, is_named=modules is not None and "Pooling" in modules),
            normalize=modules is None or "Normalize" in modules,
            width=_width(config),
            cut_to=_lengths(config, config_path),
            **_inputs(model_dir),
        )

    def check_dimensions(self, dimensions: int) -> None:
        """Raises InvalidRequest for a length that vectors are not to be cut to."""
        if dimensions == self.width:
            return
        if self.cut_to is None:
            raise InvalidRequest(
                f"dimensions is {dimensions}; this model's embeddings have {self.width or 'one length'} and are not trained to be cut: "
                'leave it out (if they are, say so with "is_matryoshka": true in its config.json)'
            )
        if self.cut_to and dimensions not in self.cut_to:
            allowed = ", ".join(map(str, self.cut_to))
            raise InvalidRequest(f"dimensions is {dimensions}; this model's embeddings can be cut to {allowed}")
        if dimensions < 1 or (self.width and dimensions > self.width):
            raise InvalidRequest(f"dimensions is {dimensions}; this model's embeddings have {self.width}: ask for 1 to {self.width}")


def is_made_for_embeddings(model_dir: Path) -> bool:
    """Returns whether the directory says that its model gives embeddings: it is saved without an output layer, or with what
    sentence-transformers needs."""
    names = read_json(model_dir / "config.json").get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
    return (name.endswith("Model") and not name.endswith("LMHeadModel")) or has_file(model_dir / MODULES)


def _modules(model_dir: Path) -> list[str] | None:
    """Returns the kinds of the parts. None: there is no such file."""
    path = model_dir / MODULES
    if not has_file(path):
        return None
    try:
        found = json.loads(read_text(path, max_bytes=_MAX_JSON_BYTES))
        if not isinstance(found, list):
            raise TypeError(f"it is a {type(found).__name__}")
        kinds = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in found]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise SetupError(f"{path} is no list of sentence-transformers' modules ({error!r}); download it again") from error
    pooling_dir = POOLING.partition("/")[0]
    for i, (kind, place) in enumerate(kinds):
        if kind not in ("Transformer", "Pooling", "Normalize") or (kind == "Pooling" and place != pooling_dir):
            raise SetupError(
                f"{path}: [{i}] is {kind[:40]!r} at {place[:40]!r}; only a Transformer, a Pooling at {pooling_dir} and a Normalize are "
                "supported: take another model, or remove it from the file for embeddings without it"
            )
    return [kind for kind, _ in kinds]


def _inputs(model_dir: Path) -> dict[str, Any]:
    """Returns the fields that say how inputs are read."""
    path = model_dir / TRANSFORMER
    config = read_optional_json(path, max_bytes=_MAX_JSON_BYTES)
    most, lowercase = config.get("max_seq_length"), config.get("do_lower_case")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise SetupError(f"{path}: max_seq_length is {repr(most)[:80]}; it must be a positive whole number, or null")
    if not isinstance(lowercase, bool | None):
        raise SetupError(f"{path}: do_lower_case is {repr(lowercase)[:80]}; it must be true or false")
    return {"max_tokens": most, "lowercase": bool(lowercase)}


def _pooling(model_dir: Path, *, is_named: bool) -> Pooling:
    """`is_named`: modules.json names a Pooling, whose file must be there."""
    path = model_dir / POOLING
    if is_named and not path.is_file():
        raise SetupError(f"{path} does not exist, and {MODULES} names it: it says how vectors are made; download it")
    config = read_optional_json(path, max_bytes=_MAX_JSON_BYTES) if path.parent.is_dir() else {}
    if (newer := config.get("pooling_mode")) is not None:
        if newer not in _POOLINGS:
            raise SetupError(f"{path}: pooling_mode is {repr(newer)[:80]}; {_SUPPORTED}")
        return _POOLINGS[newer]
    prefix = "pooling_mode_"
    asked = [key for key, value in config.items() if key.startswith(prefix) and value]
    if not asked:
        return Pooling.LAST
    if len(asked) > 1 or asked[0].removeprefix(prefix) not in _POOLINGS:
        raise SetupError(f"{path}: {' and '.join(asked)[:200]} is set; {_SUPPORTED}, and one at a time")
    return _POOLINGS[asked[0].removeprefix(prefix)]


def _width(config: dict[str, Any]) -> int:
    found = next((config[key] for key in _WIDTH_KEYS if key in config), 0)
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 < found <= _MAX_WIDTH else 0


def _lengths(config: dict[str, Any], path: Path) -> tuple[int, ...] | None:
    is_cut, lengths = map(config.get, MATRYOSHKA_KEYS)
    if not isinstance(is_cut, bool | None):
        raise SetupError(f"{path}: is_matryoshka is {repr(is_cut)[:80]}; it must be true or false")
    if lengths is None:
        return () if is_cut else None
    if not isinstance(lengths, list) or not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in lengths):
        raise SetupError(f"{path}: matryoshka_dimensions is {repr(lengths)[:80]}; it must be a list of positive whole numbers")
    return tuple(lengths)
