"""Several answers to one Generate request, each with its index, in one stream."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence

from router.prompting.prompt import Prompt, ReadPrompt
from router.serving.answers import MAX_CHOICES, ask_all, choice_name, choice_seed
from router.serving.inference import Caller, Inference, request_id_of
from twostep.errors import InvalidRequest
from twostep.rpc.v1 import inference_pb2 as pb


class AnswerCaller:
    """One answer's share of a call. See router.serving.inference.Caller."""

    def __init__(self, caller: Caller, write: Callable[[pb.GenerateResponse], Awaitable[None]], *, repeated: bool) -> None:
        """`repeated`: a further answer to the prompt."""
        self.received, self.metadata, self.remaining_s = caller.received, caller.metadata, caller.remaining_s
        self.identity = caller.identity.again() if repeated else caller.identity
        self.write = write

    def accepted(self, prompt: Sequence[int]) -> None:
        """Does nothing: the end's usage says how many there are."""

    async def write_prompt(self, part: pb.PromptLogprobs) -> None:
        await self.write(pb.GenerateResponse(prompt_logprobs=part))

    async def begin(self, request_id: str, seed: int) -> None:
        """Notes that the call has begun, with the request's own name and seed."""


async def answer_several(
    inference: Inference, request: pb.GenerateRequest, caller: Caller, read_prompt: Callable[[], Awaitable[Prompt]]
) -> None:
    """Writes pieces and ends. Raises TwostepError; the first answer that fails ends all."""
    indices = _asked_for(request)
    begun = {answer.index: answer.token_ids for answer in request.begun_answers}
    name = request_id_of(request.request_id)
    seed = request.sampling.seed if request.sampling.HasField("seed") else secrets.randbits(63)
    await caller.begin(name, seed)
    # All that the answers have in common but the prompt, of which its kind is left.
    common = pb.GenerateRequest()
    common.CopyFrom(request)
    for field in ("n", "begun_answers", "text", "token_ids", "chat"):
        common.ClearField(field)
    match request.WhichOneof("prompt"):
        case "text":
            common.text = ""
        case "token_ids":
            common.token_ids.SetInParent()
        case "chat":
            common.chat.SetInParent()
    # gRPC sends one message of a call at a time.
    turn = asyncio.Lock()

    async def ask(at: int, prompt: ReadPrompt) -> None:
        index = indices[at]
        own = pb.GenerateRequest()
        own.CopyFrom(common)
        own.request_id, own.sampling.seed = choice_name(name, index), choice_seed(seed, index)
        own.resume_token_ids.extend(begun.get(index, ()))
        if index:
            own.sampling.ClearField("prompt_logprobs")  # the first answer has them, once for all

        async def write(response: pb.GenerateResponse) -> None:
            response.index = index
            async with turn:
                await caller.write(response)

        end = await inference.generate(own, AnswerCaller(caller, write, repeated=at > 0), prompt)
        await write(pb.GenerateResponse(end=end))

    await ask_all(len(indices), ask, lambda _: read_prompt(), num_each=len(indices))


def _asked_for(request: pb.GenerateRequest) -> Sequence[int]:
    """Returns the indices of the answers that are wanted. Raises InvalidRequest."""
    n = request.n or 1
    if n > MAX_CHOICES:
        raise InvalidRequest(f"n is {n}; ask for at most {MAX_CHOICES} answers at a time")
    if request.resume_token_ids:
        raise InvalidRequest("resume_token_ids is of one answer, and n asks for several; ask for the rest of each by itself")
    if not request.begun_answers:
        return range(n)
    # Not looked at, where there are millions.
    indices = [answer.index for answer in request.begun_answers[: n + 1]]
    if len(set(indices)) < len(indices) or max(indices) >= n:
        raise InvalidRequest(f"begun_answers names an answer twice, or one that there is not; give each index from 0 to {n - 1} once")
    return indices
