"""The tensors of one of the engine's answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.utils import triton_to_np_dtype

_KINDS = {name: np.dtype(triton_to_np_dtype(name)) for name in ("INT32", "UINT32", "INT64", "UINT64", "FP32", "FP16")}


class Outputs:
    """Reads tensors of numbers where they lie in the message; an answer comes with each token.

    Args:
        response: a ModelInferResponse.
    """

    def __init__(self, response: Any) -> None:
        self._found = dict(zip((each.name for each in response.outputs), response.outputs, strict=True))
        self._contents = dict(zip(self._found, response.raw_output_contents, strict=True))

    def read(self, name: str) -> npt.NDArray[Any] | None:
        """Return a tensor; None: the answer does not have it."""
        if name not in self._found:
            return None
        tensor = self._found[name]
        return np.frombuffer(self._contents[name], _KINDS[tensor.datatype]).reshape(tuple(tensor.shape))
