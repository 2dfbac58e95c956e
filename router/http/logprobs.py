"""Log probabilities in the shapes of the two endpoints. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from twostep.rpc.v1 import inference_pb2 as pb
from twostep.text.token_bytes import TokenBytes

# JSON has no infinity: what was ruled out has this, as vLLM writes it.
_LEAST = -9999.0


class TokenNames:
    """How tokens are called: by their text, or as `token_id:17`."""

    def __init__(self, token_bytes: TokenBytes, *, by_id: bool = False) -> None:
        self._bytes = token_bytes
        self._by_id = by_id

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else self._bytes.text(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        return list(self._bytes.of(token_id))


class PieceLogprobs(Protocol):
    """`choices[].logprobs` of one answer."""

    def of(self, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        """Of its next piece. Lists, which make up the whole answer's one after the other, or None."""
        ...


class ChatLogprobs:
    """Of /v1/chat/completions."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def of(self, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_logprobs(token_ids, logprobs, self._names), "refusal": None}


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs], names: TokenNames) -> list[dict[str, Any]]:
    """Entries of `choices[].logprobs.content`."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": names.name(token_id), "logprob": max(_LEAST, logprob), "bytes": names.bytes_of(token_id)}

    return [
        entry(token_id, each.logprob) | {"top_logprobs": [entry(top.token_id, top.logprob) for top in each.top]}
        for token_id, each in zip(token_ids, logprobs, strict=True)
    ]


class TextLogprobs:
    """Of /v1/completions. Offsets go on counting from one piece to the next, in characters of the tokens' names."""

    def __init__(self, names: TokenNames, offset: int = 0) -> None:
        self._names = names
        self._offset = offset

    def of(self, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        names = [self._names.name(token_id) for token_id in token_ids]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(_LEAST, each.logprob) for each in logprobs],
            "tokens": names,
            "top_logprobs": [self._top(name, each) for name, each in zip(names, logprobs, strict=True)],
        }

    def _top(self, name: str, logprobs: pb.TokenLogprobs) -> dict[str, float]:
        """The likeliest, and the token itself wherever it is among them."""
        top = {self._names.name(each.token_id): max(_LEAST, each.logprob) for each in logprobs.top}
        return top | {name: max(_LEAST, logprobs.logprob)}
