"""Twostep: language models served in two steps, prefill and decode, behind one router.

What a program that asks for text needs is here; it is loaded on first use, so that a worker, which imports this package for its
other parts, never loads the client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twostep.client import (
        AsyncClient,
        AsyncGeneration,
        ChatOptions,
        Choice,
        Client,
        ClusterStatus,
        Completion,
        Embeddings,
        EmbedOptions,
        Generation,
        Message,
        Model,
        Phases,
        Piece,
        RefusedWorker,
        RequestOptions,
        RouterState,
        SamplingOptions,
        TokenLogprobs,
        Tokens,
        ToolCall,
        ToolCallDelta,
        TopLogprob,
        Transfer,
        Usage,
        WorkerStatus,
    )
    from twostep.errors import (
        AnswerCutOff,
        Cancelled,
        ContextExceeded,
        DataLoss,
        DeadlineExceeded,
        Incompatible,
        InternalError,
        InvalidRequest,
        NonFiniteLogits,
        NotFound,
        PermissionDenied,
        ResourceExhausted,
        SetupError,
        StreamBroken,
        TwostepError,
        Unauthenticated,
        Unavailable,
    )

__version__ = "0.1.0"

__all__ = [
    "AnswerCutOff",
    "AsyncClient",
    "AsyncGeneration",
    "Cancelled",
    "ChatOptions",
    "Choice",
    "Client",
    "ClusterStatus",
    "Completion",
    "ContextExceeded",
    "DataLoss",
    "DeadlineExceeded",
    "EmbedOptions",
    "Embeddings",
    "Generation",
    "Incompatible",
    "InternalError",
    "InvalidRequest",
    "Message",
    "Model",
    "NonFiniteLogits",
    "NotFound",
    "PermissionDenied",
    "Phases",
    "Piece",
    "RefusedWorker",
    "RequestOptions",
    "ResourceExhausted",
    "RouterState",
    "SamplingOptions",
    "SetupError",
    "StreamBroken",
    "TokenLogprobs",
    "Tokens",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "Transfer",
    "TwostepError",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "WorkerStatus",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'twostep' has no attribute {name!r}")
    module = importlib.import_module("twostep.errors")
    if not hasattr(module, name):
        module = importlib.import_module("twostep.client")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
