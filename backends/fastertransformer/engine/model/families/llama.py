"""Llama in FasterTransformer's files; format: ft_format/families/llama.py."""

from __future__ import annotations

from functools import partial

from ft_format.config_ini import ConfigIni
from ft_format.families.family import Family
from ft_format.families.llama import EMBEDDING_FILE, FINAL_NORM, layer_files
from models.decoder import Decoder
from models.engine_limits import longest_text

from ..config import NO_POSITION_LIMIT, Layout, ModelConfig
from .decoder import read_stack, structure
from .keys import common_keys, id_keys


def read(ini: ConfigIni, family: Family, decoder: Decoder) -> ModelConfig:
    """Read config.ini; the decoder is what ft_format has read of it.

    The longest text is the model's own, as far as the memory of the cache goes; a store that does not say it has
    FasterTransformer's limit.
    """
    ids = id_keys(ini, family)
    keys = common_keys(ini, family, decoder, ids["end_id"] + 1) | ids | structure(decoder)
    return ModelConfig(
        **keys | ({"head": ""} if decoder.has_tied_head else {}),
        layout=Layout(EMBEDDING_FILE, partial(read_stack, FINAL_NORM, partial(layer_files, decoder))),
        max_pos_seq_len=longest_text(decoder) or NO_POSITION_LIMIT,
    )
