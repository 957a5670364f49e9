"""Predictors of further tokens that a configuration counts and whose files have none, as transformers saves them."""

from __future__ import annotations

from collections.abc import Iterable

from export_scripts.weights.architecture import Settings
from export_scripts.weights.schema import DecoderDims
from models.decoder import Decoder

_COUNT, _ALSO = "num_nextn_predict_layers", "num_mtp_layers"


def without_absent_predictors(
    settings: Settings, dims: DecoderDims, keys: Iterable[str]
) -> tuple[Settings, tuple[str, ...]]:
    """Count no predictors where the files have none.

    Args:
        settings: the configuration.
        dims: that it describes.
        keys: of the files, without the model's prefix.

    Returns:
        The configuration, and what is to be said of it: where it counted them itself.
    """
    if not isinstance(dims, Decoder) or not dims.predictor_num:
        return settings, ()
    if any(key.startswith(f"layers.{dims.num_layer}.") for key in keys):
        return settings, ()
    said = [f"{key}: {settings[key]}" for key in (_COUNT, _ALSO) if settings.get(key)]
    kept = {key: value for key, value in settings.items() if key != _ALSO}
    remarks = tuple(f"{each}  becomes 0: the files have no layers behind the last" for each in said)
    return Settings({**kept, _COUNT: 0}), remarks
