"""Reader of TurboMind's early directories of a Llama: FasterTransformer's shards by other names, without ``.bin``.

Names and keys: lmdeploy 0.0.1 to 0.0.14, ``serve/turbomind/deploy.py`` and ``models/llama/LlamaDecoderLayerWeight.cc``.
A rank's files are void-main's but for one thing: TurboMind rotates neighbours of a head by position, where the family
rotates halves. So element 2 i + s of a head's query or key is the family's element s * size / 2 + i.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from export_scripts.checkpoints.fastertransformer.reader import Shards
from export_scripts.checkpoints.fastertransformer.table import table_of
from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tokenizers.huggingface import NO_TOKENIZER
from export_scripts.checkpoints.tokenizers.nemo import TokenizerFiles
from export_scripts.checkpoints.tokenizers.user_tokenizer import given_tokenizer
from export_scripts.tensors.array_of_pieces import array_of_pieces
from export_scripts.tensors.dtypes import Array, item_bytes
from ft_format.config_ini import FILE_NAME as CONFIG_INI
from ft_format.config_ini import ConfigIni
from ft_format.families import llama
from ft_format.families.family import LAYERS, SIZE
from ft_format.layout import TensorSpec
from ft_format.values import FLAG, INDEX, Values, decimal, fraction
from handover.errors import CheckpointError
from models.decoder import Decoder
from models.directory import SpecialIds

NAME = "TurboMind's early directories (triton_models/weights with config.ini)"
_WEIGHTS, _TOKENIZER = "triton_models/weights/", "triton_models/tokenizer/"
_EMBEDDING = "tok_embeddings.weight"
_TYPE = "fp16"  # the only one that its deploy.py writes, but for 4 bits
_FILES = {
    "tok_embeddings.weight": llama.EMBEDDING_FILE,
    "norm.weight": "model.final_layernorm.weight",
    "output.weight": llama.HEAD_FILE,
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.w_qkv.weight": "attention.query_key_value.weight",
    "attention.w_qkv.bias": "attention.query_key_value.bias",
    "attention.wo.weight": "attention.dense.weight",
    "attention.wo.bias": "attention.dense.bias",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_RANK = re.compile(r"\.(\d+)\.(weight|bias)$")
_COPIED = "attention.dense.bias"  # every rank's file holds all of it


def is_candidate(path: Path) -> bool:
    """Whether a directory looks like one, by names alone."""
    return any(
        (folder / _EMBEDDING).is_file() and (folder / CONFIG_INI).is_file() for folder in (path, path / _WEIGHTS)
    )


def recognises(archive: Archive) -> bool:
    """Whether the files are TurboMind's."""
    return any(f"{folder}{_EMBEDDING}" in archive and f"{folder}{CONFIG_INI}" in archive for folder in ("", _WEIGHTS))


def open_source(archive: Archive) -> Source:
    """Open a model.

    Raises:
        CheckpointError: a file is missing, left over or of another size than ``config.ini`` says, or the model is
            quantised or computed in a way that the family does not have.
    """
    folder = _WEIGHTS if f"{_WEIGHTS}{_EMBEDDING}" in archive else ""
    where = f"{folder}{CONFIG_INI}"
    section = ConfigIni(archive.read_bytes(where), f"{archive.path}: {where}", CheckpointError)[llama.SECTION]
    dims = _read_dims(section, archive.sizes[f"{folder}{_EMBEDDING}"])
    files = _files(archive, folder)
    ranks = max((len(names) for names in files.values()), default=1)
    schema = llama.schema(dims)
    _check(archive, files, schema, dims, ranks)
    tokenizer = given_tokenizer(archive) or _tokenizer(archive, folder)
    return Source(
        archive=archive,
        family=llama.FAMILY,
        source_map=table_of(schema, llama.own_tensors(dims), ranks, "TurboMind's Llama"),
        dims=dims,
        tensors={name: _tensor(archive, names, schema[name], dims, ranks) for name, names in files.items()},
        tokenizer=tokenizer,
        ids=SpecialIds(section.get("start_id", INDEX), section.get("end_id", INDEX)),
        remarks=() if tokenizer.members else (NO_TOKENIZER,),
    )


def _read_dims(section: Values, embedding_bytes: int) -> Decoder:
    for key, is_legal in (("use_dynamic_ntk", FLAG), ("use_logn_attn", FLAG)):
        if section.get(key, is_legal, False):
            raise CheckpointError(
                f"{CONFIG_INI}: {key} = 1  (positions are rotated and scores computed as in training)"
            )
    if section.get("rope_scaling_factor", decimal, 0.0) not in (0, 1):
        factor = section.texts["rope_scaling_factor"]
        raise CheckpointError(
            f"{CONFIG_INI}: rope_scaling_factor = {factor}  (TurboMind's dynamic scaling is not read)"
        )
    if (kind := section.get("weight_type", str, _TYPE)) != _TYPE:
        raise CheckpointError(f"{CONFIG_INI}: weight_type = {kind}", f"weights of {_TYPE} are read")
    heads, size = section.get("head_num", SIZE), section.get("size_per_head", SIZE)
    has_bias = section.get("attn_bias", FLAG, False)
    length = section.find("max_position_embeddings", INDEX) or section.find("session_len", INDEX)
    kv_heads = section.get("kv_head_num", INDEX, 0) or heads
    section.refuse("kv_head_num", heads % kv_heads != 0)
    said = {
        "head_num": heads,
        "kv_head_num": kv_heads,
        "size_per_head": size,
        "inter_size": section.get("inter_size", SIZE),
        "num_layer": section.get("num_layer", LAYERS),
        "vocab_size": embedding_bytes // (heads * size * item_bytes(_TYPE)),  # padded to a multiple of the ranks
        "max_pos_seq_len": length or 0,
        "rotary_embedding": section.get("rotary_embedding", SIZE, size),
        "layernorm_eps": section.get("norm_eps", fraction()),
        "rope_theta": section.get("rope_theta", decimal, 10000.0),
    }
    decoder = llama.of_words(said)
    biases = replace(decoder.attention, has_qkv_bias=has_bias, has_output_bias=has_bias)
    return replace(decoder, attention=biases)


def _files(archive: Archive, folder: str) -> dict[str, tuple[str, ...]]:
    """Group the files by the family's name of what they hold, in the order of ranks.

    Raises:
        CheckpointError: a file holds 4-bit weights, or has no counterpart.
    """
    ranks: dict[str, dict[int, str]] = {}
    unknown = []
    for file in sorted(archive.sizes):
        own = file.removeprefix(folder)
        if not file.startswith(folder) or "/" in own or own == CONFIG_INI:
            continue
        rank = _RANK.search(own)
        whole = f"{own[: rank.start()]}.{rank[2]}" if rank and own.startswith("layers.") else own
        layer = _LAYER.fullmatch(whole)
        target = _FILES.get(layer[2] if layer else whole)
        if target is None:
            unknown.append(own)
            continue
        name = f"model.layers.{layer[1]}.{target}" if layer else target
        ranks.setdefault(name, {})[int(rank[1]) if rank and layer else 0] = file
    if unknown:
        is_packed = any(name.endswith((".qweight", ".scales", ".zeros")) for name in unknown)
        raise CheckpointError(
            f"{archive.path} has files that are no tensors of a Llama: {', '.join(unknown[:4])}",
            "4-bit weights are packed for TurboMind's kernels and are not read" if is_packed else "",
        )
    return {name: tuple(files[rank] for rank in sorted(files)) for name, files in ranks.items()}


def _check(
    archive: Archive,
    files: Mapping[str, tuple[str, ...]],
    schema: Mapping[str, TensorSpec],
    dims: Decoder,
    ranks: int,
) -> None:
    """Refuse a directory in which a file is missing, left over or of a wrong size."""
    problems = [f"{file}  belongs to no tensor of this model" for name in files.keys() - schema for file in files[name]]
    for name, target in schema.items():
        names, is_split = files.get(name, ()), target.split_axis is not None
        wanted = prod(target.shard_shape(dims, ranks)) * item_bytes(_TYPE)
        if len(names) != (ranks if is_split or name.endswith(_COPIED) else 1):
            problems.append(f"{name}  has {len(names)} files of {ranks} ranks")
        problems += [
            f"{file}  has {archive.sizes[file]} bytes, not {wanted}" for file in names if archive.sizes[file] != wanted
        ]
    if problems:
        raise CheckpointError(
            f"{archive.path}: {len(problems)} differences from {CONFIG_INI}\n  " + "\n  ".join(problems),
            "copy the checkpoint again",
        )


def _tensor(archive: Archive, files: tuple[str, ...], target: TensorSpec, dims: Decoder, ranks: int) -> Shards:
    names = files if target.split_axis is not None else files[:1]
    axis = target.split_axis if ranks > 1 else None
    shape = target.shard_shape(dims, ranks)
    if target.parts:
        return _InPairs(archive, names, shape, _TYPE, axis, {}, dims=dims)
    return Shards(archive, names, shape, _TYPE, axis, {})


@dataclass(frozen=True)
class _InPairs(Shards):
    """A file of query, key and value whose heads are rotated in pairs; it is shown as the family has it."""

    dims: Decoder | None = None

    def parts(self) -> tuple[Array, ...]:
        """Describe each rank's file by its halves; nothing is read."""
        return tuple(self._in_halves(part) for part in super().parts())

    def _in_halves(self, part: Array) -> Array:
        """Show a rank's columns [..., q, k, v heads * size] with the halves of q and k after one another."""
        assert self.dims
        size, outer = self.dims.size_per_head, part.shape[:-1]
        heads = part.reshape(*outer, -1, size)
        values = heads.shape[-2] * self.dims.kv_head_num // self.dims.qkv_head_num
        rotated = heads.shape[-2] - values
        pairs = heads[..., :rotated, :].reshape(*outer, rotated, size // 2, 2)
        origin = (0,) * len(outer)
        pieces = [((*origin, 0, index * size // 2), pairs[..., index]) for index in range(2)]
        pieces.append(((*origin, rotated, 0), heads[..., rotated:, :]))
        return array_of_pieces(heads.shape, part.dtype, pieces).reshape(part.shape)


def _tokenizer(archive: Archive, folder: str) -> TokenizerFiles:
    """Find the tokenizer beside the weights; one of SentencePiece, or Hugging Face's file."""
    base = _TOKENIZER if folder else ""
    for name, library in (("tokenizer.json", "huggingface"), ("tokenizer.model", "sentencepiece")):
        if f"{base}{name}" in archive:
            return TokenizerFiles({name: f"{base}{name}"}, library)
    return TokenizerFiles({}, "none")
