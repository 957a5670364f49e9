"""The Triton glue, with Triton's own module replaced by a fake; the real server is for the integration tests.

FakePbUtils stands for ``triton_python_backend_utils``, the outermost boundary: everything below is real.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gpt2_checkpoint import random_gpt2, write_shards
from rank_processes import rank_environment

MODEL_PY = Path(__file__).resolve().parent.parent.parent / "backends" / "fastertransformer" / "model.py"
INPUTS = ["input_ids", "input_lengths", "request_output_len", "runtime_top_k", "beam_width", "is_return_log_probs"]


class FakePbUtils(ModuleType):
    """What model.py uses of Triton's Python API."""

    class TritonModelException(Exception):  # noqa: N818 (Triton's name)
        pass

    class TritonError:
        INTERNAL, INVALID_ARG = 1, 3

        def __init__(self, message: str, code: int) -> None:
            self.text, self.code = message, code

    class Tensor:
        def __init__(self, name: str, array: np.ndarray) -> None:
            self.tensor_name, self._array = name, array

        def as_numpy(self) -> np.ndarray:
            return self._array

    class InferenceResponse:
        def __init__(self, output_tensors: list[Any], error: Any = None) -> None:
            self.outputs = {tensor.tensor_name: tensor.as_numpy() for tensor in output_tensors}
            self.error = error

    class Logger:
        lines: list[str] = []

        @classmethod
        def log_info(cls, line: str) -> None:
            cls.lines.append(line)

        log_error = log_info

    @staticmethod
    def get_input_tensor_by_name(request: FakeRequest, name: str) -> Any:
        return FakePbUtils.Tensor(name, request.tensors[name]) if name in request.tensors else None


class FakeRequest:
    def __init__(self, tensors: dict[str, np.ndarray], outputs: tuple[str, ...] = ("output_ids",)) -> None:
        self.tensors, self._outputs = tensors, outputs

    def requested_output_names(self) -> list[str]:
        return list(self._outputs)


def ask(ids: list[list[int]], output_len: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    rows = len(ids)
    return {
        "input_ids": np.array(ids, np.uint32),
        "input_lengths": np.full(rows, len(ids[0]), np.uint32),  # [B]: what reshape {shape: []} leaves
        "request_output_len": np.full((rows, 1), output_len, np.uint32),
        **more,
    }


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils("triton_python_backend_utils"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("slipway_backend_model", MODEL_PY)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "fastertransformer"]:
        del sys.modules[name]


def arguments(repository: Path, **changes: str) -> dict[str, str]:
    parameters = {"tensor_para_size": "2", "data_type": "fp32", "model_checkpoint_path": "2-gpu"}
    parameters |= {"cpu_threads": "1"} | changes
    config = {
        "max_batch_size": 4,
        "input": [{"name": name} for name in INPUTS],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    return {
        "model_config": json.dumps(config),
        "model_repository": str(repository),
        "model_version": "1",
        "model_name": "fastertransformer",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }


@pytest.fixture
def instance(backend: Any, tmp_path: Path) -> Any:
    write_shards(random_gpt2(), tmp_path / "1", 2)
    model = backend.TritonPythonModel()
    model.initialize(arguments(tmp_path))
    return model


def test_requests_of_different_lengths_run_as_one_batch_and_are_split_again(
    instance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []
    generate = instance._engine.generate
    monkeypatch.setattr(instance._engine, "generate", lambda given: batches.append(given) or generate(given))
    flags = np.ones((1, 1), np.bool_)
    requests = [
        FakeRequest(ask([[1, 2, 3], [4, 5, 6]], 4), ("output_ids", "sequence_length")),
        FakeRequest(ask([[7, 8, 9, 10, 11]], 9)),
        FakeRequest(ask([[7]], 2, is_return_log_probs=flags), ("cum_log_probs",)),
    ]
    together = instance.execute(requests)
    assert [len(group) for group in batches] == [3]
    assert [response.error for response in together] == [None, None, None]
    assert [set(response.outputs) for response in together] == [
        {"output_ids", "sequence_length"},
        {"output_ids"},
        {"cum_log_probs"},
    ]
    assert together[0].outputs["output_ids"].shape == (2, 1, 7)
    for request, response in zip(requests, together, strict=True):
        (alone,) = instance.execute([request])
        for name, array in alone.outputs.items():
            np.testing.assert_allclose(response.outputs[name], array, rtol=1e-5)


def test_a_request_that_is_not_valid_fails_alone(instance: Any) -> None:
    good = ask([[1, 2, 3]], 4)
    responses = instance.execute(
        [
            FakeRequest(good),
            FakeRequest(good | {"beam_width": np.full((1, 1), 65, np.uint32)}),
            FakeRequest(good | {"request_output_len": np.full((1, 1), 4000, np.uint32)}),
            FakeRequest(good),
        ]
    )
    assert [response.error is None for response in responses] == [True, False, False, True]
    assert "beam_width" in responses[1].error.text and responses[1].error.code == FakePbUtils.TritonError.INVALID_ARG
    assert "max_pos_seq_len 48" in responses[2].error.text
    np.testing.assert_array_equal(responses[0].outputs["output_ids"], responses[3].outputs["output_ids"])
    (only,) = instance.execute([FakeRequest({})])
    assert "missing input" in only.error.text


def test_a_failure_of_the_engine_answers_every_request(
    backend: Any, instance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise backend.EngineError("out of memory")

    monkeypatch.setattr(instance._engine, "generate", fail)
    bad = FakeRequest(ask([[1]], 1) | {"input_lengths": np.zeros(1, np.uint32)})
    responses = instance.execute([FakeRequest(ask([[1]], 1)), bad])
    assert "out of memory" in responses[0].error.text and responses[0].error.code == FakePbUtils.TritonError.INTERNAL
    assert "input_lengths" in responses[1].error.text


def test_loading_says_what_runs(instance: Any) -> None:
    assert "fastertransformer: GPT 3 layers" in FakePbUtils.Logger.lines[-1]
    assert "2 shards" in FakePbUtils.Logger.lines[-1] and "fp32 on cpu" in FakePbUtils.Logger.lines[-1]


def test_a_missing_shard_keeps_the_model_from_being_served(backend: Any, tmp_path: Path) -> None:
    shards = write_shards(random_gpt2(), tmp_path / "1", 2)
    (shards / "model.wte.bin").unlink()
    with pytest.raises(FakePbUtils.TritonModelException, match=r"fastertransformer: .*\n  model\.wte\.bin"):
        backend.TritonPythonModel().initialize(arguments(tmp_path))


def test_a_parameter_that_is_not_supported_keeps_the_model_from_being_served(backend: Any, tmp_path: Path) -> None:
    write_shards(random_gpt2(), tmp_path / "1", 2)
    with pytest.raises(FakePbUtils.TritonModelException, match="int8_mode = 1"):
        backend.TritonPythonModel().initialize(arguments(tmp_path, int8_mode="1"))


def test_decoupled_mode_is_refused_until_it_exists(backend: Any, tmp_path: Path) -> None:
    given = arguments(tmp_path)
    config = json.loads(given["model_config"]) | {"model_transaction_policy": {"decoupled": True}}
    with pytest.raises(FakePbUtils.TritonModelException, match="decoupled"):
        backend.TritonPythonModel().initialize(given | {"model_config": json.dumps(config)})


def test_several_processes_make_up_one_instance(backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(random_gpt2(), tmp_path / "1", 2)
    for name, value in rank_environment(0, 4, tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FakePbUtils.TritonModelException, match=r"world_size \(4\) should equal to .* \(2 \* 1 here\)"):
        backend.TritonPythonModel().initialize(arguments(tmp_path))
    given = arguments(tmp_path)
    config = json.loads(given["model_config"]) | {"instance_group": [{"count": 2}]}
    with pytest.raises(FakePbUtils.TritonModelException, match="2 instances"):
        backend.TritonPythonModel().initialize(given | {"model_config": json.dumps(config)})


def test_an_instance_that_is_alone_ends_without_more_ado(instance: Any) -> None:
    assert instance.finalize() is None
