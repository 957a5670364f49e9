"""The model that benchmarks.peers gives both engines: a checkpoint of Hugging Face, or random weights of a shape."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.sizes import QUANTIZATIONS, LlamaSize, Size, find_size, torch_name
from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.convert import convert
from handover.errors import ConfigError

_PROCESSES = 8


@dataclass(frozen=True)
class ComparedModel:
    """A model as both engines read it.

    Attributes:
        directory: of Hugging Face; a made-up model has its config.json alone.
        vocab: size of the vocabulary.
        is_made_up: whether the weights are random.
        checkpoint: the same model's FasterTransformer shards; ``directory`` itself if it is made up or has none.
        model_type: of config.pbtxt; empty if it is made up.
        positions: tokens of the longest text; None if config.json does not say.
    """

    directory: Path
    vocab: int
    is_made_up: bool
    checkpoint: Path
    model_type: str = ""
    positions: int | None = None


def made_up_model(name: str, data_type: str, directory: Path, kind: str = "") -> ComparedModel:
    """Write the config.json of a shape; of the kinds of numbers, MXFP4 stands in it: the peer knows no other way.

    Raises:
        ConfigError: there is no such shape, or vLLM has no network of it.
    """
    size = find_size(name)
    directory.mkdir(parents=True)
    config = hugging_face_config(size, data_type)
    if kind == "mxfp4":
        config["quantization_config"] = QUANTIZATIONS[kind]
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return ComparedModel(directory, size.vocab, True, directory, positions=_positions(config))


def real_model(directory: Path, data_type: str, tensor_para_size: int, shards: Path) -> ComparedModel:
    """Convert a checkpoint of Hugging Face for the drop-in engine, which reads as it is what has no shards.

    Raises:
        ConfigError: it is none, or is not a decoder.
        CheckpointError: it cannot be read.
    """
    directory = directory.expanduser().absolute()
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has no config.json", "give a directory of Hugging Face")
    source = open_source(find_archive(directory), for_shards=False)
    family = source.family
    if family.is_encoder_decoder:
        raise ConfigError(f"{directory} holds an encoder-decoder", "take a model that continues its prompt")
    if family.beyond(source.dims):
        shards = directory
    else:
        convert(ConvertArguments(directory, shards, tensor_para_size, data_type, _PROCESSES))
    config = json.loads((directory / "config.json").read_text())
    return ComparedModel(directory, int(config["vocab_size"]), False, shards, family.model_types[0], _positions(config))


def _positions(config: dict[str, Any]) -> int | None:
    found = (config.get(name) for name in ("max_position_embeddings", "n_positions"))
    return next((int(each) for each in found if each), None)


def hugging_face_config(size: Size, data_type: str) -> dict[str, Any]:
    """Describe a shape as Hugging Face does.

    Raises:
        ConfigError: it is neither a Llama, a Qwen3 nor a GPT.
    """
    if isinstance(size, LlamaSize):
        return size.config(data_type)
    if size.model_type != "GPT":
        raise ConfigError(f"a made-up {size.model_type} cannot be compared", "take a Llama's, Qwen3's or GPT's shape")
    return {
        "vocab_size": size.vocab,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": torch_name(data_type),
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": size.hidden,
        "n_layer": size.layers,
        "n_head": size.heads,
        "n_positions": 2048,
        "n_ctx": 2048,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }
