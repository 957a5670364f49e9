"""The families of networks that the engine computes, one file each: how config.ini is read, and which tensors are.

A family's file has ``read``, which returns a ModelConfig with the family's Layout. A new family is a file here and a
line of ``_READERS``. What a Hugging Face directory says, ``hub`` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft_format.config_ini import ConfigIni
from ft_format.families import BY_MODEL_TYPE, MODEL_TYPES
from ft_format.families.family import Family
from ft_format.families.gpt import GptDims
from ft_format.families.t5 import T5Dims
from ft_format.location import is_hub_directory
from models.decoder import Decoder

from ...errors import ConfigIniError
from ..config import ModelConfig
from . import gpt, hub, llama, t5

_READERS: dict[type, Callable[[ConfigIni, Family, Any], ModelConfig]] = {
    GptDims: gpt.read,
    Decoder: llama.read,
    T5Dims: t5.read,
}


def read_config(directory: Path, model_type: str = "GPT", ranks: int = 1) -> ModelConfig:
    """Read ``directory/config.ini``, or the ``config.json`` of a Hugging Face directory.

    Args:
        directory: of the shards, or of Hugging Face's.
        model_type: config.pbtxt's, one of MODEL_TYPES.
        ranks: processes that share a layer.

    Raises:
        ConfigJsonError: likewise of config.json.
        ConfigIniError: the file, a section or a key is missing, a value is not legal, or the keys describe a network
            that this engine does not have.
    """
    family = BY_MODEL_TYPE.get(model_type.lower())
    if family is None:
        raise ConfigIniError(f"model_type = {model_type} is none of {', '.join(MODEL_TYPES)}")
    if is_hub_directory(directory):
        return hub.read(directory, ranks)
    ini = ConfigIni.read(directory, ConfigIniError)
    dims = family.read(ini, has=lambda name: True)  # whether the head has a file, weights.py looks up
    config = _READERS[type(dims)](ini, family, dims)
    for section in ini.values():
        section.warn_of_near_misses()
    return config
