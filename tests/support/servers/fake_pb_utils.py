"""What the backend uses of Triton's Python API, without Triton: answers are kept where a test can read them."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

FINAL = 1


class FakeRequest:
    """One request and all that was answered to it."""

    def __init__(
        self,
        tensors: dict[str, npt.NDArray[Any]],
        outputs: tuple[str, ...] = ("output_ids",),
        session: Any = 0,
        flags: int = 0,
        name: str = "",
        parameters: str = "",
    ) -> None:
        self.tensors, self._outputs, self._session, self._flags = tensors, outputs, session, flags
        self._name, self._parameters = name, parameters
        self.responses: list[Any] = []
        self.ends_empty = False
        self.is_finished, self.is_cancelled, self.questions = threading.Event(), False, 0

    def inputs(self) -> list[Any]:
        return [FakePbUtils.Tensor(name, array) for name, array in self.tensors.items()]

    def requested_output_names(self) -> list[str]:
        return list(self._outputs)

    def request_id(self) -> str:
        return self._name

    def parameters(self) -> str:
        return self._parameters

    def correlation_id(self) -> Any:
        return self._session

    def flags(self) -> int:
        return self._flags

    def get_response_sender(self) -> FakeSender:
        return FakeSender(self)

    def wait(self) -> Any:
        """The final response."""
        assert self.is_finished.wait(240), "no final answer"
        return self.responses[-1]


class FakeSender:
    """Triton's response sender; like the real one it must not be touched after the final answer."""

    def __init__(self, request: FakeRequest) -> None:
        self._request = request

    def is_cancelled(self) -> bool:
        assert not self._request.is_finished.is_set(), "asked after the final answer"
        self._request.questions += 1
        return self._request.is_cancelled

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self._request.is_finished.is_set(), "sent after the final answer"
        assert response is not None or flags & FINAL, "what is empty ends a request"
        if response is not None:
            self._request.responses.append(response)
        self._request.ends_empty = response is None
        if flags & FINAL:
            self._request.is_finished.set()


class FakeMetric:
    """One series of a metric family, or one histogram."""

    def __init__(self, family: Any, labels: dict[str, str], buckets: list[float] | None) -> None:
        self.family, self.labels, self.buckets = family, labels, buckets
        self.value, self.observed = 0.0, list[float]()

    def increment(self, value: float) -> None:
        assert self.family.kind != 2 and (value > 0 or self.family.kind == 1)
        self.value += value
        self.family.counts[self.family.name] += value

    def set(self, value: float) -> None:
        assert self.family.kind == 1
        self.value = self.family.counts[self.family.name] = value

    def observe(self, value: float) -> None:
        assert self.family.kind == 2
        self.observed.append(value)


class FakePbUtils(ModuleType):
    """The module triton_python_backend_utils."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL

    class TritonModelException(Exception):  # noqa: N818 (Triton's name)
        pass

    class TritonError:
        INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = 1, 3, 4, 7

        def __init__(self, message: str, code: int) -> None:
            self.text, self.code = message, code

    class Tensor:
        def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
            self.tensor_name, self._array = name, array

        def name(self) -> str:
            return self.tensor_name

        def as_numpy(self) -> npt.NDArray[Any]:
            return self._array

    @classmethod
    def get_input_tensor_by_name(cls, request: FakeRequest, name: str) -> Any:
        return cls.Tensor(name, request.tensors[name]) if name in request.tensors else None

    class InferenceResponse:
        def __init__(self, output_tensors: list[Any], error: Any = None) -> None:
            self.outputs = {tensor.tensor_name: tensor.as_numpy() for tensor in output_tensors}
            self.error = error

    class Logger:
        lines: list[str] = []

        @classmethod
        def log_info(cls, line: str) -> None:
            cls.lines.append(line)

        log_error = log_warn = log_info

    class MetricFamily:
        COUNTER, GAUGE, HISTOGRAM = range(3)
        counts: dict[str, float] = {}  # of counters and gauges without a label of their own
        made: list[FakeMetric] | None = None  # a test's list gets every metric

        def __init__(self, name: str, description: str, kind: int) -> None:
            self.name, self.kind = name, kind
            self.counts[name] = 0

        def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Any:  # noqa: N802 (Triton's)
            assert (buckets is not None) == (self.kind == 2), "buckets are a histogram's"
            metric = FakeMetric(self, labels, buckets)
            if self.made is not None:
                self.made.append(metric)
            return metric

    @staticmethod
    def triton_string_to_numpy(name: str) -> type:
        return {"TYPE_UINT32": np.uint32, "TYPE_INT32": np.int32, "TYPE_FP32": np.float32}[name]
