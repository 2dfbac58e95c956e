"""Items of /v1/responses and messages of a chat, either from the other.

Each item is a fragment: a message of a chat with one thing in it. `joined` makes one message of what an assistant thinks, says and calls in
turn. An `item_reference` is a fragment without a role; the item that it refers to takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from router.http.body import Body
from router.http.errors import HttpError
from router.http.offered_tools import flat_name
from router.http.request_bodies import MAX_PARTS
from twostep.rpc.v1 import inference_pb2 as pb


class ItemContentPart(Body):
    type: str = Field(max_length=64)
    """`input_text`, `output_text`, `refusal`, `reasoning_text` or `summary_text`; others are refused: models here read text."""
    text: str | None = None
    refusal: str | None = None


ContentParts = Annotated[list[ItemContentPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class Item(Body):
    """One of the conversation so far: a message, a call of a tool, its output, reasoning that an answer had, or a reference to one of
    these."""

    type: str | None = Field(default=None, max_length=64)
    """Left out or null: a message, or a reference where there is an `id` and nothing else."""
    id: str | None = Field(default=None, max_length=256)
    role: str = Field(default="", max_length=64)
    content: str | ContentParts | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    output: str | ContentParts | None = None
    summary: ContentParts | None = None

    @property
    def kind(self) -> str:
        if self.type is None:
            return "item_reference" if self.id and not self.role and self.content is None else "message"
        return self.type


def fragments(given: str | list[Item]) -> Iterator[pb.ChatMessage]:
    """Yields one for each item. Raises HttpError 400."""
    if isinstance(given, str):
        yield pb.ChatMessage(role="user", content=given)
        return
    for i, item in enumerate(given):
        path = f"input[{i}]"
        match item.kind:
            case "message" if item.role:
                yield pb.ChatMessage(role=item.role, content=_text(f"{path}.content", item.content))
            case "message":
                raise HttpError(400, f'{path}.role is missing; say "user", "assistant", "system" or "developer"', param=f"{path}.role")
            case "function_call_output":
                yield pb.ChatMessage(role="tool", content=_text(f"{path}.output", item.output), tool_call_id=item.call_id)
            case "reasoning":
                text = _text(f"{path}.content", item.content) or _text(f"{path}.summary", item.summary)
                yield pb.ChatMessage(role="assistant", reasoning=text)
            case "function_call" if item.name:
                call = pb.ToolCall(id=item.call_id, name=flat_name(item.namespace or "", item.name), arguments=item.arguments)
                yield pb.ChatMessage(role="assistant", tool_calls=[call])
            case "function_call":
                raise HttpError(400, f"{path}.name is missing; say which function was called", param=f"{path}.name")
            case "item_reference" if item.id:
                yield pb.ChatMessage(tool_call_id=item.id)
            case "item_reference":
                raise HttpError(400, f"{path}.id is missing; say which item is meant", param=f"{path}.id")
            case kind:
                message = f"{path} is of type {kind!r}; send messages, function_call, function_call_output, reasoning and item_reference"
                raise HttpError(400, f"{message}: models here read text", param=f"{path}.type", code="unsupported_parameter")


def reference_of(fragment: pb.ChatMessage) -> str | None:
    """Returns the id of the item that the fragment refers to."""
    return fragment.tool_call_id if not fragment.role else None


def joined(parts: Iterable[pb.ChatMessage]) -> list[pb.ChatMessage]:
    """Returns the messages of a chat that the fragments are of, and changes those."""
    messages: list[pb.ChatMessage] = []
    turn: pb.ChatMessage | None = None  # the assistant's, where it goes on
    for part in parts:
        if part.role != "assistant":
            turn = None
        elif turn is not None and not _begins_anew(turn, part):
            turn.content += part.content
            turn.reasoning += part.reasoning
            turn.tool_calls.extend(part.tool_calls)
            continue
        else:
            turn = part
        messages.append(part)
    return messages


def _begins_anew(turn: pb.ChatMessage, part: pb.ChatMessage) -> bool:
    return not part.tool_calls and bool(turn.content or turn.tool_calls or (part.reasoning and turn.reasoning))


def item_of(fragment: pb.ChatMessage, name: str) -> dict[str, Any]:
    """Returns the item that a fragment was made of, but for how its text was divided. `name`: its id after the kind's prefix."""
    if fragment.role == "tool":
        return {"type": "function_call_output", "id": f"fco_{name}", "call_id": fragment.tool_call_id, "output": fragment.content} | _DONE
    if fragment.tool_calls:
        call = fragment.tool_calls[0]
        fields = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        return {"type": "function_call", "id": f"fc_{name}", **fields} | _DONE
    if fragment.reasoning:
        content = [{"type": "reasoning_text", "text": fragment.reasoning}]
        return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content} | _DONE
    part: dict[str, Any] = {"type": "input_text", "text": fragment.content}
    if fragment.role == "assistant":
        part = {"type": "output_text", "text": fragment.content, "annotations": []}
    return {"type": "message", "id": f"msg_{name}", "role": fragment.role, "content": [part]} | _DONE


_DONE = {"status": "completed"}
_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _text(path: str, content: str | Sequence[ItemContentPart] | None) -> str:
    """Parts are lines, as in chats."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text if part.type in _PARTS else None
        if text is None:
            message = f'{path}[{i}] is of type {part.type!r}; models here read text: send {{"type": "input_text", "text": ...}}'
            raise HttpError(400, message, param=f"{path}[{i}].type", code="unsupported_parameter")
        texts.append(text)
    return "\n".join(texts)
