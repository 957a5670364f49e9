"""Gates that are more than an activation of one product times another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ClampedGate:
    """GPT-OSS's: SiLU of a factor, an offset of what is multiplied, and both within limits.

    Attributes:
        factor: of what SiLU's sigmoid is taken of.
        up_offset: is added to what is multiplied.
        limit: the gate is at most this number, and what is multiplied lies between its negative and it; 0: they are as
            they are.
    """

    factor: float
    up_offset: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute gate * sigmoid(factor * gate) * (up + offset)."""
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * self.factor).sigmoid_().mul_(gate).mul_(up + self.up_offset)
