"""LoRA adapters of NeMo 1.x: a ``.nemo`` with ``peft.lora_tuning`` in its configuration, and no weights of a model.

Keys and forward: NeMo 1.23, ``parallel_adapters.py`` (``ParallelLinearAdapter``: alpha / dim times linear_out of
linear_in; ``LoraMoeAdapter``), ``peft_config.py`` (``LoraPEFTConfig``) and ``mcore_mixins.py``. Tensor parallelism
cuts linear_out by rows, and linear_in by rows too, or by columns behind a row-parallel layer. The variant "canonical"
has matrices of its own for q, k, v and for the two halves of a gated feed-forward; they become one product here, with
zeros where they do not meet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.yaml_file import read_yaml
from export_scripts.checkpoints.lora.adapter import Adapter
from export_scripts.checkpoints.lora.update import FC1, QKV, Update, pair_of, side_by_side, swapped
from export_scripts.checkpoints.megatron.gpt import PartedTensor
from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.checkpoints.nemo.gpt import NemoCheckpoint
from export_scripts.checkpoints.tensor_values import read_whole
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import split_layer
from export_scripts.weights.values import Fields, number, positive
from handover.errors import CheckpointError
from models.checks import quoted

_KEY = re.compile(
    r"(?P<module>.+)\.adapter_layer\.lora_(?P<kind>\w+)_adapter"
    r"(?:\.(?P<part>q|k|v|gate|up)_adapter|\.expert_adapters\.(?P<expert>\d+))?\.linear_(?P<side>in|out)\.weight"
)
_LOCAL, _GLOBAL = ".mlp.experts.local_experts.", ".mlp.experts.experts."
_LAYER = re.compile(r"(?:.+\.)?layers\.\d+\.")
# The layer that an adapter hangs on, in the words of NeMo's own layers and of megatron-core.
_QKV, _FC1 = ("query_key_value", "linear_qkv", "layernorm_qkv"), ("dense_h_to_4h", "linear_fc1")
_LAYERS = {
    "kqv": _QKV,
    "unfused_kqv": _QKV,
    "dense_attention": ("dense", "linear_proj", "proj"),
    "hto4h": _FC1,
    "unfused_hto4h": _FC1,
    "4htoh": ("dense_4h_to_h", "linear_fc2"),
    "moe_hto4h": ("linear_fc1",),
    "moe_4htoh": ("linear_fc2",),
}
_PARTS = {"unfused_kqv": ("q", "k", "v"), "unfused_hto4h": ("gate", "up")}
_ROW_PARALLEL = ("dense_attention", "4htoh", "moe_4htoh")
_GATED = ("fast-geglu", "fast-swiglu", "fast-reglu")

Pair = tuple[PartedTensor, PartedTensor]
"""linear_in [rank, columns] and linear_out [rows, rank]."""


@dataclass(frozen=True)
class _Model:
    """What the adapter's configuration says of its model.

    Attributes:
        heads, groups: query heads, and those that have keys and values.
        is_gated: the feed-forward has two halves, of which training's ranks keep one part each.
        scale: of every product.
        rank: of every adapter.
    """

    heads: int
    groups: int
    is_gated: bool
    scale: float
    rank: int


def is_lora_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``model_config.yaml`` was that of a training of LoRA adapters; the model may hold them merged."""
    peft = config.get("peft")
    return isinstance(peft, Mapping) and "lora" in str(peft.get("peft_scheme"))


def recognises(archive: Archive) -> bool:
    """Whether the files are a LoRA adapter of NeMo's."""
    return CONFIG_FILE in archive and is_lora_config(read_yaml(archive, CONFIG_FILE))


def holds_adapter(archive: Archive) -> bool:
    """Whether the files are a LoRA adapter of NeMo's and no model, into which it may be merged."""
    keys = NemoCheckpoint(archive).state.keys() if recognises(archive) else ()
    return bool(keys) and all(".adapter_layer." in key for key in keys)


def refuse_adapter(archive: Archive) -> None:
    """Refuse an adapter where a model is wanted.

    Raises:
        CheckpointError: it is one.
    """
    if holds_adapter(archive):
        raise CheckpointError(
            f"{archive.path} holds a LoRA adapter, not a GPT",
            "give the model as export.model.checkpoint_path and this as export.model.adapter_path",
        )


def read_adapter(name: str, archive: Archive) -> Adapter:
    """Open an adapter.

    Args:
        name: of its file.
        archive: its files; its configuration is that of its model.

    Raises:
        CheckpointError: it is incomplete, or none that can be merged exactly.
    """
    checkpoint = NemoCheckpoint(archive)
    said = _read_config(checkpoint.config, f"{archive.path}: {CONFIG_FILE}")
    groups: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    tensors = checkpoint.state.tensors(_join_axis)
    for key in tensors:
        found = _KEY.fullmatch(key)
        if found is None or found["kind"] not in _LAYERS or _of_one_expert(found) != (".mlp.experts." in key):
            raise CheckpointError(f"{archive.path}: {key} is no part of a LoRA adapter that is read", _known())
        if found["expert"] and not found["module"].endswith(f"{_LOCAL}{found['expert']}"):
            continue  # every expert has adapters for all of them, and is given its own number: it uses one
        places = groups.setdefault((found["module"], found["kind"]), {})
        places[found["part"] or "", found["side"]] = key
    if not groups or checkpoint.state.other_keys():
        raise CheckpointError(f"{archive.path} holds no LoRA adapter", _known())
    _check_layers(checkpoint, groups)
    updates = tuple(_update(*place, keys, tensors, said) for place, keys in groups.items())
    return Adapter(name, str(archive.path), updates)


def _of_one_expert(found: re.Match[str]) -> bool | None:
    """Whether a key is of an expert; None: its parts say both."""
    said = {found["kind"].startswith("moe_"), found["expert"] is not None}
    return said.pop() if len(said) == 1 else None


def _known() -> str:
    return "adapters of attention and feed-forward are read: " + ", ".join(f"lora_{kind}_adapter" for kind in _LAYERS)


def _read_config(config: Mapping[str, Any], where: str) -> _Model:
    """Read what the weights' places and scale depend on.

    Raises:
        CheckpointError: it describes more than products to add.
    """
    peft = Fields(config, where).fields("peft")
    lora = peft.fields("lora_tuning")
    wanted: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
        "peft.peft_scheme": (peft, "peft_scheme", ("lora",)),
        "peft.lora_tuning.variant": (lora, "variant", (None, "nemo", "canonical")),
        "peft.lora_tuning.weight_tying": (lora, "weight_tying", (None, False)),
        "peft.lora_tuning.position_embedding_strategy": (lora, "position_embedding_strategy", (None,)),
        "megatron_legacy": (config, "megatron_legacy", (None, False)),
        "expert_model_parallel_size": (config, "expert_model_parallel_size", (None, 1)),
    }
    for key, (section, name, legal) in wanted.items():
        if section.get(name) not in legal:
            raise CheckpointError(
                f"{where}: {key} is {quoted(section.get(name))}, and no such adapter can be merged",
                f"legal: {', '.join(map(quoted, legal))}",
            )
    rank = positive(lora.get("adapter_dim"), f"{where}: peft.lora_tuning.adapter_dim")
    alpha = lora.get("alpha")
    activation = str(config.get("activation"))
    heads = positive(config.get("num_attention_heads"), f"{where}: num_attention_heads")
    return _Model(
        heads=heads,
        groups=positive(config.get("num_query_groups") or heads, f"{where}: num_query_groups"),
        is_gated=activation in _GATED or (bool(config.get("mcore_gpt")) and activation.endswith("glu")),
        scale=number(rank if alpha is None else alpha, f"{where}: peft.lora_tuning.alpha") / rank,
        rank=rank,
    )


def _check_layers(checkpoint: NemoCheckpoint, groups: Mapping[tuple[str, str], object]) -> None:
    """Make sure that layers can be numbered: each pipeline stage counts its own from 0.

    Raises:
        CheckpointError: a stage may lack some, as with ``layer_selection``.
    """
    layers = {found.group() for module, _ in groups if (found := _LAYER.match(f"{module}."))}
    wanted = checkpoint.config.get("num_layers")
    if checkpoint.pipeline_parallel > 1 and len(layers) != wanted:
        raise CheckpointError(
            f"{checkpoint.archive.path} has adapters of {len(layers)} of {quoted(wanted)} layers, from "
            f"{checkpoint.pipeline_parallel} pipeline stages: their layers' numbers cannot be told",
            "save it again with pipeline_model_parallel_size 1",
        )


def _join_axis(key: str) -> int | None:
    found = _KEY.fullmatch(split_layer(key)[0].replace("{layer}", "0"))
    if found is None:
        return None
    return 1 if found["side"] == "in" and found["kind"] in _ROW_PARALLEL else 0


def _update(
    module: str,
    kind: str,
    keys: Mapping[tuple[str, str], str],
    tensors: Mapping[str, PartedTensor],
    said: _Model,
) -> Update:
    """Describe what an adapter adds to one weight.

    Raises:
        CheckpointError: a matrix is missing or of another rank.
    """
    adapter = f"{module}.adapter_layer.lora_{kind}_adapter"
    pairs = []
    for part in _PARTS.get(kind, ("",)):
        sides = {side: key for (whose, side), key in keys.items() if whose == part}
        place = f"{adapter}.{part}_adapter" if part else adapter
        pairs.append(pair_of(place, sides, tensors, f"adapter_dim {said.rank}", said.rank, keys.values()))
    is_fc1 = kind in ("hto4h", "unfused_hto4h", "moe_hto4h")
    modules = dict.fromkeys((module, module.replace(_LOCAL, _GLOBAL)))
    # NeMo 2 calls module what NeMo 1 calls model.
    places = [place for each in modules for place in (each, f"module.{each.removeprefix('model.')}")]
    return Update(
        names=tuple(f"{place}.{layer}.weight" for layer in _LAYERS[kind] for place in places),
        shape=(sum(out.shape[0] for _, out in pairs), pairs[0][0].shape[1]),
        factors=tuple(tensor for pair in pairs for tensor in pair),
        read=partial(_READERS.get(kind, _read_one), pairs, said),
        scale=said.scale,
        is_gated=is_fc1 and said.is_gated,
        keys=tuple(keys.values()),
        apart=tuple(range(len(pairs))) if len(pairs) > 1 else (),
    )


def _read_one(pairs: list[Pair], said: _Model) -> tuple[Array, Array]:
    down, up = pairs[0]
    return read_whole(up), read_whole(down)


def _read_fc1(pairs: list[Pair], said: _Model) -> tuple[Array, Array]:
    """Read a fused adapter; the rows of a gated one in the order [gate, up], whatever the training's ranks."""
    left, right = _read_one(pairs, said)
    ranks = pairs[0][1].part_count
    return (swapped(left, ranks, 2) if said.is_gated else left), right


def _read_unfused_fc1(pairs: list[Pair], said: _Model) -> tuple[Array, Array]:
    """Read gate's and up's; without a gate they are the two halves of each training rank's rows."""
    left, right = side_by_side(_values(pairs, "unfused_hto4h"), FC1, sum(up.shape[0] for _, up in pairs), {})
    return (left if said.is_gated else swapped(left, 2, pairs[0][1].part_count)), right


def _read_unfused_qkv(pairs: list[Pair], said: _Model) -> tuple[Array, Array]:
    """Read q's, k's and v's; rows in megatron-core's order [groups, heads of the group + 2, size per head]."""
    size = pairs[0][1].shape[0] // said.heads
    sizes = {"heads_per_group": said.heads // said.groups, "size_per_head": size}
    return side_by_side(_values(pairs, "unfused_kqv"), QKV, sum(up.shape[0] for _, up in pairs), sizes)


def _values(pairs: list[Pair], kind: str) -> dict[str, tuple[Array, Array]]:
    return {part: (read_whole(down), read_whole(up)) for part, (down, up) in zip(_PARTS[kind], pairs, strict=True)}


_READERS: dict[str, Callable[[list[Pair], _Model], tuple[Array, Array]]] = {
    "hto4h": _read_fc1,
    "moe_hto4h": _read_fc1,
    "unfused_hto4h": _read_unfused_fc1,
    "unfused_kqv": _read_unfused_qkv,
}
