"""Decoders whose tensors are the model's own, Llama and its relatives: architectures of models/, read and written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import models
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.architecture import Architecture
from export_scripts.weights.hub_keys import Facts
from export_scripts.weights.hub_tensor import HubTensor
from export_scripts.weights.layouts import less_one, plus_one
from export_scripts.weights.schema import DecoderDims, Elementwise, Rule, Rules, SourceMap, Sources, split_layer
from export_scripts.weights.settings import Settings
from export_scripts.weights.values import checkpoint_errors
from ft_format.families import llama
from models.architecture import ZERO_CENTRED
from models.decoder import Decoder
from models.spelling import Spelling, spelled_out
from models.tensor import Tensor

PREDICTORS = "predictors of further tokens, which transformers' class passes over"
_TIE = "tie_word_embeddings"


@dataclass(frozen=True, kw_only=True)
class HubDecoder(Architecture):
    """An architecture of models/."""

    described: models.Architecture

    def dims(self, settings: Settings) -> Decoder:
        """Read the dimensions."""
        with checkpoint_errors():
            return self.described.read(settings)

    def problems(self, settings: Settings) -> list[str]:
        """List the keys in the way, one line each."""
        with checkpoint_errors():
            return self.described.problems(settings)

    def table(self, settings: Settings, dims: DecoderDims) -> SourceMap:
        """List every tensor: it becomes itself."""
        assert isinstance(dims, Decoder)
        rules: dict[Sources, Rules] = {
            split_layer(name)[0].removeprefix(self.prefix): Rule(split_layer(name)[0], partial(_own_axes, tensor))
            for name, tensor in dims.tensors().items()
        }
        rules |= _experts_in_one(dims)
        ignored = {"*rotary_emb.inv_freq": "frequencies, which are computed"}
        ignored |= dict.fromkeys(self.described.passes_over, PREDICTORS)
        if dims.has_tied_head:
            ignored[self.head] = "the tied copy of the embedding"
        return SourceMap(f"Hugging Face {self.title}", rules, ignored, biases={"*": True})

    def written(self, dims: Decoder, facts: Facts) -> dict[str, HubTensor]:
        """List every tensor: it is taken from itself."""
        norms, stored_as = dims.norm_names, None
        stores_less_one = bool(self.described.has.get(ZERO_CENTRED))
        if stores_less_one != dims.norms.is_zero_centred:
            stored_as = less_one if stores_less_one else plus_one
        taken = cache(_taken)  # equal ones are one
        return {name: taken(tensor, stored_as if name in norms else None) for name, tensor in dims.tensors().items()}

    def config(self, dims: Decoder, facts: Facts) -> dict[str, Any]:
        """List the keys of ``config.json``."""
        return self.described.write(dims)

    def lacks(self, dims: Decoder, facts: Facts) -> list[str]:
        """List what it cannot express of a model, one line each."""
        return self.described.lacks(dims)

    def dropped(self, dims: Decoder, facts: Facts) -> dict[str, str]:
        """Name nothing: every tensor is written."""
        return {}


def _taken(tensor: Tensor, stored_as: Elementwise | None) -> HubTensor:
    merged = tuple(len(axis) if isinstance(axis, tuple) else 1 for axis in tensor.axes)
    return HubTensor("", merged=merged, elementwise=stored_as, stays_fp32=tensor.stays_fp32)


def _experts_in_one(dims: Decoder) -> dict[Sources, Rules]:
    """List the arrays of all experts that some files have in the place of each expert's tensors: gate above up.

    transformers 5 holds them so in memory, ``<experts>.gate_up_proj`` [experts, 2 middle, hidden]; newer files of GLM
    have them, with and without ``.weight``.
    """
    place, tensors = dims.names["expert.up"].partition("{expert}")[0], dims.roles
    rules: dict[Sources, Rules] = {}
    for spelling in dims.spellings() if dims.mixture else ():
        if spelling.is_stacked:
            parts = dict.fromkeys(role.rpartition(".")[2] for role in spelling.roles)
            name = f"layers.{{layer}}.{place}{'_'.join(parts)}_proj"
            made = tuple(
                Rule(dims.name_of(f"{role}.weight"), partial(_of_one, spelling, role, tensors[f"{role}.weight"]))
                for role in spelling.roles
            )
            rules |= {name: made, f"{name}.weight": made}
    return rules


def _of_one(spelling: Spelling, role: str, tensor: Tensor, values: Array, dims: Decoder) -> Array:
    """Show an expert's tensor."""
    shown: Array = spelling.read(values, role, tensor, dims.axis_size)
    return shown


def _own_axes(tensor: Tensor, values: Array, dims: Decoder) -> Array:
    """Show the inner structure of a tensor's axes."""
    laid: Array = spelled_out(values, tensor, dims.axis_size)
    return laid


def _expressed(described: models.Architecture) -> HubDecoder:
    prefix, dot, embedding = described.all_names["embedding"].partition(".")
    return HubDecoder(
        model_type=described.model_type,
        class_name=described.class_name,
        title=described.class_name.removesuffix("ForCausalLM"),
        family=llama.FAMILY,
        prefix=prefix + dot,
        embedding=f"{embedding}.weight",
        has_tied_head=bool(described.defaults.get(_TIE)),
        aliases=described.aliases,
        described=described,
    )


HUB_DECODERS = tuple(map(_expressed, models.ARCHITECTURES))
