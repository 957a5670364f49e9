"""The fake Triton server with a decoupled model: an answer for each token, each after a fixed delay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from support.servers.fake_triton import FakeTriton

DELAY_S = 0.01


class StreamingTriton(FakeTriton):
    """Streams what its function answers, a token every ``DELAY_S``."""

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = super().ModelConfig(request, context)
        answer.config.model_transaction_policy.decoupled = True
        return answer

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        for request in requests:
            lengths = np.frombuffer(request.raw_input_contents[1], np.uint32)
            whole = self.ModelInfer(request, context)
            total = int(np.frombuffer(whole.raw_output_contents[1], np.uint32)[0])
            for length in range(int(lengths[0]) + 1, total + 1):
                time.sleep(DELAY_S)
                chunk = pb.ModelInferResponse()
                chunk.CopyFrom(whole)
                chunk.raw_output_contents[1] = np.array([length], np.uint32).tobytes()
                yield pb.ModelStreamInferResponse(infer_response=chunk)
            yield pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse())
