"""A model's first predictor of further tokens as a decoder of its own, which an engine runs beside the model."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from models.blocks import predictor
from models.decoder import Decoder
from models.tensor import Tensor


@dataclass(frozen=True)
class FirstPredictor(Decoder):
    """A predictor: its first layer has what leads into it, and its embedding and head are the model's."""

    def layer(self, index: int = 0) -> dict[str, Tensor]:
        """See Decoder."""
        into = predictor.roles(is_first=index == 0, is_last=False)
        own = {role: predictor.TENSORS[role] for role in into if role not in predictor.COPIES.values()}
        return {**own, **super().layer(index)}


def first_predictor(decoder: Decoder) -> FirstPredictor:
    """Describe the first of a model's predictors: of the layers that are listed, or one as the last with attention."""
    attends = (layer for layer in reversed(decoder.layers) if not {"attention", "latent"}.isdisjoint(layer.blocks))
    alike = next(attends)
    layers = tuple(replace(alike, blocks=each) for each in decoder.predictor_blocks) or (alike,)
    last = decoder.num_layer + len(layers) - 1
    own = {
        "layer": decoder.names["predictor.layer"].replace("{predictor}", "{layer}")
        or decoder.names["layer"].format(layer=decoder.num_layer),
        "final_norm": decoder.name_of("predictor.norm.", last).removesuffix("."),
    }
    said = {each.name: getattr(decoder, each.name) for each in fields(Decoder)}
    of_one = {"layers": layers, "names": {**decoder.names, **own}, "predictor_num": 0, "predictor_blocks": ()}
    return FirstPredictor(**said | of_one)
