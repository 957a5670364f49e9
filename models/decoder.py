"""The description of a decoder: sizes, blocks, layers; and every tensor under the name that transformers saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from models.blocks import attention, delta_rule, feed_forward, latent, mamba, mixture, norms, predictor
from models.blocks.attention import Attention
from models.blocks.delta_rule import DeltaRule
from models.blocks.feed_forward import FeedForward
from models.blocks.latent import Latent
from models.blocks.mamba import Mamba
from models.blocks.mixture import Mixture
from models.blocks.multipliers import Multipliers
from models.blocks.norms import Norms
from models.blocks.rotary import Rotary
from models.keys import Fields
from models.spelling import Spelling
from models.tensor import Tensor

NAMES = {
    **{"embedding": "model.embed_tokens", "layer": "model.layers.{layer}", "final_norm": "model.norm"},
    **{"head": "lm_head", **norms.NAMES, **attention.NAMES, **feed_forward.NAMES, **mixture.NAMES},
    **{**latent.NAMES, **mamba.NAMES, **delta_rule.NAMES, **predictor.NAMES},
}
"""What a tensor is called by its role, where an architecture does not say otherwise."""
BLOCKS: Mapping[str, type] = {"attention": Attention, "feed_forward": FeedForward, "norms": Norms}
"""What every description has. A block that is not in ``Layer.blocks`` says sizes alone: heads, or a dense layer's."""
MORE_BLOCKS: Mapping[str, type] = {
    **{"mixture": Mixture, "latent": Latent, "mamba": Mamba, "delta": DeltaRule},
    "multipliers": Multipliers,
}
"""Those that some have; multipliers are in no layer's list."""
FEED_FORWARDS = ("feed_forward", "mixture")
"""Blocks that work on each token by itself; the others mix tokens."""
_VOCABULARY = Tensor(("vocab_size", "hidden_units"), 0)


@dataclass(frozen=True)
class Layer:
    """What may differ from layer to layer.

    Attributes:
        rotary: how queries and keys are rotated; None: they are not.
        window: tokens that a token sees, itself among them; 0: all before it.
        chunk: tokens of a chunk of the text, of which a token sees those before it; 0: it sees all.
        blocks: fields of a Decoder, in the order in which they are computed; mixers that follow one another work
            side by side on one normalised input, and are added.
    """

    rotary: Rotary | None
    window: int = 0
    blocks: tuple[str, ...] = ("attention", "feed_forward")
    chunk: int = 0


@dataclass(frozen=True)
class Decoder:
    """A decoder of transformer blocks, one after another on a residual stream.

    Attributes:
        hidden_units: width of the residual stream.
        vocab_size: rows of the embedding, with the training's padding.
        max_positions: the longest text that it was trained for; 0: it is not known.
        attention, feed_forward, norms: its plain blocks.
        layers: each by itself.
        embedding_scale: what embeddings are multiplied by.
        residual_multiplier: of what attention and feed-forward add to the residual stream.
        logits_divisor: what logits are divided by.
        final_softcap: c of c * tanh(logit / c); 0: there is none.
        has_tied_head: the output projection is the embedding.
        model_type: of the architecture, as qwen2; empty: the source has none.
        names: of its tensors by role.
        mixture: its experts; None: it has none.
        latent: its latent attention; None: it has none.
        mamba: its layers with a state; None: it has none.
        multipliers: numbers within its layers; None: they are ones.
        delta: its layers with the gated delta rule; None: it has none.
        predictor_num: predictors of further tokens, each behind the one before.
        predictor_blocks: blocks of each layer of one; empty: it has one layer, of the last one's kind.
        predictors_beside: those that its files may have, and that its class passes over: they are none of its tensors.
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
    mixture: Mixture | None = None
    latent: Latent | None = None
    mamba: Mamba | None = None
    multipliers: Multipliers | None = None
    delta: DeltaRule | None = None
    predictor_num: int = 0
    predictor_blocks: tuple[tuple[str, ...], ...] = ()
    predictors_beside: int = 0

    @classmethod
    def of(cls, said: Fields, **own: Any) -> Decoder:
        """Put a description together out of its fields by name; see ``fields``."""
        more = {name: kind for name, kind in MORE_BLOCKS.items() if _below(said, name)}
        blocks = {name: kind(**_below(said, name)) for name, kind in {**BLOCKS, **more}.items()}
        by_layer = (said.get(f"layers.{each.name}") or (each.default,) * said["num_layer"] for each in fields(Layer))
        layers = tuple(map(Layer, *by_layer))
        plain = {name: value for name, value in said.items() if "." not in name and name != "num_layer"}
        return cls(**blocks, layers=layers, **plain, **own)

    def fields(self) -> dict[str, Any]:
        """List the fields by name: ``hidden_units``, ``attention.head_num``, ``layers.window``; names are none.

        A block that the model has not has no fields.
        """
        own = {each.name: getattr(self, each.name) for each in fields(Decoder)}
        blocks = {name: own.pop(name) for name in (*BLOCKS, *MORE_BLOCKS)}
        found = {name: own[name] for name in own.keys() - {"layers", "model_type", "names"}}
        for name, block in blocks.items():
            if block is not None:
                found |= {f"{name}.{each.name}": getattr(block, each.name) for each in fields(block)}
        for each in fields(Layer):
            found[f"layers.{each.name}"] = tuple(getattr(layer, each.name) for layer in self.layers)
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
        return self.mixture.expert_num if self.mixture else 0

    def tensors(self) -> dict[str, Tensor]:
        """List every tensor by the name that transformers saves, with its shape."""
        found = {f"{self.names['embedding']}.weight": _VOCABULARY}
        for index in range(self.num_layer + len(self._behind)):
            found |= {self.name_of(role, index): tensor for role, tensor in self.layer(index).items()}
        found |= {self.name_of(role): tensor for role, tensor in self.norms.tensors("final_norm").items()}
        if not self.has_tied_head:
            found[f"{self.names['head']}.weight"] = _VOCABULARY
        sized = {tensor: tensor.sized(self.axis_size) for tensor in set(found.values())}
        return {name: sized[tensor] for name, tensor in found.items()}

    def layer_tensors(self, index: int) -> dict[str, str]:
        """Name a layer's linear layers, norms and parameters by role, without ``.weight`` and ``.bias``."""
        roles = dict.fromkeys(role.rpartition(".")[0] or role for role in self.layer(index))
        bare = {role for role in self.layer(index) if "." not in role}
        return {role: self.name_of(role if role in bare else f"{role}.", index).removesuffix(".") for role in roles}

    def name_of(self, role: str, layer: int | str = "{layer}") -> str:
        """Name a tensor by its role, as ``query.weight``, ``experts.3.up.weight`` or ``choice_bias``, and its layer."""
        part, dot, kind = role.rpartition(".")
        part, expert = part or role, ""
        if part.startswith("experts."):
            _, expert, inner = part.split(".")
            part = f"expert.{inner}"
        name = self.names[part].format(expert=expert) + (f"{dot}{kind}" if dot else "")
        place = self.names["layer"].format(layer=layer)
        if isinstance(layer, int) and layer >= self.num_layer and (own := self.names["predictor.layer"]):
            place = own.format(predictor=layer - self.num_layer)
        is_outer = part in ("embedding", "final_norm", "head") or name.startswith(predictor.OUTER)
        return name if is_outer else f"{place}.{name}"

    def for_ranks(self, ranks: int) -> Decoder:
        """Copy heads of keys and values, and Mamba's groups, such that each rank has one where there are too few."""
        copied = self.with_kv_heads(self.kv_head_num * max(1, ranks // self.kv_head_num))
        if not self.mamba:
            return copied
        groups = self.mamba.group_num * max(1, ranks // self.mamba.group_num)
        return replace(copied, mamba=replace(self.mamba, group_num=groups))

    def with_kv_heads(self, count: int) -> Decoder:
        """Return the same with another number of heads of keys and values."""
        return replace(self, attention=replace(self.attention, kv_head_num=count))

    def axis_size(self, symbol: str | int) -> int:
        """Resolve a symbol of a tensor's axes, as ``hidden_units`` or ``mixture.expert_num``."""
        return symbol if isinstance(symbol, int) else int(attrgetter(symbol)(self))

    def layer(self, index: int = 0) -> dict[str, Tensor]:
        """List the tensors of a layer by role, or of a predictor behind the last one."""
        if index < self.num_layer:
            return self._by_kind[self.layers[index].blocks]
        place, last = (index - self.num_layer) % len(self._predictor_layers), len(self._predictor_layers) - 1
        there = predictor.roles(is_first=place == 0, is_last=place == last)
        own = {role: predictor.TENSORS[role] for role in there if self.names[role.rpartition(".")[0]]}
        return {**own, **self._by_kind[self._predictor_layers[place]]}

    @property
    def _predictor_layers(self) -> tuple[tuple[str, ...], ...]:
        return self.predictor_blocks or (self.layers[-1].blocks,)

    @property
    def _behind(self) -> tuple[tuple[str, ...], ...]:
        """The blocks of every layer behind the last."""
        return self._predictor_layers * self.predictor_num

    @property
    def roles(self) -> dict[str, Tensor]:
        """List the tensors of all kinds of layers by role."""
        return {role: tensor for kind in self._by_kind.values() for role, tensor in kind.items()}

    @property
    def norm_names(self) -> set[str]:
        """Name the weights of the norms of the residual stream, and of those that are stored as they are."""
        blocks = {name: getattr(self, name) for kind in self._by_kind for name in kind}
        own = [role for block in blocks.values() for role in block.norms()]
        roles = {*(f"{role}.weight" for role in self.norms.roles()), *own, *predictor.NORMS}
        layers = range(self.num_layer + len(self._behind))
        return {self.name_of("final_norm.weight")} | {
            self.name_of(role, index) for index in layers for role in roles & self.layer(index).keys()
        }

    @cached_property
    def _by_kind(self) -> dict[tuple[str, ...], dict[str, Tensor]]:
        """The tensors of each kind of layer, by its blocks."""
        kinds = dict.fromkeys((*(layer.blocks for layer in self.layers), *self.predictor_blocks))
        return {blocks: self._of_blocks(blocks) for blocks in kinds}

    def _of_blocks(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        halves = [any(name not in FEED_FORWARDS for name in names), any(name in FEED_FORWARDS for name in names)]
        found: dict[str, Tensor] = {}
        for role in self.norms.roles(*halves):
            found |= self.norms.tensors(role)
        for block in (getattr(self, name) for name in names):
            found |= {**block.norms(), **block.tensors()}
        return found

    def spellings(self, is_apart: bool = False) -> tuple[Spelling, ...]:
        """List how trainings keep the tensors of layers; ``is_apart``: gate and up in two matrices."""
        used = dict.fromkeys(name for kind in self._by_kind for name in kind)
        blocks = (getattr(self, name).spellings(is_apart) for name in used)
        return (*norms.SPELLINGS, *(each for block in blocks for each in block))


def _below(said: Fields, block: str) -> dict[str, Any]:
    return {name.removeprefix(f"{block}."): value for name, value in said.items() if name.startswith(f"{block}.")}
