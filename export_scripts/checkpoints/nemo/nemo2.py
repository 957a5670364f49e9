"""Reader of NeMo 2.x checkpoints: a directory with ``weights/`` (distributed) and ``context/`` (how it was made).

Files: NeMo 2.x, ``lightning/io/mixin.py`` (``io_dump``: ``io.json``, ``model.yaml`` with every default spelled out, the
tokenizer's files under their own names) and ``lightning/io/registry.py``. ``model.yaml`` holds megatron-core's
``TransformerConfig`` and NeMo's ``GPTConfig``; it is put into the words of NeMo 1.x here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.distributed import open_distributed
from export_scripts.checkpoints.files.yaml_file import read_yaml
from export_scripts.checkpoints.megatron.gpt import gpt_source
from export_scripts.checkpoints.nemo.core_fields import CARRIED, CORE_KNOWN, OF_FALCON_H1
from export_scripts.checkpoints.nemo.gemma3 import gemma3_words, is_gemma3
from export_scripts.checkpoints.nemo.latent import with_original_length
from export_scripts.checkpoints.nemo.limits import remark_on, unknown_keys
from export_scripts.checkpoints.nemo.llama4 import AS_LLAMA4
from export_scripts.checkpoints.nemo.model_class import builds_llama4, class_remarks, scales_embeddings
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles, only_named, tiktoken_files
from handover.errors import CheckpointError

NAME = "NeMo 2.x (weights/ and context/)"
_MODEL_FILE = "context/model.yaml"
_IO_FILE = "context/io.json"
_WEIGHTS = "weights/"
_PREFIX = "module."
# Activation functions by the last word of their names; the tanh form of GELU has several names.
_ACTIVATIONS = {
    **dict.fromkeys(("gelu", "openai_gelu", "fast_gelu", "gelu_pytorch_tanh"), "gelu"),
    **{"silu": "silu", "relu": "relu", "relu2": "squared_relu"},
}
_OF_ACTIVATIONS = ("torch.", "megatron.", "nemo.")  # whose functions are what their names say
_OF_LLAMA31 = ("low_freq_factor", "high_freq_factor", "old_context_len")
_TANH_GELU = ("openai_gelu", "fast_gelu", "gelu_pytorch_tanh")


# What AutoTokenizer's folder may hold; tokenizer.json alone knows of tokens that were added to a vocabulary.
_FOLDERS = ((("tokenizer.json",), "huggingface"), (("vocab.json", "merges.txt"), "bpe"))


def is_candidate(path: Path) -> bool:
    """Whether a directory is laid out as NeMo 2.x does it."""
    return (path / "weights").is_dir() and (path / "context").is_dir()


def recognises(archive: Archive) -> bool:
    """Whether the files are NeMo 2.x's."""
    return _MODEL_FILE in archive or _IO_FILE in archive


def open_source(archive: Archive) -> Source:
    """Open a GPT.

    Raises:
        CheckpointError: incomplete, or not a model that FasterTransformer's GPT can express.
    """
    if _MODEL_FILE not in archive:
        raise CheckpointError(
            f"{archive.path} has no {_MODEL_FILE}",
            "NeMo 2.0 and later write it beside io.json; save the model with one",
        )
    model = read_yaml(archive, _MODEL_FILE)
    config = model.get("config")
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{archive.path}: {_MODEL_FILE} has no config", "is it a checkpoint of nemo.collections.llm?"
        )
    kind = str(model.get("_target_", "")).rpartition(".")[2]
    if ".gpt." not in str(model.get("_target_", ".gpt.")):
        raise CheckpointError(f"{archive.path} is a {kind}, not a GPT")
    return gpt_source(
        archive,
        config_in_nemo1_words(model),
        lambda: open_distributed(archive, _WEIGHTS),
        _PREFIX,
        lambda: _find_tokenizer(archive, model.get("tokenizer")),
        (*remark_on(unknown_keys(config, CORE_KNOWN), _MODEL_FILE), *class_remarks(model, config, _MODEL_FILE)),
    )


def config_in_nemo1_words(model: Mapping[str, Any]) -> dict[str, Any]:
    """Put ``model.yaml`` into the words of ``model_config.yaml``.

    Raises:
        CheckpointError: the model's class may compute what its fields do not say.
    """
    config = model["config"]
    return {**in_nemo1_words(config), "apply_embedding_scaling": scales_embeddings(model, config, _MODEL_FILE)}


def in_nemo1_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """Put megatron-core's configuration into the words of ``model_config.yaml``."""
    same = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("layernorm_epsilon", "position_embedding_type", "share_embeddings_and_output_weights", "num_moe_experts"),
        *("bias_activation_fusion", "apply_residual_connection_post_layernorm", "qk_layernorm", "window_size"),
        *("rotary_base", "seq_len_interpolation_factor", "rotary_interleaved", "add_bias_linear", "add_qkv_bias"),
    )
    words = {name: config[name] for name in (*same, *CARRIED, *OF_FALCON_H1, *_OF_LLAMA31) if name in config}
    words.setdefault("bias_activation_fusion", False)  # megatron-core's default; NeMo 1 has another
    words["max_position_embeddings"] = config.get("seq_length")
    words["rotary_percentage"] = config.get("rotary_percent", 1.0)
    norm = str(config.get("normalization", "LayerNorm")).lower()
    words["normalization"] = f"{norm}1p" if config.get("layernorm_zero_centered_gamma") else norm
    function = config.get("activation_func")
    path = str(function.get("_target_") if isinstance(function, Mapping) else function or "gelu")
    name = path.rpartition(".")[2] if path.startswith(_OF_ACTIVATIONS) or "." not in path else path
    activation = _ACTIVATIONS.get(name, name)
    words["activation"] = f"gated {activation}" if config.get("gated_linear_unit") else activation
    is_of_engine = bool(config.get("use_te_activation_func"))
    words["openai_gelu"] = name in _TANH_GELU or is_of_engine  # Transformer Engine's GELU is the tanh form
    if is_of_engine and words["activation"] == "silu":
        words["activation"] = "silu of Transformer Engine, for which megatron-core computes ReLU"
    words = with_original_length(words, config) | {AS_LLAMA4: builds_llama4(config)}
    return words | gemma3_words(config) if is_gemma3(config) else words


def _find_tokenizer(archive: Archive, settings: Any) -> TokenizerFiles:
    """Find the tokenizer's files in ``context/``: they lie beside ``model.yaml`` or in a folder that it names."""
    settings = settings if isinstance(settings, Mapping) else {}
    kind = str(settings.get("_target_", "")).rpartition(".")[2]
    if kind == "SentencePieceTokenizer":
        files = {"tokenizer.model": _member(archive, settings, "model_path")}
        return TokenizerFiles(files, "sentencepiece", bool(settings.get("legacy")), is_nemos=True)
    if kind == "AutoTokenizer" and settings.get("vocab_file") and settings.get("merges_file"):
        files = {"vocab.json": _member(archive, settings, "vocab_file")}
        return TokenizerFiles({**files, "merges.txt": _member(archive, settings, "merges_file")}, "bpe", is_nemos=True)
    if kind == "AutoTokenizer":
        folder = f"context/{_text(settings, 'pretrained_model_name').strip('./')}/"
        for names, library in _FOLDERS:
            if all(folder + name in archive for name in names):
                return TokenizerFiles({name: folder + name for name in names}, library, is_nemos=True)
        if not any(name.startswith(folder) for name in archive.sizes):
            raise only_named(archive, _text(settings, "pretrained_model_name"))
    if kind == "TiktokenTokenizer":
        return tiktoken_files(_member(archive, settings, "vocab_file"))
    raise CheckpointError(
        f"{archive.path}: the tokenizer {kind or 'of ' + _MODEL_FILE} has no files in context/ that are read",
        "SentencePieceTokenizer, TiktokenTokenizer, and AutoTokenizer with tokenizer.json or vocab.json and merges.txt "
        "are; export.model.tokenizer=PATH takes another in its place",
    )


def _member(archive: Archive, settings: Mapping[str, Any], key: str) -> str:
    name = f"context/{_text(settings, key).removeprefix('./')}"
    if name not in archive:
        raise CheckpointError(f"{archive.path}: tokenizer.{key} names {name}, which is not there")
    return name


def _text(settings: Mapping[str, Any], key: str) -> str:
    """Read a path; one that was no file when it was saved is wrapped in the class that would have copied it."""
    value = settings.get(key)
    return str(value.get("attr") if isinstance(value, Mapping) else value)
