"""A typed client of FasterTransformer's Triton models, over gRPC.

``generate_ids`` speaks to ``fastertransformer`` (token ids in and out), ``generate_text`` to
``ensemble`` (text in and out); tensor names and shapes are those of FasterTransformer backend's GPT
guide. A client object belongs to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from handover.errors import ServerError

NEVER_END_ID = 2**31 - 1
"""An end_id that no vocabulary holds, so that every requested token is generated. It fits FT's int."""

_FIRST_PAUSE_S = 0.2
_PROBE_TIMEOUT_S = 5.0


class UnreachableError(ServerError):
    """No server answers at the address; every further request would fail the same way."""


class RequestError(ServerError):
    """The server is there, but this request was refused, failed or ran out of time."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the default is greedy.

    Attributes:
        top_k: number of candidates; 1 is greedy, 0 leaves the choice to top_p.
        top_p: probability mass of the candidates; 0 switches it off.
        temperature: divisor of the logits.
        repetition_penalty: 1 for none.
        random_seed: row i of a batch samples with ``random_seed + i``.
    """

    top_k: int = 1
    top_p: float = 0.0
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    random_seed: int = 0


@dataclass(frozen=True)
class IdsRequest:
    """A batch for a model that takes token ids, ready to be sent.

    Attributes:
        prompts: token ids, one sequence a row.
        output_lengths: tokens to generate for each row.
        inputs: the tensors of the request.
    """

    prompts: tuple[tuple[int, ...], ...]
    output_lengths: tuple[int, ...]
    inputs: tuple[triton.InferInput, ...]


@dataclass(frozen=True)
class Generation:
    """What was generated for one row.

    Attributes:
        tokens: generated token ids, the end token included where it came.
        cum_log_prob: sum of the natural log probabilities of the generated tokens and, if it was asked
            for, of the prompt's tokens but the first; None if not asked for.
        log_probs: of each generated token; None if not asked for.
    """

    tokens: tuple[int, ...]
    cum_log_prob: float | None = None
    log_probs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelInterface:
    """What a served model takes and how much of it.

    Attributes:
        inputs: names of its input tensors.
        max_batch_size: rows that one request may have.
        parameters: of its config.pbtxt, as text.
    """

    inputs: frozenset[str]
    max_batch_size: int
    parameters: dict[str, str]

    @property
    def takes_ids(self) -> bool:
        """Whether it speaks FasterTransformer's token id tensors."""
        return "input_ids" in self.inputs

    @property
    def takes_text(self) -> bool:
        """Whether it speaks the ensemble's text tensors."""
        return "INPUT_0" in self.inputs


class Client:
    """One connection to a Triton server.

    Args:
        url: ``host:port`` of its gRPC endpoint.
        timeout_s: limit of one request.
        retries: how often a request is sent again after an infrastructure error (the connection was
            refused or broke, or Triton said UNAVAILABLE); answers and time-outs are never retried.
    """

    def __init__(self, url: str, timeout_s: float = 600.0, retries: int = 3) -> None:
        self.url, self.timeout_s, self.retries = url, timeout_s, retries
        self._connection = triton.InferenceServerClient(url)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def is_live(self) -> bool:
        """Ask whether a server answers at all."""
        try:
            return bool(self._connection.is_server_live(client_timeout=_PROBE_TIMEOUT_S))
        except InferenceServerException:
            return False

    def describe(self, model: str) -> ModelInterface:
        """Read a model's inputs, batch limit and parameters from the server.

        Raises:
            UnreachableError: no server answers.
            RequestError: the server has no such model.
        """
        answer = self._call(self._connection.get_model_config, model, client_timeout=_PROBE_TIMEOUT_S)
        config = answer.config
        return ModelInterface(
            inputs=frozenset(tensor.name for tensor in config.input),
            max_batch_size=max(1, config.max_batch_size),
            parameters={name: value.string_value for name, value in config.parameters.items()},
        )

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        output_lengths: int | Sequence[int],
        *,
        model: str = "fastertransformer",
        sampling: Sampling | None = None,
        end_id: int | None = None,
        log_probs: bool = False,
        context_log_probs: bool = False,
    ) -> list[Generation]:
        """Generate from token ids; see ``prepare_ids`` for the arguments.

        Raises:
            UnreachableError: no server answers.
            RequestError: the request was refused, failed or ran out of time.
            ServerError: the answer does not continue the prompts.
        """
        request = prepare_ids(
            prompts,
            output_lengths,
            sampling=sampling,
            end_id=end_id,
            log_probs=log_probs,
            context_log_probs=context_log_probs,
        )
        return read_generations(request, self.send(model, request.inputs))

    def generate_text(
        self,
        prompts: Sequence[str],
        output_length: int,
        *,
        model: str = "ensemble",
        sampling: Sampling | None = None,
    ) -> list[str]:
        """Generate from texts; each answer is the prompt and what follows it.

        Raises:
            UnreachableError: no server answers.
            RequestError: the request was refused, failed or ran out of time.
            ServerError: the server answered a different number of texts.
        """
        rows = len(prompts)
        texts = np.array([[prompt.encode()] for prompt in prompts], dtype=np.object_)
        none = np.full((rows, 1), b"", dtype=np.object_)
        inputs = [
            _tensor("INPUT_0", texts),
            _tensor("INPUT_1", np.full((rows, 1), output_length, np.uint32)),
            _tensor("INPUT_2", none),
            _tensor("INPUT_3", none),
            *_sampling_tensors(sampling or Sampling(), rows),
        ]
        answer = self.send(model, inputs).as_numpy("OUTPUT_0")
        if answer is None or answer.size != rows:
            raise ServerError(
                f"model '{model}' answered {0 if answer is None else answer.size} texts to {rows} prompts"
            )
        return [text.decode(errors="replace") for text in answer.reshape(-1)]

    def send(self, model: str, inputs: Sequence[triton.InferInput]) -> triton.InferResult:
        """Send one request and wait for its answer.

        Raises:
            UnreachableError: no server answers.
            RequestError: the request was refused, failed or ran out of time.
        """
        return self._call(self._connection.infer, model, list(inputs), client_timeout=self.timeout_s)

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
                "start one with: python main.py stages=[deploy], or give --endpoint=<endpoint.json or host:port>",
            )
        return RequestError(f"model '{model}' at {self.url}: {error.message()}")


def prepare_ids(
    prompts: Sequence[Sequence[int]],
    output_lengths: int | Sequence[int],
    *,
    sampling: Sampling | None = None,
    end_id: int | None = None,
    log_probs: bool = False,
    context_log_probs: bool = False,
) -> IdsRequest:
    """Build the tensors of one batch.

    Args:
        prompts: token ids, at least one a row; shorter rows are padded with token 0, which is not read.
        output_lengths: tokens to generate, for all rows or for each.
        sampling: greedy if None.
        end_id: token that ends a row; None for the model's own, NEVER_END_ID for none.
        log_probs: ask for the generated tokens' log probabilities.
        context_log_probs: let cum_log_prob sum over the prompt's tokens too; implies log_probs.
    """
    rows = len(prompts)
    wanted = (output_lengths,) * rows if isinstance(output_lengths, int) else tuple(output_lengths)
    if not rows or len(wanted) != rows or not all(prompts):
        raise ValueError(f"{rows} prompts with {len(wanted)} output lengths; each prompt needs a token")
    ids = np.zeros((rows, max(map(len, prompts))), np.uint32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    inputs = [
        _tensor("input_ids", ids),
        _tensor("input_lengths", np.array([[len(prompt)] for prompt in prompts], np.uint32)),
        _tensor("request_output_len", np.array([[length] for length in wanted], np.uint32)),
        *_sampling_tensors(sampling or Sampling(), rows),
    ]
    if end_id is not None:
        inputs.append(_tensor("end_id", np.full((rows, 1), end_id, np.uint32)))
    if log_probs or context_log_probs:
        inputs.append(_tensor("is_return_log_probs", np.ones((rows, 1), np.bool_)))
    if context_log_probs:
        inputs.append(_tensor("is_return_context_cum_log_probs", np.ones((rows, 1), np.bool_)))
    return IdsRequest(tuple(map(tuple, prompts)), wanted, tuple(inputs))


def read_generations(request: IdsRequest, answer: triton.InferResult) -> list[Generation]:
    """Take the generated part out of an answer, and prove that the answer continues the prompts.

    ``output_ids`` is [rows, beams, longest input + longest output] and ``sequence_length`` [rows, beams];
    generated tokens follow directly after each row's own input. The first beam is read. Our engine counts
    ``sequence_length`` from a row's own input, FasterTransformer from the longest input of the batch; both
    are understood.

    Raises:
        ServerError: a tensor is missing or misshapen, or a row does not begin with its prompt.
    """
    ids, lengths = answer.as_numpy("output_ids"), answer.as_numpy("sequence_length")
    rows = len(request.prompts)
    if ids is None or lengths is None or ids.ndim != 3 or ids.shape[0] != rows or lengths.shape[:1] != (rows,):
        raise ServerError(f"the answer to {rows} prompts has no fitting output_ids and sequence_length")
    cum_log_probs, log_probs = answer.as_numpy("cum_log_probs"), answer.as_numpy("output_log_probs")
    generations = []
    longest = max(map(len, request.prompts))
    for row, (prompt, wanted) in enumerate(zip(request.prompts, request.output_lengths, strict=True)):
        length = int(lengths[row].reshape(-1)[0])
        count = wanted if length - longest == wanted else length - len(prompt)
        sequence = tuple(int(token) for token in ids[row, 0, : len(prompt) + count])
        if sequence[: len(prompt)] != prompt or not 0 <= count <= wanted:
            raise ServerError(f"row {row} of the answer does not continue its prompt of {len(prompt)} tokens")
        tokens = sequence[len(prompt) :]
        generations.append(
            Generation(
                tokens,
                None if cum_log_probs is None else float(cum_log_probs[row].reshape(-1)[0]),
                None if log_probs is None else tuple(float(value) for value in log_probs[row, 0, : len(tokens)]),
            )
        )
    return generations


def _sampling_tensors(sampling: Sampling, rows: int) -> list[triton.InferInput]:
    def full(name: str, value: float, dtype: npt.DTypeLike) -> triton.InferInput:
        return _tensor(name, np.full((rows, 1), value, dtype))

    seeds = sampling.random_seed + np.arange(rows, dtype=np.uint64).reshape(rows, 1)
    return [
        full("runtime_top_k", sampling.top_k, np.uint32),
        full("runtime_top_p", sampling.top_p, np.float32),
        full("temperature", sampling.temperature, np.float32),
        full("repetition_penalty", sampling.repetition_penalty, np.float32),
        _tensor("random_seed", seeds.astype(np.uint64)),
    ]


def _tensor(name: str, values: npt.NDArray[Any]) -> triton.InferInput:
    tensor = triton.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    tensor.set_data_from_numpy(values)
    return tensor


def _is_infrastructure(error: InferenceServerException) -> bool:
    return "UNAVAILABLE" in str(error.status())
