"""Ready is what a real generation says: Triton's own ready endpoint stays 200 when a stub is dead."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from deployment.served_models import ServedModel
from handover.errors import ServerError

_ENSEMBLE = "ensemble"
_PROMPT = "Hello"
_PAUSE_S = 0.1


class Probe:
    """One generation of one token, tried in the background until the server takes requests.

    Args:
        url: ``host:port`` of gRPC.
        repository: being served.
        model: used directly where the repository has no ensemble.
        timeout_s: seconds for everything together.
    """

    def __init__(self, url: str, repository: Path, model: ServedModel, timeout_s: float) -> None:
        self._url, self._model, self._deadline = url, model, time.monotonic() + timeout_s
        self._has_ensemble = (repository / _ENSEMBLE / "config.pbtxt").is_file()
        self._finished = threading.Event()
        self._error: ServerError | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def is_done(self) -> bool:
        """Whether the generation came back.

        Raises:
            ServerError: it failed, or what came back is no generation.
        """
        if not self._finished.is_set():
            return False
        if self._error:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            with triton.InferenceServerClient(self._url) as client:
                if self._wait_until_it_listens(client):
                    self._generate(client)
        except InferenceServerException as error:
            self._error = ServerError(f"the server is up, but a generation failed: {error.message()}")
        except ServerError as error:
            self._error = error
        self._finished.set()

    def _wait_until_it_listens(self, client: Any) -> bool:
        """Poll; Triton opens its ports only when every model is loaded."""
        while time.monotonic() < self._deadline:
            try:
                if client.is_server_ready(client_timeout=1):
                    return True
            except InferenceServerException:
                pass
            time.sleep(_PAUSE_S)
        self._error = ServerError("the server took no request in time")
        return False

    def _generate(self, client: Any) -> None:
        timeout_s = max(1.0, self._deadline - time.monotonic())
        if self._has_ensemble:
            inputs = [_tensor("INPUT_0", [[_PROMPT]], "BYTES"), _tensor("INPUT_1", [[1]], "UINT32")]
            result = client.infer(_ENSEMBLE, inputs, client_timeout=timeout_s)
            length, text = result.as_numpy("sequence_length"), result.as_numpy("OUTPUT_0")
            is_generation = text is not None and text.size == 1 and length is not None and int(length.flat[0]) > 0
        else:
            start_id = int(self._model.config.get("start_id", 0))
            inputs = [
                _tensor("input_ids", [[start_id]], "UINT32"),
                _tensor("input_lengths", [[1]], "UINT32"),
                _tensor("request_output_len", [[1]], "UINT32"),
            ]
            result = client.infer(self._model.name, inputs, client_timeout=timeout_s)
            ids = result.as_numpy("output_ids")
            is_generation = ids is not None and ids.shape[-1] == len(("prompt", "generated"))
        if not is_generation:
            raise ServerError("the server is up, but what it answers is no generation")


def _tensor(name: str, values: list[list[str]] | list[list[int]], data_type: str) -> Any:
    array = np.array(values, dtype=object if data_type == "BYTES" else np.uint32)
    tensor = triton.InferInput(name, list(array.shape), data_type)
    tensor.set_data_from_numpy(array)
    return tensor
