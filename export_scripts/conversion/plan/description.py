"""The description of a checkpoint that is elsewhere or does not exist yet: its configuration alone.

Read are NeMo 1's ``model_config.yaml``, NeMo 2's ``model.yaml``, Megatron-Bridge's ``run_config.yaml`` and Hugging
Face's ``config.json`` of a decoder. It needs ``vocab_size``: rows of the embedding, padding included. NeMo's have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.checkpoints.files.yaml_file import parse_yaml
from export_scripts.checkpoints.huggingface.decoder import described
from export_scripts.checkpoints.huggingface.quantized import described_bytes
from export_scripts.checkpoints.megatron.bridge import model_in_nemo1_words
from export_scripts.checkpoints.megatron.gpt import model_of
from export_scripts.checkpoints.nemo.nemo2 import config_in_nemo1_words
from export_scripts.tensors.dtypes import item_bytes
from export_scripts.weights.schema import DecoderDims, Shape
from export_scripts.weights.settings import Settings
from export_scripts.weights.values import Fields
from ft_format.families.family import Family
from handover.errors import CheckpointError
from handover.regular_file import SETTINGS_BYTES, read_bytes
from models.decoder import Decoder
from models.quantization import Quantization, quantization_said, read_quantization

_SUFFIXES = (".yaml", ".yml", ".json")
_PRECISIONS = {"16": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-mixed": "bf16"}
_TORCH_TYPES = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Description:
    """A model that is described.

    Attributes:
        family: FasterTransformer's model.
        dims: its dimensions.
        data_type: of the weights, as far as the description says; else fp32.
        files: that hold them.
        quantization: how matrices are stored, where that is not ``data_type``.
    """

    family: Family
    dims: DecoderDims
    data_type: str
    files: int = 1
    quantization: Quantization | None = None

    def stored_bytes(self, shapes: Iterable[Shape]) -> int:
        """Return the bytes that tensors of these shapes, which are the model's, have in the files."""
        if self.quantization is None or not isinstance(self.dims, Decoder):
            return sum(map(prod, shapes)) * item_bytes(self.data_type)
        own = self.dims.tensors().values()
        return sum(described_bytes(self.quantization, tensor, self.data_type) for tensor in own)


def is_description(path: Path) -> bool:
    """Whether a path is the description of a checkpoint instead of one."""
    return path.suffix in _SUFFIXES and path.is_file()


def read_description(path: Path) -> Description:
    """Read a description.

    Raises:
        CheckpointError: it is damaged, lacks a size, or the model cannot be expressed.
    """
    content = read_bytes(path, SETTINGS_BYTES)
    if path.suffix == ".json":
        return _of_huggingface(Settings(parse_json(content, str(path))), str(path))
    config, half = _in_nemo1_words(parse_yaml(content, str(path)), str(path))
    model = model_of(config)
    vocab_size = config.get("vocab_size") or config.get("override_vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise CheckpointError(
            f"{path} does not say vocab_size", "a description needs it: rows of the embedding, padding included"
        )
    ranks = [int(config.get(f"{kind}_model_parallel_size") or 1) for kind in ("tensor", "pipeline")]
    return Description(model.family(config), model.dims(config, vocab_size, ()), half, ranks[0] * ranks[1])


def _of_huggingface(settings: Settings, where: str) -> Description:
    architecture, dims = described(settings)
    stored = str(settings.get("dtype") or settings.get("torch_dtype"))
    said = quantization_said(settings, {}, where, CheckpointError)
    quantization = read_quantization(said, where, CheckpointError) if said else None
    return Description(architecture.family, dims, _TORCH_TYPES.get(stored, "fp32"), quantization=quantization)


def _in_nemo1_words(content: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
    """Put any of the three YAML files into the words of the first, and read the data type of the weights."""
    if isinstance(content.get("config"), Mapping):
        config = Fields(content, where).fields("config")
        return {**config_in_nemo1_words(content), "vocab_size": config.get("vocab_size")}, _core_type(config)
    if isinstance(content.get("model"), Mapping) and "num_layers" not in content:
        model = Fields(content, where).fields("model")
        return {**model_in_nemo1_words(model), "vocab_size": model.get("vocab_size")}, _core_type(model)
    is_half = content.get("megatron_amp_O2", False)
    return content, _PRECISIONS.get(str(content.get("precision")), "fp32") if is_half else "fp32"


def _core_type(config: Mapping[str, Any]) -> str:
    """Read megatron-core's ``params_dtype``, or its ``bf16`` and ``fp16``."""
    named = config.get("params_dtype")
    name = str(named.get("_target_") if isinstance(named, Mapping) else named).rpartition(".")[2]
    halves = [half for half in ("bf16", "fp16") if config.get(half)]
    return _TORCH_TYPES.get(name) or (halves[0] if halves else "fp32")
