"""Requests to Triton over asynchronous gRPC, with a time stamp for each answer.

Requests are encoded before the load starts, and answers are decoded after their time stamp, so that the measured times
contain little more than gRPC and the server. The message types are tritonclient's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as messages

from evaluation.client.request_tensors import prepare_ids, prepare_texts
from evaluation.speed.prompts.workload import LoadPrompt
from evaluation.speed.tables.record import RequestRecord
from ft_format.tensors import NO_TOKEN
from handover.errors import ServerError

_SERVICE = "/inference.GRPCInferenceService/"
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True)
class Encoded:
    """An encoded request, which can be sent any number of times.

    Attributes:
        payload: the serialised ModelInferRequest.
        prompt: the prompt and the number of tokens to generate.
        is_encoder_decoder: whether the model is an encoder-decoder, whose answer does not repeat the prompt.
        is_text: whether request and answer contain texts.
        follow_up: the next request of the same conversation, which is sent after the answer; None for the last.
    """

    payload: bytes
    prompt: LoadPrompt
    is_encoder_decoder: bool = False
    is_text: bool = False
    follow_up: Encoded | None = None


def encode(model: str, prompt: LoadPrompt, is_encoder_decoder: bool = False, is_text: bool = False) -> Encoded:
    """Encode a request for greedy decoding without an end token, so that every requested token is generated."""
    request = messages.ModelInferRequest(model_name=model)
    if is_text:
        inputs = prepare_texts([prompt.text], prompt.output_length, end_id=NO_TOKEN)
    else:
        inputs = prepare_ids(
            [prompt.ids], prompt.output_length, end_id=NO_TOKEN, is_encoder_decoder=is_encoder_decoder
        ).inputs
    for tensor in inputs:
        request.inputs.append(tensor._get_tensor())
        request.raw_input_contents.append(tensor._get_content())
    for name in ("OUTPUT_0" if is_text else "output_ids", "sequence_length"):
        request.outputs.add(name=name)
    return Encoded(request.SerializeToString(), prompt, is_encoder_decoder, is_text)


class Wire:
    """One asynchronous connection to a Triton server.

    Args:
        url: ``host:port`` of its gRPC endpoint.
        timeout_s: limit of one request.
        is_streaming: whether to use ModelStreamInfer, with one stream for each request.
    """

    def __init__(self, url: str, timeout_s: float, is_streaming: bool) -> None:
        self.timeout_s, self.is_streaming = timeout_s, is_streaming
        self._channel = grpc.aio.insecure_channel(url, options=_OPTIONS)
        # Without serialisers gRPC passes bytes through.
        self._infer: Any = self._channel.unary_unary(f"{_SERVICE}ModelInfer")
        self._stream: Any = self._channel.stream_stream(f"{_SERVICE}ModelStreamInfer")

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def ask(self, request: Encoded, scheduled_ns: int) -> RequestRecord:
        """Send one request, wait for its last token, and check the answer; a failure is a record too."""
        answers: list[tuple[int, bytes]] = []
        sent_ns = time.perf_counter_ns()
        try:
            if self.is_streaming:
                call = self._stream(timeout=self.timeout_s)
                await call.write(request.payload)
                await call.done_writing()
                async for raw in call:
                    answers.append((time.perf_counter_ns(), raw))
                    if request.prompt.cancel_after and _has_enough(request, raw):
                        call.cancel()
                        break
            else:
                raw = await self._infer(request.payload, timeout=self.timeout_s)
                answers.append((time.perf_counter_ns(), raw))
            return _record(request, scheduled_ns, sent_ns, answers, self.is_streaming)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except ServerError as error:
            reason = error.problem
        failed_ns = time.perf_counter_ns()
        return RequestRecord(scheduled_ns, sent_ns, failed_ns, len(request.prompt.ids), error=reason)


def _has_enough(request: Encoded, raw: bytes) -> bool:
    """Whether a streamed answer has come so far that the client hangs up."""
    answer = _unwrap(raw)
    if not answer.outputs:
        return False
    return request.prompt.cancel_after <= _generated(answer, request) < request.prompt.output_length


def _record(
    request: Encoded, scheduled_ns: int, sent_ns: int, answers: list[tuple[int, bytes]], is_streamed: bool
) -> RequestRecord:
    prompt, generated = request.prompt, 0
    times, tokens = [], []
    for arrived_ns, raw in answers:
        answer = _unwrap(raw) if is_streamed else messages.ModelInferResponse.FromString(raw)
        if not answer.outputs:
            continue  # the empty answer that ends a decoupled request
        total = _generated(answer, request)
        if total > generated:
            times.append(arrived_ns)
            tokens.append(total - generated)
            generated = total
    is_cancelled = 0 < prompt.cancel_after <= generated < prompt.output_length
    if generated != prompt.output_length and not is_cancelled:
        raise ServerError(f"{generated} tokens were generated instead of {prompt.output_length}")
    return RequestRecord(
        scheduled_ns,
        sent_ns,
        times[-1],
        len(prompt.ids),
        tuple(times),
        tuple(tokens),
        is_streamed=is_streamed,
        is_cancelled=is_cancelled,
    )


def _unwrap(raw: bytes) -> Any:
    answer = messages.ModelStreamInferResponse.FromString(raw)
    if answer.error_message:
        raise ServerError(str(answer.error_message))
    return answer.infer_response


def _generated(answer: Any, request: Encoded) -> int:
    """Count the tokens generated so far, and check that the answer continues the prompt.

    ``sequence_length`` counts prompt and generated tokens, ``output_ids`` or ``OUTPUT_0`` begins with the prompt; an
    encoder-decoder gives the generated tokens alone.
    """
    contents = {tensor.name: raw for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)}
    name = "OUTPUT_0" if request.is_text else "output_ids"
    if not {name, "sequence_length"} <= contents.keys():
        raise ServerError(f"an answer has no {name} and sequence_length")
    shown = () if request.is_encoder_decoder else request.prompt.ids
    # The bytes of a text follow the four bytes of its length.
    given = request.prompt.text.encode() if request.is_text else np.asarray(shown, np.uint32).tobytes()
    if shown and not contents[name][4 if request.is_text else 0 :].startswith(given):
        raise ServerError(f"an answer does not continue its prompt of {len(shown)} tokens")
    return int(np.frombuffer(contents["sequence_length"][:4], np.uint32)[0]) - len(shown)
