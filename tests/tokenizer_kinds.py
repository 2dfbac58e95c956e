"""Tokenizers of every kind that models have, trained on a page."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_PAGE = [
    "The quick brown fox jumps over the lazy dog, and the capital of France is Paris.",
    "a serving system splits every request into two steps: prefill and decode.",
    'one two three four five; {"name": "Ada", "age": 36, "tags": ["a", "b"], "ok": true, "none": null}',
    "Die Antwort lautet größer als übermäßig; ça va? naïve café, größte Straße.",
    "What is the answer to the question that the other one asked in the beginning? 0123456789",
    "日本語のテキスト、中文文本, и немного русского текста. x != y . (it's) [not] <so>",
]
_SPECIAL = ("<unk>", "<s>", "</s>")
_SIZE = 600
_MARK = "\u2581"


def sentencepiece_bpe() -> Tokenizer:
    """As Llama 2 and Mistral have it: bytes for what has no token, spaces written as marks, one of them put before every text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), normalizers.Replace(" ", _MARK)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=_SIZE + 256, special_tokens=[*_SPECIAL, *bytes_], show_progress=False)
    # Word by word, or a word and its neighbour become one token.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(_MARK, "merged_with_next")
    tokenizer.train_from_iterator(_PAGE, trainer)
    tokenizer.pre_tokenizer = None
    # Bytes are tokens of the vocabulary and no special ones.
    written = json.loads(tokenizer.to_str())
    written["added_tokens"] = written["added_tokens"][: len(_SPECIAL)]
    made: Tokenizer = Tokenizer.from_str(json.dumps(written))
    return made


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=_SIZE, special_tokens=list(_SPECIAL), unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(_PAGE, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(_PAGE, trainers.WordPieceTrainer(vocab_size=_SIZE, special_tokens=list(_SPECIAL), show_progress=False))
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_SIZE, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_PAGE, trainer)
    return tokenizer


def words() -> Tokenizer:
    """Without a decoder: a space between any two tokens."""
    tokenizer = wordpiece()
    tokenizer.decoder = None
    return tokenizer


def suffixed() -> Tokenizer:
    """Words end with a mark of their own, and the decoder looks at what comes after them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(vocab_size=_SIZE, special_tokens=list(_SPECIAL), end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator(_PAGE, trainer)
    return tokenizer


def fused() -> Tokenizer:
    """Tokens one after the other, and nothing between them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.UnigramTrainer(vocab_size=_SIZE, special_tokens=list(_SPECIAL), unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(_PAGE, trainer)
    return tokenizer


KINDS = {made.__name__: made for made in (sentencepiece_bpe, unigram, wordpiece, byte_level, words, suffixed, fused)}


def save_kind(directory: Path, kind: str) -> Path:
    """tokenizer.json, the first three of its tokens special, and a tokenizer_config.json that names them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = KINDS[kind]()
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return directory
