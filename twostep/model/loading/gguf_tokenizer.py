"""tokenizer.json and tokenizer_config.json out of a GGUF file's metadata, for byte-level BPE vocabularies ("gpt2")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from twostep.errors import SetupError

_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    # Each digit is a piece of its own before anything else is split, so that spaces before a digit stay together.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# `tokenizer.ggml.pre` names how text is cut before merges apply; a wrong guess gives other ids and no error.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {"gpt-2": _gpt2, "smollm": _smollm}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata describe. Control and user-defined tokens (by token type) are matched in text as a whole;
    control tokens are special. Raises SetupError for another vocabulary type or an unknown pre-tokenizer."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise SetupError(
            f"tokenizer.ggml.model is {kind!r}; only gpt2 (byte-level BPE) is converted: give the Hugging Face directory instead"
        )
    if pre not in _PRE_TOKENIZERS:
        raise SetupError(
            f"tokenizer.ggml.pre is {pre!r}; converted are {', '.join(sorted(_PRE_TOKENIZERS))}: give the Hugging Face directory instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _SPECIAL_TOKENS.items():
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = tokens[token_id]
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config


def eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The end-of-sequence id, and that of <|endoftext|> where a chat model ends its turns with another token."""
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    end_of_text = [
        i
        for i, (token, token_type) in enumerate(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
        if token == "<|endoftext|>" and token_type == TokenType.CONTROL and i != eos
    ]
    return ([] if eos is None else [eos]) + end_of_text
