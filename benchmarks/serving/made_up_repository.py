"""A decoupled model repository to measure the path with: a model with made-up weights, and models that compute nothing.

The empty ones, in Python too, take and give the same tensors in the same steps and answer as often: what they take is
Triton's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from export_scripts import convert
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.repository.interfaces import gpt
from export_scripts.repository.interfaces.serving import Serving
from export_scripts.repository.model_repository import build_repository
from export_scripts.repository.names import ENGINE, ENSEMBLE, POSTPROCESSING, PREPROCESSING
from export_scripts.repository.pbtxt import ModelSpec, to_text
from ft_format.families.gpt import FAMILY as GPT
from ft_format.weight_format import NONE
from handover.manifest import FILE_NAME as MANIFEST_NAME

VOCAB_SIZE, POSITIONS = 1024, 1024
EMPTY = "empty_"
"""What the names of the models begin with that compute nothing."""
_DESCRIPTION = """num_layers: {layers}
hidden_size: {hidden}
ffn_hidden_size: {inner}
num_attention_heads: {heads}
max_position_embeddings: {positions}
encoder_seq_length: {positions}
vocab_size: {vocab_size}
layernorm_epsilon: 1.0e-05
activation: gelu
position_embedding_type: learned_absolute
share_embeddings_and_output_weights: true
"""
_HEAD = '''"""Answers as the model of the same tensors does, and computes nothing."""
import queue
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


def read(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def respond(**arrays):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])


class TritonPythonModel:
'''
_CODE = {
    ENGINE: """    def initialize(self, args):
        self.requests = queue.SimpleQueue()
        threading.Thread(target=self.answer_all, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            ids, count = read(request, "input_ids"), int(read(request, "request_output_len").max())
            whole = np.pad(ids, ((0, 0), (0, count)))[:, None, :]
            # What is not asked for Triton (2.51) frees without Python's lock, which ends the stub under Python 3.12.
            self.requests.put((request.get_response_sender(), whole, count, request.requested_output_names()))

    def answer_all(self):
        while True:
            sender, whole, last, wanted = self.requests.get()
            inputs = np.full(whole.shape[:2], whole.shape[2] - last, np.int32)
            for count in range(1, last + 1):
                lengths = (inputs + count).astype(np.uint32)
                outputs = dict(output_ids=whole, sequence_length=lengths, response_input_lengths=inputs)
                response = respond(**{name: outputs[name] for name in outputs if name in wanted})
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if count == last else 0)
""",
    PREPROCESSING: """    def execute(self, requests):
        words = np.array([[[0], [-1]]], np.int32)
        return [
            respond(
                INPUT_ID=np.zeros((1, len(read(request, "QUERY")[0, 0])), np.uint32),
                REQUEST_INPUT_LEN=np.array([[len(read(request, "QUERY")[0, 0])]], np.uint32),
                BAD_WORDS_IDS=words,
                STOP_WORDS_IDS=words,
                REQUEST_OUTPUT_LEN=read(request, "REQUEST_OUTPUT_LEN"),
            )
            for request in requests
        ]
""",
    POSTPROCESSING: """    def execute(self, requests):
        lengths = [int(read(request, "SEQUENCE_LENGTH").max()) for request in requests]
        return [respond(OUTPUT=np.array([b" " * length], object)) for length in lengths]
""",
}


def write_repository(
    directory: Path, shape: Sequence[int], data_type: str, kv_cache_bytes: int, max_batch_size: int = 64
) -> Path:
    """Make the model and its repository.

    Args:
        directory: private.
        shape: layers, hidden units, heads.
        data_type: fp32, fp16 or bf16.
        kv_cache_bytes: of the model; on a GPU a second engine needs room beside it.
        max_batch_size: sequences in a step.
    """
    layers, hidden, heads = shape
    description = directory / "model_config.yaml"
    numbers = {"inner": 4 * hidden, "positions": POSITIONS, "vocab_size": VOCAB_SIZE}
    description.write_text(_DESCRIPTION.format(layers=layers, hidden=hidden, heads=heads, **numbers))
    weights, repository = directory / "1-gpu", directory / "model_repo"
    convert.convert(ConvertArguments(description, weights, 1, data_type, processes=16, random_weights=True))
    build_repository(
        ExportArguments(weights, repository, ENGINE, 1, 1, data_type, 0, 0, max_batch_size, decoupled=True)
    )
    (repository / MANIFEST_NAME).unlink()  # it is to be another repository
    with (repository / ENGINE / "config.pbtxt").open("a", encoding="utf-8") as config:
        config.write(f'parameters {{ key: "kv_cache_bytes" value {{ string_value: "{kv_cache_bytes}" }} }}\n')
    return repository


def write_empty_models(repository: Path) -> None:
    """Put models beside those of a decoupled repository that compute nothing."""
    serving = Serving(GPT, 1, 1, "fp32", NONE, 0, "", 64, 0, True, VOCAB_SIZE - 1, VOCAB_SIZE - 1)
    for make in (gpt.engine, gpt.preprocessing, gpt.postprocessing, gpt.ensemble):
        _write_empty(repository, make(serving))


def _write_empty(repository: Path, spec: ModelSpec) -> None:
    """Write the model that has the tensors and steps of another and computes nothing."""
    steps = tuple(replace(step, model_name=EMPTY + step.model_name) for step in spec.steps)
    backend = "" if spec.name == ENSEMBLE else "python"
    empty = replace(
        spec, name=EMPTY + spec.name, backend=backend, steps=steps, parameters={}, default_model_filename=""
    )
    version = repository / empty.name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(to_text(empty))
    (version / "model.py").write_text(_HEAD + _CODE[spec.name] if spec.name in _CODE else "")
