"""Triton model ``postprocessing``: token ids to text. Export copies it to ``postprocessing/1/model.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

try:  # in the model repository
    from slipway_tokenizer import decode_rows, load_text_ids, load_tokenizer  # type: ignore[import-not-found]
except ModuleNotFoundError:  # in the project
    from export_scripts.repository.tokenizer_models.slipway_tokenizer import decode_rows, load_text_ids, load_tokenizer


class TritonPythonModel:
    """TOKENS_BATCH [batch, beam, length] to OUTPUT [batch * beam], the shape that FT's repository gives.

    A decoupled engine answers once a token; each answer becomes the text so far, which ends with a whole character.
    OUTPUT_DELTA, where the repository has it, is the text behind the first TEXT_START tokens: what this answer adds.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Build the tokenizer, once."""
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        self._has_axis = len(config["input"][0]["dims"]) > 2  # the stateful form: [1, batch, n] for [batch, n]
        self._end_id = int(parameters["end_id"]["string_value"])
        self._tokenizer = load_tokenizer(Path(__file__).parent)
        self._text_ids = load_text_ids(Path(__file__).parent)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request."""
        return [self._decode(request) for request in requests]

    def _decode(self, request: Any) -> Any:
        tokens, input_lengths = self._read(request, "TOKENS_BATCH"), self._read(request, "RESPONSE_INPUT_LENGTHS")
        lengths, outputs = self._read(request, "SEQUENCE_LENGTH"), []
        starts = {"OUTPUT": None, "OUTPUT_DELTA": self._read(request, "TEXT_START")}
        for name in sorted(starts.keys() & set(request.requested_output_names())):
            texts = decode_rows(
                self._tokenizer, tokens, input_lengths, lengths, self._end_id, self._text_ids, starts[name]
            )
            encoded = np.array([text.encode("utf-8") for text in texts], dtype=object)
            outputs.append(pb_utils.Tensor(name, encoded))
        return pb_utils.InferenceResponse(output_tensors=outputs)

    def _read(self, request: Any, name: str) -> Any:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            return None
        return tensor.as_numpy()[0] if self._has_axis else tensor.as_numpy()
