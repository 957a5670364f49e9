"""One of the engine's answers, in the forms in which it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tritonclient.utils import triton_to_np_dtype

from deployment.openai.errors import ApiError

_KINDS = {name: np.dtype(triton_to_np_dtype(name)) for name in ("INT32", "UINT32", "INT64", "UINT64", "FP32", "FP16")}
Array = npt.NDArray[Any]


class Outputs(ABC):
    """An answer to one sequence."""

    @abstractmethod
    def read(self, name: str) -> Array | None:
        """Return a tensor with all tokens so far; None: the answer does not have it."""

    def new_tokens(self, start: int, end: int) -> list[int]:
        """Return the tokens that are there from one place of the sequence to another, the end left out.

        Args:
            start: behind the tokens of the answer before.
            end: where the sequence ends at the latest. FasterTransformer counts its lengths from the longest input of
                the batch that it has made of several requests.

        Raises:
            ApiError: the answer has no tokens.
        """
        ids, lengths = self.read("output_ids"), self.read("sequence_length")
        if ids is None or lengths is None:
            raise ApiError("the model's answer has no output_ids and sequence_length", status=500)
        found: list[int] = ids[0, 0, start : min(int(lengths.reshape(-1)[0]), end)].tolist()
        return found


class Reader(Protocol):
    """Takes the answers to one sequence as they come.

    Answers are handed over where they are read off the connection, without waking a task for each: under many streams
    that is a large part of what a token costs, and on the way of a first token a part of its delay.
    """

    def get_ready(self) -> None:
        """Do what can be done before the first answer, now that the request is sent; may be called again."""

    def take(self, answer: Outputs) -> bool:
        """Read an answer; returns whether the client is so far behind that the next one should wait for it."""

    async def catch_up(self) -> None:
        """Wait until the client is no more behind."""

    @property
    def has_enough(self) -> bool:
        """Whether the answers that are still to come are not wanted."""


class ResponseOutputs(Outputs):
    """Reads tensors of numbers where they lie in the message; an answer comes with each token."""

    def __init__(self, response: Any) -> None:
        self._found = dict(zip((each.name for each in response.outputs), response.outputs, strict=True))
        self._contents = dict(zip(self._found, response.raw_output_contents, strict=True))

    def read(self, name: str) -> Array | None:
        """Return a tensor; None: the answer does not have it."""
        if name not in self._found:
            return None
        tensor = self._found[name]
        return np.frombuffer(self._contents[name], _KINDS[tensor.datatype]).reshape(tuple(tensor.shape))


class ArrayOutputs(Outputs):
    """Tensors by name."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    def read(self, name: str) -> Array | None:
        """Return a tensor; None: the answer does not have it."""
        return self._arrays.get(name)


class TokenOutputs(Outputs):
    """Tokens alone, and only those that the answer before did not have."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def read(self, name: str) -> Array | None:
        """Return None: there is no tensor."""
        return None

    def new_tokens(self, start: int, end: int) -> list[int]:
        """Return the tokens, as many as there is room for."""
        return list(self._tokens[: end - start])
