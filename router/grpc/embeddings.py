"""Several inputs of one Embed call, each a request of router.serving.inference."""

from __future__ import annotations

from collections.abc import Sequence

from router.prompting.prompt import Prompt, ReadPrompt
from router.request.vector import floats_of
from router.serving.answers import ask_all, choice_name
from router.serving.inference import Asker, Embedded, Inference
from twostep.errors import InvalidRequest
from twostep.rpc.v1 import inference_pb2 as pb

# As many as OpenAI's API takes.
MAX_INPUTS = 2048
# Of one answer, which is one message.
_MAX_BYTES = 12 << 20
_FLOAT_BYTES = 4


async def embed_all(inference: Inference, request: pb.EmbedRequest, asker: Asker, name: str) -> pb.EmbedResponse:
    """`name`: the request's. Raises TwostepError; the first input that fails ends all of them."""
    if not request.inputs:
        raise InvalidRequest("inputs is empty; send at least one")
    if len(request.inputs) > MAX_INPUTS:
        raise InvalidRequest(f"inputs has {len(request.inputs)}; send at most {MAX_INPUTS} at a time")
    most = inference.max_input_len
    cut_to = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    if cut_to is not None and cut_to != -1 and not 1 <= cut_to <= most:
        raise InvalidRequest(f"truncate_prompt_tokens is {cut_to}; give 1 to {most}, or -1 for the latter")
    params = inference.pooling(
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        normalize=request.normalize if request.HasField("normalize") else None,
    )
    width = params.dimensions or inference.embedding.width
    if len(request.inputs) * width * _FLOAT_BYTES > _MAX_BYTES:
        raise InvalidRequest(
            f"inputs has {len(request.inputs)}, whose vectors of {width} numbers do not fit one answer; send at most "
            f"{_MAX_BYTES // (width * _FLOAT_BYTES)} at a time"
        )
    found: list[Embedded | None] = [None] * len(request.inputs)

    async def read(index: int) -> Prompt:
        given = request.inputs[index]
        match given.WhichOneof("input"):
            case "text":
                value: str | Sequence[int] = given.text
            case "token_ids":
                value = given.token_ids.ids
            case _:
                raise InvalidRequest(f"inputs[{index}] is missing; set text or token_ids")
        most_kept = most if cut_to == -1 else cut_to
        return await inference.prompts.embedding_input(value, asker.identity.share, most=most, cut_to=most_kept)

    async def ask(index: int, prompt: ReadPrompt) -> None:
        own = pb.GenerateRequest(
            model=request.model,
            request_id=choice_name(name, index),
            cache_salt=request.cache_salt,
            request_class=request.request_class,
            ttft_ms=request.ttft_ms if request.HasField("ttft_ms") else None,
            tenant=request.tenant,
        )
        found[index] = await inference.embed(own, asker, prompt, params)

    await ask_all(len(found), ask, read)
    vectors = [each for each in found if each is not None]
    usage = pb.Usage(
        prompt_tokens=sum(each.num_prompt_tokens for each in vectors), cached_tokens=sum(each.num_cached_tokens for each in vectors)
    )
    return pb.EmbedResponse(embeddings=[pb.Embedding(values=floats_of(each.values)) for each in vectors], usage=usage)
