"""The GPUs that a server uses, of those that Slurm or the user gave to its task."""

from __future__ import annotations

import pytest

from deployment.ranks.gpus import visible_devices
from handover.errors import ServerError


@pytest.mark.parametrize(
    ("wanted", "given", "expected"),
    [
        ("0,1", None, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ("0", "0,1,2,3,4,5,6,7", {"CUDA_VISIBLE_DEVICES": "0"}),
        ("0,1", "5,3,7", {"CUDA_VISIBLE_DEVICES": "5,3"}),  # another job has the first GPU
        ("0", "GPU-9f2e,GPU-11aa", {"CUDA_VISIBLE_DEVICES": "GPU-9f2e"}),
        ("", "4,5", {}),
        ("", None, {}),
    ],
)
def test_the_first_of_those_that_the_task_sees(wanted: str, given: str | None, expected: dict[str, str]) -> None:
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_devices(wanted, "fastertransformer", environment) == expected


def test_too_few_are_refused_for_fastertransformer_only() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "6"}
    with pytest.raises(ServerError, match="takes 2 GPUs of a node, and this task sees 1"):
        visible_devices("0,1", "fastertransformer", environment)
    assert visible_devices("0,1", "slipway", environment) == {}
    assert visible_devices("0", "slipway", {"CUDA_VISIBLE_DEVICES": ""}) == {}
