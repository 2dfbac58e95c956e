"""A head's directory, as published EAGLE-3 heads are: config.json and safetensors.

    fc.weight                   [hidden, 3 * target hidden]       midlayer.mlp.{gate,up,down}_proj.weight
    midlayer.hidden_norm        of the state                      norm.weight, lm_head.weight [draft vocabulary, hidden]
    midlayer.input_layernorm    of the embedding                  d2t  int64 [draft vocabulary]   model's token - head's
    midlayer.self_attn.{q,k,v}_proj.weight  [.., 2 * hidden]      t2d  bool [vocabulary]          which of the model's tokens it has
    midlayer.self_attn.o_proj, .post_attention_layernorm          embed_tokens.weight             where it is not the model's own

Some call midlayer `layers.0`. t2d says what d2t says, and is compared with it.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from twostep.checkpoint.directory import FLOAT_DTYPES, SINGLE
from twostep.errors import SetupError
from twostep.model.eagle.config import EagleConfig, eagle_config_json, parse_eagle_config
from twostep.model.eagle.head import EagleHead
from twostep.model.families.config import ModelConfig
from twostep.model.families.modules import Place
from twostep.model.loading.weight_files import StoredTensor, read_weights, stored_tensors

_MIDLAYER, _OTHER_MIDLAYER = "midlayer.", "layers.0."
_EMBEDDING, _D2T, _T2D = "embed_tokens.weight", "d2t", "t2d"
_SHOWN_NAMES = 8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_head(head_dir: Path, target: ModelConfig, embedding: torch.Tensor, dtype: torch.dtype, *, num_positions: int = 0) -> EagleHead:
    """Returns the head of a directory for a model, in `dtype` and where the model's embedding [vocab_size, hidden_size] is, for so many
    positions; 0: the model's context. Raises SetupError, naming the file, the key or the tensor: before anything is read for what is
    missing, not known or of the wrong shape or type, or made for another model; later for maps of the vocabulary that contradict
    themselves."""
    config = parse_eagle_config(head_dir)
    stored = {_name_here(tensor.name): tensor for tensor in stored_tensors(head_dir)}
    has_embedding = _EMBEDDING in stored
    config.check_target(target, has_embedding=has_embedding)
    with torch.device("meta"):
        wanted = EagleHead(replace(config, max_model_len=1), has_embedding=has_embedding).state_dict()
    _check(stored, {name: tuple(tensor.shape) for name, tensor in wanted.items()}, config)
    head = EagleHead(config, has_embedding=has_embedding, num_positions=num_positions or target.max_model_len).to(dtype)
    work = [(stored[name], Place.whole(tensor)) for name, tensor in head.state_dict().items() if name != _D2T]
    read_weights(work)
    if _D2T in stored:
        _read_tokens(head, stored)
    head.eval().requires_grad_(False).to(embedding.device)
    if not has_embedding:
        head.use_embedding(embedding)
    return head


def save_head(head: EagleHead, head_dir: Path) -> None:
    """Writes a head so that one that was there is replaced as a whole, in the type that its config names. The embedding is not written
    where it is the model's."""
    config = head.config
    tensors = {
        name: tensor.detach().to("cpu", _DTYPES[config.dtype]).contiguous() for name, tensor in head.state_dict().items() if name != _D2T
    }
    tensors[_D2T] = head.d2t.cpu()
    tensors[_T2D] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, head.target_ids.cpu(), True)
    head_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(eagle_config_json(config), indent=2) + "\n"
    part = head_dir / f".{SINGLE}.part"
    save_file(tensors, part, metadata={"format": "pt"})
    (head_dir / "config.json").write_text(text)
    # safetensors makes files that nobody else may read; workers often run as somebody else.
    part.chmod((head_dir / "config.json").stat().st_mode)
    os.replace(part, head_dir / SINGLE)


def _name_here(name: str) -> str:
    return _MIDLAYER + name.removeprefix(_OTHER_MIDLAYER) if name.startswith(_OTHER_MIDLAYER) else name


def _check(stored: dict[str, StoredTensor], wanted: dict[str, tuple[int, ...]], config: EagleConfig) -> None:
    """Raises SetupError."""
    whole = config.draft_vocab_size == config.vocab_size
    required = wanted.keys() - ({_D2T} if whole else set())
    if missing := sorted(required - stored.keys()):
        raise SetupError(f"the head's directory lacks {_shown(missing)}; download it again, or fix its config.json")
    if unknown := sorted(stored.keys() - wanted.keys() - {_T2D}):
        raise SetupError(f"the head's directory has tensors that an EAGLE-3 head does not know: {_shown(unknown)}")
    shapes = wanted | {_T2D: (config.vocab_size,)}
    for name, tensor in stored.items():
        kinds = {_D2T: {"I64"}, _T2D: {"BOOL", "U8", "I64"}}.get(name, set(FLOAT_DTYPES))
        if tensor.stored_as not in kinds:
            raise SetupError(f"tensor {tensor.name} of the head is stored as {tensor.stored_as}; supported is {' or '.join(sorted(kinds))}")
        if tensor.shape != shapes[name]:
            asked = list(shapes[name])
            raise SetupError(
                f"tensor {tensor.name} of the head has shape {list(tensor.shape)}, but its config.json asks for {asked}; fix one of the two"
            )


def _read_tokens(head: EagleHead, stored: dict[str, StoredTensor]) -> None:
    """Raises SetupError for maps that are none."""
    d2t = torch.empty(head.config.draft_vocab_size, dtype=torch.int64)
    read_weights([(stored[_D2T], Place.whole(d2t))])
    ids, vocab_size = torch.arange(len(d2t)) + d2t, head.config.vocab_size
    if not bool(((ids >= 0) & (ids < vocab_size)).all()) or len(ids.unique()) < len(ids):
        raise SetupError(f"d2t of the head does not give each of its tokens another one of the model's {vocab_size}; download it again")
    if _T2D in stored:
        # Stored in a byte each, whatever it is called, or as whole numbers.
        raw = replace(stored[_T2D], dtype=torch.int64 if stored[_T2D].stored_as == "I64" else torch.uint8)
        assert raw.dtype is not None
        has = torch.empty(vocab_size, dtype=raw.dtype)
        read_weights([(raw, Place.whole(has))])
        if not torch.equal(has.bool().nonzero()[:, 0], ids.sort().values):
            raise SetupError("t2d and d2t of the head contradict each other about which tokens it has; download it again")
    head.d2t.copy_(d2t)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more
