"""A checkpoint, opened: what every format's reader gives to the conversion. Nothing of the weights is read yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles
from export_scripts.weights.schema import LazyTensor, SourceMap
from ft_format.config_ini import Sections
from ft_format.families.family import Family
from ft_format.layout import Dims, TensorSpec, whole_tensors
from models.directory import SpecialIds


@dataclass(frozen=True)
class OwnModel:
    """A Hugging Face model as its directory has it: what it is converted back to, key by key.

    Attributes:
        config: ``config.json``.
        tensors: by the names in the files; copies and what is computed are left out.
        is_renamed: whether the files have other names, so that they cannot be taken as they are.
        quantization: what config.json says of how they are stored; empty: nothing.
        scales: of activations, by the names in the files, which belong to quantized weights.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    is_renamed: bool = False
    quantization: Mapping[str, Any] = field(default_factory=dict)
    scales: Mapping[str, LazyTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """What is known of a checkpoint before its weights are read.

    Attributes:
        family: FasterTransformer's model that expresses it.
        source_map: the table of its format.
        dims: dimensions, in the family's words.
        tensors: by key; training's shards joined.
        tokenizer: the tokenizer's files.
        ids: the tokenizer's special ids.
        other_keys: keys whose values are not tensors.
        remarks: what is expressed only nearly, one line each; those on shards alone are ``ShardRemark``s.
        extra_targets: tensors beyond the family's schema, by name.
        extra_config: sections and keys of ``config.ini`` beyond the family's.
        extra_files: what is written beside the shards, by name.
        beyond: what no shards can hold of it and a directory of Hugging Face can, one line each.
        own: the model as Hugging Face has it; None: the source is no directory of Hugging Face's.
        activation: the feed-forward's function in transformers' words, where ``dims`` cannot say it; empty: they do.
        is_padded: whether training added rows to the embedding beyond the tokenizer's.
        added_tokens: that training put behind the tokenizer's own and NeMo's special tokens: T5's sentinels.
        chat_template: how training wrote conversations, as transformers' ``apply_chat_template`` takes it; empty: it is
            not known, or lies beside the tokenizer.
    """

    archive: Archive
    family: Family
    source_map: SourceMap
    dims: Dims
    tensors: Mapping[str, LazyTensor]
    tokenizer: TokenizerFiles
    ids: SpecialIds
    other_keys: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    extra_targets: Mapping[str, TensorSpec] = field(default_factory=dict)
    extra_config: Sections = field(default_factory=dict)
    extra_files: Mapping[str, bytes] = field(default_factory=dict)
    beyond: tuple[str, ...] = ()
    own: OwnModel | None = None
    activation: str = ""
    is_padded: bool = False
    added_tokens: tuple[str, ...] = ()
    chat_template: str = ""

    def files(self) -> Mapping[str, TensorSpec]:
        """List every file of FasterTransformer's by name, without ``.<rank>.bin``."""
        return {**self.family.schema(self.dims), **self.extra_targets}

    def schema(self) -> Mapping[str, TensorSpec]:
        """List the model's own tensors by name, whole."""
        return {**self.family.tensors(self.dims), **whole_tensors(self.extra_targets)}
