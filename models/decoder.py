"""The description of a decoder: sizes, blocks, layers; and every tensor under the name that transformers saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from models.blocks import attention, feed_forward, norms
from models.blocks.attention import Attention
from models.blocks.feed_forward import FeedForward
from models.blocks.norms import Norms
from models.blocks.rotary import Rotary
from models.keys import Fields
from models.spelling import Spelling
from models.tensor import Tensor

NAMES = {
    **{"embedding": "model.embed_tokens", "layer": "model.layers.{layer}", "final_norm": "model.norm"},
    **{"head": "lm_head", **norms.NAMES, **attention.NAMES, **feed_forward.NAMES},
}
"""What a tensor is called by its role, where an architecture does not say otherwise."""
_BLOCKS: Mapping[str, type] = {"attention": Attention, "feed_forward": FeedForward, "norms": Norms}
AnyDecoder = TypeVar("AnyDecoder", bound="Decoder")
_VOCABULARY = Tensor(("vocab_size", "hidden_units"), 0)


@dataclass(frozen=True)
class Layer:
    """What may differ from layer to layer.

    Attributes:
        rotary: how queries and keys are rotated; None: they are not.
        window: tokens that a token sees, itself among them; 0: all before it.
    """

    rotary: Rotary | None
    window: int = 0


@dataclass(frozen=True)
class Decoder:
    """A decoder of transformer blocks, one after another on a residual stream.

    Attributes:
        hidden_units: width of the residual stream.
        vocab_size: rows of the embedding, with the training's padding.
        max_positions: the longest text that it was trained for; 0: it is not known.
        attention, feed_forward, norms: the blocks of every layer.
        layers: each by itself.
        embedding_scale: what embeddings are multiplied by.
        residual_multiplier: of what attention and feed-forward add to the residual stream.
        logits_divisor: what logits are divided by.
        final_softcap: c of c * tanh(logit / c); 0: there is none.
        has_tied_head: the output projection is the embedding.
        model_type: of the architecture, as qwen2; empty: the source has none.
        names: of its tensors by role.
    """

    hidden_units: int
    vocab_size: int
    max_positions: int
    attention: Attention
    feed_forward: FeedForward
    norms: Norms
    layers: tuple[Layer, ...]
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    final_softcap: float = 0.0
    has_tied_head: bool = False
    model_type: str = ""
    names: Mapping[str, str] = field(default_factory=lambda: NAMES, hash=False, repr=False)

    @classmethod
    def of(cls: type[AnyDecoder], said: Fields, **own: Any) -> AnyDecoder:
        """Put a description together out of its fields by name; see ``fields``."""
        blocks = {name: kind(**_below(said, name)) for name, kind in _BLOCKS.items()}
        windows = said.get("layers.window") or (0,) * said["num_layer"]
        layers = tuple(map(Layer, said["layers.rotary"], windows))
        plain = {name: value for name, value in said.items() if "." not in name and name != "num_layer"}
        return cls(**blocks, layers=layers, **plain, **own)

    def fields(self) -> dict[str, Any]:
        """List the fields by name: ``hidden_units``, ``attention.head_num``, ``layers.window``; names are none."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        found = {name: own[name] for name in own.keys() - {*_BLOCKS, "layers", "model_type", "names"}}
        for block in _BLOCKS:
            found |= {f"{block}.{each.name}": getattr(own[block], each.name) for each in fields(own[block])}
        by_layer = {"layers.rotary": "rotary", "layers.window": "window"}
        found |= {name: tuple(getattr(layer, part) for layer in self.layers) for name, part in by_layer.items()}
        return {"num_layer": self.num_layer, **found}

    @property
    def num_layer(self) -> int:
        """Transformer blocks."""
        return len(self.layers)

    @property
    def head_num(self) -> int:
        """Heads of the queries."""
        return self.attention.head_num

    @property
    def kv_head_num(self) -> int:
        """Heads of the keys and values."""
        return self.attention.kv_head_num

    @property
    def heads_per_group(self) -> int:
        """Heads that share one key and value."""
        return self.attention.heads_per_group

    @property
    def qkv_head_num(self) -> int:
        """Heads of queries, keys and values together."""
        return self.head_num + 2 * self.kv_head_num

    @property
    def size_per_head(self) -> int:
        """Width of a head."""
        return self.attention.size_per_head

    @property
    def inter_size(self) -> int:
        """Width of the feed-forward's middle."""
        return self.feed_forward.inter_size

    @property
    def expert_num(self) -> int:
        """Experts of a layer."""
        return self.feed_forward.expert_num

    def tensors(self) -> dict[str, Tensor]:
        """List every tensor by the name that transformers saves, with its shape."""
        found, layer = {f"{self.names['embedding']}.weight": _VOCABULARY}, self.layer()
        for index in range(self.num_layer):
            found |= {self.name_of(role, index): tensor for role, tensor in layer.items()}
        found |= {self.name_of(role): tensor for role, tensor in self.norms.tensors("final_norm").items()}
        if not self.has_tied_head:
            found[f"{self.names['head']}.weight"] = _VOCABULARY
        return {name: tensor.sized(self.axis_size) for name, tensor in found.items()}

    def layer_tensors(self, index: int) -> dict[str, str]:
        """Name a layer's linear layers and norms by role, without ``.weight`` and ``.bias``."""
        roles = dict.fromkeys(role.rpartition(".")[0] for role in self.layer())
        return {role: self.name_of(f"{role}.", index).removesuffix(".") for role in roles}

    def name_of(self, role: str, layer: int | str = "{layer}") -> str:
        """Name a tensor by its role, as ``query.weight`` or ``experts.3.gate.weight``, and its layer's number."""
        part, _, kind = role.rpartition(".")
        expert = ""
        if part.startswith("experts."):
            _, expert, inner = part.split(".")
            part = f"expert.{inner}"
        name = self.names[part].format(expert=expert)
        is_outer = part in ("embedding", "final_norm", "head")
        return f"{name}.{kind}" if is_outer else f"{self.names['layer'].format(layer=layer)}.{name}.{kind}"

    def axis_size(self, symbol: str | int) -> int:
        """Resolve a symbol of a tensor's axes."""
        return symbol if isinstance(symbol, int) else int(getattr(self, symbol))

    def layer(self) -> dict[str, Tensor]:
        """List the tensors of a layer by role."""
        of_norms: Iterator[dict[str, Tensor]] = map(self.norms.tensors, self.norms.roles())
        attention = {**self.attention.norms(), **self.attention.tensors()}
        return {
            **{role: tensor for norm in of_norms for role, tensor in norm.items()},
            **attention,
            **self.feed_forward.tensors(),
        }

    def spellings(self, is_apart: bool = False) -> tuple[Spelling, ...]:
        """List how trainings keep the tensors of a layer; ``is_apart``: gate and up in two matrices."""
        return (*norms.SPELLINGS, *attention.SPELLINGS, *self.feed_forward.spellings(is_apart))


def _below(said: Fields, block: str) -> dict[str, Any]:
    return {name.removeprefix(f"{block}."): value for name, value in said.items() if name.startswith(f"{block}.")}
