"""A mixture of experts: feed-forwards of which a router chooses some for each token, and one that every token uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from models.blocks import expert_arrays
from models.blocks.feed_forward import FeedForward
from models.config_json import ConfigJson
from models.keys import Fields, Keys
from models.spelling import Spelling
from models.tensor import Tensor

SOFTMAX, SIGMOID = "softmax", "sigmoid"
DENSE_LAYER, SPARSE_LAYER = ("attention", "feed_forward"), ("attention", "mixture")
"""Blocks of a layer with one feed-forward, and of one with experts."""
NAMES = {
    **{"router": "mlp.gate", "choice_bias": "mlp.gate.e_score_correction_bias"},
    **{f"expert.{role}": f"mlp.experts.{{expert}}.{role}_proj" for role in ("gate", "up", "down")},
    **{f"shared.{role}": f"mlp.shared_experts.{role}_proj" for role in ("gate", "up", "down")},
    **{"shared_gate": "mlp.shared_expert_gate", **expert_arrays.NAMES},
    **{"latent_in": "mlp.fc1_latent_proj", "latent_out": "mlp.fc2_latent_proj"},
}
_CORE = "mlp.linear_fc"


@dataclass(frozen=True)
class Mixture:
    """One kind of mixture; its function is that of the plain feed-forward.

    A token's experts are those with the highest scores, or scores plus ``choice_bias``; groups of experts are chosen
    first where there are several. What the chosen experts compute is weighted by their scores.

    Attributes:
        expert_num, experts_per_token: experts of a layer, and those that a token uses.
        inter_size: width of an expert's middle.
        is_gated, has_bias: whether an expert has a gate, and biases.
        scoring: SOFTMAX over all experts, or SIGMOID of each.
        is_normalised: the scores of the chosen are divided by their sum.
        scale: what they are multiplied by then.
        has_router_bias: whether the router's linear layer has one.
        has_choice_bias: whether numbers are added to the scores to choose, and for that alone.
        is_choice_bias_row: whether they are stored as a matrix of one row.
        group_num, groups_per_token: groups of experts, and those that a token's experts are in; 1, 1: there are none.
        is_group_of_two: a group counts as its two best experts together, else as its best.
        shared_inter_size: width of the feed-forward that every token uses; 0: there is none.
        has_shared_gate: whether what that computes is multiplied by a sigmoid of the token.
        is_in_arrays: the experts of a layer are stored together; see ``expert_arrays``.
        is_in_halves: of such arrays, gates come before what they are multiplied with; else they take turns.
        is_weighted_before: what a chosen expert is given is multiplied by its score; else what it gives.
        latent_size: width in which the chosen experts work, projected into and out of it; 0: that of the model.
    """

    expert_num: int
    experts_per_token: int
    inter_size: int
    is_gated: bool = True
    has_bias: bool = False
    scoring: str = SOFTMAX
    is_normalised: bool = True
    scale: float = 1.0
    has_router_bias: bool = False
    has_choice_bias: bool = False
    is_choice_bias_row: bool = False
    group_num: int = 1
    groups_per_token: int = 1
    is_group_of_two: bool = True
    shared_inter_size: int = 0
    has_shared_gate: bool = False
    is_in_arrays: bool = False
    latent_size: int = 0
    is_in_halves: bool = False
    is_weighted_before: bool = False

    def norms(self) -> dict[str, Tensor]:
        """List the weights of norms, by role: it has none."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """List the tensors, by role: ``experts.<n>.gate.weight``, and ``shared.gate.weight`` of what all tokens use."""
        router = Tensor(("mixture.expert_num", "hidden_units"))
        found = {"router.weight": router}
        if self.has_router_bias:
            found["router.bias"] = router.bias
        if self.has_choice_bias:
            axes = ((1,) if self.is_choice_bias_row else ()) + router.axes[:1]
            found["choice_bias"] = Tensor(axes, stays_fp32=True)
        outer = "mixture.latent_size" if self.latent_size else "hidden_units"
        if self.latent_size:
            found["latent_in.weight"] = Tensor((outer, "hidden_units"))
            found["latent_out.weight"] = Tensor(("hidden_units", outer))
        if self.is_in_arrays:
            found |= expert_arrays.tensors(self.has_bias, self.is_in_halves)
        else:
            one = self._one("mixture.inter_size", self.has_bias, outer)
            found |= {f"experts.{n}.{role}": each for n in range(self.expert_num) for role, each in one.items()}
        if self.shared_inter_size:
            found |= {f"shared.{role}": each for role, each in self._one("mixture.shared_inter_size", False).items()}
        if self.has_shared_gate:
            found["shared_gate.weight"] = Tensor((1, "hidden_units"))
        return found

    def _one(self, middle: str, has_bias: bool, outer: str = "hidden_units") -> dict[str, Tensor]:
        return FeedForward(1, is_gated=self.is_gated, has_bias=has_bias).tensors(middle, outer)

    def spellings(self, is_apart: bool = False) -> tuple[Spelling, ...]:
        """List megatron-core's.

        Rank files hold tensors of each expert, distributed checkpoints arrays of all of them or, with
        ``singleton_local_shards``, arrays of each. Which training rank had an expert does not show in their names.

        Args:
            is_apart: gate and up are two matrices; else they are one, the gate first.
        """
        found = [
            Spelling(("router",), ("mlp.router.{kind}",)),
            Spelling(("choice_bias",), ("mlp.router.expert_bias",), kinds=("",)),
            Spelling(("shared_gate",), ("mlp.shared_experts.gate_{kind}",)),
            Spelling(("latent_in",), ("mlp.fc1_latent_proj.{kind}",)),
            Spelling(("latent_out",), ("mlp.fc2_latent_proj.{kind}",)),
        ]
        if self.is_in_arrays:
            arrays = expert_arrays.spellings(self.expert_num, is_apart, self.is_in_halves)
            return (*found, *arrays, *self._shared_spellings(is_apart))
        for spelling in FeedForward(1, is_gated=self.is_gated).spellings(is_apart):
            core = [name.removeprefix("mlp.") for name in spelling.names if name.startswith(_CORE)]
            every = [tuple(f"experts.{n}.{role}" for role in spelling.roles) for n in range(self.expert_num)]
            for number, roles in enumerate(every):
                places = (f"mlp.experts.experts.{number}", f"mlp.experts.local_experts.{number}")
                names = tuple(f"{place}.{name}" for place in places for name in core)
                grouped = tuple(f"mlp.experts.{name.replace('{kind}', f'{{kind}}{number}')}" for name in core)
                found.append(replace(spelling, roles=roles, names=names + grouped))
            stacked = tuple(f"mlp.experts.experts.{name}" for name in core)
            found.append(replace(spelling, roles=sum(every, ()), names=stacked, is_stacked=True))
        return (*found, *self._shared_spellings(is_apart))

    def _shared_spellings(self, is_apart: bool) -> Iterator[Spelling]:
        for spelling in FeedForward(1, is_gated=self.is_gated).spellings(is_apart):
            names = (name.removeprefix("mlp.") for name in spelling.names if name.startswith(_CORE))
            roles = tuple(f"shared.{role}" for role in spelling.roles)
            yield replace(spelling, roles=roles, names=tuple(f"mlp.shared_experts.{name}" for name in names))


@dataclass(frozen=True)
class Experts(Keys):
    """How many experts a layer has, how many of them a token uses, and how wide one is."""

    count: str = "num_local_experts"
    used: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    says: ClassVar[tuple[str, ...]] = ("mixture.expert_num", "mixture.experts_per_token", "mixture.inter_size")

    def read(self, config: ConfigJson) -> dict[str, Any]:
        count, used = config.experts(self.count), config.size(self.used)
        return dict(zip(self.says, (count, used, config.size(self.width)), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        keys = (self.count, self.used, self.width)
        return {key: fields[name] for key, name in zip(keys, self.says, strict=True)}

    def problems(self, config: ConfigJson) -> list[str]:
        used, count = config.size(self.used), config.experts(self.count)
        return [f"{self.used}: {used}  (there are {count} experts)"] if used > count else []

    def lacks(self, fields: Fields) -> list[str]:
        dense, own = fields["feed_forward.inter_size"], fields[self.says[2]]
        if self.width != "intermediate_size" or dense == own:
            return []
        return [f"{self.says[2]}: {own}  (an expert is as wide as a feed-forward, {dense})"]


@dataclass(frozen=True)
class EveryLayer(Keys):
    """Every layer has experts, and no key says so.

    Attributes:
        mixer: the block before a feed-forward.
    """

    mixer: str = DENSE_LAYER[0]
    says: ClassVar[tuple[str, ...]] = ("layers.blocks",)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        kinds = ((self.mixer, SPARSE_LAYER[1] if each else DENSE_LAYER[1]) for each in self.sparse(config))
        return {self.says[0]: tuple(kinds)}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {}

    def lacks(self, fields: Fields) -> list[str]:
        meant = self.read(ConfigJson({**self.write(fields), "num_hidden_layers": fields["num_layer"]}))
        if fields[self.says[0]] == meant[self.says[0]]:
            return []
        kinds = sorted({"+".join(blocks) for blocks in fields[self.says[0]]})
        return [f"{self.says[0]}: {', '.join(kinds)}  (it has others, or in other layers)"]

    def sparse(self, config: ConfigJson) -> Sequence[bool]:
        """Return which layers have experts."""
        return [True] * config.layer_num


class SparseSteps(EveryLayer):
    """Every n-th layer has experts, from the n-th on, but for those that are listed."""

    _STEP, _DENSE = "decoder_sparse_step", "mlp_only_layers"

    def sparse(self, config: ConfigJson) -> Sequence[bool]:
        step, dense = config.size(self._STEP), config.get(self._DENSE) or ()
        return [layer not in dense and not (layer + 1) % step for layer in range(config.layer_num)]

    def write(self, fields: Fields) -> dict[str, Any]:
        dense = [layer for layer, blocks in enumerate(fields[self.says[0]]) if "mixture" not in blocks]
        return {self._STEP: 1, self._DENSE: dense}


class FirstDense(EveryLayer):
    """The first layers have one feed-forward, all others have experts."""

    _KEY = "first_k_dense_replace"

    def sparse(self, config: ConfigJson) -> Sequence[bool]:
        first = config.whole(self._KEY)
        return [layer >= first for layer in range(config.layer_num)]

    def write(self, fields: Fields) -> dict[str, Any]:
        blocks = fields[self.says[0]]
        return {self._KEY: next((layer for layer, each in enumerate(blocks) if "mixture" in each), len(blocks))}


@dataclass(frozen=True)
class SharedExperts(Keys):
    """The feed-forward that every token uses: as wide as some experts.

    Attributes:
        count: key of how many.
        may_be_none: whether there may be none; else the class of transformers makes one without a width.
    """

    count: str = "n_shared_experts"
    may_be_none: bool = False
    says: ClassVar[tuple[str, ...]] = ("mixture.shared_inter_size",)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return {self.says[0]: config.whole(self.count) * config.size("moe_intermediate_size")}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self.count: fields[self.says[0]] // fields["mixture.inter_size"]}

    def problems(self, config: ConfigJson) -> list[str]:
        is_legal = self.may_be_none or config.whole(self.count) > 0
        return [] if is_legal else [f"{self.count}: 0  (every token uses at least one)"]

    def lacks(self, fields: Fields) -> list[str]:
        shared, own = fields[self.says[0]], fields["mixture.inter_size"]
        if shared % own == 0 and (shared or self.may_be_none):
            return []
        return [f"{self.says[0]}: {shared}  (it is a multiple of an expert's {own})"]


@dataclass(frozen=True)
class Groups(Keys):
    """Groups of experts of which some are chosen first, each by its two best.

    Attributes:
        experts: key of the number of experts.
    """

    experts: str = "n_routed_experts"
    says: ClassVar[tuple[str, ...]] = ("mixture.group_num", "mixture.groups_per_token")
    _COUNT: ClassVar[str] = "n_group"
    _USED: ClassVar[str] = "topk_group"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return dict(zip(self.says[:2], (config.size(self._COUNT), config.size(self._USED)), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self._COUNT: fields[self.says[0]], self._USED: fields[self.says[1]]}

    def problems(self, config: ConfigJson) -> list[str]:
        said = {"mixture.expert_num": config.experts(self.experts), **self.read(config)}
        return self.lacks({**said, "mixture.experts_per_token": config.size("num_experts_per_tok")})

    def lacks(self, fields: Fields) -> list[str]:
        count, used = (fields[name] for name in self.says[:2])
        experts, chosen = fields["mixture.expert_num"], fields["mixture.experts_per_token"]
        if count * 2 <= experts and experts % count == 0 and used <= count and chosen <= used * (experts // count):
            return []
        return [f"{self._COUNT}: {count}, {self._USED}: {used}  (they have no {chosen} of {experts} experts)"]
