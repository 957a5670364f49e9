"""Reads NeMo's files of a Llama-like model back into what each training rank held, by torch and tarfile."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import yaml

from support.tiny_models.llama_forward import Array, Weights

_LEGACY = (
    ("encoder.", "decoder."),
    ("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("query_key_value", "linear_qkv"),
    ("self_attention.dense", "self_attention.linear_proj"),
    ("dense_h_to_4h", "linear_fc1"),
    ("dense_4h_to_h", "linear_fc2"),
)


def read_archive(path: Path) -> tuple[dict[str, Any], list[Weights]]:
    """The configuration of a ``.nemo`` of torch files and what each tensor rank holds of all layers."""
    config: dict[str, Any] = {}
    ranks: dict[int, dict[str, Array]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            if member.name.endswith(".yaml"):
                config = yaml.safe_load(content)
            if member.name.endswith(".ckpt"):
                *_, folder, _ = [".", *member.name.split("/")]
                digits = [int(word) for word in folder.split("_") if word.isdigit()]
                rank, stage = digits if len(digits) == 2 else (*digits, 0, 0)[:2]
                state = torch.load(io.BytesIO(content.read()), weights_only=True)
                per_stage = config["num_layers"] // config["pipeline_model_parallel_size"]
                ranks.setdefault(rank, {}).update(_of_stage(state, stage * per_stage))
    return config, [_fused(ranks[rank]) for rank in sorted(ranks)]


def _of_stage(state: dict[str, torch.Tensor], first: int) -> dict[str, Array]:
    made = {}
    for key, value in state.items():
        for prefix in ("model.module.", "model.language_model.", "model."):
            key = key.removeprefix(prefix)
        before, is_layer, after = key.partition(".layers.")
        if is_layer:
            number, _, rest = after.partition(".")
            key = f"{before}.layers.{int(number) + first}.{rest}"
        made[key] = value.double().numpy()
    return made


def _fused(weights: dict[str, Array]) -> Weights:
    """The legacy and local names made today's; a legacy second matrix goes below the first, as ParallelMLP takes it."""
    is_mixture = any("router" in key for key in weights)
    made = {}
    for key, value in weights.items():
        for old, new in () if is_mixture else _LEGACY:
            key = key.replace(old, new)
        made[key] = value
    for key in [key for key in made if "linear_fc1_2" in key]:
        first = key.replace("linear_fc1_2", "linear_fc1")
        made[first] = np.concatenate([made[first], made.pop(key)])
    return made


def read_zarr(folder: Path, prefix: str = "model.") -> Weights:
    """All layers of a zarr directory as one rank would hold them."""
    arrays = {}
    for header in folder.glob("*/.zarray"):
        about = json.loads(header.read_text())
        whole = torch.zeros(about["shape"], dtype=torch.float32 if about["dtype"] == "<f4" else torch.bfloat16)
        for file in header.parent.iterdir():
            if file.name != ".zarray":
                place = [int(word) * size for word, size in zip(file.name.split("."), about["chunks"], strict=True)]
                box = tuple(slice(at, at + size) for at, size in zip(place, about["chunks"], strict=True))
                values = torch.frombuffer(bytearray(file.read_bytes()), dtype=whole.dtype)
                whole[box] = values.reshape(about["chunks"])
        arrays[header.parent.name.removeprefix(prefix)] = whole
    return unstacked(arrays)


def read_torch_dist(folder: Path, prefix: str = "module.") -> Weights:
    """All layers of a torch_dist directory as one rank would hold them, by torch's own reader."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return unstacked({key.removeprefix(prefix): value for key, value in state.items()})


def unstacked(arrays: dict[str, torch.Tensor]) -> Weights:
    """Give every layer and every expert its own key, and put ``_w`` above ``_v``."""
    found: dict[str, torch.Tensor] = dict(arrays)
    for key in [key for key in found if key.endswith("_w")]:
        pair = key.removesuffix("_w")
        axis = found[key].ndim - 2
        found[pair] = torch.cat([found.pop(key), found.pop(f"{pair}_v")], axis)
    made = {}
    for key, value in found.items():
        before, _, after = key.partition(".layers.")
        if after and not after.split(".")[0].isdigit():
            made |= {f"{before}.layers.{layer}.{after}": part for layer, part in enumerate(value)}
        else:
            made[key] = value
    result = {}
    for key, value in made.items():
        rest = key.partition(".experts.experts.")[2]
        if rest[:1].isdigit():
            result[key.replace(".experts.experts.", ".experts.local_experts.")] = value.double().numpy()
        elif rest:
            for expert, part in enumerate(value):
                name = key.replace(".experts.experts.", f".experts.local_experts.{expert}.")
                result[name] = part.double().numpy()
        else:
            result[key] = value.double().numpy()
    return result
