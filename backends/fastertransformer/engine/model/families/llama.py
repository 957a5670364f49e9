"""Llama and its relatives in FasterTransformer's files; format: ft_format/families/llama.py."""

from __future__ import annotations

from functools import partial

from ft_format.config_ini import ConfigIni
from ft_format.families.family import Family
from ft_format.families.llama import EMBEDDING_FILE, FINAL_NORM, LlamaDims, layer_files

from ...errors import ConfigIniError
from ..config import Layout, ModelConfig
from .decoder import read_stack, structure
from .keys import decoder_keys


def read(ini: ConfigIni, family: Family, dims: LlamaDims) -> ModelConfig:
    """Read config.ini; dims are what ft_format has read of it.

    The longest text is the model's own, as far as the memory of the cache goes; a store that does not say it has
    FasterTransformer's limit.
    """
    if dims.expert_num:
        raise ConfigIniError(
            f"[{family.main}] expert_num = {dims.expert_num}: this engine does not serve mixtures of experts",
            "export the checkpoint with format=huggingface, and serve that directory by an engine that has them",
        )
    keys = decoder_keys(ini, family, dims) | ({} if dims.has_untied_head else {"head": ""})
    layout = Layout(EMBEDDING_FILE, partial(read_stack, FINAL_NORM, partial(layer_files, dims)))
    return ModelConfig(**keys | structure(dims), layout=layout)
