"""A typed client of FasterTransformer's Triton models, over gRPC.

``generate`` sends token ids to ``fastertransformer``, ``generate_text`` sends texts to ``ensemble``; tensor names and
shapes are those of FasterTransformer backend's GPT guide. A client object belongs to one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from evaluation.client.answer_tensors import Generation, read_completions, read_generations
from evaluation.client.errors import RequestError, UnreachableError
from evaluation.client.interface import Interface
from evaluation.client.request_tensors import IdsRequest, Sampling, adapter_input, prepare_texts
from evaluation.client.streaming import Turn, stream
from handover.errors import ServerError
from handover.provenance import PROGRAM

_FIRST_PAUSE_S = 0.2
_T5_INPUT = "max_output_len"
SCORES_INPUT, DECODER_INPUT = "is_return_context_log_probs", "decoder_input_ids"
_PATIENCE_S = 60.0
"""Limit of requests for metadata. It is long, because a busy host or a paused server is still alive; a server that has
exited refuses the connection, which the client notices at once."""
_DECOUPLED = "decoupled transaction policy"
"""Part of Triton's error for a unary request to a model that may send several answers."""


@dataclass(frozen=True, kw_only=True)
class ModelInterface(Interface):
    """The inputs of a served model and the limits of its requests.

    Attributes:
        inputs: names of its input tensors: those of FasterTransformer's token ids, or of its ensemble's texts.
        steps: names of the models of an ensemble.
    """

    inputs: frozenset[str]
    steps: tuple[str, ...] = ()

    @property
    def can_score(self) -> bool:
        """Whether the model has the inputs that request scores; FasterTransformer may have them and ignore them."""
        needed = {SCORES_INPUT, DECODER_INPUT} if self.is_encoder_decoder else {SCORES_INPUT}
        return needed <= self.inputs


class Client:
    """One connection to a Triton server.

    Args:
        url: ``host:port`` of its gRPC endpoint.
        timeout_s: limit of one request in seconds.
        retries: how often a request is sent again after an infrastructure error (the connection was
            refused or broke, or Triton answered UNAVAILABLE); model errors and timeouts are never retried.
        lora_name: the LoRA adapter that answers every request; empty: none.

    Every request raises UnreachableError where no server answers, and RequestError where it was refused, failed or
    exceeded the time limit.
    """

    def __init__(self, url: str, timeout_s: float = 600.0, retries: int = 3, lora_name: str = "") -> None:
        self.url, self.timeout_s, self.retries, self._lora_name = url, timeout_s, retries, lora_name
        self._connection = triton.InferenceServerClient(url)
        self._decoupled: set[str] = set()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def is_live(self) -> bool:
        """Return whether a server answers."""
        try:
            return bool(self._connection.is_server_live(client_timeout=_PATIENCE_S))
        except InferenceServerException:
            return False

    def describe(self, model: str) -> ModelInterface:
        """Read a model's inputs, batch limit and parameters from the server.

        Raises:
            UnreachableError: no server answers.
            RequestError: the server has no such model.
        """
        answer = self._call(self._connection.get_model_config, model, client_timeout=_PATIENCE_S)
        config = answer.config
        inputs = frozenset(tensor.name for tensor in config.input)
        batcher = config.dynamic_batching if config.HasField("dynamic_batching") else None
        passed_on = (name for step in config.ensemble_scheduling.step for name in step.input_map)
        return ModelInterface(
            inputs=inputs,
            takes_ids="input_ids" in inputs,
            takes_text="INPUT_0" in inputs,
            max_batch_size=max(1, config.max_batch_size),
            parameters={name: value.string_value for name, value in config.parameters.items()},
            has_sessions="session_len" in inputs,
            is_encoder_decoder=_T5_INPUT in {*inputs, *passed_on},
            steps=tuple(step.model_name for step in config.ensemble_scheduling.step),
            is_decoupled=bool(config.model_transaction_policy.decoupled),
            max_queue_delay_us=None if batcher is None else batcher.max_queue_delay_microseconds,
        )

    def generate(self, request: IdsRequest, model: str = "fastertransformer") -> list[Generation]:
        """Generate from token ids; ``prepare_ids`` builds the request.

        Raises:
            ServerError: the answer does not continue the prompts.
        """
        return read_generations(request, self.send(model, request.inputs))

    def generate_text(
        self, prompts: Sequence[str], output_length: int, *, model: str = "ensemble", sampling: Sampling | None = None
    ) -> list[str]:
        """Generate from texts; each answer is the prompt with its completion, or the completion of an encoder-decoder.

        Raises:
            ServerError: the server answered a different number of texts.
        """
        answer = self.send(model, prepare_texts(prompts, output_length, sampling))
        return [completion.text for completion in read_completions(len(prompts), answer)]

    def send(self, model: str, inputs: Sequence[triton.InferInput]) -> triton.InferResult:
        """Send one request and return its answer; of a decoupled model, the last of its answers."""
        if self._lora_name:
            inputs = [*inputs, adapter_input(self._lora_name, inputs[0].shape()[0])]
        if model not in self._decoupled:
            try:
                return self._call(self._connection.infer, model, list(inputs), client_timeout=self.timeout_s)
            except RequestError as error:
                if _DECOUPLED not in error.problem:
                    raise
            self._decoupled.add(model)
        answers = deque(self.stream(model, inputs), maxlen=1)
        if not answers:
            raise RequestError(f"model '{model}' at {self.url} gave no tensors")
        return answers.pop()

    def stream(
        self, model: str, inputs: Sequence[triton.InferInput], turn: Turn | None = None
    ) -> Iterator[triton.InferResult]:
        """Send one request and yield its answers as they arrive; see ``evaluation.client.streaming``."""
        try:
            yield from stream(self._connection, model, inputs, self.timeout_s, turn)
        except InferenceServerException as error:
            raise self._explain(error, model, self.timeout_s) from error

    def _call(self, function: Any, *args: Any, client_timeout: float) -> Any:
        pause_s = _FIRST_PAUSE_S
        for attempts_left in range(self.retries, -1, -1):
            try:
                return function(*args, client_timeout=client_timeout)
            except InferenceServerException as error:
                if not _is_infrastructure(error) or attempts_left == 0:
                    raise self._explain(error, args[0], client_timeout) from error
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _explain(self, error: InferenceServerException, model: str, timeout_s: float) -> ServerError:
        if "DEADLINE_EXCEEDED" in str(error.status()):
            return RequestError(f"model '{model}' at {self.url} gave no answer within {timeout_s:g} s")
        if _is_infrastructure(error) and not self.is_live():
            return UnreachableError(
                f"no server answers at {self.url}: {error.message()}",
                f"start one with: {PROGRAM} stages=[deploy], or give --endpoint=<endpoint.json or host:port>",
            )
        reason = error.message().removeprefix("[request id: <id_unknown>] ")
        return RequestError(f"model '{model}' at {self.url}: {reason}")


def _is_infrastructure(error: InferenceServerException) -> bool:
    return "UNAVAILABLE" in str(error.status())
