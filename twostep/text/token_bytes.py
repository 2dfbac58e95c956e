"""What a token stands for by itself: bytes, which need not be whole characters."""

from __future__ import annotations

from twostep.text.tokenizer import Tokenizer


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
