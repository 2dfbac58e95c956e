"""Which class serves which architecture, and filling it with weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from twostep.engine.weights import iter_tensors
from twostep.errors import SetupError
from twostep.kernels.ops import Ops
from twostep.models.config import ModelConfig
from twostep.models.decoder import Decoder
from twostep.models.llama import Llama
from twostep.models.opt import Opt
from twostep.models.qwen import Qwen2, Qwen3

ARCHITECTURES: dict[str, type[Decoder]] = {"llama": Llama, "mistral": Llama, "opt": Opt, "qwen2": Qwen2, "qwen3": Qwen3}

# Buffers that old checkpoints carry and that are computed from the config here.
_COMPUTED = (".rotary_emb.inv_freq",)
_SHOWN_NAMES = 8


def build_model(config: ModelConfig, dtype: torch.dtype, ops: Ops, device: str = "cpu") -> Decoder:
    """A model with uninitialized weights. Raises SetupError for an unknown architecture."""
    if config.architecture not in ARCHITECTURES:
        raise SetupError(f"architecture {config.architecture!r} is not served; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[config.architecture](config, dtype, ops, device)


def load_weights(model: Decoder, model_dir: Path) -> None:
    """Streams a model directory's tensors into a built model; each is converted to its final place, none is kept.
    Raises SetupError naming what is missing, unexpected or of the wrong shape."""
    fill(model, iter_tensors(model_dir))


def fill(model: Decoder, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """load_weights from any (name, tensor) stream."""
    places = model.places()
    missing = set(places)
    unexpected = []
    for name, tensor in tensors:
        place = places.get(name)
        if place is None:
            if not name.endswith(_COMPUTED) and not (name == "lm_head.weight" and model.config.tie_word_embeddings):
                unexpected.append(name)
            continue
        if place.shape != tensor.shape:
            raise SetupError(
                f"tensor {name} has shape {list(tensor.shape)}, but config.json asks for {list(place.shape)}; fix one of the two"
            )
        place.tensor.copy_(tensor)
        missing.discard(name)
    if missing:
        raise SetupError(f"the model directory lacks {_names(missing)}; download it again, or fix config.json")
    if unexpected:
        raise SetupError(f"the model directory has tensors that {model.config.architecture} does not know: {_names(unexpected)}")
    model.finish_loading()


def fill_random(model: Decoder, seed: int = 0) -> None:
    """Random weights in place of files, the same for the same seed and kind of device: for benchmarks. They keep the activations'
    scale from layer to layer about as trained ones do."""
    places = model.places()
    generator = torch.Generator(next(iter(places.values())).tensor.device).manual_seed(seed)
    for name, place in places.items():
        place.tensor.normal_(0.0, 0.02, generator=generator)
        if name.endswith("norm.weight"):
            place.tensor.add_(1.0)
    model.finish_loading()


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN_NAMES} more" if len(ordered) > _SHOWN_NAMES else ""
    return ", ".join(ordered[:_SHOWN_NAMES]) + more
