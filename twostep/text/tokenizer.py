"""Text to token ids and back, out of a directory's tokenizer.json."""

from __future__ import annotations

import copy
import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.decoders

from twostep.errors import InvalidRequest
from twostep.text.tokenizer_files import read_tokenizer


@dataclass(frozen=True, slots=True)
class AddedToken:
    """`control`: it makes what a chat consists of. `single_word`: it is none where a letter or digit stands beside it."""

    content: str
    control: bool
    single_word: bool = False


class AddedTokens:
    """Finds one tokenizer's added tokens: the first in a text, of those that begin at one place the longest, as the tokenizer does it."""

    def __init__(self, tokens: Mapping[str, AddedToken]) -> None:
        self._tokens = tokens
        self._pattern = re.compile(_longest_of([token for token in tokens if token])) if any(tokens) else None

    def __iter__(self) -> Iterator[AddedToken]:
        return iter(self._tokens.values())

    @property
    def control(self) -> list[str]:
        return [content for content, token in self._tokens.items() if token.control]

    def control_in(self, text: str) -> Iterator[re.Match[str]]:
        """Where control tokens stand in a text, in order."""
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            token = self._tokens[match.group()]
            if token.control and not (token.single_word and _within_a_word(text, match)):
                yield match


def _within_a_word(text: str, match: re.Match[str]) -> bool:
    beside = text[max(0, match.start() - 1) : match.start()] + text[match.end() : match.end() + 1]
    return any(char.isalnum() or char == "_" for char in beside)


def _longest_of(words: list[str]) -> str:
    """A pattern that takes as long as the longest word at each place, however many words there are: `a(?:bc?|d)`."""
    by_first: dict[str, list[str]] = {}
    for word in sorted(set(words)):
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
    branches = []
    for first, rests in by_first.items():
        # A run without branches is written at once, so that the pattern is no deeper than tokens differ.
        run = ""
        while len(rests) == 1 and rests[0]:
            run, rests = run + rests[0], [""]
        while "" not in rests and len({rest[0] for rest in rests}) == 1:
            run, rests = run + rests[0][0], [rest[1:] for rest in rests]
        more = _longest_of(rests) if any(rests) else ""
        optional = "?" if more and "" in rests else ""
        branches.append(re.escape(first + run) + (f"(?:{more}){optional}" if more else ""))
    return "|".join(branches)


_REPLACEMENT = "\ufffd"
# A token of a vocabulary with byte fallback that stands for one byte.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Decoders for which a token adds the same to any text, and another thing only at the beginning of one.
_ALIKE_AFTER_TEXT = frozenset({"ByteFallback", "Metaspace", "WordPiece", "Fuse"})
# Of more than so many the library is asked in the way that releases the GIL, which costs threads of its own.
_MAX_HELD_IDS = 2048
# Longer texts are encoded without the interpreter's lock, in which nothing else could run: a million characters take half a second.
MAX_INLINE_CHARS = 4096
# A text is only encoded whole if it may have so many tokens for each that fits, and else looked at piece by piece.
_MAX_CHARS_PER_TOKEN = 16
_LEAST_PIECE = 1 << 16
_CUT_TOKENS = 64


class Tokenizer:
    """Immutable after loading; every method may be called from any thread. Long texts are encoded without the GIL."""

    def __init__(self, inner: tokenizers.Tokenizer, control_ids: AbstractSet[int] = frozenset()) -> None:
        """`control_ids`: what chats are made of besides the tokens that the file calls special: those that end answers."""
        # A file may ask for cutting and padding; a server must do neither to a prompt.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        # How many ids mean something; the model's own vocabulary may be padded beyond it.
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        vocab = inner.get_vocab(with_added_tokens=False)
        added = inner.get_added_tokens_decoder()
        # Without a normalizer nothing of a text is lost before it is cut into tokens.
        longest = max((*map(len, vocab), *(len(token.content) for token in added.values())), default=1)
        self._longest = longest if inner.normalizer is None else None
        # Ids that the vocabulary writes as they are read, special or not; and those that decode leaves out: ends, markers of chats.
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_by_text: dict[str, int] = {token.content: i for i, token in added.items()}
        control = self.special_ids | (control_ids & self.added_ids)
        # What `encode` cuts out of a text.
        self.added_tokens = AddedTokens(
            {token.content: AddedToken(token.content, i in control, token.single_word) for i, token in added.items()}
        )
        self._guarded = _Guarded(inner, added, self.added_tokens, frozenset(vocab.values()))
        # Special ids that decode writes out all the same; they are not among `special_ids`.
        self._shown: frozenset[int] = frozenset()
        # Tokens are written in the printable alphabet of byte-level vocabularies. Their decoder joins the tokens' bytes, so that whole
        # characters read the same wherever they stand.
        self.joins_bytes = isinstance(inner.decoder, tokenizers.decoders.ByteLevel)
        # Spaces between words are the decoder's: no token says whether one comes.
        self.spaces_words = inner.decoder is None or isinstance(inner.decoder, tokenizers.decoders.WordPiece)
        self._whole: dict[int, str | None] = {}
        # Tokens that stand for any text that comes before: `decode` of them and more adds what it adds after any other text. Nothing
        # where that never matters. None: the decoder looks at neighbours in a way that no token can stand for.
        self.anchor = self._find_anchor(inner.decoder, vocab.values())
        self._anchor_chars = len(self.decode(self.anchor)) if self.anchor else 0

    @classmethod
    def load(cls, model_dir: Path, control_ids: AbstractSet[int] = frozenset()) -> Tokenizer:
        """`control_ids` as of the constructor. Raises SetupError, naming the file, if tokenizer.json is missing or broken."""
        return cls(read_tokenizer(model_dir), control_ids)

    def showing(self, special_ids: AbstractSet[int]) -> Tokenizer:
        """The same tokenizer, but that `decode` writes these special ids out. What is not special is shown anyway."""
        view = copy.copy(self)
        view._shown = self._shown | (self.special_ids & special_ids)
        view.special_ids = self.special_ids - view._shown
        view._whole = {}
        return view

    def added_id(self, text: str) -> int | None:
        """The id of a token that is cut out of texts before all others are, special or not: markers of chats, for one."""
        return self._added_by_text.get(text)

    def least_tokens(self, num_chars: int) -> int:
        """A text of so many characters has at least so many tokens: tells what can never fit without tokenizing megabytes."""
        return 0 if self._longest is None else num_chars // self._longest

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text become their ids. `add_special_tokens=False` leaves out
        those that the tokenizer would put around it (a chat template writes them itself). Raises InvalidRequest for text that is
        not valid Unicode (lone surrogates), or that the tokenizer cannot read."""
        ids: list[int] = _encoded(self._inner, text, add_special_tokens).ids
        return ids

    def encode_first(self, text: str, num_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """The first ids of a text, so many at most, as `encode` gives them: of those that the tokenizer puts around it none is cut off. Of
        a long text only as much is looked at as is needed. Raises InvalidRequest as `encode` does."""
        num_added = self._inner.num_special_tokens_to_add(False) if add_special_tokens else 0
        wanted, num_chars = max(0, num_tokens - num_added), max(_LEAST_PIECE, _MAX_CHARS_PER_TOKEN * num_tokens)
        encoding = _encoded(self._inner, text[:num_chars], False)
        # Where it was cut tokens may be others.
        while num_chars < len(text) and len(encoding) < wanted + _CUT_TOKENS:
            num_chars *= 4
            encoding = _encoded(self._inner, text[:num_chars], False)
        encoding.truncate(wanted)
        ids: list[int] = self._inner.post_process(encoding, None, add_special_tokens).ids
        return ids

    def encode_chat(self, text: str, clients: Collection[int] = ()) -> list[int]:
        """Encodes what a chat template makes, special tokens and all. Those that begin at `clients` are encoded as if there were no such
        token. Raises InvalidRequest as `encode` does, and where the vocabulary has no other way to write them."""
        if not clients:
            return self.encode(text, add_special_tokens=False)
        return self._guarded.encode(text, frozenset(clients))

    def is_beyond(self, text: str, num_tokens: int) -> bool:
        """Whether a text certainly has more tokens, found out without encoding all of it: megabytes would take gigabytes, and seconds.
        False says nothing. Takes time in proportion to `num_tokens` at most, but for texts of very long tokens."""
        piece = max(_LEAST_PIECE, _MAX_CHARS_PER_TOKEN * num_tokens)
        if len(text) <= piece:
            return False
        found = 0
        for start in range(0, len(text), piece):
            found += len(_encoded(self._inner, text[start : start + piece], False))
            # Where it was cut tokens may be others, but not half of them.
            if found > 2 * num_tokens:
                return True
        return False

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids outside the vocabulary decode to nothing; incomplete UTF-8 to U+FFFD."""
        ids = list(token_ids)
        if self._shown and skip_special_tokens:
            ids, skip_special_tokens = [i for i in ids if i not in self.special_ids], False
        if len(ids) > _MAX_HELD_IDS:
            return str(self._inner.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        text: str = self._inner.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_after(self, token_ids: Sequence[int]) -> str:
        """Returns what tokens add to a text that ends on a character boundary. Many decoders leave out a space at the beginning of a text,
        which `decode` takes them for."""
        if not self.anchor:
            return self.decode(token_ids)
        return self.decode((*self.anchor, *token_ids))[self._anchor_chars :]

    def whole_text(self, token_id: int) -> str | None:
        """Returns what a token adds to a text that ends on a character boundary, if that is whole characters whatever stands around it:
        empty for special ids and those outside the vocabulary. None: it takes `decode` to tell. Remembered, so that a token of a stream
        costs no call of the library."""
        try:
            return self._whole[token_id]
        except KeyError:
            pass
        text: str | None = ""
        if token_id not in self.special_ids and self.token_text(token_id):
            text = None if self.anchor is None or self.byte_of(token_id) is not None else self.decode_after([token_id])
            if not text or _REPLACEMENT in text:
                text = None
        if 0 <= token_id < self.vocab_size:
            self._whole[token_id] = text
        return text

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a token stands for in a vocabulary that writes what it has no token for in bytes."""
        found = None if self.joins_bytes else _BYTE_TOKEN.fullmatch(self.token_text(token_id))
        return None if found is None else int(found.group(1), 16)

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary writes it (byte-level tokens in their printable alphabet); empty for no such id."""
        return self._inner.id_to_token(token_id) or ""

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def _find_anchor(self, decoder: Any, ids: Iterable[int]) -> tuple[int, ...] | None:
        if self.joins_bytes:
            return ()
        if not _adds_alike(None if decoder is None else json.loads(decoder.__getstate__())):
            return None
        plain = (i for i in sorted(ids) if i not in self.added_ids and self.byte_of(i) is None)
        return next(((i,) for i in plain if self.decode([i]).isalnum()), None)


def _adds_alike(decoder: Any) -> bool:
    """Whether a token adds the same after any text, by a decoder as tokenizer.json describes it; None: tokens are joined by spaces."""
    if decoder is None:
        return True
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and (fused or len(step["pattern"].get("String", "")) != 1):
            return False
        if kind == "Strip" and step["stop"]:
            return False
        if kind not in _ALIKE_AFTER_TEXT and kind not in ("Replace", "Strip"):
            return False
        fused = fused or kind == "Fuse"
    return True


class _Guarded:
    """Knows control tokens by secret names: whatever a text says, none is made of it but by such a name.
    All else is the same: what is cut out of a text first, and how what remains is read."""

    def __init__(
        self, inner: tokenizers.Tokenizer, added: dict[int, tokenizers.AddedToken], tokens: AddedTokens, model_ids: frozenset[int]
    ) -> None:
        """`model_ids`: of the vocabulary without what was added."""
        secret = secrets.token_hex(16)
        self._tokens = tokens
        self._names = {content: f"\U000f0000{secret}.{i}\U000f0000" for i, content in enumerate(tokens.control)}
        # The model is shared: it has the vocabulary.
        self._inner = tokenizers.Tokenizer(inner.model)
        if inner.normalizer is not None:
            self._inner.normalizer = inner.normalizer
        if inner.pre_tokenizer is not None:
            self._inner.pre_tokenizer = inner.pre_tokenizer
        for special, group in itertools.groupby((added[i] for i in sorted(added)), key=lambda token: token.special):
            (self._inner.add_special_tokens if special else self._inner.add_tokens)([self._renamed(token) for token in group])
        # Ids differ where the vocabulary has no such name.
        self._ids = {self._inner.token_to_id(self._names.get(token.content, token.content)): i for i, token in added.items()}
        self._control_ids = frozenset(i for i, token in added.items() if token.content in self._names)
        unknown = getattr(inner.model, "unk_token", None)
        self._unknown_id = getattr(inner.model, "unk_id", None) if unknown is None else inner.token_to_id(unknown)
        self._sound = all(i == own or i not in model_ids for i, own in self._ids.items())

    def _renamed(self, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
        name = self._names.get(token.content)
        return tokenizers.AddedToken(
            token.content if name is None else name,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word and name is None,
            normalized=token.normalized and name is None,
            special=token.special,
        )

    def encode(self, text: str, clients: frozenset[int]) -> list[int]:
        parts: list[str] = []
        end = 0
        for match in self._tokens.control_in(text):
            if match.start() not in clients:
                parts += (text[end : match.start()], self._names[match.group()])
                end = match.end()
        ids = _encoded(self._inner, "".join((*parts, text[end:])), False).ids
        if not self._sound or any(i in self._control_ids and i not in self._ids and i != self._unknown_id for i in ids):
            raise InvalidRequest("the messages hold what only control tokens of this model can write; leave them out")
        return [self._ids.get(i, i) for i in ids]


def _encoded(inner: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode: a lone surrogate at character {error.start}; send valid UTF-8") from error
    try:
        if len(text) <= MAX_INLINE_CHARS:
            return inner.encode(text, add_special_tokens=add_special_tokens)
        return inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except BaseException as error:
        # The library's own failures are no Exception: a regular expression that gives up, for one.
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest("the model's tokenizer cannot read this text; change it") from None


def _byte_of_char() -> dict[str, int]:
    """The printable alphabet of byte-level vocabularies (GPT-2's): bytes that print as themselves do, the others are moved up by 256 in
    their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class TokenBytes:
    """Remembers what it was asked for: a vocabulary at most."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Empty for an id outside the vocabulary; of a special token the bytes of its name."""
        found = self._known.get(token_id)
        if found is None:
            found = self._bytes(token_id)
            if 0 <= token_id < self._tokenizer.vocab_size:
                self._known[token_id] = found
        return found

    def text(self, token_id: int) -> str:
        r"""The bytes as text; of those that are no whole characters as OpenAI writes them: `bytes:\xf0\x9f`."""
        raw = self.of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        name = tokenizer.token_text(token_id)
        if token_id in tokenizer.special_ids or (token_id in tokenizer.added_ids and tokenizer.joins_bytes):
            return name.encode()
        if tokenizer.joins_bytes:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in name)
            except KeyError:
                return name.encode()
        text = tokenizer.decode_after([token_id])
        byte = tokenizer.byte_of(token_id)
        # A decoder without byte fallback writes such a token as it is called.
        return bytes([byte]) if byte is not None and text != name else text.encode()
