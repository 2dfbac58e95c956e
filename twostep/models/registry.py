"""Which class serves which architecture, and filling it with weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

import torch

from twostep.engine.weight_reader import ReadProgress, read_weights
from twostep.engine.weights import StoredTensor, stored_tensors
from twostep.errors import SetupError
from twostep.kernels.ops import Ops
from twostep.models.config import ModelConfig
from twostep.models.decoder import Decoder
from twostep.models.llama import Llama
from twostep.models.modules import Place
from twostep.models.opt import Opt
from twostep.models.qwen import Qwen2, Qwen3
from twostep.models.sharding import ModelPart

ARCHITECTURES: dict[str, type[Decoder]] = {"llama": Llama, "mistral": Llama, "opt": Opt, "qwen2": Qwen2, "qwen3": Qwen3}

# Buffers that old checkpoints carry and that are computed from the config here.
_COMPUTED = (".rotary_emb.inv_freq",)
_SHOWN_NAMES = 8


def build_model(config: ModelConfig, dtype: torch.dtype, ops: Ops, device: str = "cpu", part: ModelPart | None = None) -> Decoder:
    """A model with uninitialized weights, or one rank's `part` of it (then `config` is that rank's). Raises SetupError for an unknown
    architecture."""
    if config.architecture not in ARCHITECTURES:
        raise SetupError(f"architecture {config.architecture!r} is not served; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[config.architecture](config, dtype, ops, device, part)


def load_weights(model: Decoder, model_dir: Path, progress: ReadProgress | None = None) -> None:
    """Fills a built model from a model directory. Raises SetupError, before anything is read, naming what is missing, unexpected or of
    the wrong shape."""
    places = model.places()
    work: dict[str, tuple[StoredTensor, Place]] = {}
    unexpected = []
    for tensor in stored_tensors(model_dir):
        # A checkpoint of the decoder without its head has no prefix (facebook/opt-*).
        name = tensor.name if tensor.name in places else f"model.{tensor.name}"
        place = places.get(name)
        if place is None or name in work:
            if not tensor.name.endswith(_COMPUTED) and not (tensor.name == "lm_head.weight" and model.config.tie_word_embeddings):
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
    """Random weights in place of files, the same for the same seed and kind of device: for benchmarks. They keep the activations'
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
