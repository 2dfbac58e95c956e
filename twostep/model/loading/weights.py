"""Fills a model with weights: which tensor of a directory goes where, or random numbers."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from twostep.errors import SetupError
from twostep.model.families.config import ModelConfig
from twostep.model.families.decoder import Decoder
from twostep.model.families.modules import Place
from twostep.model.families.registry import decoder_class
from twostep.model.loading.weight_files import ReadProgress, StoredTensor, read_weights, stored_tensors

log = logging.getLogger(__name__)

# Buffers that old checkpoints carry and that are computed from the config here.
_COMPUTED = (".rotary_emb.inv_freq",)
_SHOWN_NAMES = 8
_HEAD = "lm_head.weight"
# Of two matrices that are compared, at a time.
_COMPARED_ELEMENTS = 1 << 24


def as_stored(config: ModelConfig, model_dir: Path, dtype: torch.dtype) -> ModelConfig:
    """Returns `config` with the head untied from the embedding if the files hold one that differs from it in `dtype`, the model's: what
    transformers makes of a config.json that contradicts them so. Raises SetupError."""
    if not config.tie_word_embeddings:
        return config
    stored = stored_tensors(model_dir)
    head = next((tensor for tensor in stored if tensor.name == _HEAD), None)
    embedding = _embedding(decoder_class(config), stored)
    if head is None or embedding is None or _are_equal(head, embedding, dtype):
        return config
    log.warning(
        "%s: tie_word_embeddings is true, but %s differs from %s; the head is used as it is stored. Set it to false to say the same",
        model_dir / "config.json",
        _HEAD,
        embedding.name,
    )
    return replace(config, tie_word_embeddings=False)


def _embedding(kind: type[Decoder], stored: Sequence[StoredTensor]) -> StoredTensor | None:
    name = f"{kind.embed_name}.weight"
    return next((tensor for tensor in stored if name in (tensor.name, f"model.{tensor.name}")), None)


def _are_equal(one: StoredTensor, other: StoredTensor, dtype: torch.dtype) -> bool:
    """Reads both by and by, up to the first difference: two heads of a large model are gigabytes."""
    if one.shape != other.shape or len(one.shape) != 2:
        return False
    num_rows, num_columns = one.shape
    at_once = max(1, _COMPARED_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, at_once):
        parts = [torch.empty(min(at_once, num_rows - start), num_columns, dtype=dtype) for _ in range(2)]
        places = [Place(part, one.shape, (start, 0)) for part in parts]
        read_weights(list(zip((one, other), places, strict=True)))
        if not torch.equal(*parts):
            return False
    return True


def load_weights(model: Decoder, model_dir: Path, progress: ReadProgress | None = None) -> None:
    """Fills a built model from a model directory. Raises SetupError, before anything is read, naming what is missing, unexpected or of
    the wrong shape."""
    places = model.places()
    stored = stored_tensors(model_dir)
    tied = model.config.tie_word_embeddings
    # Of two that are one, either may have been saved.
    head_is_embedding = tied and _embedding(type(model), stored) is None
    work: dict[str, tuple[StoredTensor, Place]] = {}
    unexpected = []
    for tensor in stored:
        # A checkpoint of the decoder without its head has no prefix (facebook/opt-*).
        name = tensor.name if tensor.name in places else f"model.{tensor.name}"
        if tensor.name == _HEAD and head_is_embedding:
            name = f"{model.embed_name}.weight"
        place = places.get(name)
        if place is None or name in work:
            if not tensor.name.endswith(_COMPUTED) and not (tensor.name == _HEAD and tied):
                unexpected.append(tensor.name)
            continue
        if place.shape != tensor.shape:
            raise SetupError(
                f"tensor {tensor.name} has shape {list(tensor.shape)}, but config.json asks for {list(place.shape)}; fix one of the two"
            )
        work[name] = tensor, place
    if missing := places.keys() - work:
        raise SetupError(f"the model directory lacks {_names(missing)}; download it again, or fix config.json")
    if unexpected:
        raise SetupError(f"the model directory has tensors that {model.config.architecture} does not know: {_names(unexpected)}")
    read_weights(list(work.values()), progress)
    model.finish_loading()


def fill_random(model: Decoder, seed: int = 0) -> None:
    """Puts random weights in place of files, the same for the same seed and kind of device: for benchmarks. They keep the activations'
    scale from layer to layer about as trained ones do."""
    places = model.places()
    generator = torch.Generator(next(iter(places.values())).tensor.device)
    for name, place in places.items():
        # By name: what several ranks hold whole is the same on each.
        generator.manual_seed(zlib.crc32(name.encode(), seed))
        place.tensor.normal_(0.0, 0.02, generator=generator)
        if name.endswith("norm.weight"):
            place.tensor.add_(1.0)
    model.finish_loading()


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN_NAMES} more" if len(ordered) > _SHOWN_NAMES else ""
    return ", ".join(ordered[:_SHOWN_NAMES]) + more
