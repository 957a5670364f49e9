"""A fake Triton server: real gRPC and Triton's own protocol, with a Python function in place of the model.

It stands at the outermost boundary of the clients; nothing of theirs is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

Tensors = dict[str, np.ndarray[Any, Any]]


class RefusalError(Exception):
    """What the fake model raises to make the server answer INVALID_ARGUMENT."""


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Serves one model on a free loopback port while the ``with`` block runs.

    Args:
        answer: inputs by name to outputs by name; runs for each request. A decoupled model's gives a list of them.
        inputs: names of the model's inputs, as its config says.
        parameters: of its config.
        passes_on: inputs of the model inside, for an ensemble.
        port: to listen on; 0: a free one.
    """

    def __init__(
        self,
        answer: Callable[[Tensors], Tensors | list[Tensors]],
        inputs: tuple[str, ...] = ("input_ids",),
        parameters: dict[str, str] | None = None,
        max_batch_size: int = 64,
        passes_on: tuple[str, ...] = (),
        port: int = 0,
    ) -> None:
        self.answer, self.inputs, self.parameters = answer, inputs, parameters or {}
        self.max_batch_size, self.passes_on = max_batch_size, passes_on
        self.requests: list[Tensors] = []
        self.sequences: list[dict[str, Any]] = []
        self.unavailable = 0
        self.patience_s: list[float] = []  # that clients have left when they ask for a configuration
        self.server = grpc.server(ThreadPoolExecutor(max_workers=4))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeTriton:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(None).wait()

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ModelReadyResponse(ready=True)

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.patience_s.append(context.time_remaining() or float("inf"))
        answer = pb.ModelConfigResponse()
        answer.config.name, answer.config.max_batch_size = request.name, self.max_batch_size
        for name in self.inputs:
            answer.config.input.add().name = name
        if self.passes_on:
            answer.config.ensemble_scheduling.step.add().input_map.update({name: name for name in self.passes_on})
        for name, value in self.parameters.items():
            answer.config.parameters[name].string_value = value
        return answer

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.unavailable:
            self.unavailable -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "the model is not ready")
        answers = self._answer(request, context)
        if len(answers) != 1:
            words = "ModelInfer RPC doesn't support models with decoupled transaction policy"
            context.abort(grpc.StatusCode.UNIMPLEMENTED, words)
        return answers[0]

    def ModelStreamInfer(self, requests: Any, context: Any) -> Any:  # noqa: N802
        for request in requests:
            try:
                answers = self._answer(request, context)
            except RefusalError as refusal:
                yield pb.ModelStreamInferResponse(error_message=str(refusal))
                continue
            for index, answer in enumerate(answers):
                answer.parameters["triton_final_response"].bool_param = index == len(answers) - 1
                yield pb.ModelStreamInferResponse(infer_response=answer)

    def _answer(self, request: Any, context: Any) -> list[Any]:
        tensors = {
            tensor.name: _read(tensor.datatype, raw).reshape(tuple(tensor.shape))
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        self.requests.append(tensors)
        self.sequences.append({key: _value(value) for key, value in request.parameters.items()})
        try:
            outputs = self.answer(tensors)
        except RefusalError as refusal:
            if "triton_enable_empty_final_response" in request.parameters:  # of a stream
                raise
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refusal))
        return [_response(request, each) for each in (outputs if isinstance(outputs, list) else [outputs])]


def _value(parameter: Any) -> Any:
    return getattr(parameter, parameter.WhichOneof("parameter_choice"))


def _response(request: Any, outputs: Tensors) -> Any:
    answer = pb.ModelInferResponse(model_name=request.model_name)
    for name, values in outputs.items():
        datatype, raw = _write(values)
        answer.outputs.add(name=name, datatype=datatype, shape=values.shape)
        answer.raw_output_contents.append(raw)
    return answer


def _read(datatype: str, raw: bytes) -> np.ndarray[Any, Any]:
    return deserialize_bytes_tensor(raw) if datatype == "BYTES" else np.frombuffer(raw, triton_to_np_dtype(datatype))


def _write(values: np.ndarray[Any, Any]) -> tuple[str, bytes]:
    names = {"float32": "FP32", "uint32": "UINT32", "int32": "INT32"}
    if values.dtype == np.object_:
        return "BYTES", serialize_byte_tensor(values).item()
    return names[values.dtype.name], values.tobytes()


def count_up(tensors: Tensors) -> Tensors:
    """A model whose next token is always the last plus one; each token has log probability -0.5."""
    ids, lengths, wanted = tensors["input_ids"], tensors["input_lengths"][:, 0], tensors["request_output_len"][:, 0]
    rows, width, longest = len(ids), ids.shape[1], int(wanted.max())
    output = np.full((rows, 1, width + longest), 0, np.uint32)
    for row, (length, count) in enumerate(zip(lengths, wanted, strict=True)):
        output[row, 0, :length] = ids[row, :length]
        output[row, 0, length : length + count] = ids[row, length - 1] + 1 + np.arange(count)
    outputs = {"output_ids": output, "sequence_length": (lengths + wanted)[:, None].astype(np.uint32)}
    if "is_return_log_probs" in tensors:
        context = (lengths - 1) if "is_return_context_cum_log_probs" in tensors else 0 * lengths
        outputs["cum_log_probs"] = (-0.5 * (wanted + context))[:, None].astype(np.float32)
        outputs["output_log_probs"] = np.full((rows, 1, longest), -0.5, np.float32)
    return outputs


T5_INPUTS = ("input_ids", "sequence_length", "max_output_len")


def count_up_t5(tensors: Tensors) -> Tensors:
    """An encoder-decoder that counts up from its input's last token; tensors as FasterTransformer's T5 has them."""
    ids, lengths, wanted = tensors["input_ids"], tensors["sequence_length"][:, 0], tensors["max_output_len"][:, 0]
    output = np.zeros((len(ids), 1, int(wanted.max())), np.int32)
    for row, (length, count) in enumerate(zip(lengths, wanted, strict=True)):
        output[row, 0, :count] = ids[row, length - 1] + 1 + np.arange(count)
    return {"output_ids": output, "sequence_length": wanted[:, None].astype(np.int32)}
