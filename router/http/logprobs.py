"""Log probabilities in the shapes of the two endpoints. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from router.http.text_places import TextPlaces
from router.json_pieces import Json, compact, small
from router.request.memory_budget import Holding
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.text.tokenizer import TokenBytes

# JSON has no infinity: what was ruled out has this, as vLLM writes it.
_LEAST = -9999.0


class TokenNames:
    """How tokens are called: by their text, or as `token_id:17`."""

    def __init__(self, token_bytes: TokenBytes, *, by_id: bool = False) -> None:
        self._bytes = token_bytes
        self._by_id = by_id

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else self._bytes.text(token_id)

    def text(self, token_id: int) -> str:
        return self._bytes.text(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        return list(self._bytes.of(token_id))

    def chat_entry(self, token_id: int, logprob: float) -> str:
        """Returns what ChatLogprobsWriter says of a token, as JSON."""
        before, after = _around(self._bytes, token_id, by_id=self._by_id)
        return f"{before}{_finite(logprob)!r}{after}"


@lru_cache(1 << 14)
def _around(token_bytes: TokenBytes, token_id: int, *, by_id: bool) -> tuple[str, str]:
    """Returns the JSON of a chat's entry before and after its log probability."""
    names = TokenNames(token_bytes, by_id=by_id)
    return f'{{"token":{compact(names.name(token_id))},"logprob":', f',"bytes":{compact(names.bytes_of(token_id))}}}'


class Kept(NamedTuple):
    """One token's. The first one of a prompt has none; of a prompt's others, `rank` says how many tokens were likelier, plus 1."""

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]]
    rank: int = 0

    @property
    def of_prompt(self) -> bool:
        return self.logprob is None or self.rank > 0


class KeptLogprobs:
    """Those of a whole answer as numbers: eight bytes for each, of the hundred that it is as JSON."""

    def __init__(self) -> None:
        self._token_ids, self._logprobs, self._num_top = array("I"), array("f"), array("B")
        self._top_ids, self._top = array("I"), array("f")

    @property
    def num_named(self) -> int:
        """Tokens, over and over, that their JSON names."""
        return len(self._token_ids) + len(self._top_ids)

    @property
    def num_bytes(self) -> int:
        return sum(len(each) * each.itemsize for each in (self._token_ids, self._logprobs, self._num_top, self._top_ids, self._top))

    def add(self, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]) -> None:
        """Adds those of the next piece."""
        self._token_ids.extend(token_ids)
        for each in logprobs:
            top = each.top
            self._logprobs.append(each.logprob)
            self._num_top.append(len(top))
            self._top_ids.extend([one.token_id for one in top])
            self._top.extend([one.logprob for one in top])

    def extend(self, others: KeptLogprobs) -> None:
        for name in ("_token_ids", "_logprobs", "_num_top", "_top_ids", "_top"):
            getattr(self, name).extend(getattr(others, name))

    def __iter__(self) -> Iterator[Kept]:
        """Iterates from the first token on."""
        start = 0
        for token_id, logprob, num_top in zip(self._token_ids, self._logprobs, self._num_top, strict=True):
            end = start + num_top
            yield Kept(token_id, logprob, list(zip(self._top_ids[start:end], self._top[start:end], strict=True)))
            start = end


class KeptPromptLogprobs:
    """Those of a prompt, as numbers."""

    def __init__(self, holding: Holding) -> None:
        """`holding`: what it keeps is counted there."""
        self._holding = holding
        self._logprobs, self._ranks, self._top_ids, self._top = array("f"), array("I"), array("I"), array("f")
        self._num_top = 0

    @property
    def num_named(self) -> int:
        """Tokens that their JSON names."""
        return len(self._logprobs) + len(self._top_ids)

    def add(self, part: pb.PromptLogprobs) -> None:
        """Raises ResourceExhausted."""
        self._holding.add(8 * (len(part.logprobs) + len(part.top_logprobs)))
        self._num_top = part.num_top
        self._logprobs.extend(part.logprobs)
        self._ranks.extend(part.ranks)
        self._top_ids.extend(part.top_token_ids)
        self._top.extend(part.top_logprobs)

    def of(self, prompt: Sequence[int]) -> Iterator[Kept]:
        """Yields each token's, the first one included."""
        num_top = self._num_top
        yield Kept(prompt[0], None, [])
        for i, (token_id, logprob, rank) in enumerate(zip(islice(prompt, 1, None), self._logprobs, self._ranks, strict=False)):
            at = slice(i * num_top, (i + 1) * num_top)
            yield Kept(token_id, logprob, list(zip(self._top_ids[at], self._top[at], strict=True)), rank)


def kept_of(prompt: Sequence[int], part: pb.PromptLogprobs) -> list[Kept]:
    """Returns those of one part; with those of the prompt's second token, its first one, which has none."""
    kept = [Kept(prompt[0], None, [])] if part.position == 1 else []
    for i, (logprob, rank) in enumerate(zip(part.logprobs, part.ranks, strict=True)):
        at = slice(i * part.num_top, (i + 1) * part.num_top)
        top = list(zip(part.top_token_ids[at], part.top_logprobs[at], strict=True))
        kept.append(Kept(prompt[part.position + i], logprob, top, rank))
    return kept


def _cut(kept: Iterable[Kept], num_top: int) -> Iterator[Kept]:
    """Yields entries with so many of the likeliest at most: more may have been computed, for another field."""
    return (each._replace(top=each.top[:num_top]) for each in kept)


class WithPrompt:
    """Those of a prompt, with so many of the likeliest, and then those of the answer; as often as it is asked."""

    def __init__(self, of_prompt: KeptPromptLogprobs, prompt: Sequence[int], num_top: int, of_answer: KeptLogprobs) -> None:
        self._parts = of_prompt, prompt, num_top, of_answer

    def __iter__(self) -> Iterator[Kept]:
        of_prompt, prompt, num_top, of_answer = self._parts
        yield from _cut(of_prompt.of(prompt), num_top)
        yield from of_answer


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)


class LogprobsWriter(ABC):
    """Writes `choices[].logprobs` of one answer, piece by piece or whole."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def of(self, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]) -> dict[str, Any] | Json:
        """Returns those of its next piece."""
        top = ([(one.token_id, one.logprob) for one in each.top] for each in logprobs)
        return self._as_object([Kept(*each) for each in zip(token_ids, (each.logprob for each in logprobs), top, strict=True)], list)

    def of_all(self, kept: Iterable[Kept], listed: Callable[[Iterator[Any]], Any] = small) -> dict[str, Any]:
        """Returns those of a whole answer. Its lists are iterators (router/json_pieces.py), or what `listed` makes of these."""
        return self._as_object(kept, listed)

    def of_prompt(self, kept: Iterable[Kept], num_top: int) -> dict[str, Any]:
        """Returns those of the prompt's next tokens, before the answer's."""
        return self._as_object(list(_cut(kept, num_top)), list)

    def prompt_entries(self, kept: Iterable[Kept], num_top: int) -> Iterator[dict[str, Any] | None]:
        """Yields the items of `prompt_logprobs`, as vLLM has it: null, then an object for each token, by token id."""
        for each in _cut(kept, num_top):
            if each.logprob is None:
                yield None
                continue
            # The token itself comes first, wherever it is among the likeliest.
            entries = {each.token_id: (each.logprob, each.rank)}
            for rank, (token_id, logprob) in enumerate(each.top, 1):
                entries.setdefault(token_id, (logprob, rank))
            yield {
                str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._names.text(token_id)}
                for token_id, (logprob, rank) in entries.items()
            }

    @abstractmethod
    def _as_object(self, kept: Iterable[Kept], listed: Callable[[Iterator[Any]], Any]) -> dict[str, Any]:
        """Reads `kept` once for each list, which `listed` makes of an iterator."""


class ChatLogprobsWriter(LogprobsWriter):
    """Writes those of /v1/chat/completions."""

    def of(self, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]) -> Json:
        # Streams may ask for twenty of each token, so that this is most of what a router does for them.
        entry, tokens = self._names.chat_entry, list[str]()
        for token_id, each in zip(token_ids, logprobs, strict=True):
            top = ",".join([entry(one.token_id, one.logprob) for one in each.top])
            tokens.append(f'{entry(token_id, each.logprob)[:-1]},"top_logprobs":[{top}]}}')
        return Json(f'{{"content":[{",".join(tokens)}],"refusal":null}}')

    def _as_object(self, kept: Iterable[Kept], listed: Callable[[Iterator[Any]], Any]) -> dict[str, Any]:
        return {"content": listed(self._token(each) for each in kept), "refusal": None}

    def _token(self, kept: Kept) -> dict[str, Any]:
        return self._entry(kept.token_id, kept.logprob or 0.0) | {
            "top_logprobs": [self._entry(token_id, top) for token_id, top in kept.top]
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        names = self._names
        return {"token": names.name(token_id), "logprob": _finite(logprob), "bytes": names.bytes_of(token_id)}


class TextLogprobsWriter(LogprobsWriter):
    """Writes those of /v1/completions."""

    def __init__(self, names: TokenNames, places: Callable[[], TextPlaces]) -> None:
        """`places`: of the answer's tokens, known once the prompt is read."""
        super().__init__(names)
        self._make_places = places
        self._places: TextPlaces | None = None

    def _as_object(self, kept: Iterable[Kept], listed: Callable[[Iterator[Any]], Any]) -> dict[str, Any]:
        return {
            "text_offset": listed(self._offsets(kept)),
            "token_logprobs": listed(None if each.logprob is None else _finite(each.logprob) for each in kept),
            "tokens": listed(self._names.name(each.token_id) for each in kept),
            "top_logprobs": listed(self._top(each) for each in kept),
        }

    def _offsets(self, kept: Iterable[Kept]) -> Iterator[int]:
        if self._places is None:
            self._places = self._make_places()
        for each in kept:
            yield self._places.in_echo(each.token_id) if each.of_prompt else self._places.in_answer(each.token_id)

    def _top(self, kept: Kept) -> dict[str, float] | None:
        """Returns the likeliest tokens, and the token itself wherever it is among them."""
        if kept.logprob is None:
            return None
        top = {self._names.name(token_id): _finite(logprob) for token_id, logprob in kept.top}
        return top | {self._names.name(kept.token_id): _finite(kept.logprob)}
