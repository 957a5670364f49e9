"""Keys of ``config.json`` and FasterTransformer's dimensions of a decoder: one list, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from export_scripts.weights.hub_tensor import HubTensor
from export_scripts.weights.schema import ModelDims
from export_scripts.weights.settings import REQUIRED, Settings
from ft_format.families.gpt import GptDims

_ACTIVATIONS = {"Gelu": "gelu_new", "Relu": "relu"}


@dataclass(frozen=True)
class Facts:
    """What a model's dimensions do not say.

    Attributes:
        activation: the feed-forward's function in transformers' words, where the source knows more of it than the
            dimensions do; empty: they say all.
        is_head_tied: the output projection is the embedding, whether or not the family has a tensor for it.
        start_id, end_id: special ids, settled.
        pad_id: of the token that fills a batch up; None: not known.
    """

    activation: str = ""
    is_head_tied: bool = False
    start_id: int = 0
    end_id: int = 0
    pad_id: int | None = None


class Target(Protocol):
    """One architecture of transformers as a target."""

    @property
    def model_type(self) -> str:
        """Transformers' name of it."""

    @property
    def class_name(self) -> str:
        """The class that generates."""

    def written(self, dims: Any, facts: Facts) -> dict[str, HubTensor]:
        """List every tensor by its name in a saved model."""

    def config(self, dims: Any, facts: Facts) -> dict[str, Any]:
        """List the keys of ``config.json`` that are this architecture's own."""

    def lacks(self, dims: Any, facts: Facts) -> list[str]:
        """List what it cannot express, ``field: value  (reason)`` a line each; empty: it can express the model."""

    def dropped(self, dims: Any, facts: Facts) -> Mapping[str, str]:
        """Name tensors of the family that are not written, with the reason."""


def activation(dims: GptDims, facts: Facts) -> str:
    """Name the feed-forward's function in transformers' words; FasterTransformer's Gelu is the tanh form."""
    return facts.activation or _ACTIVATIONS.get(dims.activation_type, dims.activation_type)


def is_untied(dims: GptDims, facts: Facts) -> bool:
    """Whether the output projection has weights of its own."""
    return dims.has_untied_head and not facts.is_head_tied


def is_tied(dims: GptDims, facts: Facts) -> bool:
    """Whether the output projection is the embedding."""
    return not is_untied(dims, facts)


@dataclass(frozen=True)
class Keys:
    """The keys of an architecture.

    Attributes:
        names: by key, in the order in which they are written: the dimension that it is; a function of the dimensions
            and facts that it is written from; or the one value that it is written with.
        defaults: of dimensions, where the key is missing or null, or the family has no such number.
    """

    names: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)

    def read(self, settings: Settings, **more: Any) -> ModelDims:
        """Read the dimensions; ``more`` are those that have no key, or go before it."""
        keys = {dimension: key for key, dimension in self.names.items() if isinstance(dimension, str)}
        width, epsilon = keys.pop("hidden_units"), keys.pop("layernorm_eps", None)
        sizes: dict[str, Any] = {
            name: settings.size(key, self.defaults.get(name, REQUIRED))
            for name, key in keys.items()
            if name not in more
        }
        if epsilon:
            sizes["layernorm_eps"] = settings.epsilon(epsilon)
        return ModelDims(size_per_head=settings.head_size(width, keys["head_num"]), **sizes, **more)

    def write(self, dims: GptDims, facts: Facts) -> dict[str, Any]:
        """List the keys of a model."""
        return {
            key: (getattr(dims, said) or self.defaults.get(said, 0))
            if isinstance(said, str)
            else said(dims, facts)
            if callable(said)
            else said
            for key, said in self.names.items()
        }
