"""The client SDK: blocking and asyncio. Needs grpcio and protobuf only."""

from twostep.client._async import AsyncClient, AsyncGeneration
from twostep.client._sync import Client, Generation
from twostep.client._types import (
    Completion,
    FinishReason,
    Message,
    Model,
    Phases,
    Piece,
    RequestClass,
    SamplingOptions,
    TokenLogprobs,
    Tokens,
    TopLogprob,
    Transfer,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "Client",
    "Completion",
    "FinishReason",
    "Generation",
    "Message",
    "Model",
    "Phases",
    "Piece",
    "RequestClass",
    "SamplingOptions",
    "TokenLogprobs",
    "Tokens",
    "TopLogprob",
    "Transfer",
    "Usage",
]
