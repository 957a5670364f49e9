"""What a served checkpoint says of itself: its ``config.ini``, or a Hugging Face directory in the same words."""

from __future__ import annotations

from pathlib import Path

from ft_format.config_ini import ConfigIni, ConfigIniError, render
from ft_format.families import llama
from ft_format.location import is_hub_directory
from models.checks import Refusal
from models.described import read_directory
from models.directory import CONFIG_FILE


def read_served_config(directory: Path, error: Refusal = ConfigIniError) -> ConfigIni:
    """Read the sizes, ids and number type of a checkpoint.

    Args:
        directory: of shards, or of Hugging Face's; the second has the section of a Llama, with what all decoders have.
        error: makes the exception for a description that is missing or damaged.
    """
    if not is_hub_directory(directory):
        return ConfigIni.read(directory, error)
    decoder, ids, data_type = read_directory(directory, error)
    sizes = ("head_num", "kv_head_num", "size_per_head", "inter_size", "num_layer", "vocab_size", "hidden_units")
    section = {
        **{name: getattr(decoder, name) for name in sizes},
        "max_pos_seq_len": decoder.max_positions,
        "start_id": ids.start_id,
        "end_id": ids.end_id,
        "weight_data_type": data_type,
    }
    return ConfigIni(render({llama.SECTION: section}).encode(), directory / CONFIG_FILE, error)
