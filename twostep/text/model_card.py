"""A model's card: what a router needs to know of it besides its tokenizer: limits, defaults, where answers end, the chat template."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from twostep.checkpoint.config_file import read_config
from twostep.checkpoint.context import context_of
from twostep.checkpoint.directory import MAX_VOCAB_SIZE, has_file, read_optional_json, read_text
from twostep.checkpoint.usual_keys import WITH_ENCODER, kind_of
from twostep.errors import InvalidRequest, SetupError
from twostep.sampling_params import SamplingParams
from twostep.text.tokenizer_files import read_tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The longest there are have 30,000 characters.
_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_EOS_IDS = 1024
_SHOWN_CHARS = 80
# Tokens that chat templates end a turn with. A model may have learned them from chats while its config names another end.
_TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|end|>"
)  # fmt: skip
# Harmony ends a message with <|end|>; the answer goes on with the next one.
_HARMONY_SIGN, _HARMONY_ENDS = "<|channel|>", ("<|return|>", "<|call|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values for what a request leaves unset: generation_config.json's, else neutral (as vLLM does, not transformers' top_k 50).
    `do_sample: false` makes the default greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class EndToken:
    """A token that ends an answer. `sources`: what of the directory names it. `text` is empty if its tokenizer has no such token."""

    token_id: int
    text: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.token_id} {self.text}".rstrip() + f" ({', '.join(self.sources)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    max_model_len: int
    vocab_size: int  # rows of the embedding: ids from 0 to vocab_size - 1 are valid input
    end_tokens: tuple[EndToken, ...]
    generation: GenerationDefaults
    chat_template: str | None  # Jinja source
    # What a decoder begins with that has an encoder before it, which reads the prompt; None: the decoder goes on with the prompt.
    decoder_start_token_id: int | None = None
    tool_use_template: str | None = None  # for chats with tools, where the model has one of its own for them
    # Strings a chat template may name, by its name for them: bos_token, eos_token, ...; absent if the model has none.
    special_tokens: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, model_dir: Path, architecture: str = "") -> ModelCard:
        """Reads config.json, generation_config.json, tokenizer_config.json and the chat template wherever it stands. `architecture`: what
        it is, if config.json has another name for it.
        Raises SetupError naming the file and the key."""
        config_path = model_dir / "config.json"
        config = read_config(model_dir, architecture)
        generation = read_optional_json(model_dir / "generation_config.json")
        tokenizer_config = read_optional_json(model_dir / "tokenizer_config.json")
        special_tokens = _special_tokens(tokenizer_config, read_optional_json(model_dir / "special_tokens_map.json"))
        templates = _chat_templates(model_dir, tokenizer_config)
        return cls(
            max_model_len=context_of(config, config_path),
            vocab_size=_positive(config, "vocab_size", MAX_VOCAB_SIZE, config_path),
            end_tokens=_end_tokens(model_dir, config, generation, special_tokens, templates),
            generation=_defaults(generation, model_dir / "generation_config.json"),
            chat_template=templates.get("default"),
            tool_use_template=templates.get("tool_use"),
            special_tokens=special_tokens,
            decoder_start_token_id=_decoder_start(config, generation, config_path) if kind_of(config) in WITH_ENCODER else None,
        )

    def with_chat_template(self, path: Path) -> ModelCard:
        """Returns the card with the template of a file in place of the model's own ones. Raises SetupError."""
        try:
            template = read_text(path, max_bytes=_MAX_TEMPLATE_BYTES)
        except SetupError as error:
            raise SetupError(f"--chat-template: {error.message.partition(';')[0]}; give a Jinja file") from error
        return replace(self, chat_template=template, tool_use_template=None)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(end.token_id for end in self.end_tokens)

    @property
    def described_ends(self) -> str:
        """Says which tokens end an answer and what names each, for the log."""
        return ", ".join(map(str, self.end_tokens)) or "no token: the model directory names none, so that answers run to max_tokens"

    @property
    def bos_token(self) -> str:
        return self.special_tokens.get("bos_token", "")

    @property
    def eos_token(self) -> str:
        return self.special_tokens.get("eos_token", "")


def _positive(raw: dict[str, Any], key: str, at_most: int, path: Path) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= at_most:
        raise SetupError(f"{path}: {key} is {repr(value)[:_SHOWN_CHARS]}; it must be a positive whole number, {at_most} at most")
    return value


def _decoder_start(config: dict[str, Any], generation: dict[str, Any], path: Path) -> int:
    """Returns the token that a decoder begins with, found where transformers' `generate` finds it. Where none is named, it is the one for
    padding, as transformers has it of T5 in training."""
    key, of_generation = "decoder_start_token_id", path.with_name("generation_config.json")
    named = ((key, generation, of_generation), (key, config, path), ("pad_token_id", config, path))
    key, start, path_of_start = next(((name, raw[name], where) for name, raw, where in named if raw.get(name) is not None), (key, 0, path))
    vocab_size = _positive(config, "vocab_size", MAX_VOCAB_SIZE, path)
    if not isinstance(start, int) or isinstance(start, bool) or not 0 <= start < vocab_size:
        raise SetupError(f"{path_of_start}: {key} is {repr(start)[:_SHOWN_CHARS]}; it must be a token id, from 0 to {vocab_size - 1}")
    return start


def _ids(raw: dict[str, Any], path: Path) -> frozenset[int]:
    """`eos_token_id`: one id, several or none."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MAX_EOS_IDS or any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < MAX_VOCAB_SIZE for i in ids):
        raise SetupError(f"{path}: eos_token_id is {repr(value)[:_SHOWN_CHARS]}; it must be a token id, a list of them, or null")
    return frozenset(ids)


def _end_tokens(
    model_dir: Path, config: dict[str, Any], generation: dict[str, Any], special_tokens: dict[str, str], templates: dict[str, str]
) -> tuple[EndToken, ...]:
    """Returns the union of what the files name, in the order of ids. Any one file may be older than the training that made the model end
    with another token."""
    sources: dict[int, list[str]] = {}
    for name, raw in (("config.json", config), ("generation_config.json", generation)):
        for token_id in _ids(raw, model_dir / name):
            sources.setdefault(token_id, []).append(name)
    # Read whole, since a token may get its id only when it is added to the vocabulary.
    tokenizer = read_tokenizer(model_dir) if has_file(model_dir / "tokenizer.json") else None
    texts = "".join(templates.values())
    turn_ends = _HARMONY_ENDS if _HARMONY_SIGN in texts else [end for end in _TURN_ENDS if end in texts]
    named = [("the tokenizer's eos_token", special_tokens.get("eos_token")), *(("the chat template", end) for end in turn_ends)]
    for name, token in named:
        found = None if tokenizer is None or token is None else tokenizer.token_to_id(token)
        if found is not None:
            sources.setdefault(found, []).append(name)
    texts_of = {token_id: "" if tokenizer is None else tokenizer.id_to_token(token_id) or "" for token_id in sources}
    return tuple(EndToken(token_id, texts_of[token_id], tuple(sources[token_id])) for token_id in sorted(sources))


def _defaults(raw: dict[str, Any], path: Path) -> GenerationDefaults:
    known = {key: raw[key] for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty") if raw.get(key) is not None}
    for key, value in known.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or (key == "top_k" and not isinstance(value, int)):
            raise SetupError(f"{path}: {key} is {repr(value)[:_SHOWN_CHARS]}; it must be a number")
    if raw.get("do_sample") is False:
        known = {"temperature": 0.0} | {key: value for key, value in known.items() if key == "repetition_penalty"}
    if known.get("top_k") == -1:  # some models write "off" so
        known["top_k"] = 0
    defaults = GenerationDefaults(**known)
    try:
        SamplingParams(max_tokens=1, **asdict(defaults))
    except InvalidRequest as error:
        raise SetupError(f"{path}: {error.message}") from error
    return defaults


def _chat_templates(model_dir: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """By name, "default" if there are any. chat_template.jinja, with others in additional_chat_templates/NAME.jinja; else
    tokenizer_config.json (a string, or a list of named ones), else chat_template.json."""
    jinja = model_dir / "chat_template.jinja"
    if has_file(jinja):
        others = sorted((model_dir / "additional_chat_templates").glob("*.jinja"))
        read = {path.stem: read_text(path, max_bytes=_MAX_TEMPLATE_BYTES) for path in others if path.stem == "tool_use"}
        return read | {"default": read_text(jinja, max_bytes=_MAX_TEMPLATE_BYTES)}
    for path, raw in (
        (model_dir / "tokenizer_config.json", tokenizer_config),
        (model_dir / "chat_template.json", read_optional_json(model_dir / "chat_template.json")),
    ):
        value = raw.get("chat_template")
        if isinstance(value, list):
            named = {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
            if named.get("default") is None:
                raise SetupError(f'{path}: none of the chat templates is named "default"; rename one of {sorted(named)}')
        else:
            named = {"default": value}
        for template in named.values():
            if isinstance(template, str) and len(template) > _MAX_TEMPLATE_BYTES:
                raise SetupError(f"{path}: a chat template has {len(template)} characters, more than {_MAX_TEMPLATE_BYTES}; shorten it")
            if template is not None and not isinstance(template, str):
                raise SetupError(f"{path}: chat_template is a {type(template).__name__}; it must be a string or a list of named templates")
        if value is not None:
            return {name: template for name, template in named.items() if template is not None}
    return {}


def _special_tokens(tokenizer_config: dict[str, Any], token_map: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in SPECIAL_TOKENS:
        value = tokenizer_config.get(key, token_map.get(key))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
    return found
