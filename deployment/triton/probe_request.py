"""The smallest request to any model of FasterTransformer's kinds, and whether it was answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as triton

_PROMPT = "Hello"
_ENOUGH_TOKENS = 8  # of a conversation that is begun and ended by one request
_TEXTS = ("INPUT_0", "INPUT_2", "INPUT_3")
_TYPES = {"BYTES": object, "UINT32": np.uint32}


def build_inputs(config: Any, model_config: Mapping[str, str]) -> list[triton.InferInput]:
    """Ask for one token behind one token, or for the encoder's states of one token.

    Args:
        config: of the model, as Triton gives it.
        model_config: section of config.ini that names the start token.
    """
    names = {tensor.name for tensor in config.input}
    start_id = int(model_config.get("start_id", model_config.get("decoder_start_token_id", 0)))
    values: dict[str, Any] = {
        "INPUT_0": [[_PROMPT]],
        "INPUT_1": [[1]],
        "INPUT_2": [[""]],  # bad words and stop words, which FasterTransformer's own ensemble wants
        "INPUT_3": [[""]],
        "input_ids": [[start_id]],
        "input_lengths": [[1]],
        "request_output_len": [[1]],
        "sequence_length": [[1]],
        "max_output_len": [[1]],
        "session_len": [[_ENOUGH_TOKENS]],
        "memory_len": [[_ENOUGH_TOKENS]],
    }
    has_axis = "session_len" in names
    return [
        _tensor(name, [given] if has_axis else given, "BYTES" if name in _TEXTS else "UINT32")
        for name, given in values.items()
        if name in names
    ]


def is_generation(answer: triton.InferResult) -> bool:
    """Whether the answer holds what was asked for: a generated token, its text, or hidden states."""
    lengths = answer.as_numpy("sequence_length")
    for name in ("OUTPUT_0", "output_ids", "output_hidden_state"):
        content = answer.as_numpy(name)
        if content is not None:
            return content.size > 0 and (lengths is None or int(lengths.flat[0]) > 0)
    return False


def _tensor(name: str, values: Any, data_type: str) -> triton.InferInput:
    array = np.array(values, dtype=_TYPES[data_type])
    tensor = triton.InferInput(name, list(array.shape), data_type)
    tensor.set_data_from_numpy(array)
    return tensor
