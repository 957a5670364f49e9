"""From a configuration in NeMo's words and a model's state to a Source: the GPT of NeMo and of Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.rank_files import JoinAxis
from export_scripts.checkpoints.megatron.copies import (
    HoldsCopies,
    differing_copies,
    refuse_differing,
    remarks_on_copies,
)
from export_scripts.checkpoints.nemo import llama_config
from export_scripts.checkpoints.nemo.chat import chat_template
from export_scripts.checkpoints.nemo.falcon_h1 import is_falcon_h1
from export_scripts.checkpoints.nemo.gpt_config import (
    check_expressible,
    has_exact_gelu,
    has_zero_centred_norms,
    heads_per_group,
    is_beyond_gpt,
    is_rotary,
    read_dims,
    remarks,
)
from export_scripts.checkpoints.nemo.hybrid import is_hybrid
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles, special_ids
from export_scripts.checkpoints.tokenizers.user_tokenizer import given_tokenizer
from export_scripts.weights import megatron_decoder, megatron_gpt
from export_scripts.weights.layouts import (
    qkv_by_block_to_block,
    qkv_by_element_to_block,
    qkv_by_group_to_block,
    qkv_by_head_to_block,
)
from export_scripts.weights.schema import DecoderDims, Layout, LazyTensor, SourceMap, rows_of
from ft_format.families import gpt, gptneox, llama
from ft_format.families.family import Family
from handover.errors import CheckpointError
from models import ARCHITECTURES

CHECKPOINT_VERSION = "checkpoint_version"
"""Megatron-LM's own word in a configuration; NeMo has ``megatron_legacy`` for the first version's order."""

_EMBEDDINGS = {"model.wte", *(f"{each.all_names['embedding']}.weight" for each in ARCHITECTURES)}
_QUERY_NORM, _KEY_NORM = "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"
_QKV = "self_attention.linear_qkv.weight"
_QUERIES = ("attention.query", *{each.all_names["query"] for each in ARCHITECTURES})
_LINEAR = ("*.attention.dense.bias", "*.mlp.*.bias")
# Versions 2 and 3 have today's order.
_OLD_ORDERS = {0: qkv_by_block_to_block, 1: qkv_by_element_to_block}


class PartedTensor(LazyTensor, Protocol):
    """A tensor that knows in how many parts it lies."""

    @property
    def part_count(self) -> int:
        """Parts that it is joined from."""


class State(HoldsCopies, Protocol):
    """A model's keys and tensors, however they are stored."""

    def keys(self) -> tuple[str, ...]:
        """Every key."""

    def other_keys(self) -> tuple[str, ...]:
        """Keys whose values are not tensors."""

    def tensors(self, join_axis: JoinAxis) -> Mapping[str, PartedTensor]:
        """Tensors by key; training's shards joined."""


def gpt_source(
    archive: Archive,
    config: Mapping[str, Any],
    open_state: Callable[[], State],
    prefix: str,
    open_tokenizer: Callable[[], TokenizerFiles],
    more_remarks: tuple[str, ...] = (),
) -> Source:
    """Put a GPT together.

    Args:
        archive: the files.
        config: of the model, in the words of ``model_config.yaml``.
        open_state: opens the model's state, once its configuration is known to be fine.
        prefix: what every key begins with.
        open_tokenizer: finds the tokenizer's files, once the weights are known to be fine.
        more_remarks: beside those that the configuration gives rise to.

    Raises:
        CheckpointError: not a model that FasterTransformer's GPT can express.
    """
    model = model_of(config)
    state = open_state()
    config = _with_width(config, state)
    source_map = model.table(archive, config, state.keys(), prefix)
    tensors = state.tensors(source_map.join_axis)
    # The configuration does not know the vocabulary's padding; a missing embedding is for the completeness check.
    vocab_size = next((rows_of(t) for key, t in tensors.items() if _EMBEDDINGS & {*source_map.targets(key)}), 0)
    dims = model.dims(config, vocab_size, state.keys())
    _check_parts(source_map, tensors, dims.head_num // heads_per_group(config))
    refuse_differing(source_map, tensors, archive)
    differing = differing_copies(source_map, state, archive)
    _refuse_parts_of_norms(differing, tensors, dims.head_num, archive)
    tokenizer = given_tokenizer(archive) or open_tokenizer()
    return Source(
        archive=archive,
        family=model.family(config),
        source_map=source_map,
        dims=dims,
        tensors=tensors,
        tokenizer=tokenizer,
        ids=special_ids(archive, tokenizer),
        other_keys=state.other_keys(),
        remarks=(*model.remarks(config), *more_remarks, *remarks_on_copies(differing), *_left_out(source_map, tensors)),
        activation="gelu" if model.has_exact_gelu(config) else "",
        is_padded=True,
        chat_template=chat_template(config),
    )


def _left_out(source_map: SourceMap, tensors: Mapping[str, PartedTensor]) -> tuple[str, ...]:
    """Name the predictors of further tokens that are not written, in one line."""
    keys = [key for key in tensors if source_map.ignored_as(key) == megatron_decoder.LEFT_OUT]
    return tuple(f"{len(keys)} tensors are left out, such as {key}: {megatron_decoder.LEFT_OUT}" for key in keys[:1])


def _with_width(config: Mapping[str, Any], state: State) -> Mapping[str, Any]:
    """Add what queries are normalised with, where they are: no key of a configuration says how wide it is."""
    if not config.get("qk_layernorm"):
        return config
    shapes = (each.shape for key, each in state.tensors(lambda _: None).items() if key.endswith(_QUERY_NORM))
    return {**config, llama_config.QK_WIDTH: next((shape[-1] for shape in shapes if shape), None)}


@dataclass(frozen=True)
class Model:
    """What FasterTransformer's model of a configuration is.

    Attributes:
        check: refuses what it has not; CheckpointError.
        family: names it.
        table: chooses the table by the keys, of the archive, the configuration, the keys and their prefix.
        dims: reads the dimensions, of the configuration, the rows of the embedding and the keys.
        remarks: lists what is expressed only nearly, one line each.
        has_exact_gelu: whether the feed-forward's function is one that dimensions do not say.
    """

    check: Callable[[Mapping[str, Any]], None]
    family: Callable[[Mapping[str, Any]], Family]
    table: Callable[[Archive, Mapping[str, Any], tuple[str, ...], str], SourceMap]
    dims: Callable[[Mapping[str, Any], int, tuple[str, ...]], DecoderDims]
    remarks: Callable[[Mapping[str, Any]], tuple[str, ...]]
    has_exact_gelu: Callable[[Mapping[str, Any]], bool]


def model_of(config: Mapping[str, Any]) -> Model:
    """Choose FasterTransformer's model for a configuration in NeMo's words.

    Raises:
        CheckpointError: it has not what the configuration says.
    """
    model = _LLAMA if is_hybrid(config) or is_falcon_h1(config) or is_beyond_gpt(config) else _GPT
    model.check(config)
    return model


def _check_parts(source_map: SourceMap, tensors: Mapping[str, PartedTensor], groups: int) -> None:
    """Make sure that training's ranks cut the fused query, key and value between heads, as all of Megatron does.

    Args:
        source_map: the table.
        tensors: the source.
        groups: heads, or groups of heads that share a key and value.

    Raises:
        CheckpointError: a part ends within a head or a group.
    """
    for key, tensor in tensors.items():
        if (
            not any(place in target for target in source_map.targets(key) for place in _QUERIES)
            or tensor.axis is None
            or source_map.is_ignored(key)
        ):
            continue
        if groups % tensor.part_count:
            raise CheckpointError(
                f"{key} lies in {tensor.part_count} parts, which cannot hold whole ones of {groups} heads or groups",
                "it was not cut by Megatron's tensor parallelism",
            )


def _refuse_parts_of_norms(
    differing: Sequence[str], tensors: Mapping[str, PartedTensor], heads: int, archive: Archive
) -> None:
    """Refuse norms of one head's width that differ where each rank has one head: they may be parts of one norm.

    A norm of all heads, as OLMoE and MiniMax M2 have, is cut by heads; one of each head is the same on all ranks.

    Args:
        differing: keys of which the ranks hold different values.
        tensors: the source.
        heads: of attention.
        archive: the files.

    Raises:
        CheckpointError: naming the first one.
    """
    for key in differing:
        name = next((name for name in (_QUERY_NORM, _KEY_NORM) if key.endswith(name)), None)
        attention = tensors.get(key.removesuffix(name) + _QKV) if name else None
        if attention is not None and attention.part_count == heads:
            raise CheckpointError(
                f"{archive.path}: {key} differs between the {heads} training ranks, which have one head each: it may "
                "be of each head by itself or a part of one norm of all heads, and both look alike",
                "save the checkpoint with fewer tensor-parallel ranks, or as torch_dist, which has the norm's shape",
            )


def _source_map(archive: Archive, config: Mapping[str, Any], keys: tuple[str, ...], prefix: str) -> SourceMap:
    """Choose the table by the keys: a configuration may be silent about the format."""
    variant = megatron_gpt.GptVariant(
        qkv=_qkv(config),
        has_zero_centred_norms=has_zero_centred_norms(config),
        has_untied_head=not config.get("share_embeddings_and_output_weights", True),
        is_rotary=is_rotary(config),
    )
    if megatron_gpt.is_legacy(keys, prefix):
        return replace(megatron_gpt.legacy(prefix, variant), biases=_biases(config))
    if megatron_gpt.is_megatron_core(keys, prefix):
        return replace(megatron_gpt.megatron_core(prefix, variant), biases=_biases(config))
    some = ", ".join(keys[:3])
    raise CheckpointError(f"{archive.path} has no keys of a GPT ({some or 'it is empty'})")


def _biases(config: Mapping[str, Any]) -> dict[str, bool]:
    """Read which biases there are: NeMo's ``bias``, megatron-core's ``add_bias_linear`` and ``add_qkv_bias``."""
    linear, of_qkv = config.get("add_bias_linear", config.get("bias")), config.get("add_qkv_bias")
    said = {"*.query_key_value.bias": True} if of_qkv else {}
    if linear is not None:
        said |= {pattern: bool(linear) for pattern in ("*.query_key_value.bias", *_LINEAR) if pattern not in said}
    return said


def _qkv(config: Mapping[str, Any]) -> Layout:
    """The order of the fused query, key and value."""
    version = 0 if config.get("megatron_legacy") else config.get(CHECKPOINT_VERSION)
    if isinstance(version, int) and version in _OLD_ORDERS:
        return _OLD_ORDERS[version]
    shared_by = heads_per_group(config)
    return qkv_by_head_to_block if shared_by == 1 else qkv_by_group_to_block(shared_by)


_GPT = Model(
    check=check_expressible,
    family=lambda config: gptneox.FAMILY if is_rotary(config) else gpt.FAMILY,
    table=_source_map,
    dims=lambda config, vocab_size, keys: read_dims(config, vocab_size),
    remarks=remarks,
    has_exact_gelu=has_exact_gelu,
)
"""GPT, and GPT-NeoX where positions are rotated."""
_LLAMA = Model(
    check=llama_config.check_expressible,
    family=lambda config: llama.FAMILY,
    table=lambda archive, config, keys, prefix: megatron_decoder.table(
        prefix, keys, llama_config.read_dims(config, 1, keys)
    ),
    dims=llama_config.read_dims,
    remarks=llama_config.remarks,
    has_exact_gelu=lambda config: False,
)
"""Llama and its relatives."""
