"""Decoders whose tensors are the model's own, Llama and its relatives: architectures of models/ as sources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import models
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.architecture import Architecture, Settings
from export_scripts.weights.schema import DecoderDims, Rule, Rules, SourceMap, Sources, split_layer
from export_scripts.weights.values import checkpoint_errors
from ft_format.families import llama
from models.decoder import Decoder
from models.spelling import spelled_out
from models.tensor import Tensor

_PREFIX, _TIE = "model.", "tie_word_embeddings"


@dataclass(frozen=True, kw_only=True)
class HubDecoder(Architecture):
    """An architecture of models/ as a source.

    Attributes:
        described: that one.
    """

    described: models.Architecture

    def problems(self, settings: Settings) -> list[str]:
        """List the keys in the way, one line each."""
        with checkpoint_errors():
            return self.described.problems(settings)

    def table(self, settings: Settings, dims: DecoderDims) -> SourceMap:
        """List every tensor: it becomes itself."""
        assert isinstance(dims, Decoder)
        rules: dict[Sources, Rules] = {
            split_layer(name)[0].removeprefix(_PREFIX): Rule(split_layer(name)[0], partial(_own_axes, tensor))
            for name, tensor in dims.tensors().items()
        }
        ignored = {"*rotary_emb.inv_freq": "frequencies, which are computed"}
        if dims.has_tied_head:
            ignored[self.head] = "the tied copy of the embedding"
        return SourceMap(self.source_map.name, rules, ignored, biases={"*": True})


def _own_axes(tensor: Tensor, values: Array, dims: Decoder) -> Array:
    """Show the inner structure of a tensor's axes."""
    laid: Array = spelled_out(values, tensor, dims.axis_size)
    return laid


def _source(described: models.Architecture) -> HubDecoder:
    def dims(settings: Settings) -> Decoder:
        with checkpoint_errors():
            return described.read(settings)

    embedding: Any = described.all_names["embedding"]
    return HubDecoder(
        model_type=described.model_type,
        family=llama.FAMILY,
        source_map=SourceMap(f"Hugging Face {described.class_name.removesuffix('ForCausalLM')}", {}, {}),
        dims=dims,
        prefix=_PREFIX,
        embedding=f"{embedding.removeprefix(_PREFIX)}.weight",
        has_tied_head=bool(described.defaults.get(_TIE)),
        aliases=described.aliases,
        described=described,
    )


HUB_DECODERS = tuple(map(_source, models.ARCHITECTURES))
