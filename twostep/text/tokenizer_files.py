"""The tokenizer of a model directory as transformers reads it: tokenizer.json, and what tokenizer_config.json says beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.processors

from twostep.checkpoint.directory import MAX_TOKENIZER_BYTES, has_file, read_optional_json
from twostep.errors import SetupError

# What a pattern is made of, as far as it matters: escapes, sets of characters, groups and repetitions.
_PART = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|\(\?<?[=!>]|\(|\)|(?:[*+]|\{\d*,\})|.", re.DOTALL)
_ENDLESS = re.compile(r"[*+]|\{\d*,\}")


def slow_pattern(tokenizer: tokenizers.Tokenizer) -> str | None:
    """The first one that a text is cut or rewritten with; None: there is none."""
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        if part is not None:
            found = next((pattern for pattern in _patterns(json.loads(part.__getstate__())) if repeats_repetitions(pattern)), None)
            if found is not None:
                return found
    return None


def _patterns(value: Any) -> Iterator[str]:
    """{"Regex": "..."} wherever it stands."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "Regex" and isinstance(each, str):
                yield each
            else:
                yield from _patterns(each)
    elif isinstance(value, list):
        for each in value:
            yield from _patterns(each)


def repeats_repetitions(pattern: str) -> bool:
    """Whether a group that is repeated without end has something in it that is, as `(x+)+y`: twice as many characters of some text take
    four billion times as long to match, and nothing stops a match."""
    # Of each group that is open: whether something in it is repeated so.
    endless = [False]
    closed = False  # the part before was a group, and one such
    for part in _PART.findall(pattern):
        if part.startswith("("):
            endless.append(False)
            closed = False
        elif part == ")":
            closed = endless.pop() if len(endless) > 1 else False
            endless[-1] |= closed
        elif _ENDLESS.fullmatch(part):
            if closed:
                return True
            endless[-1], closed = True, False
        else:
            closed = False
    return False


_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_MAX_ADDED = 1 << 20
_SHOWN_CHARS = 80


def read_tokenizer(model_dir: Path) -> tokenizers.Tokenizer:
    """Raises SetupError, naming the file, if tokenizer.json is missing or broken, or tokenizer_config.json says what cannot be."""
    inner = _read(model_dir / "tokenizer.json")
    path = model_dir / "tokenizer_config.json"
    config = read_optional_json(path)
    if "added_tokens_decoder" not in config:
        config |= read_optional_json(model_dir / "special_tokens_map.json")
    named = _named(config, path)
    _add_tokens(inner, config, named, path)
    _put_around(inner, config, named, path)
    return inner


def _read(path: Path) -> tokenizers.Tokenizer:
    if not has_file(path):
        raise SetupError(f"{path} does not exist; give a Hugging Face model directory with a tokenizer.json, or download it")
    if (num_bytes := path.stat().st_size) > MAX_TOKENIZER_BYTES:
        raise SetupError(f"{path} has {num_bytes} bytes, more than any tokenizer ({MAX_TOKENIZER_BYTES}); download it again")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every broken file
        raise SetupError(f"{path} cannot be read as a tokenizer ({error}); download it again") from error
    if (pattern := slow_pattern(inner)) is not None:
        raise SetupError(f"{path} cuts texts with {pattern[:80]!r}, which repeats what repeats and may never end; write it without")
    return inner


def _named(config: dict[str, Any], path: Path) -> dict[str, tokenizers.AddedToken]:
    """The tokens that have a role."""
    return {role: _token(config[role], path, special=True) for role in _ROLES if config.get(role) is not None}


def _add_tokens(inner: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, tokenizers.AddedToken], path: Path) -> None:
    """Adds what tokenizer.json has not, or has otherwise. Ids are given out in their order: what the file calls them is not looked at."""
    by_id = config.get("added_tokens_decoder") or {}
    if not isinstance(by_id, dict) or not all(i.isdecimal() and i.isascii() for i in by_id):
        raise _wrong(path, "added_tokens_decoder", by_id, "an object of tokens by their ids")
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    if not isinstance(extra, list):
        raise _wrong(path, "extra_special_tokens", extra, "a list of tokens")
    if len(by_id) + len(extra) > _MAX_ADDED:
        raise _wrong(path, "added_tokens_decoder", len(by_id), f"of {_MAX_ADDED} tokens at most")
    there = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    roles = {token.content for token in named.values()}
    wanted: dict[str, tokenizers.AddedToken] = {}
    for token in (*there.values(), *(_token(by_id[i], path) for i in sorted(by_id, key=int))):
        had = repr(there.get(token.content))
        token.special = token.special or token.content in roles
        if repr(token) != had:
            wanted[token.content] = token
    for token in (*named.values(), *(_token(each, path, special=True) for each in extra)):
        if token.content not in there:
            wanted.setdefault(token.content, token)
    inner.add_tokens(list(wanted.values()))


def _put_around(inner: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, tokenizers.AddedToken], path: Path) -> None:
    """Sets what is put around a text: what tokenizer.json says counts; where it says nothing of it, `add_bos_token` and `add_eos_token`
    do."""
    around: dict[str, str] = {}
    for key, role in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        wanted = config.get(key)
        if wanted is not None and not isinstance(wanted, bool):
            raise _wrong(path, key, wanted, "true or false")
        if wanted and role in named:
            around[role] = named[role].content
    if not around or inner.num_special_tokens_to_add(False):
        return
    ids = [(content, inner.token_to_id(content)) for content in dict.fromkeys(around.values())]
    template = [f"{around[role]}:0" if role else "$A:0" for role in ("bos_token", "", "eos_token") if not role or role in around]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=ids)


def _token(raw: Any, path: Path, *, special: bool = False) -> tokenizers.AddedToken:
    """`special`: whatever the file says of that."""
    given = raw if isinstance(raw, dict) else {"content": raw}
    content = given.get("content")
    flags = {key: given[key] for key in _FLAGS if key in given}
    if not isinstance(content, str) or not content or not all(isinstance(flag, bool) for flag in flags.values()):
        raise _wrong(path, "an added token", raw, "a text with flags")
    return tokenizers.AddedToken(content, **(flags | {"special": True} if special else flags))


def _wrong(path: Path, key: str, value: Any, wanted: str) -> SetupError:
    return SetupError(f"{path}: {key} is {repr(value)[:_SHOWN_CHARS]}; it must be {wanted}")
