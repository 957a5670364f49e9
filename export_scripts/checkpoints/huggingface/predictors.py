"""Predictors of further tokens that are not written: the files have none, or transformers' class passes over them."""

from __future__ import annotations

from collections.abc import Iterable

from export_scripts.weights.architecture import Architecture
from export_scripts.weights.huggingface_decoder import HubDecoder
from export_scripts.weights.schema import DecoderDims
from export_scripts.weights.settings import Settings
from models.decoder import Decoder

_COUNT, _ALSO = "num_nextn_predict_layers", "num_mtp_layers"
_COUNTS = (_COUNT, "mtp_num_hidden_layers")
"""The second is Qwen3.5's word."""


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


def without_passed_over(settings: Settings, architecture: Architecture) -> tuple[Settings, tuple[str, ...]]:
    """Count no predictors where transformers' class passes over them, so that they are not written.

    Returns:
        The configuration, and what is to be said of it.
    """
    passes_over = isinstance(architecture, HubDecoder) and architecture.described.passes_over
    counts = [key for key in _COUNTS if passes_over and settings.get(key)]
    remarks = tuple(f"{key}: {settings[key]}  becomes 0: predictors are left out" for key in counts)
    return Settings({**settings, **dict.fromkeys(counts, 0)}), remarks
