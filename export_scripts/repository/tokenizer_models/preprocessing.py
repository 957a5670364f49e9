"""Triton model ``preprocessing``: text to token ids. Export copies it to ``preprocessing/1/model.py``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

try:  # in the model repository
    from slipway_tokenizer import (  # type: ignore[import-not-found]
        encode_prompts,
        load_text_ids,
        load_tokenizer,
        read_texts,
    )
    from slipway_words import encode_word_lists  # type: ignore[import-not-found]
except ModuleNotFoundError:  # in the project
    from export_scripts.repository.tokenizer_models.slipway_tokenizer import (
        encode_prompts,
        load_text_ids,
        load_tokenizer,
        read_texts,
    )
    from export_scripts.repository.tokenizer_models.slipway_words import encode_word_lists

_SEQUENCE_START = 1  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_START


class TritonPythonModel:
    """QUERY, REQUEST_OUTPUT_LEN and the two word dictionaries to what the engine takes."""

    def initialize(self, args: dict[str, str]) -> None:
        """Build the tokenizer, once."""
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        self._has_axis = len(config["input"][0]["dims"]) > 1  # the stateful form: [1, batch, n] for [batch, n]
        self._start_id = int(parameters["start_id"]["string_value"])
        self._end_id = int(parameters["end_id"]["string_value"])
        self._ends_inputs = "ends_inputs" in parameters and parameters["ends_inputs"]["string_value"] == "1"
        self._most_bytes = int(parameters.get("max_text_bytes", {"string_value": "0"})["string_value"])
        self._tokenizer = load_tokenizer(Path(__file__).parent)
        self._text_ids = load_text_ids(Path(__file__).parent)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request; one that cannot be read gets an error of its own."""
        responses = []
        for request in requests:
            try:
                responses.append(pb_utils.InferenceResponse(output_tensors=self._encode(request)))
            except ValueError as error:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"preprocessing: {error}")))
        return responses

    def _encode(self, request: Any) -> list[Any]:
        texts = read_texts(self._read(request, "QUERY"), "QUERY", self._most_bytes)
        around = self._text_ids
        if self._has_axis and not request.flags() & _SEQUENCE_START:  # a conversation goes on
            around = around._replace(before=())
        ids, lengths = encode_prompts(self._tokenizer, texts, self._start_id, self._end_id, self._ends_inputs, around)
        tensors = {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": lengths,
            "BAD_WORDS_IDS": self._words(request, "BAD_WORDS_DICT", len(texts)),
            "STOP_WORDS_IDS": self._words(request, "STOP_WORDS_DICT", len(texts), around.more_end_ids),
            "REQUEST_OUTPUT_LEN": self._read(request, "REQUEST_OUTPUT_LEN").astype(np.uint32),
        }
        return [pb_utils.Tensor(name, array[None] if self._has_axis else array) for name, array in tensors.items()]

    def _read(self, request: Any, name: str) -> Any:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            return None
        return tensor.as_numpy()[0] if self._has_axis else tensor.as_numpy()

    def _words(self, request: Any, name: str, batch: int, always: Sequence[int] = ()) -> Any:
        words = self._read(request, name)
        texts = [""] * batch if words is None else read_texts(words, name, self._most_bytes)
        return encode_word_lists(self._tokenizer, texts, always)
