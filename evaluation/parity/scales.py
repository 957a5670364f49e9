"""Is a tensor of the served model its source times a number other than 1? Tensor by tensor, from log probabilities.

Let r be the differences of log probabilities between the served model and its source in the same number formats, over
thousands of tokens, and d what they would be per unit if one tensor were scaled. Rounding makes an r that has nothing
to do with d, so sum(r d) is near 0; a tensor that is scaled by 1 + a makes r = a d + rounding, and a is found as
sum(r d) / sum(d d) although a d is a fraction of the rounding in every single place. This is a matched filter.

No d is computed. sum(r d) is the derivative of sum(r log p) by the tensor's scale, and one backward pass gives it for
all tensors; with random signs in place of r the mean square of the same derivative is sum(d d). A scale for each
passage gives as many independent values of sum(r d) as there are passages, and so their standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Array = npt.NDArray[np.float64]
Log_Probs = Callable[[], Tensor]
WEIGHT, BIAS = "weight", "bias"
_TINY = 1e-300


@dataclass(frozen=True)
class Scale:
    """How a served tensor relates to its source; the columns of ``scales.csv``.

    Attributes:
        tensor: its name in Hugging Face's model.
        is_norm: whether it is the weight of a norm.
        error: found scale less 1; -1: the tensor is 0.
        standard_error: of that, over passages.
        z: mean over standard error of what ``error`` is made of.
        likeness: how far the differences are like this tensor's, in units of their noise: the largest names the tensor.
    """

    tensor: str
    is_norm: bool
    error: float
    standard_error: float
    z: float
    likeness: float

    def less(self, error: float) -> Scale:
        """Give the same without a part of the error that has another cause."""
        rest = self.error - error
        return replace(self, error=rest, z=rest / (self.standard_error or _TINY))


class Scales:
    """Sums for every tensor, passage by passage.

    Args:
        model: of transformers, whose parameters take no gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._norms = {name for name, module in model.named_modules() if "Norm" in type(module).__name__}
        self._generator = torch.Generator().manual_seed(0)
        self._products: dict[str, list[Array]] = {}
        self._squares: dict[str, list[Array]] = {}
        self._residuals: list[Array] = []

    def add(self, log_probs: Log_Probs, residuals: Array) -> None:
        """Add some passages.

        Args:
            log_probs: computes theirs, [n, T].
            residuals: [n, T], of the served model's against these.
        """
        with torch.enable_grad(), _scaled(self._model, len(residuals)) as scales:
            found = log_probs()
        variables = list(scales.values())
        signs = torch.randint(0, 2, found.shape, generator=self._generator).float() * 2 - 1
        for weights, sums in ((torch.from_numpy(residuals).float(), self._products), (signs, self._squares)):
            derivatives = torch.autograd.grad((found * weights).sum(), variables, retain_graph=sums is self._products)
            for name, derivative in zip(scales, derivatives, strict=True):
                sums.setdefault(name, []).append(derivative.flatten().double().numpy())
        self._residuals.append(residuals)

    def found(self) -> list[Scale]:
        """Give what was found of each tensor."""
        noise = float(np.sqrt(np.mean(np.concatenate(self._residuals) ** 2))) or _TINY
        scales = []
        for name in self._products:
            products, squares = (np.concatenate(sums[name]) for sums in (self._products, self._squares))
            square, rows = float((squares**2).sum()) or _TINY, len(products)
            if rows < sum(map(len, self._residuals)):
                continue  # positions, which have a row of their own only where a passage was computed alone
            error = float(products.std(ddof=1)) * rows**0.5
            scales.append(
                Scale(
                    tensor=name,
                    is_norm=name.endswith(WEIGHT) and name.rpartition(".")[0] in self._norms,
                    error=float(products.sum()) / square,
                    standard_error=error / square,
                    z=float(products.sum()) / (error or _TINY),
                    likeness=abs(float(products.sum())) / square**0.5 / noise,
                )
            )
        return scales


@contextmanager
def _scaled(model: nn.Module, rows: int) -> Iterator[dict[str, Tensor]]:
    """Multiply every tensor with a scale for each row, to be differentiated by: 1 + 0, a weight's and a bias' apart."""
    scales: dict[str, Tensor] = {}

    def multiply(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def hook(module: nn.Module, given: Any, found: Tensor) -> Tensor:
            if len(found) != rows or found.dim() < 2:  # positions, and what is the same in every row
                return found
            bias: Tensor | None = getattr(module, BIAS, None)
            zeros = torch.zeros((rows, *(1,) * (found.dim() - 1)))
            scale = scales[f"{name}.{WEIGHT}"] = zeros.clone().requires_grad_()
            if bias is None:
                return found + scale * found
            shift = scales[f"{name}.{BIAS}"] = zeros.clone().requires_grad_()
            moved: Tensor = found + scale * (found - bias) + shift * bias
            return moved

        return hook

    leaves = [(name, each) for name, each in model.named_modules() if isinstance(getattr(each, WEIGHT, None), Tensor)]
    hooks = [module.register_forward_hook(multiply(name)) for name, module in leaves]
    try:
        yield scales
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def scaled_by(model: nn.Module, tensor: str, error: float) -> Iterator[None]:
    """Multiply one tensor with 1 + error for a while; where a head and an embedding are one, both are."""
    owner, _, kind = tensor.rpartition(".")
    parameter: Tensor = getattr(model.get_submodule(owner), kind)
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.mul_(1 + error)
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(kept)


def suspects(scales: Sequence[Scale], least_z: float, least_error: float) -> list[Scale]:
    """Find those whose scale is certainly and noticeably not the source's; the one that explains most comes first.

    Args:
        scales: all.
        least_z: in standard errors.
        least_error: of a weight's scale; a bias matters less and may be off by ten times as much.
    """
    found = [
        scale
        for scale in scales
        if abs(scale.z) >= least_z and abs(scale.error) >= least_error * (10 if scale.tensor.endswith(BIAS) else 1)
    ]
    return sorted(found, key=lambda scale: -scale.likeness)
