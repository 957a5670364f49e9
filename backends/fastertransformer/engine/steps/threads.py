"""How many threads a step computes with on a CPU.

At the end of a product its threads wait for each other, which takes 10 to 60 us: awake on cores that are free, asleep
on cores that others want too. Products that take no longer than that are made by one thread. Measured on an AMD EPYC
with layers of 256 numbers (0.2 to 0.3 million a matrix): 27 us by one thread and 24 by two for a row, 89 and 55 for 32;
and on two cores of a Xeon of which something else kept one busy, 20 tokens took 57 ms with one thread, 93 with two.
"""

from __future__ import annotations

import torch

from ..model.network import Network

_READ_NS, _MULTIPLY_NS = 0.14, 0.01  # a number of a matrix; and for each row
_WORTH_NS = 50e3


class Threads:
    """Of torch, in the thread that takes the steps.

    Args:
        network: whose products they are.
    """

    def __init__(self, network: Network) -> None:
        self._most = torch.get_num_threads()
        stacks = [stack for stack in (network.weights.decoder, network.weights.encoder) if stack and stack.layers]
        matrices = [stack.layers[0].mlp_in for stack in stacks]
        self._numbers = max((each.size_bytes // network.weights.like.itemsize for each in matrices), default=0)
        self._is_on_cpu = network.weights.like.device.type == "cpu"

    def fit(self, rows: int) -> None:
        """Have a step of so many rows or tokens computed by one thread or by all."""
        if self._is_on_cpu:
            is_worth_it = self._numbers * (_READ_NS + _MULTIPLY_NS * rows) > _WORTH_NS
            torch.set_num_threads(self._most if is_worth_it else 1)
