"""What one Hugging Face architecture is to a conversion: its family, its table, and what its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from export_scripts.weights.hub_keys import Facts, Keys, is_untied
from export_scripts.weights.hub_tensor import HubTensor, in_every_layer, rules_of
from export_scripts.weights.remarks import EXACT_GELU as EXACT_GELU_REMARK
from export_scripts.weights.remarks import ShardRemark
from export_scripts.weights.schema import DecoderDims, ModelDims, SourceMap, as_tuple
from export_scripts.weights.settings import Settings
from export_scripts.weights.values import Fields, checkpoint_errors
from ft_format.families.family import Family
from ft_format.families.gpt import HEAD_FILE, GptDims
from models import architecture
from models.blocks.feed_forward import EXACT_GELU
from models.checks import shown

# What FasterTransformer's decoders compute: ParallelGptDecoder.cc, GptJDecoder.cc, GptNeoXDecoder.cc.
_ACTIVATIONS = {"gpt": ("Gelu", "Relu"), "gptj": ("Gelu",), "gptneox": ("Gelu",)}


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


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One Hugging Face architecture, expressed by one of FasterTransformer's models: what is read of it and written.

    Attributes:
        model_type: transformers' name of it.
        class_name: transformers' class that generates.
        title: its name, for people.
        tensors: lists those of a saved model by their names, for the dimensions; ``{layer}`` is a layer's number.
        ignored: keys without ``prefix`` (shell patterns) that are dropped on purpose, with the reason.
        keys: of the configuration, and the dimensions that they are.
        more_dims: reads dimensions that are no key's.
        prefix: with which keys begin where the model was saved with its head.
        embedding, head: keys of the two ends of the vocabulary, without ``prefix``.
        aliases: keys of the configuration that transformers takes for another, which they go before.
        other_names: names that some versions of transformers give to keys of the table.
        has_tied_head: what a configuration that does not say it means.
        activation: key of the feed-forward's function and transformers' default; None: the tanh form of GELU.
        adapt: changes the tensors that are read to what the configuration says.
        products: tensors to multiply before the table applies, by the key of what they give; that of the head, if it
            is there, makes it untied.
        limits: by key.
        more_problems: lists what else is in the way, one line each.
        without_biases: names of biases (shell patterns) that the configuration leaves out; they become zeros.
        family_eps: the epsilon that FasterTransformer's own engine computes norms with; None: that of config.ini.
        unlike: lists what it cannot express of a model of the family, ``field: value  (reason)`` a line each.
    """

    model_type: str
    class_name: str
    title: str
    family: Family
    tensors: Callable[[Any], Mapping[str, HubTensor]] = lambda dims: {}
    ignored: Mapping[str, str] = field(default_factory=dict)
    keys: Keys = Keys()
    more_dims: Callable[[Settings], dict[str, Any]] = lambda settings: {}
    prefix: str
    embedding: str
    head: str = "lm_head.weight"
    aliases: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    has_tied_head: bool = True
    activation: tuple[str, str] | None = None
    adapt: Callable[[Mapping[str, HubTensor], Settings], Mapping[str, HubTensor]] = lambda tensors, settings: tensors
    products: Callable[[Settings], Mapping[str, Product]] = lambda settings: {}
    limits: Mapping[str, Limit] = field(default_factory=dict)
    more_problems: Callable[[Settings], list[str]] = lambda settings: []
    without_biases: Callable[[Settings], tuple[str, ...]] = lambda settings: ()
    family_eps: float | None = None
    unlike: Callable[[Any, Facts], list[str]] = lambda dims, facts: []

    def dims(self, settings: Settings) -> DecoderDims:
        """Read the dimensions."""
        function = {"activation_type": settings.activation(*self.activation)} if self.activation else {}
        return self.keys.read(settings, **function, **self.more_dims(settings))

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
        tensors = self.adapt(self.tensors(dims), settings)
        patterns = self.without_biases(settings)
        absent = {name for name in tensors if any(fnmatchcase(name, pattern) for pattern in patterns)}
        kept = {name.removeprefix(self.prefix): tensor for name, tensor in tensors.items() if name not in absent}
        targets, schema = {tensor.pivot for tensor in kept.values()}, self.family.schema(dims)
        zeros = [tensors[name].pivot.replace("{layer}", "*") for name in absent if tensors[name].pivot not in targets]
        rules = rules_of(kept, schema, dims)
        ignored = dict(self.ignored)
        if self.is_tied(settings):
            head, embedding = rules.pop(self.head), rules[self.embedding]
            ignored[self.head] = "the tied copy of the embedding"
            if HEAD_FILE in schema:
                rules[self.embedding] = (*as_tuple(embedding), *as_tuple(head))
        return SourceMap(
            f"Hugging Face {self.title}", rules, ignored, biases={**dict.fromkeys(zeros, False), "*": True}
        )

    def written(self, dims: Any, facts: Facts) -> dict[str, HubTensor]:
        """List every tensor by its name in a saved model; transformers takes the embedding for a tied head."""
        tensors = self.tensors(dims).items()
        kept = {name: tensor for name, tensor in tensors if tensor.pivot != HEAD_FILE or is_untied(dims, facts)}
        return in_every_layer(kept, dims.num_layer)

    def config(self, dims: Any, facts: Facts) -> dict[str, Any]:
        """List the keys of ``config.json`` that are this architecture's own."""
        return self.keys.write(dims, facts)

    def lacks(self, dims: Any, facts: Facts) -> list[str]:
        """List what it cannot express of a model, one line each."""
        return self.unlike(dims, facts)

    def dropped(self, dims: Any, facts: Facts) -> Mapping[str, str]:
        """Name the output projection where it is the embedding's copy."""
        return {} if is_untied(dims, facts) else {HEAD_FILE: "the tied copy of the embedding"}


def attention_problems(settings: Fields) -> list[str]:
    """List what transformers' common code reads of any configuration and no model here has, one line each."""
    with checkpoint_errors():
        return architecture.attention_problems(settings)


def _beyond(limits: Mapping[str, Limit], settings: Fields) -> list[str]:
    return [
        f"{key}: {shown(settings[key])}  ({limit.reason})"
        for key, limit in limits.items()
        if key in settings and settings[key] not in limit.legal
    ]


def other_than(dims: GptDims, **wanted: tuple[Any, str]) -> list[str]:
    """List the dimensions that an architecture cannot follow, a line each."""
    return [
        f"{name}: {getattr(dims, name)}  ({reason})"
        for name, (value, reason) in wanted.items()
        if getattr(dims, name) != value
    ]
