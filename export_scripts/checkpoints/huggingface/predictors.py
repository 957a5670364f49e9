"""Predictors of further tokens that the files lack, or that transformers' class passes over."""

from __future__ import annotations

from collections.abc import Iterable

from export_scripts.weights.huggingface_decoder import PREDICTORS
from export_scripts.weights.schema import DecoderDims, SourceMap
from export_scripts.weights.settings import Settings
from models.decoder import Decoder

_COUNT, _ALSO = "num_nextn_predict_layers", "num_mtp_layers"
_COUNTS = (_COUNT, "mtp_num_hidden_layers")
"""The second is Qwen3.5's word."""


def without_absent_predictors(
    settings: Settings, dims: DecoderDims, keys: Iterable[str]
) -> tuple[Settings, tuple[str, ...]]:
    """Count no predictors where the files have none.

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


def of_passed_over(
    settings: Settings, table: SourceMap, keys: Iterable[str], is_written: bool
) -> tuple[Settings, tuple[str, ...]]:
    """Return what becomes of predictors that transformers' class passes over, and count none where none is written.

    Args:
        settings: the configuration.
        table: of the model.
        keys: of the files, without the model's prefix.
        is_written: whether the files' tensors are written as they are.

    Returns:
        The configuration, and what is to be said.
    """
    found = [key for key in keys if table.ignored_as(key) == PREDICTORS]
    becomes = "are written as they are" if is_written else "are left out"
    remarks = tuple(f"{len(found)} tensors {becomes}, such as {key}: {PREDICTORS}" for key in found[:1])
    counts = [key for key in _COUNTS if PREDICTORS in table.ignored.values() and settings.get(key)]
    if found and is_written:
        return settings, remarks
    why = "predictors are left out" if found else "the files have no predictors"
    remarks += tuple(f"{key}: {settings[key]}  becomes 0: {why}" for key in counts)
    return Settings({**settings, **dict.fromkeys(counts, 0)}), remarks
