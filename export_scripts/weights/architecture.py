"""What one Hugging Face architecture is to a conversion: its family, its table, and what its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.layouts import unchanged
from export_scripts.weights.remarks import EXACT_GELU as EXACT_GELU_REMARK
from export_scripts.weights.remarks import ShardRemark
from export_scripts.weights.schema import DecoderDims, ModelDims, Rule, Rules, SourceMap, Sources
from export_scripts.weights.values import Fields, checkpoint_errors, epsilon, positive
from ft_format.families.family import Family
from handover.errors import CheckpointError
from models import architecture
from models.blocks.feed_forward import EXACT_GELU, TANH_GELU
from models.checks import shown

_NO_DEFAULT = object()
# What FasterTransformer's decoders compute: ParallelGptDecoder.cc, GptJDecoder.cc, GptNeoXDecoder.cc.
_ACTIVATIONS = {"gpt": ("Gelu", "Relu"), "gptj": ("Gelu",), "gptneox": ("Gelu",)}
_HEAD = "model.lm_head.weight"


class Settings(Fields):
    """``config.json`` of a checkpoint, with errors that name the key."""

    def __init__(self, values: Any) -> None:
        super().__init__(values, "config.json")

    def size(self, key: str, default: Any = _NO_DEFAULT) -> int:
        """Read a positive number; ``default`` stands for a missing key and for null.

        Raises:
            CheckpointError: it is none.
        """
        value = self.get(key)
        value = default if value is None and default is not _NO_DEFAULT else value
        return positive(value, f"config.json: {key}")

    def epsilon(self, key: str) -> float:
        """Read a norm's epsilon, 1e-5 where there is none; CheckpointError: no norm can have it."""
        return epsilon(self.get(key, 1e-5), f"config.json: {key}")

    def activation(self, key: str, default: str) -> str:
        """Translate the feed-forward's function to FasterTransformer's name; empty: it has none for it."""
        name = self.get(key, default)
        return "Gelu" if name in (*TANH_GELU, *EXACT_GELU) else "Relu" if name == "relu" else ""

    def head_size(self, hidden_key: str, heads_key: str) -> int:
        """Divide the width by the heads.

        Raises:
            CheckpointError: it is no multiple.
        """
        hidden, heads = self.size(hidden_key), self.size(heads_key)
        if hidden % heads:
            raise CheckpointError(f"config.json: {hidden_key} {hidden} is not a multiple of {heads_key} {heads}")
        return hidden // heads


@dataclass(frozen=True)
class Limit:
    """A key of ``config.json`` that FasterTransformer's model can follow in part.

    Attributes:
        legal: values that can be expressed; a missing key is always fine.
        reason: what FasterTransformer has instead.
    """

    legal: tuple[Any, ...]
    reason: str


_OF_EVERY_DECODER = {"is_encoder_decoder": Limit((False, None), "it is a decoder alone")}


@dataclass(frozen=True)
class Product:
    """A key that stands for two others multiplied; they are no keys any more.

    Attributes:
        rows: key of a matrix [row, inner].
        weight: key of a linear layer's weight.
        is_transposed: the layer is [outer, inner], as torch keeps one that leads outwards; else [inner, outer].
    """

    rows: str
    weight: str
    is_transposed: bool


@dataclass(frozen=True)
class Architecture:
    """One Hugging Face architecture, expressed by one of FasterTransformer's models.

    Attributes:
        model_type: transformers' name of it.
        family: FasterTransformer's model.
        source_map: the table; keys are without ``prefix``.
        dims: reads the dimensions.
        prefix: with which keys begin where the model was saved with its head.
        embedding, head: keys of the two ends of the vocabulary.
        aliases: keys of the configuration that transformers takes for another, which they go before.
        other_names: names that some versions of transformers give to keys of the table.
        has_tied_head: what a configuration that does not say it means.
        activation: key of the feed-forward's function and transformers' default; None: the tanh form of GELU.
        adapt: changes the table to what the configuration says.
        products: tensors to multiply before the table applies, by the key of what they give; that of the head, if it
            is there, makes it untied.
        limits: by key.
        more_problems: lists what else is in the way, one line each.
        without_biases: names of targets (shell patterns) whose biases the configuration leaves out; they become zeros.
        family_eps: the epsilon that FasterTransformer's own engine computes norms with; None: that of config.ini.
    """

    model_type: str
    family: Family
    source_map: SourceMap
    dims: Callable[[Settings], DecoderDims]
    prefix: str
    embedding: str
    head: str = "lm_head.weight"
    aliases: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    has_tied_head: bool = True
    activation: tuple[str, str] | None = None
    adapt: Callable[[SourceMap, Settings], SourceMap] = lambda table, settings: table
    products: Callable[[Settings], Mapping[str, Product]] = lambda settings: {}
    limits: Mapping[str, Limit] = field(default_factory=dict)
    more_problems: Callable[[Settings], list[str]] = lambda settings: []
    without_biases: Callable[[Settings], tuple[str, ...]] = lambda settings: ()
    family_eps: float | None = None

    def settled(self, settings: Settings) -> Settings:
        """Call keys by the names that the class has for them."""
        given = {key: value for key, value in settings.items() if key not in self.aliases}
        others = {self.aliases[key]: settings[key] for key in self.aliases if settings.get(key) is not None}
        return Settings({**given, **others})

    def is_tied(self, settings: Settings) -> bool:
        """Whether the output projection is the embedding."""
        is_tied = bool(settings.get("tie_word_embeddings", self.has_tied_head))
        return is_tied and self.head not in self.products(settings)

    def problems(self, settings: Settings) -> list[str]:
        """List the keys in the way, one line each."""
        found = _beyond({**_OF_EVERY_DECODER, **self.limits}, settings)
        found += attention_problems(settings)
        if self.activation and settings.activation(*self.activation) not in _ACTIVATIONS[self.family.name]:
            key, default = self.activation
            legal = " or ".join(_ACTIVATIONS[self.family.name])
            found.append(f"{key}: {shown(settings.get(key, default))}  (its feed-forward has {legal}, without a gate)")
        return found + self.more_problems(settings)

    def exact_function(self, settings: Settings) -> str:
        """Name the feed-forward's function where it is the exact GELU, which dimensions do not say; else empty."""
        return "gelu" if self.activation and settings.get(*self.activation) in EXACT_GELU else ""

    def remarks(self, settings: Settings, dims: DecoderDims) -> tuple[str, ...]:
        """List what is expressed only nearly, one line each."""
        said = []
        if self.exact_function(settings):
            said.append(EXACT_GELU_REMARK)
        if isinstance(dims, ModelDims) and self.family_eps not in (None, dims.layernorm_eps):
            said.append(
                ShardRemark(
                    f"norms have an epsilon of {dims.layernorm_eps:g}, as config.ini says; NVIDIA's library computes "
                    f"every {self.family.name} with {self.family_eps:g}"
                )
            )
        return tuple(said)

    def table(self, settings: Settings, dims: DecoderDims) -> SourceMap:
        """Adapt the table to the configuration.

        Biases that the configuration leaves out have no rule: transformers leaves those of the files out.
        A tied head is the embedding: a copy of it is ignored, and the family's file of it, if it has one, is made
        from the embedding.
        """
        table = self.adapt(self.source_map, settings)
        without = self.without_biases(settings)
        kept = {key: rule for key, rule in table.rules.items() if not _is_bias_of(rule, without)}
        table = replace(table, rules=kept, biases={**dict.fromkeys(without, False), "*": True})
        if not self.is_tied(settings):
            return table
        rules = {key: rule for key, rule in table.rules.items() if key != self.head}
        if _HEAD in self.family.schema(dims):
            embedding = rules[self.embedding]
            assert isinstance(embedding, Rule), "an embedding becomes one target"
            rules[self.embedding] = (embedding, Rule(_HEAD, unchanged))
        return replace(table, rules=rules, ignored={**table.ignored, self.head: "the tied copy of the embedding"})


def attention_problems(settings: Fields) -> list[str]:
    """List what transformers' common code reads of any configuration and no model here has, one line each."""
    with checkpoint_errors():
        return architecture.attention_problems(settings)


def _is_bias_of(rules: Rules, patterns: tuple[str, ...]) -> bool:
    """Whether all that a source becomes are biases whose names are like one of the patterns."""
    targets = [rule.target for rule in (rules if isinstance(rules, tuple) else (rules,))]
    return all(".bias" in name and any(fnmatchcase(name, pattern) for pattern in patterns) for name in targets)


def _beyond(limits: Mapping[str, Limit], settings: Fields) -> list[str]:
    return [
        f"{key}: {shown(settings[key])}  ({limit.reason})"
        for key, limit in limits.items()
        if key in settings and settings[key] not in limit.legal
    ]


def in_layers(prefix: str, rules: Mapping[Any, Rules]) -> dict[Sources, Rules]:
    """Complete the keys and targets of one layer: ``ln_1.weight`` becomes ``<prefix>ln_1.weight``.

    Args:
        prefix: of the source's layers, as ``h.{layer}.``.
        rules: of a layer, with targets as they follow ``model.layers.{layer}.``.
    """

    def full(rule: Rule) -> Rule:
        return replace(rule, target=f"model.layers.{{layer}}.{rule.target}")

    return {
        tuple(prefix + key for key in keys) if isinstance(keys, tuple) else prefix + keys: (
            tuple(full(each) for each in rule) if isinstance(rule, tuple) else full(rule)
        )
        for keys, rule in rules.items()
    }


def sinusoidal_positions(rows: int, width: int, first: int = 0) -> Array:
    """Make a table of sines in its first half and cosines in its second.

    Formula: fairseq and transformers, ``XGLMSinusoidalPositionalEmbedding.get_embedding``.

    Args:
        rows: positions.
        width: of the model; an odd one ends with zeros.
        first: number of the first position.

    Returns:
        [rows, width], fp32.
    """
    half = width // 2
    frequencies = np.exp(np.arange(half, dtype=np.float32) * np.float32(-np.log(10000.0) / (half - 1)))
    angles = np.arange(first, first + rows, dtype=np.float32)[:, None] * frequencies
    table = np.zeros((rows, width), np.float32)
    table[:, : 2 * half] = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    return table
