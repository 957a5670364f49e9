"""The Triton python-based backend ``fastertransformer``: translates between Triton and the engine, nothing else.

It serves every model whose config.pbtxt says ``backend: "fastertransformer"`` and honours that file's parameters; see
``engine/settings.py`` for them and for how a relative model_checkpoint_path is resolved. A backend directory needs this
file and ``engine/`` beside it, both below a directory named ``fastertransformer``; this file may be a symbolic link.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fastertransformer.engine.engine import Engine, open_engine  # noqa: E402
from fastertransformer.engine.errors import EngineError  # noqa: E402
from fastertransformer.engine.parallel import Group  # noqa: E402
from fastertransformer.engine.precision import choose_device  # noqa: E402
from fastertransformer.engine.ranks import read_ranks  # noqa: E402
from fastertransformer.engine.request import INPUT_NAMES, Request  # noqa: E402
from fastertransformer.engine.settings import read_settings  # noqa: E402


class TritonPythonModel:
    """One instance of a model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint that config.pbtxt names; an exception here keeps the model from being served."""
        model_config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in model_config.get("parameters", {}).items()}
        if model_config.get("model_transaction_policy", {}).get("decoupled", False):
            raise pb_utils.TritonModelException(f"{args['model_name']}: decoupled mode is not supported yet")
        try:
            settings = read_settings(parameters, Path(args["model_repository"]), args["model_version"])
            device = choose_device(args["model_instance_kind"], int(args["model_instance_device_id"]))
            ranks = read_ranks(os.environ)
            instances = sum(int(each.get("count", 1)) for each in model_config.get("instance_group", []))
            if ranks and instances > 1:
                raise EngineError(f"instance_group asks for {instances} instances; several processes make up one")
            group = Group(ranks, settings.tensor_para_size, settings.pipeline_para_size, device) if ranks else None
            max_rows = max(1, int(model_config.get("max_batch_size", 0)))
            self._engine: Engine = open_engine(settings, device, group, max_rows)
        except EngineError as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from error
        self._input_names = [entry["name"] for entry in model_config["input"]] or sorted(INPUT_NAMES)
        pb_utils.Logger.log_info(f"{args['model_name']}: {self._engine.description}")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer all requests as one batch; a request that is not valid fails alone."""
        parsed = [self._parse(request) for request in requests]
        valid = [(index, item) for index, item in enumerate(parsed) if isinstance(item, Request)]
        responses = [None if isinstance(item, Request) else _failure(item, "INVALID_ARG") for item in parsed]
        try:
            answers = self._engine.generate([item for _, item in valid])
        except EngineError as error:
            pb_utils.Logger.log_error(f"{len(valid)} requests failed: {error}")
            for index, _ in valid:
                responses[index] = _failure(f"generation failed: {error}", "INTERNAL")
            return responses
        for (index, _), tensors in zip(valid, answers, strict=True):
            wanted = requests[index].requested_output_names()
            outputs = [pb_utils.Tensor(name, array) for name, array in tensors.items() if name in wanted]
            responses[index] = pb_utils.InferenceResponse(output_tensors=outputs)
        return responses

    def finalize(self) -> None:
        """Send the other ranks home, where there are any."""
        self._engine.close()

    def _parse(self, request: Any) -> Request | str:
        """Check one request; give what is wrong with it as text."""
        tensors = {}
        for name in self._input_names:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                tensors[name] = tensor.as_numpy()
        try:
            return self._engine.parse(tensors)
        except EngineError as error:
            return str(error)


def _failure(problem: str, code: str) -> Any:
    """Make an error response; code is a name of pb_utils.TritonError: INVALID_ARG (HTTP 400), INTERNAL (500)."""
    error = pb_utils.TritonError(problem, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(output_tensors=[], error=error)
