"""Oracle: the table of TP, PP, GPUs, nodes and CUDA devices for 8-GPU machines in the inference guide."""

from __future__ import annotations

import pytest

from handover.errors import ConfigError
from launcher.plan.topology import topology

TABLE = [
    (1, 1, 1, 1, "0"),
    (2, 1, 2, 1, "0,1"),
    (4, 1, 4, 1, "0,1,2,3"),
    (8, 1, 8, 1, None),
    (8, 2, 16, 2, None),
    (16, 1, 16, 2, None),
    (8, 3, 24, 3, None),
    (8, 4, 32, 4, None),
    (16, 2, 32, 4, None),
]


@pytest.mark.parametrize(("tp", "pp", "gpus", "nodes", "devices"), TABLE)
def test_every_row_of_the_guide_is_computed(tp: int, pp: int, gpus: int, nodes: int, devices: str | None) -> None:
    layout = topology(tp, pp, gpus_per_node=8)
    assert (layout.gpus, layout.nodes, layout.cuda_devices) == (gpus, nodes, devices)


@pytest.mark.parametrize(("tp", "pp", "gpus_per_node"), [(3, 3, 8), (6, 2, 8), (4, 3, 8), (5, 1, 4)])
def test_gpus_that_fill_no_whole_nodes_are_refused(tp: int, pp: int, gpus_per_node: int) -> None:
    with pytest.raises(ConfigError, match=f"TP {tp} x PP {pp}"):
        topology(tp, pp, gpus_per_node)
