"""LoRA adapters of NeMo 2.x: a directory with ``weights/`` and ``context/`` whose weights are an adapter's alone.

Files, keys and forward: NeMo 2.x, ``lightning/pytorch/callbacks/peft.py`` (``WrappedAdapterIO`` keeps the adapter's
keys and notes the model's path in ``weights/adapter_metadata.json``), ``collections/llm/peft/lora.py`` (``LoRA`` is the
``model_transform`` of ``context/model.yaml``) and ``utils.py`` (``ParallelLinearAdapter``: alpha / dim times linear_out
of linear_in). The matrices lie whole in distributed arrays. The rows of linear_out of ``linear_fc1`` are always stored
as a gated weight's: the first half of every training rank's rows, then the second half of each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.checkpoints.files.chunked import ChunkedState, ChunkedTensor
from export_scripts.checkpoints.files.distributed import is_distributed, open_distributed
from export_scripts.checkpoints.files.yaml_file import read_yaml
from export_scripts.checkpoints.lora.adapter import Adapter
from export_scripts.checkpoints.lora.update import Update, pair_of, swapped
from export_scripts.checkpoints.tensor_values import read_whole
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.values import Fields, number, positive
from handover.errors import CheckpointError
from models.checks import quoted

_MODEL_FILE, _WEIGHTS = "context/model.yaml", "weights/"
_BASE_FILE = f"{_WEIGHTS}adapter_metadata.json"
_MARK, _FC1 = ".adapter.", "linear_fc1"
_KEY = re.compile(r"(?P<place>.+\.(?P<layer>linear_\w+))\.adapter\.linear_(?P<side>in|out)\.weight")
_LAYERS = ("linear_qkv", "linear_proj", _FC1, "linear_fc2")
_CLASS = "nemo.collections.llm.peft.lora.LoRA"
# Training's own tensors, and what Transformer Engine leaves beside the weights.
_NO_WEIGHTS = re.compile(r"(?:optimizer|chained_|rng_state|rerun_state_machine_state).*|.*\._extra_state.*")


@dataclass(frozen=True)
class _Transform:
    """How an adapter's matrices are used.

    Attributes:
        rank: of every product.
        scale: of every product.
        is_gated: the feed-forward's first layer has a gate.
    """

    rank: int
    scale: np.float32
    is_gated: bool


def recognises(archive: Archive) -> bool:
    """Whether the files are an adapter's: every weight belongs to one."""
    if _MODEL_FILE not in archive or not is_distributed(archive, _WEIGHTS):
        return False
    if _BASE_FILE not in archive and not read_yaml(archive, _MODEL_FILE).get("model_transform"):
        return False
    keys = _weights(open_distributed(archive, _WEIGHTS))
    return bool(keys) and all(_MARK in key for key in keys)


def refuse_adapter(archive: Archive) -> None:
    """Refuse an adapter where a model is wanted.

    Raises:
        CheckpointError: it is one; its model is named where the adapter names it.
    """
    if recognises(archive):
        base = _base(archive)
        model = f"its model, {base}," if base else "its model"
        raise CheckpointError(
            f"{archive.path} holds a LoRA adapter of NeMo 2, not a model",
            f"give {model} as export.model.checkpoint_path and this as export.model.adapter_path",
        )


def read_adapter(name: str, archive: Archive) -> Adapter:
    """Open an adapter.

    Args:
        name: of its directory.
        archive: its files.

    Raises:
        CheckpointError: it is incomplete, or none that can be merged exactly.
    """
    said = _read_transform(archive)
    state = open_distributed(archive, _WEIGHTS)
    tensors = state.tensors(lambda key: None)
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    for key in _weights(state):
        found = _KEY.fullmatch(key)
        if found is None or found["layer"] not in _LAYERS or ".experts." in key:
            raise CheckpointError(
                f"{archive.path}: {key} is no part of a LoRA adapter that is read",
                f"adapters of {', '.join(_LAYERS)} are, not those of a mixture's experts",
            )
        pairs.setdefault((found["place"], found["layer"]), {})[found["side"]] = key
    updates = tuple(_update(place, layer, keys, tensors, said) for (place, layer), keys in pairs.items())
    return Adapter(name, str(archive.path), updates)


def _weights(state: ChunkedState) -> list[str]:
    return [key for key in (*state.keys(), *state.other_keys()) if not _NO_WEIGHTS.fullmatch(key)]


def _base(archive: Archive) -> str:
    """Read the path of the model that an adapter was trained on; empty: it names none."""
    if _BASE_FILE not in archive:
        return ""
    where = f"{archive.path}: {_BASE_FILE}"
    path = Fields(parse_json(archive.read_bytes(_BASE_FILE), where), where).text("model_ckpt_path", "")
    return "" if path == "None" else path.removesuffix("/weights")


def _read_transform(archive: Archive) -> _Transform:
    """Read what the products depend on.

    Raises:
        CheckpointError: it is another transformation than LoRA.
    """
    where = f"{archive.path}: {_MODEL_FILE}"
    model = Fields(read_yaml(archive, _MODEL_FILE), where)
    lora = model.fields("model_transform", {})
    if lora.get("_target_") != _CLASS:
        raise CheckpointError(
            f"{where}: model_transform is {quoted(lora.get('_target_'))}, and no such adapter can be merged",
            f"legal: {_CLASS}; CanonicalLoRA orders its rows by the training's ranks, DoRA scales the weights as well",
        )
    rank = positive(lora.get("dim"), f"{where}: model_transform: dim")
    alpha = number(lora.get("alpha"), f"{where}: model_transform: alpha")
    return _Transform(rank, np.float32(alpha / rank), bool(model.fields("config").get("gated_linear_unit")))


def _update(
    place: str, layer: str, keys: Mapping[str, str], tensors: Mapping[str, ChunkedTensor], said: _Transform
) -> Update:
    """Describe what an adapter adds to one weight.

    Raises:
        CheckpointError: a matrix is missing or of another rank.
    """
    down, up = pair_of(f"{place}.adapter", keys, tensors, f"dim {said.rank}", said.rank, keys.values())
    return Update(
        names=(f"{place}.weight", f"model.{place.removeprefix('module.')}.weight"),
        shape=(up.shape[0], down.shape[1]),
        factors=(down, up),
        read=partial(_read, down, up, said.scale, 1 if layer != _FC1 or said.is_gated else len(up.chunks) // 2),
        is_gated=layer == _FC1 and said.is_gated,
        keys=tuple(keys.values()),
    )


def _read(down: ChunkedTensor, up: ChunkedTensor, scale: np.float32, ranks: int) -> tuple[Array, Array]:
    """Read the two matrices, rows of ``left`` in the order of the weight's.

    Args:
        down: linear_in.
        up: linear_out.
        scale: of their product.
        ranks: how many training ranks' rows are stored as the first half of each, then the second half of each.
    """
    left = read_whole(up) * scale
    if ranks > 1:
        left = swapped(left, 2, ranks)
    return left, read_whole(down)
