"""Read FasterTransformer's ``config.ini`` into the dimensions of a GPT.

Format: FasterTransformer, ``src/fastertransformer/triton_backend/multi_gpu_gpt/ParallelGptTritonModel.cc``, which reads
the section ``[gpt]`` and gives every architecture key a default.
"""

from __future__ import annotations

import configparser
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigIniError

FILE_NAME = "config.ini"
SECTION = "gpt"
DATA_TYPES = ("fp32", "fp16", "bf16")

# What the keys of other architectures must say for this network to be the right one. The first value of each is what
# FasterTransformer assumes where the key is absent.
_ARCHITECTURE = {
    "layernorm_type": ("pre_layernorm",),
    "activation_type": ("gelu",),
    "has_positional_encoding": ("1", "true", "yes", "on"),
    "has_pre_decoder_layernorm": ("0", "false", "no", "off"),
    "has_post_decoder_layernorm": ("1", "true", "yes", "on"),
    "use_attention_linear_bias": ("0", "false", "no", "off"),
    "has_adapters": ("0", "false", "no", "off"),
}


@dataclass(frozen=True)
class GptConfig:
    """Dimensions of a GPT with learned positions, pre-LayerNorm and tanh-GELU.

    Attributes:
        head_num: attention heads.
        size_per_head: width of one head.
        inter_size: width of the MLP's inner layer.
        num_layer: transformer layers.
        vocab_size: rows of the embedding, padding included.
        max_pos_seq_len: rows of the position embedding: the longest input plus output, in tokens.
        start_id: token that an empty input starts from.
        end_id: token that ends a generation where the request names none.
        layernorm_eps: added to the variance.
        weight_data_type: of the shards on disk: fp32, fp16 or bf16.
        tensor_para_size: how many ranks the shards were written for; None where config.ini does not say.
    """

    head_num: int
    size_per_head: int
    inter_size: int
    num_layer: int
    vocab_size: int
    max_pos_seq_len: int
    start_id: int
    end_id: int
    layernorm_eps: float = 1e-6
    weight_data_type: str = "fp32"
    tensor_para_size: int | None = None

    @property
    def hidden_units(self) -> int:
        """Width of the residual stream."""
        return self.head_num * self.size_per_head


def read_config(directory: Path) -> GptConfig:
    """Read ``directory/config.ini``.

    Absent keys take FasterTransformer's defaults: layernorm_eps 1e-6, pre_layernorm, Gelu, fp32.

    Raises:
        ConfigIniError: the file or a key is missing, a value is not a number, or the keys describe another network.
    """
    path = directory / FILE_NAME
    parser = configparser.ConfigParser(inline_comment_prefixes=(";", "#"), interpolation=None, strict=False)
    try:
        with path.open(encoding="utf-8") as file:
            parser.read_file(file)
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise ConfigIniError(f"cannot read {path}: {error}") from error
    if not parser.has_section(SECTION):
        raise ConfigIniError(f"{path} has no section [{SECTION}]; it has {parser.sections()}")
    section = parser[SECTION]
    _check_architecture(section, path)
    tensor_para_size = _integer(section, "tensor_para_size", path) if "tensor_para_size" in section else None
    return GptConfig(
        head_num=_integer(section, "head_num", path),
        size_per_head=_integer(section, "size_per_head", path),
        inter_size=_integer(section, "inter_size", path),
        num_layer=_integer(section, "num_layer", path),
        vocab_size=_integer(section, "vocab_size", path),
        max_pos_seq_len=_integer(section, "max_pos_seq_len", path),
        start_id=_integer(section, "start_id", path, least=0),
        end_id=_integer(section, "end_id", path, least=0),
        layernorm_eps=_layernorm_eps(section, path),
        weight_data_type=_weight_data_type(section, path),
        tensor_para_size=tensor_para_size,
    )


def _check_architecture(section: configparser.SectionProxy, path: Path) -> None:
    wrong = [
        f"{key} = {section[key]} (only {legal[0]})"
        for key, legal in _ARCHITECTURE.items()
        if key in section and section[key].strip().lower() not in legal
    ]
    if wrong:
        raise ConfigIniError(f"{path} describes a network that this engine does not serve: {'; '.join(wrong)}")


def _integer(section: configparser.SectionProxy, key: str, path: Path, least: int = 1) -> int:
    text = section.get(key)
    if text is None:
        raise ConfigIniError(f"{path}: [{SECTION}] has no {key}")
    try:
        value = int(text)
    except ValueError:
        raise ConfigIniError(f"{path}: {key} = {text} is not a whole number") from None
    if value < least:
        raise ConfigIniError(f"{path}: {key} = {value} is less than {least}")
    return value


def _layernorm_eps(section: configparser.SectionProxy, path: Path) -> float:
    text = section.get("layernorm_eps", "1e-6")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1.0:
        raise ConfigIniError(f"{path}: layernorm_eps = {text} is not a number between 0 and 1")
    return value


def _weight_data_type(section: configparser.SectionProxy, path: Path) -> str:
    value = section.get("weight_data_type", "fp32").strip()
    if value not in DATA_TYPES:
        raise ConfigIniError(f"{path}: weight_data_type = {value} is none of {', '.join(DATA_TYPES)}")
    return value
