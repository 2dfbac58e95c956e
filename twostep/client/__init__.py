"""The client SDK: blocking and asyncio. Needs grpcio and protobuf only."""

from twostep.client._async import AsyncClient, AsyncGeneration
from twostep.client._status import ClusterStatus, Percentiles, RefusedWorker, RouterLoad, WorkerStatus
from twostep.client._sync import Client, Generation
from twostep.client._types import (
    ChatOptions,
    Completion,
    FinishReason,
    Message,
    Model,
    Phases,
    Piece,
    RequestClass,
    RequestOptions,
    RouterState,
    SamplingOptions,
    TokenLogprobs,
    Tokens,
    ToolCall,
    TopLogprob,
    Transfer,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "ChatOptions",
    "Client",
    "ClusterStatus",
    "Completion",
    "FinishReason",
    "Generation",
    "Message",
    "Model",
    "Percentiles",
    "Phases",
    "Piece",
    "RefusedWorker",
    "RequestClass",
    "RequestOptions",
    "RouterLoad",
    "RouterState",
    "SamplingOptions",
    "TokenLogprobs",
    "Tokens",
    "ToolCall",
    "TopLogprob",
    "Transfer",
    "Usage",
    "WorkerStatus",
]
