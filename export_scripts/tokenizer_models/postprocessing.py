"""Triton model ``postprocessing``: token ids to text. Export copies it to ``postprocessing/1/model.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

try:  # in the model repository
    from slipway_tokenizer import decode_rows, load_tokenizer  # type: ignore[import-not-found]
except ModuleNotFoundError:  # in the project
    from export_scripts.tokenizer_models.slipway_tokenizer import decode_rows, load_tokenizer


class TritonPythonModel:
    """TOKENS_BATCH [batch, beam, length] to OUTPUT [batch * beam], the shape that FT's repository gives."""

    def initialize(self, args: dict[str, str]) -> None:
        """Build the tokenizer, once."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._end_id = int(parameters["end_id"]["string_value"])
        self._tokenizer = load_tokenizer(Path(__file__).parent)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request."""
        return [self._decode(request) for request in requests]

    def _decode(self, request: Any) -> Any:
        tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        input_lengths = pb_utils.get_input_tensor_by_name(request, "RESPONSE_INPUT_LENGTHS").as_numpy()
        lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH")
        texts = decode_rows(
            self._tokenizer, tokens, input_lengths, None if lengths is None else lengths.as_numpy(), self._end_id
        )
        encoded = np.array([text.encode("utf-8") for text in texts], dtype=object)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUTPUT", encoded)])
