"""Read a mixture of experts as models/ describes it, from the tensors of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping

from models.blocks.feed_forward import FeedForward
from models.blocks.mixture import SIGMOID, Mixture

from ...ops.experts import ExpertMatrices, Experts
from ...ops.gates import ClampedGate
from ...ops.linear import Linear
from ...ops.routing import Router
from ..blocks.feed_forward import DenseWeights
from ..blocks.mixture import MixtureWeights
from ..hub_experts import ExpertsReader

Names = Mapping[str, str]
"""A layer's tensors by role."""


def read_mixture(read: ExpertsReader, mixture: Mixture, function: FeedForward, names: Names) -> MixtureWeights:
    """Read a layer's experts; ``function`` says how the middle is activated."""
    own = read.own_experts(mixture.expert_num)
    return MixtureWeights(
        _router(read, mixture, names),
        Experts(
            _into(read, mixture, names),
            _out(read, mixture, names),
            mixture.is_gated,
            function.activation,
            ClampedGate(function.gate_factor, function.up_offset, function.clamp) if function.is_clamped else None,
            own.start if len(own) < mixture.expert_num else None,
        ),
        _shared(read, mixture, function, names) if mixture.shared_inter_size else None,
        read.column_parallel(names["shared_gate"]) if mixture.has_shared_gate else None,
        read.column_parallel(names["latent_in"]) if mixture.latent_size else None,
        read.column_parallel(names["latent_out"]) if mixture.latent_size else None,
        mixture.is_weighted_before,
    )


def _router(read: ExpertsReader, mixture: Mixture, names: Names) -> Router:
    name = names["router"]
    bias = read.tensor(f"{name}.bias", read.exact_type) if mixture.has_router_bias else None
    linear = Linear(read.tensor(f"{name}.weight", read.exact_type), bias)
    return Router(
        read.placed(linear, name, is_extendable=False),
        mixture.experts_per_token,
        is_sigmoid=mixture.scoring == SIGMOID,
        choice_bias=read.exact(names["choice_bias"]).flatten() if mixture.has_choice_bias else None,
        is_normalised=mixture.is_normalised,
        scale=mixture.scale,
        groups=mixture.group_num,
        groups_used=mixture.groups_per_token,
        is_group_of_two=mixture.is_group_of_two,
    )


def _into(read: ExpertsReader, mixture: Mixture, names: Names) -> ExpertMatrices:
    """Read what leads into the middle: the gate's rows, which are activated, before those of up."""
    if mixture.is_in_arrays:
        turns = 1 if mixture.is_in_halves else 2
        return read.expert_arrays(names["experts_gate_up"], names.get("experts_gate_up_bias", ""), turns)
    roles = ("gate", "up")[not mixture.is_gated :]
    own = read.own_experts(mixture.expert_num)
    return read.experts([[names[f"experts.{n}.{role}"] for role in roles] for n in own])


def _out(read: ExpertsReader, mixture: Mixture, names: Names) -> ExpertMatrices:
    if mixture.is_in_arrays:
        return read.expert_arrays(names["experts_down"], names.get("experts_down_bias", ""), 1)
    return read.experts([[names[f"experts.{n}.down"]] for n in read.own_experts(mixture.expert_num)])


def _shared(read: ExpertsReader, mixture: Mixture, function: FeedForward, names: Names) -> DenseWeights:
    up = read.column_parallel(names["shared.up"])
    gate = read.column_parallel(names["shared.gate"]) if mixture.is_gated else None
    out = read.row_parallel(names["shared.down"])
    return DenseWeights(gate or up, up if gate else None, out, function.activation)
