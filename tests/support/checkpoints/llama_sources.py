"""One source of each form in which people hold a Llama-like model, ready to be converted."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from support.checkpoints.llama_configs import bridge, megatron_lm, nemo1, nemo2, padded_vocabulary
from support.checkpoints.llama_files import (
    chunked,
    write_archive,
    write_bridge_tree,
    write_megatron_lm,
    write_megatron_lm_tree,
    write_nemo1_tree,
    write_nemo2_tree,
    write_torch_dist,
    write_zarr,
)
from support.checkpoints.llama_state import State, core_state, local_norms, two_matrices
from support.tiny_models.llama_models import Saved, saved


@dataclass(frozen=True)
class Case:
    """A model in one form, cut by training ranks.

    Attributes:
        name: of llama_models.MODELS.
        form: of FORMS.
        tensor: training's tensor parallelism.
        pipeline: training's pipeline parallelism; distributed forms do not show it.
        dtype: of the weights.
    """

    name: str
    form: str
    tensor: int = 1
    pipeline: int = 1
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        type_name = "fp32" if self.dtype == torch.float32 else "bf16"
        return f"{self.name}, {self.form}, {self.tensor} x {self.pipeline}, {type_name}"

    @property
    def grid(self) -> tuple[int, int]:
        """Training's tensor and pipeline parallelism."""
        return self.tensor, self.pipeline

    @property
    def source(self) -> Saved:
        """What transformers wrote and computes."""
        return saved(self.name, self.dtype)


def write_source(case: Case, folder: Path) -> Path:
    """Write a case's files into a new folder and return the path to give."""
    source = case.source
    is_nemo1 = not case.form.startswith(("NeMo 2", "Megatron"))
    stores_one_more = is_nemo1 and source.config.model_type == "gemma"
    padded = padded_vocabulary(source.config, case.tensor)
    return FORMS[case.form](case, core_state(source.tensors, source.config, padded, stores_one_more), folder)


def _legacy(case: Case, state: State, folder: Path) -> Path:
    activation = "swiglu" if case.form.endswith("two matrices") else "fast-swiglu"
    state = two_matrices(state) if activation == "swiglu" else state
    changes = {"mcore_gpt": False, "transformer_engine": False, "activation": activation}
    config = nemo1(case.source.config, case.grid, **changes)
    folder.mkdir()
    return write_archive(folder / "model.nemo", config, state, case.grid, "model.language_model.")


def _core(case: Case, state: State, folder: Path) -> Path:
    config = nemo1(case.source.config, case.grid)
    if case.form.endswith("local"):
        state, config["transformer_engine"] = local_norms(state), False
    folder.mkdir()
    prefix = "model.module." if config["megatron_amp_O2"] else "model."
    return write_archive(folder / "model.nemo", config, state, case.grid, prefix)


def _distributed(case: Case, state: State, folder: Path) -> Path:
    config = nemo1(case.source.config, case.grid)
    weights = write_nemo1_tree(folder, config)
    prefix = "model.module." if config["megatron_amp_O2"] else "model."
    (write_zarr if case.form == "zarr" else write_torch_dist)(weights, chunked(state, case.tensor), prefix)
    return folder


def _nemo2(case: Case, state: State, folder: Path) -> Path:
    weights = write_nemo2_tree(folder, nemo2(case.source.config, case.name))
    is_stacked, has_pairs = "layers apart" not in case.form, "gate and up apart" in case.form
    write_torch_dist(weights, chunked(state, case.tensor, is_stacked, has_pairs))
    return folder


def _megatron_lm(case: Case, state: State, folder: Path) -> Path:
    is_legacy = case.form.endswith("legacy")
    arguments = megatron_lm(case.source.config, case.grid)
    return write_megatron_lm(folder, arguments, state, case.grid, is_legacy)


def _megatron_lm_distributed(case: Case, state: State, folder: Path) -> Path:
    arguments = megatron_lm(case.source.config, case.grid)
    common = {"args": Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 500}
    is_stacked, has_pairs = "layers apart" not in case.form, "gate and up apart" in case.form
    write_torch_dist(write_megatron_lm_tree(folder), chunked(state, case.tensor, is_stacked, has_pairs), "", common)
    return folder


def _bridge(case: Case, state: State, folder: Path) -> Path:
    weights = write_bridge_tree(folder, bridge(case.source.config, case.grid))
    is_stacked, has_pairs = "layers apart" not in case.form, "gate and up apart" in case.form
    common = {"iteration": 7, "checkpoint_version": 3.0, "content_metadata": {}}
    write_torch_dist(weights, chunked(state, case.tensor, is_stacked, has_pairs), "", common)
    return folder


FORMS: dict[str, Callable[[Case, State, Path], Path]] = {
    "legacy": _legacy,
    "legacy, two matrices": _legacy,
    "core": _core,
    "core, local": _core,
    "zarr": _distributed,
    "torch_dist": _distributed,
    "NeMo 2": _nemo2,
    "NeMo 2, layers apart": _nemo2,
    "NeMo 2, gate and up apart": _nemo2,
    "NeMo 2, layers apart, gate and up apart": _nemo2,
    "Megatron-LM, legacy": _megatron_lm,
    "Megatron-LM": _megatron_lm,
    "Megatron-LM, torch_dist": _megatron_lm_distributed,
    **{f"Megatron-LM, torch_dist, {how}": _megatron_lm_distributed for how in ("layers apart", "gate and up apart")},
    "Bridge": _bridge,
    "Bridge, layers apart": _bridge,
    "Bridge, layers apart, gate and up apart": _bridge,
}
"""Form -> writer. NeMo 1's archives of before megatron-core are ``legacy``, of megatron-core ``core``."""
