"""Text to token ids and back, out of a directory's tokenizer.json."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import tokenizers
import tokenizers.decoders

from twostep.errors import InvalidRequest, SetupError

_REPLACEMENT = "\ufffd"
# Of more than so many the library is asked in the way that releases the GIL, which costs threads of its own.
_MAX_HELD_IDS = 2048


class Tokenizer:
    """Immutable after loading; every method may be called from any thread, and releases the GIL while it encodes."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # A file may ask for cutting and padding; a server must do neither to a prompt.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._size: int = inner.get_vocab_size(with_added_tokens=True)
        # Without a normalizer nothing of a text is lost before it is cut into tokens.
        self._longest = max((len(token) for token in inner.get_vocab()), default=1) if inner.normalizer is None else None
        added = inner.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._added_ids: dict[str, int] = {token.content: i for i, token in added.items()}
        # Special ids that decode writes out all the same; they are not among `_special`.
        self._shown: frozenset[int] = frozenset()
        # Such a decoder joins the tokens' bytes, so that whole characters read the same wherever they stand. Others look at neighbours.
        self._joins_bytes = isinstance(inner.decoder, tokenizers.decoders.ByteLevel)
        self._whole: dict[int, str | None] = {}

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Raises SetupError, naming the file, if tokenizer.json is missing or broken."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise SetupError(f"{path} does not exist; give a Hugging Face model directory with a tokenizer.json, or download it")
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every broken file
            raise SetupError(f"{path} cannot be read as a tokenizer ({error}); download it again") from error
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        """Number of ids that mean something; the model's own vocabulary may be padded beyond it."""
        return self._size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that decode leaves out: end of sequence, chat markers and the like."""
        return self._special

    def showing(self, special_ids: AbstractSet[int]) -> Tokenizer:
        """The same tokenizer, but that `decode` writes these special ids out. What is not special is shown anyway."""
        view = copy.copy(self)
        view._shown = self._shown | (self._special & special_ids)
        view._special = self._special - view._shown
        view._whole = {}
        return view

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids that the vocabulary writes as they are read, special or not."""
        return self._added

    @property
    def joins_bytes(self) -> bool:
        """The vocabulary writes tokens in the printable alphabet of byte-level ones."""
        return self._joins_bytes

    def added_id(self, text: str) -> int | None:
        """The id of a token that is cut out of texts before all others are, special or not: markers of chats, for one."""
        return self._added_ids.get(text)

    def least_tokens(self, num_chars: int) -> int:
        """A text of so many characters has at least so many tokens: tells what can never fit without tokenizing megabytes."""
        return 0 if self._longest is None else num_chars // self._longest

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text become their ids. `add_special_tokens=False` leaves out
        those that the tokenizer would put around it (a chat template writes them itself). Raises InvalidRequest for text that is
        not valid Unicode (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode: a lone surrogate at character {error.start}; send valid UTF-8") from error
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids outside the vocabulary decode to nothing; incomplete UTF-8 to U+FFFD."""
        ids = list(token_ids)
        if self._shown and skip_special_tokens:
            ids, skip_special_tokens = [i for i in ids if i not in self._special], False
        if len(ids) > _MAX_HELD_IDS:
            return str(self._inner.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        text: str = self._inner.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def whole_text(self, token_id: int) -> str | None:
        """What a token adds to a text that ends on a character boundary, if that is whole characters whatever stands around it: empty for
        special ids and those outside the vocabulary. None: it takes `decode` to tell. Remembered, so that a token of a stream costs no
        call of the library."""
        try:
            return self._whole[token_id]
        except KeyError:
            pass
        text: str | None = ""
        if token_id not in self._special and self.token_text(token_id):
            text = self.decode([token_id]) if self._joins_bytes else None
            if text is not None and (not text or _REPLACEMENT in text):
                text = None
        if 0 <= token_id < self._size:
            self._whole[token_id] = text
        return text

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary writes it (byte-level tokens in their printable alphabet); empty for no such id."""
        return self._inner.id_to_token(token_id) or ""

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        found: int | None = self._inner.token_to_id(token)
        return found
