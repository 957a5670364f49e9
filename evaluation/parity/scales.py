"""Find tensors of the served model that are their source times a number other than 1, from log probabilities.

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
    """The estimated scale of a served tensor relative to its source; the columns of ``scales.csv``.

    Attributes:
        tensor: name of the tensor in Hugging Face's model.
        is_norm: whether it is the weight of a norm.
        error: estimated scale less 1; -1 for a tensor of zeros.
        standard_error: standard error of ``error`` over passages.
        z: ``error`` divided by its standard error.
        likeness: correlation of the differences with those of a scaled tensor, in units of their noise; the tensor with
            the largest value explains most.
    """

    tensor: str
    is_norm: bool
    error: float
    standard_error: float
    z: float
    likeness: float

    def less(self, error: float) -> Scale:
        """Return the scale without a part of the error that has another cause."""
        rest = self.error - error
        return replace(self, error=rest, z=rest / (self.standard_error or _TINY))


class Scales:
    """Sums of derivatives for every tensor, passage by passage.

    Args:
        model: model of transformers, whose parameters require no gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._norms = {name for name, module in model.named_modules() if "Norm" in type(module).__name__}
        self._generator = torch.Generator().manual_seed(0)
        self._products: dict[str, list[Array]] = {}
        self._squares: dict[str, list[Array]] = {}
        self._residuals: list[Array] = []

    def add(self, log_probs: Log_Probs, residuals: Array) -> None:
        """Add passages to the sums.

        Args:
            log_probs: computes the passages' log probabilities, [n, T].
            residuals: [n, T], the served model's log probabilities less these.
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
        """Return the estimated scale of each tensor."""
        noise = float(np.sqrt(np.mean(np.concatenate(self._residuals) ** 2))) or _TINY
        scales = []
        for name in self._products:
            products, squares = (np.concatenate(sums[name]) for sums in (self._products, self._squares))
            square, rows = float((squares**2).sum()) or _TINY, len(products)
            if rows < sum(map(len, self._residuals)):
                continue  # position embeddings have a row for each passage only if one passage is computed at once
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
    """Multiply each tensor's output by 1 + scale for each row; the scales are 0, and are differentiated by."""
    scales: dict[str, Tensor] = {}

    def multiply(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def hook(module: nn.Module, given: Any, found: Tensor) -> Tensor:
            if len(found) != rows or found.dim() < 2:  # position embeddings are the same in every row
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
    """Multiply one tensor by 1 + error inside the block; tied head and embedding change together."""
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
    """Return the tensors whose scale is significantly and noticeably not 1; the one that explains most comes first.

    Args:
        scales: estimated scales.
        least_z: minimum of ``z``, in standard errors.
        least_error: minimum error of a weight's scale; that of a bias is ten times as large.
    """
    found = [
        scale
        for scale in scales
        if abs(scale.z) >= least_z and abs(scale.error) >= least_error * (10 if scale.tensor.endswith(BIAS) else 1)
    ]
    return sorted(found, key=lambda scale: -scale.likeness)
