"""Any OpenAI-compatible server as the load generator's target: /v1/completions or /v1/chat/completions, streamed. Prompts are texts."""

from __future__ import annotations

import asyncio
import json
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from twostep.client._channel import key_metadata
from twostep.errors import PermissionDenied, SetupError, TwostepError, Unauthenticated
from twostep.lab.bench.serve.content import COMMON, Words, load_tokenizer
from twostep.lab.bench.serve.record import REFUSED, RequestRecord
from twostep.lab.bench.serve.target import Clock, Exchange, ReceivedAnswer, RequestFailed, TargetModel
from twostep.lab.bench.serve.workloads import SessionTurn, Text

_OPEN_TIMEOUT_S = 30.0
_LOOPBACK = ("localhost:", "127.", "[::1]:")
_DONE = b"[DONE]"
_UNAUTHORIZED, _FORBIDDEN, _TOO_MANY_REQUESTS = 401, 403, 429


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIOptions:
    url: str  # the server's address, with or without /v1
    api: Literal["completions", "chat"] = "completions"
    model: str = ""
    api_key: str = field(default="", repr=False)  # bearer token of every request; empty: none
    tokenizer_dir: Path | None = None  # None: prompts are of common words, and how many tokens they have is what the server says of each
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = True  # vLLM's and SGLang's field; servers that refuse unknown ones need it off
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    max_model_len: int = 0  # 0: what the server tells, as vLLM does


class OpenAITarget:
    """See LoadTarget."""

    def __init__(self, options: OpenAIOptions) -> None:
        """Raises SetupError for a tokenizer that cannot be read, InvalidRequest for a key that cannot be; warns of a key that would go
        unencrypted."""
        self._options = options
        self._headers = dict(key_metadata(options.api_key, (), tls=False))
        if options.api_key and _readable_on_the_way(options.url):
            warnings.warn(f"the API key goes to {options.url} unencrypted; give https://… if the server has TLS", stacklevel=2)
        base = options.url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._tokenizer = None if options.tokenizer_dir is None else load_tokenizer(options.tokenizer_dir)
        self._words = Words(COMMON) if self._tokenizer is None else Words.of(self._tokenizer)
        self._model = options.model
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> TargetModel:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # Every request has a connection of its own if need be: a queue in here would be counted as the server's.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=self._options.timeout_s, sock_connect=_OPEN_TIMEOUT_S),
            read_bufsize=1 << 20,
        )
        models: list[Any] = []
        try:
            async with self._session.get(f"{self._base}/models", timeout=aiohttp.ClientTimeout(total=_OPEN_TIMEOUT_S)) as response:
                if response.status == 200:
                    models = (await response.json(content_type=None)).get("data", [])
                elif response.status in (_UNAUTHORIZED, _FORBIDDEN):
                    raise _not_let_in(self._base, response.status, await response.text())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise SetupError(f"no OpenAI-compatible server answers at {self._base} ({error}); check --target") from error
        names = [str(m.get("id", "")) for m in models]
        if not self._model:
            if len(names) != 1:
                raise SetupError(f"give --model; {self._base} serves {', '.join(names) or 'it does not say which'}")
            self._model = names[0]
        told = next((m.get("max_model_len") for m in models if m.get("id") == self._model), None)
        return TargetModel(model=self._model, max_model_len=self._options.max_model_len or int(told or 0), alphabet=range(len(self._words)))

    async def tokenize(self, text: str) -> array[int]:
        if self._tokenizer is None:
            raise SetupError("texts out of a file have an unknown number of tokens over HTTP; give the model's directory as --tokenizer")
        return array("I", self._tokenizer.encode(text))

    def prepare(self, history: Sequence[Exchange], turn: SessionTurn, run: str) -> dict[str, Any]:
        o = self._options
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": turn.output_tokens,
            "temperature": o.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if o.ignore_eos:
            body["ignore_eos"] = True
        if o.api == "chat":
            body["messages"] = [
                message
                for exchange in history
                for message in (
                    {"role": "user", "content": self._text(exchange.turn)},
                    {"role": "assistant", "content": exchange.answer.text},
                )
            ] + [{"role": "user", "content": self._text(turn)}]
        else:
            said = [part for e in history for part in (self._text(e.turn), e.answer.text)]
            body["prompt"] = "".join([*said, self._text(turn)])
        return body | dict(o.extra_body)

    def num_prompt_tokens(self, history: Sequence[Exchange], turn: SessionTurn) -> int:
        # Answers are not counted here: the server does, in its usage.
        return sum(e.turn.num_tokens + e.turn.output_tokens for e in history) + turn.num_tokens

    async def ask(self, prepared: dict[str, Any], record: RequestRecord, clock: Clock, *, keep: bool) -> ReceivedAnswer | None:
        assert self._session is not None, "open() comes first"
        url = f"{self._base}/{'chat/completions' if self._options.api == 'chat' else 'completions'}"
        texts: list[str] = []
        record.sent_s = clock()
        try:
            async with self._session.post(url, json=prepared) as response:
                if response.status != 200:
                    raise _refused(response.status, await response.text(), response.headers.get("Retry-After", ""))
                ended = await self._follow(response.content, record, clock, texts if keep else None)
        except TimeoutError as error:
            raise RequestFailed("timeout", f"no whole answer within {self._options.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed("connection", f"{type(error).__name__}: {error}") from error
        except ValueError as error:
            raise RequestFailed("bad answer", str(error)) from error
        finally:
            record.ended_s = clock()
        if not ended:
            raise RequestFailed("broken", "the stream ended without an end")
        return ReceivedAnswer(token_ids=array("I"), text="".join(texts)) if keep else None

    @staticmethod
    async def _follow(stream: aiohttp.StreamReader, record: RequestRecord, clock: Clock, texts: list[str] | None) -> bool:
        """Notes what comes; False: it broke off. Raises ValueError for what is no such stream, RequestFailed for an error in it."""
        reader = EventReader()
        ended, counted = False, 0
        async for chunk in stream.iter_any():
            now = clock()
            for data in reader.feed(chunk):
                event = read_event(data)
                if event.error:
                    raise RequestFailed("error in stream", event.error)
                if event.has_token:
                    # Servers that count in every event (vLLM's continuous_usage_stats) tell how many tokens it carries.
                    carried = 1 if event.completion_tokens is None else max(1, event.completion_tokens - counted)
                    counted += carried
                    record.times_s.append(now)
                    record.num_tokens.append(carried)
                    if texts is not None:
                        texts.append(event.text)
                if event.completion_tokens is not None:
                    record.told_output_tokens = event.completion_tokens
                record.prompt_tokens = event.prompt_tokens or record.prompt_tokens
                record.cached_tokens = event.cached_tokens or record.cached_tokens
                record.finish_reason = event.finish_reason or record.finish_reason
                ended = ended or event.done or bool(event.finish_reason)
        return ended

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            # aiohttp closes its sockets in the loop's next turns.
            await asyncio.sleep(0)

    def _text(self, turn: SessionTurn) -> str:
        return turn.prompt.text if isinstance(turn.prompt, Text) else self._words.text(turn.prompt)


def _readable_on_the_way(url: str) -> bool:
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0].rpartition("@")[2]
    return scheme != "https" and not f"{host}:".startswith(_LOOPBACK)


def _not_let_in(base: str, status: int, body: str) -> TwostepError:
    """The server's own word, where its error is shaped like OpenAI's; else the body's beginning."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = body.strip()
    kind = Unauthenticated if status == _UNAUTHORIZED else PermissionDenied
    return kind(f"{base} answers {status}: {said[:500] or 'it gives no reason; check the key'}")


def _refused(status: int, body: str, retry_after: str) -> RequestFailed:
    seconds = float(retry_after) if retry_after.replace(".", "", 1).isdecimal() else None
    return RequestFailed(REFUSED if status == _TOO_MANY_REQUESTS else f"http {status}", body.strip()[:500], seconds)


# ---- server-sent events with JSON in them -------------------------------------------------------------------------------


class EventReader:
    """Bytes, cut anywhere, to the data of whole events (WHATWG HTML, "Server-sent events": lines may end in LF or CRLF, an event ends
    with an empty line, `data` lines of one event are joined by LF; comments and other fields are left out)."""

    def __init__(self, max_bytes: int = 8 << 20) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._max_bytes = max_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """Raises ValueError if a line never ends."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > self._max_bytes:
            raise ValueError(f"a line of more than {self._max_bytes} bytes; this is no stream of events")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    text: str = ""
    has_token: bool = False  # it stands for at least one token, visible or not
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None  # so far, or in all: the server's count
    cached_tokens: int | None = None
    error: str = ""
    done: bool = False


def read_event(data: bytes) -> StreamEvent:
    """Reads an event of /v1/completions or /v1/chat/completions. Raises ValueError if it is no JSON object.

    An event with a text is a message of tokens, and so is one whose text is empty while the answer goes on (half a character, held
    back); a chat's first event, which only says the role, is not."""
    if data == _DONE:
        return StreamEvent(done=True)
    body: Any = json.loads(data)
    if not isinstance(body, dict):
        raise ValueError(f"an event with {data[:100]!r}; expected a JSON object")
    if body.get("error"):
        error = body["error"]
        return StreamEvent(error=str(error.get("message", error)) if isinstance(error, dict) else str(error))
    usage: Any = body.get("usage") or {}
    details: Any = usage.get("prompt_tokens_details") or {}
    counts = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": details.get("cached_tokens"),
    }
    choices: Any = body.get("choices")
    if not choices:
        return StreamEvent(**counts)
    choice = choices[0]
    finish = choice.get("finish_reason") or ""
    delta: Any = choice.get("delta")
    if delta is None:
        text = choice.get("text")
        said = text is not None
    else:
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        said = "role" not in delta and ("content" in delta or "reasoning_content" in delta or bool(delta.get("tool_calls")))
    return StreamEvent(text=text or "", has_token=bool(text) or (said and not finish), finish_reason=finish, **counts)
