"""A model's first predictor of further tokens as a decoder of one layer, which an engine runs beside the model."""

from __future__ import annotations

from dataclasses import dataclass, fields

from models.blocks import predictor
from models.decoder import Decoder
from models.tensor import Tensor


@dataclass(frozen=True)
class FirstPredictor(Decoder):
    """A predictor: its layer has what leads into it, and its embedding and head are the model's."""

    def layer(self, index: int = 0) -> dict[str, Tensor]:
        """See Decoder."""
        into = predictor.roles(is_first=True, is_last=False)
        own = {role: predictor.TENSORS[role] for role in into if role not in predictor.COPIES.values()}
        return {**own, **super().layer(index)}


def first_predictor(decoder: Decoder) -> FirstPredictor:
    """Describe the first of a model's predictors."""
    place = decoder.names["predictor.layer"].format(predictor=0)
    alike = next(layer for layer in reversed(decoder.layers) if not {"attention", "latent"}.isdisjoint(layer.blocks))
    own = {
        "layer": place or decoder.names["layer"].format(layer=decoder.num_layer),
        "final_norm": decoder.name_of("predictor.norm.", decoder.num_layer).removesuffix("."),
    }
    said = {each.name: getattr(decoder, each.name) for each in fields(Decoder)}
    of_one = {"layers": (alike,), "names": {**decoder.names, **own}, "predictor_num": 0}
    return FirstPredictor(**said | of_one)
