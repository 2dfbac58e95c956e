"""The deployment as this router sees it, over gRPC."""

from __future__ import annotations

from typing import Any

import grpc.aio

from router.status.board import StatusBoard
from twostep.rpc.v1 import status_pb2, status_pb2_grpc


class StatusService(status_pb2_grpc.StatusServicer):
    def __init__(self, board: StatusBoard) -> None:
        self._board = board

    async def GetStatus(self, request: status_pb2.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> status_pb2.ClusterStatus:
        return self._board.status()
