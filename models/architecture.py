"""What one architecture of transformers is: which blocks, which names, which keys of ``config.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from models.blocks.rotary import ROPE_KEYS
from models.blocks.windows import CHUNKED, FULL, LINEAR, SLIDING
from models.checks import shown
from models.config_json import ConfigJson
from models.decoder import BLOCKS, MORE_BLOCKS, NAMES, Decoder, Layer
from models.errors import ModelError
from models.keys import Keys

ZERO_CENTRED = "norms.is_zero_centred"
STORAGE = (
    *(ZERO_CENTRED, "mixture.is_choice_bias_row", "mixture.is_in_arrays", "mixture.is_in_halves", "delta.is_by_kind"),
)
"""Fields that say how numbers are stored and not what they mean: whoever writes a model may change them."""
_CHUNK = "attention_chunk_size"
_KINDS = {"layers.window": SLIDING, "delta.key_size": LINEAR, "layers.chunk": CHUNKED}
"""Kinds of layers beside those that see all tokens, by a field that is said where there are such."""
_ONE_SIDED = "a token sees those before it alone"
LIMITS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "is_causal": ((True,), _ONE_SIDED),
    "use_bidirectional_attention": ((False, None), _ONE_SIDED),
    "per_layer_config": ((None, {}), "its layers are alike"),
    _CHUNK: ((None,), "a token sees all before it"),
    "kv_sharing_modes": ((None,), "each layer has keys and values of its own"),
}
"""Keys that transformers' common code reads of any configuration: the values that are followed, and what there is
instead. Read by ``masking_utils.py``, ``cache_utils.py``, ``integrations/heterogeneity``."""
_OF_NO_KEY = {"model_type", "names", *MORE_BLOCKS}
_OF_A_DECODER = {"is_encoder_decoder": ((False, None), "it is a decoder alone")}


def _defaults() -> dict[str, Any]:
    """List the fields that a description has unless it says otherwise."""
    kinds = {"": Decoder, **{f"{name}.": kind for name, kind in {**BLOCKS, **MORE_BLOCKS}.items()}}
    named = {f"{block}{each.name}": each.default for block, kind in kinds.items() for each in fields(kind)}
    return {name: value for name, value in named.items() if value is not MISSING and name not in _OF_NO_KEY}


def _alike(layers: int) -> dict[str, Any]:
    """List what layers have unless it is said otherwise."""
    return {f"layers.{each.name}": (each.default,) * layers for each in fields(Layer) if each.default is not MISSING}


@dataclass(frozen=True)
class Architecture:
    """One architecture of transformers, read and written.

    Attributes:
        class_name: of the class that generates.
        keys: of ``config.json``, in the order in which they are written.
        has: fields of the description that no key says, where they are not a ``Decoder``'s defaults.
        names: of tensors by role, where they are not Llama's.
        defaults: of ``config.json``: what the class in transformers takes for a key that is not there.
        aliases: keys that transformers takes for another, which they go before.
        also: keys of an engine's own, and the key whose value they repeat.
        instead: keys in words that engines refuse, and the key of the same meaning that all read.
        passes_over: shell patterns of further predictors' tensors in files, which the class does not load.
        limits: keys that the class reads and no field stands for: the values that are followed, and the reason.
    """

    model_type: str
    class_name: str
    keys: tuple[Keys, ...]
    has: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    passes_over: tuple[str, ...] = ()
    limits: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)

    def read(self, config: Mapping[str, Any]) -> Decoder:
        """Read what ``config.json`` describes.

        Raises:
            ModelError: a value that no model can have, or that this architecture's description has no field for.
        """
        if found := self.problems(config):
            raise ModelError(f"{self.model_type} is read without\n  " + "\n  ".join(found), "see config.json")
        given = self.completed(config)
        said = {name: value for keys in self.keys for name, value in keys.read(given).items()}
        missing = MORE_BLOCKS.keys() - {name.partition(".")[0] for name in said}
        has = {name: value for name, value in self.has.items() if name.partition(".")[0] not in missing}
        return Decoder.of({**has, **said}, model_type=self.model_type, names=self.all_names)

    def write(self, decoder: Decoder) -> dict[str, Any]:
        """Write a description as ``config.json`` has it: the architecture's own keys.

        Raises:
            ModelError: the architecture lacks something of it; see ``lacks``.
        """
        if found := self.lacks(decoder):
            raise ModelError(f"{self.class_name} cannot express this model\n  " + "\n  ".join(found))
        fields = decoder.fields()
        said = {key: value for keys in self.keys for key, value in keys.write(fields).items()}
        return said | {name: said[key] for name, key in self.also.items() if key in said}

    def for_engines(self, config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
        """Add the keys that a configuration leaves out: engines read more of them than transformers saves.

        A rotation's scaling has two keys of which one counts; the other one is not added. A configuration whose model
        the architecture cannot write, as that of a class of the checkpoint's own, stays as it is.
        """
        if self.lacks(decoder):
            return dict(config)
        said = {key: value for key, value in self.write(decoder).items() if value is not None}
        other = {key: instead for key, instead in self.instead.items() if key in config and instead in said}
        kept = {key: value for key, value in config.items() if key not in (*other, *other.values())}
        more = {key: value for key, value in said.items() if kept.get(key) is None and key not in ROPE_KEYS}
        return kept | more

    def problems(self, config: Mapping[str, Any]) -> list[str]:
        """List the keys that no description here has a field for, ``key: value  (reason)`` a line each."""
        given = self.completed(config)
        kinds = {kind for field, kind in _KINDS.items() if field in self._said}
        found = beyond({**_OF_A_DECODER, **self.limits}, config) + attention_problems(config, kinds)
        return found + [problem for keys in self.keys for problem in keys.problems(given)]

    def lacks(self, decoder: Decoder) -> list[str]:
        """List what of a model this architecture has not, ``field: value  (reason)`` a line each."""
        said, has = decoder.fields(), {**_defaults(), **_alike(decoder.num_layer), **self.has}
        if strange := [
            *(
                f"{name}: {shown(said[name])}  ({self.model_type} has none)"
                for name in said.keys() - has.keys() - self._said
            ),
            *(
                f"{name}: none  ({self.model_type} has it)"
                for keys in self.keys
                for name in keys.says
                if name not in said and not keys.of_some
            ),
        ]:
            return sorted(strange)
        fixed = has.keys() & said.keys() - {*self._said, *STORAGE}
        found = [
            f"{name}: {shown(said[name])}  ({self.model_type} has {shown(has[name])})"
            for name in sorted(fixed)
            if said[name] != has[name]
        ]
        if decoder.model_type not in ("", self.model_type):
            found.append(f"model_type: {decoder.model_type}  (it is {self.model_type})")
        return found + [lack for keys in self.keys for lack in keys.lacks(said)]

    def completed(self, config: Mapping[str, Any]) -> ConfigJson:
        """Call keys by the names that the class has for them, and add its defaults."""
        given = {key: value for key, value in config.items() if key not in self.aliases}
        others = {self.aliases[key]: config[key] for key in self.aliases if config.get(key) is not None}
        return ConfigJson({**self.defaults, **given, **others})

    def is_passed_over(self, name: str) -> bool:
        """Whether a tensor of a directory is a further predictor's, which the class does not load."""
        short = name.removeprefix(f"{self.all_names['embedding'].partition('.')[0]}.")
        return any(fnmatchcase(short, pattern) for pattern in self.passes_over)

    @property
    def _said(self) -> set[str]:
        return {name for keys in self.keys for name in keys.says}

    @property
    def all_names(self) -> Mapping[str, str]:
        """Names of tensors by role."""
        return {**NAMES, **self.names}


def attention_problems(config: Mapping[str, Any], of_class: Set[str] = frozenset()) -> list[str]:
    """List what transformers' common code reads of any configuration and no model here has, one line each.

    Args:
        config: the configuration.
        of_class: kinds of layers that the class has beside those that see all tokens; the cache of one without windows
            is cut by one even so.
    """
    reason = "transformers' own model of this type has no such layers"
    said = config.get("layer_types") or []
    if not isinstance(said, (list, tuple)):
        raise ModelError(f"config.json: layer_types is {shown(said)}, not a list")
    kinds = {str(kind) for kind in said} - {FULL, "attention", *of_class}
    found = beyond({key: each for key, each in LIMITS.items() if key != _CHUNK or CHUNKED not in of_class}, config)
    if kinds:
        found.append(f"layer_types: {', '.join(map(shown, sorted(kinds)))}  ({reason})")
    if SLIDING not in of_class and config.get("sliding_window") is not None:
        found.append(f"sliding_window: {shown(config['sliding_window'])}  ({reason})")
    return found


def beyond(limits: Mapping[str, tuple[Iterable[Any], str]], config: Mapping[str, Any]) -> list[str]:
    """List the keys whose value is none of those that are followed, one line each."""
    return [
        f"{key}: {shown(config[key])}  ({reason})"
        for key, (legal, reason) in limits.items()
        if key in config and config[key] not in legal
    ]
