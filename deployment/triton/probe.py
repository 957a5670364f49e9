"""Ready is what a real generation says: Triton's own ready endpoint stays 200 when a stub is dead.

It is the smallest request to any model of FasterTransformer's kinds.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from deployment.life.background_probe import BackgroundProbe
from deployment.proof.served_models import ServedModel
from handover.errors import ServerError

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


_ENSEMBLE = "ensemble"
_SESSION = "slipway-probe"
_PAUSE_S = 0.1
_RECONNECT = [(f"grpc.{name}_reconnect_backoff_ms", 100) for name in ("initial", "min", "max")]
"""gRPC tries to connect again after a second, then 1.6 and 2.6, however often it is asked: the start took as long."""


class Probe(BackgroundProbe):
    """One generation of one token, tried in the background until the server takes requests.

    Args:
        url: ``host:port`` of gRPC.
        repository: being served.
        model: used directly where the repository has no ensemble.
        timeout_s: seconds for everything together.
    """

    def __init__(self, url: str, repository: Path, model: ServedModel, timeout_s: float) -> None:
        self._url, self._model = url, model
        self._has_ensemble = (repository / _ENSEMBLE / "config.pbtxt").is_file()
        super().__init__(timeout_s)

    def _probe(self) -> None:
        try:
            with triton.InferenceServerClient(self._url, channel_args=_RECONNECT) as client:
                self._wait_until_it_listens(client)
                self._generate(client)
        except InferenceServerException as error:
            raise ServerError(f"the server is up, but a generation failed: {error.message()}") from error

    def _wait_until_it_listens(self, client: Any) -> None:
        """Poll; Triton opens its ports only when every model is loaded."""
        while time.monotonic() < self._deadline:
            try:
                if client.is_server_ready(client_timeout=1):
                    return
            except InferenceServerException:
                pass
            time.sleep(_PAUSE_S)
        raise ServerError("the server took no request in time")

    def _generate(self, client: Any) -> None:
        """Ask over a stream: a decoupled model takes nothing else, and every other takes it too."""
        name = _ENSEMBLE if self._has_ensemble else self._model.name
        config = client.get_model_config(name).config
        inputs = build_inputs(config, self._model.config)
        is_stateful = any(tensor.name == "session_len" for tensor in config.input)
        turn = {"sequence_id": _SESSION, "sequence_start": True, "sequence_end": True} if is_stateful else {}
        answers: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            client.async_stream_infer(name, inputs, enable_empty_final_response=True, **turn)
            answer, error = answers.get(timeout=max(1.0, self._deadline - time.monotonic()))
        except queue.Empty:
            raise ServerError("the server is up, but no generation came back in time") from None
        finally:
            client.stop_stream(cancel_requests=True)
        if error is not None:
            raise error
        if not is_generation(answer):
            raise ServerError("the server is up, but what it answers is no generation")
