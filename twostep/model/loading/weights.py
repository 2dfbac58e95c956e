"""Fills a model with weights: which tensor of a directory goes where, or random numbers."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from twostep.checkpoint.directory import FLOAT_DTYPES
from twostep.checkpoint.embedding_format import is_made_for_embeddings
from twostep.checkpoint.linear_format import Role, StoredPart
from twostep.checkpoint.quantization import HEAD
from twostep.checkpoint.stacked import names_apart, shape_apart
from twostep.errors import SetupError
from twostep.model.families.config import ModelConfig
from twostep.model.families.decoder import Decoder
from twostep.model.families.modules import INPUT_SCALE, Place, Places
from twostep.model.families.quantized_part import QuantizedPart
from twostep.model.families.registry import build_model, decoder_class, parse_config
from twostep.model.kernels.ops import Ops
from twostep.model.kernels.weight_quantizer import quantize
from twostep.model.loading.quantized import DenseTensor, QuantizedTensors, check_part
from twostep.model.loading.weight_files import ReadProgress, StoredTensor, bytes_to_read, read_weights, stored_tensors
from twostep.process.free_memory import return_freed_memory

log = logging.getLogger(__name__)

# Buffers that old checkpoints carry and that are computed from the config here.
_COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
# KV is held as --kv-cache-dtype says, with scales of its own.
_UNUSED = (".k_scale", ".v_scale")
_SHOWN_NAMES = 8
_HEAD = f"{HEAD}.weight"
# Of two matrices that are compared, at a time.
_COMPARED_ELEMENTS = 1 << 24
_QUANTIZED_BYTES_AT_ONCE = 256 << 20

# What a quantized layer is filled from.
_Layer = tuple[QuantizedPart, QuantizedTensors | DenseTensor]
# By tensors' names: whose places each is for, and as what part of a quantized one.
_Wanted = dict[str, list[tuple[str, StoredPart | None]]]


def as_stored(config: ModelConfig, model_dir: Path, dtype: torch.dtype) -> ModelConfig:
    """Returns `config` with the head untied from the embedding if the files hold one that differs from it in `dtype`, the model's: what
    transformers makes of a config.json that contradicts them so; and as that of a model which does not generate, if they hold none and the
    directory is of one that was trained for embeddings. Raises SetupError."""
    kind = decoder_class(config)
    stored = _stored(kind, model_dir)
    names = {tensor.name for tensor in stored}
    if not config.tie_word_embeddings:
        if any(name.startswith(f"{HEAD}.") for name in names) or not is_made_for_embeddings(model_dir):
            return config
        log.info("%s has no %s: it gives embeddings, and no tokens", model_dir, _HEAD)
        return replace(config, tie_word_embeddings=True, generates=False)
    quantization = config.quantization
    format = quantization.format_of(HEAD) if quantization is not None and quantization.stored else None
    if format is not None and any(f"{HEAD}.{part.suffix}" in names for part in format.parts if part.role is Role.SCALE):
        # Nobody quantizes the output layer to use the embedding.
        return replace(config, tie_word_embeddings=False)
    head = next((tensor for tensor in stored if tensor.name == _HEAD), None)
    embedding = _embedding(kind, stored)
    if head is None or embedding is None or _are_equal(head, embedding, dtype):
        return config
    log.warning(
        "%s: tie_word_embeddings is true, but %s differs from %s; the head is used as it is stored. Set it to false to say the same",
        model_dir / "config.json",
        _HEAD,
        embedding.name,
    )
    return replace(config, tie_word_embeddings=False)


def _stored(kind: type[Decoder], model_dir: Path) -> list[StoredTensor]:
    """Returns the files' tensors, those that hold several of equal size apart, the output layer's under the name that it has here."""
    old = f"{kind.head_name}."
    tensors = [each for tensor in stored_tensors(model_dir) for each in _apart(tensor)]
    return [replace(each, name=f"{HEAD}.{each.name.removeprefix(old)}") if each.name.startswith(old) else each for each in tensors]


def _apart(tensor: StoredTensor) -> list[StoredTensor]:
    names = names_apart(tensor.name, tensor.shape)
    if not names:
        return [tensor]
    shape, size = shape_apart(tensor.shape), tensor.num_bytes // len(names)
    return [replace(tensor, name=name, shape=shape, offset=tensor.offset + i * size, num_bytes=size) for i, name in enumerate(names)]


def _embedding(kind: type[Decoder], stored: Sequence[StoredTensor]) -> StoredTensor | None:
    name = f"{kind.embed_name}.weight"
    return next((tensor for tensor in stored if name in (tensor.name, f"{kind.prefix()}{tensor.name}")), None)


def _are_equal(one: StoredTensor, other: StoredTensor, dtype: torch.dtype) -> bool:
    """Reads both by and by, up to the first difference: two heads of a large model are gigabytes."""
    if not {one.stored_as, other.stored_as} <= FLOAT_DTYPES.keys() or one.shape != other.shape or len(one.shape) != 2:
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


def check_weights(model_dir: Path, architecture: str = "") -> None:
    """Raises SetupError for what load_weights refuses before anything is read. Takes no memory for weights."""
    config = parse_config(model_dir, architecture)
    model = build_model(config, torch.float32, Ops(), "meta")
    _match(model, model.places(), _stored(type(model), model_dir))


def load_weights(model: Decoder, model_dir: Path, progress: ReadProgress | None = None) -> None:
    """Fills a built model from a model directory. Quantized layers stay so. Raises SetupError, naming the tensor: before anything is read
    for what is missing, unexpected or of the wrong shape or dtype, later for values that cannot be."""
    places = model.places()
    work, wanted = _match(model, places, _stored(type(model), model_dir))
    plain, layers = [], list[_Layer]()
    quantized: dict[str, dict[Role, StoredTensor]] = {}
    for name, tensor in work.items():
        for place_name, stored_part in wanted[name]:
            place = places[place_name]
            if stored_part is not None:
                quantized.setdefault(place_name, {})[stored_part.role] = tensor
            elif place.part is not None:
                layers.append((place.part, DenseTensor(place, tensor)))
            else:
                plain += [(replace(tensor, shape=run.shape), run) for run in place.runs()]
    for name, parts in quantized.items():
        if (layer := places[name].part) is not None:
            layers.append((layer, QuantizedTensors(_in_stored(places[name]), parts)))
    _read(plain, layers, progress)
    _check_input_scales(places)
    model.finish_loading()
    return_freed_memory()


def _match(model: Decoder, places: Places, stored: Sequence[StoredTensor]) -> tuple[dict[str, StoredTensor], _Wanted]:
    """Returns the files' tensors under the names that the model has for them, and whose place each is for. Raises SetupError."""
    tied = model.config.tie_word_embeddings
    # Of two that are one, either may have been saved.
    head_is_embedding = tied and _embedding(type(model), stored) is None
    wanted = _wanted(places)
    work: dict[str, StoredTensor] = {}
    unexpected = []
    unused = model.unused({tensor.name for tensor in stored})
    for tensor in stored:
        # A checkpoint of the decoder without its head has no prefix (facebook/opt-*).
        name = tensor.name if tensor.name in wanted else f"{model.prefix()}{tensor.name}"
        if tensor.name == _HEAD and head_is_embedding:
            name = f"{model.embed_name}.weight"
        if name not in wanted or name in work:
            known = tensor.name.endswith(_COMPUTED + _UNUSED) or tensor.name in unused
            if not known and not (tensor.name == _HEAD and tied):
                unexpected.append(tensor)
            continue
        for place_name, part in wanted[name]:
            _check(tensor, places[place_name], part)
        work[name] = tensor
    required = {name for name, uses in wanted.items() if any(part is None or part.required for _, part in uses)}
    if missing := required - work.keys():
        raise SetupError(f"the model directory lacks {_names(missing)}; download it again, or fix config.json")
    shapes = _quantized_shapes(places)
    if names := [tensor.name for tensor in unexpected if not _is_empty_bias(tensor, shapes)]:
        _refuse_more_layers(model, names)
        raise SetupError(f"the model directory has tensors that {model.config.architecture} does not know: {_names(names)}")
    return work, wanted


def _refuse_more_layers(model: Decoder, names: Sequence[str]) -> None:
    """Raises SetupError where some of these tensors are of layers behind the last one that config.json counts."""
    of_layer = re.compile(rf"(?:{re.escape(model.prefix())})?{re.escape(model.layers_name.removeprefix(model.prefix()))}\.(\d+)\.")
    extra = {int(found[1]): name for name in names if (found := of_layer.match(name)) and int(found[1]) >= model.config.num_layers}
    if extra:
        counted = f"{model.config.num_layers} layers"
        if model.config.num_mtp_layers:
            counted += f" and {model.config.num_mtp_layers} that predict further tokens"
        raise SetupError(
            f"the model directory has a layer {max(extra)} ({extra[max(extra)]}), counted from 0, but config.json has {counted}: a part "
            "of the model would be left out; correct config.json, or download it again"
        )


def _wanted(places: Places) -> _Wanted:
    """Returns, by the tensors' names, whose places each is for, and as what part of a quantized one."""
    wanted: _Wanted = {}
    for name, place in places.items():
        layer, _, kind = name.rpartition(".")
        layer = layer if place.fused is None else place.fused.layer
        if place.part is None or not place.part.stored:
            wanted.setdefault(f"{layer}.{kind}", []).append((name, None))
        else:
            for part in place.part.format.parts:
                wanted.setdefault(f"{layer}.{part.suffix}", []).append((name, part))
    return wanted


def _in_stored(place: Place) -> Place:
    """Returns the one rectangle of a quantized layer of the checkpoint that this place takes. Raises SetupError."""
    if place.fused is None:
        return place
    runs = place.runs()
    if place.fused.turned or place.fused.period < place.shape[0] or len(runs) > 1:
        raise SetupError(
            f"{place.fused.layer} is quantized, but holds several layers in turn, or lies the other way round: that is read of unquantized "
            "weights only; use the unquantized model, and --quantization if it should take fewer bits"
        )
    return runs[0] if runs else replace(place, shape=place.stored_shape, fused=None)


def _quantized_shapes(places: Places) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights that the checkpoint has quantized, by its layers' names."""
    shapes = {}
    for name, place in places.items():
        if place.part is not None and place.part.stored:
            shapes[name.removesuffix(".weight") if place.fused is None else place.fused.layer] = place.stored_shape
    return shapes


def _check(tensor: StoredTensor, place: Place, part: StoredPart | None) -> None:
    if part is not None:
        check_part(tensor, part, _in_stored(place))
        return
    if tensor.stored_as not in FLOAT_DTYPES:
        raise SetupError(
            f"tensor {tensor.name} is stored as {tensor.stored_as}, but nothing says how it is quantized; use the model's own config.json, "
            "or an unquantized model (bfloat16, float16, float32)"
        )
    asked = place.stored_shape
    if asked != tensor.shape and not (tensor.name.endswith(INPUT_SCALE) and tensor.shape == ()):
        raise SetupError(f"tensor {tensor.name} has shape {list(tensor.shape)}, but config.json asks for {list(asked)}; fix one of the two")


def _is_empty_bias(tensor: StoredTensor, quantized: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns whether this is a bias of zeros beside a quantized weight, which AutoGPTQ gives to layers that have none."""
    layer, _, kind = tensor.name.rpartition(".")
    shape = quantized.get(layer)
    if shape is None or kind != "bias" or tensor.stored_as not in FLOAT_DTYPES or tensor.shape != shape[:1]:
        return False
    bias = torch.empty(tensor.shape)
    read_weights([(tensor, Place.whole(bias))])
    return not bool(bias.any())


def _read(
    plain: Sequence[tuple[StoredTensor, Place]],
    quantized: Sequence[_Layer],
    progress: ReadProgress | None,
) -> None:
    """Reads plain tensors to their places, then quantized ones, of which so many bytes are on their way at a time."""
    total = sum(tensors.num_bytes for _, tensors in quantized)
    total += sum(bytes_to_read(tensor, len(place.tensor)) for tensor, place in plain)
    before = done = 0

    def advance(read: int, of: int) -> None:
        nonlocal done
        done = before + read
        if progress is not None:
            progress(done, total)

    read_weights(plain, advance)
    # Of a small model, too, no more than a part is there in both forms.
    for some in _batches(quantized, min(_QUANTIZED_BYTES_AT_ONCE, total // 8)):
        before = done
        read_weights([each for _, tensors in some for each in tensors.reads()], advance)
        for part, tensors in some:
            part.fill(tensors.take())


def _batches(
    layers: Sequence[_Layer],
    at_once: int,
) -> Iterator[list[_Layer]]:
    batch: list[_Layer] = []
    size = 0
    for layer in layers:
        num_bytes = layer[1].num_bytes
        if batch and size + num_bytes > at_once:
            yield batch
            batch, size = [], 0
        batch.append(layer)
        size += num_bytes
    if batch:
        yield batch


def _check_input_scales(places: Places) -> None:
    for name, place in places.items():
        if name.endswith(INPUT_SCALE) and not bool((place.tensor.isfinite() & (place.tensor > 0)).all()):
            raise SetupError(f"tensor {name} is {place.tensor.tolist()}, no positive number; download the model again")


def fill_random(model: Decoder, seed: int = 0) -> None:
    """Puts random weights in place of files, the same for the same seed and kind of device: for benchmarks. They keep the activations'
    scale from layer to layer about as trained ones do."""
    places = model.places()
    generator = torch.Generator(next(iter(places.values())).tensor.device)
    for name, place in places.items():
        # By name: what several ranks hold whole is the same on each.
        generator.manual_seed(zlib.crc32(name.encode(), seed))
        if name.endswith(INPUT_SCALE):
            continue  # 1, as it was made
        part = place.part
        weight = place.tensor if part is None else torch.empty_like(place.tensor, device=part.device)
        weight.normal_(0.0, 0.02, generator=generator)
        if place.middle:
            weight.add_(place.middle)
        # A checkpoint has no more digits, whatever the weight is kept in (a router's in float32): kernels count on it.
        weight.copy_(weight.to(model.dtype))
        if part is not None:
            part.fill(quantize(weight, part.format))
    model.finish_loading()


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN_NAMES} more" if len(ordered) > _SHOWN_NAMES else ""
    return ", ".join(ordered[:_SHOWN_NAMES]) + more
