"""Checkpoints of each file format, to be damaged."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from support.checkpoints import fairseq_checkpoints as fairseq
from support.checkpoints import gptj_slim_checkpoints as slim
from support.checkpoints import megatron_checkpoints as megatron
from support.checkpoints.distributed_checkpoints import ZARR, nemo2
from support.checkpoints.nemo_archive import NEMO, write_gpt
from support.checkpoints.nemo_samples import restore, unpacked
from support.shards.gpt2_checkpoint import random_gpt2
from support.tiny_models.huggingface_models import HIDDEN, build, save


def nemo_gzipped(root: Path) -> Path:
    tree = unpacked(write_gpt(root.with_suffix(".plain")), root.with_suffix(".tree"))
    with tarfile.open(root, "w:gz") as tar:
        tar.add(tree, arcname=".")
    return root


def hugging_face(root: Path, form: str) -> Path:
    """One file, or shards with an index, as transformers writes them."""
    model = save("gpt2", root)
    if form == "bin":
        (root / "model.safetensors").unlink()
        torch.save(model.state_dict(), root / "pytorch_model.bin")
    if form == "sharded":
        (root / "model.safetensors").unlink()
        model.save_pretrained(root, max_shard_size="40KB")
    return root


def megatron_lm(root: Path, is_zip: bool) -> Path:
    return megatron.write(
        root, random_gpt2(n_layer=megatron.LAYERS, n_positions=megatron.POSITIONS), 3.0, (2, 1), is_zip=is_zip
    )


def ft_checkpoint(root: Path) -> Path:
    convert(ConvertArguments(write_gpt(root.with_suffix(".nemo")), root, 2, "fp32"))
    return root


def torch_dist(root: Path) -> Path:
    root.mkdir()
    return nemo2(root)


def zarr(root: Path) -> Path:
    root.mkdir()
    return unpacked(restore(ZARR, root.parent), root)


# How to write each, and the files that hold its weights.
SOURCES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "NeMo, gzipped": (nemo_gzipped, ""),
    "NeMo T5": (lambda root: unpacked(NEMO / "t5_abs.nemo", root), "*.ckpt"),
    "NeMo, zarr": (zarr, "model_weights/*[st]/*"),
    "NeMo 2, torch_dist": (torch_dist, "weights/*"),
    "Megatron-LM": (lambda root: megatron_lm(root, is_zip=True), "*/*/*.pt"),
    "Megatron-LM, before torch 1.6": (lambda root: megatron_lm(root, is_zip=False), "*/*/*.pt"),
    "safetensors": (lambda root: hugging_face(root, "safetensors"), "*.safetensors"),
    "safetensors, sharded": (lambda root: hugging_face(root, "sharded"), "*.safetensors*"),
    "pytorch_model.bin": (lambda root: hugging_face(root, "bin"), "*.bin"),
    "GPT-J's original": (
        lambda root: slim.write_slim(slim.rounded_model(), root, np.full(HIDDEN, 1 / 16, np.float32)),
        "*/*.npz",
    ),
    "fairseq": (lambda root: fairseq.write(root, build("xglm", activation_function="relu")), "*.pt"),
    "FT checkpoint": (ft_checkpoint, "*.bin"),
}
UNPROTECTED = ("NeMo, zarr", "safetensors", "safetensors, sharded", "Megatron-LM, before torch 1.6")
