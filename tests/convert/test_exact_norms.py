"""Norms that are stored plus or less one, and whose other form is a number of the data type or is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints.llama_configs import nemo1, padded_vocabulary
from support.checkpoints.llama_files import write_archive
from support.checkpoints.llama_state import State, core_state
from support.checkpoints.nemo_archive import NEMO
from support.tiny_models.llama_models import saved, tensors

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.move.assembly import Assembly, Piece
from export_scripts.conversion.move.transposition import Transposer
from export_scripts.convert import convert
from export_scripts.targets.huggingface.table import taken
from export_scripts.weights.hub_tensor import HubTensor
from export_scripts.weights.layouts import less_one
from handover.errors import CheckpointError

NORM = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
WRITTEN = "model.layers.1.input_layernorm.weight"


def gemma(folder: Path, number: float, dtype: torch.dtype = torch.bfloat16) -> Path:
    """NeMo 1's Gemma, whose norms are stored plus one; one element of one norm is set."""
    source = saved("gemma", dtype)
    state: State = core_state(source.tensors, source.config, padded_vocabulary(source.config, 1), stores_one_more=True)
    state[NORM] = state[NORM].clone()
    state[NORM][5] = number
    return write_archive(folder / "gemma.nemo", nemo1(source.config), state)


def to_huggingface(source: Path, output: Path, data_type: str) -> dict[str, torch.Tensor]:
    convert(ConvertArguments(source, output, weight_data_type=data_type, format="huggingface"))
    return tensors(output)


def test_every_norm_that_nemos_importer_stores_comes_back_exactly() -> None:
    """It stores 1 + w, rounded to bfloat16: less one is a number of bfloat16 again, for every w up to 127."""
    weights = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    weights = weights[weights.float().abs() < 127]
    stored = (weights + 1).contiguous()
    assert len(stored) > 34000
    piece = Piece(stored.view(torch.int16).numpy().view("<u2"), "bf16", (0,))
    made = taken(HubTensor("norm", elementwise=less_one), Assembly(stored.shape, ((piece,),)))
    values = made.values("bf16", np.empty(1 << 20, np.uint8), Transposer())
    found = torch.from_numpy(values.view("<i2")).view(torch.bfloat16)
    assert torch.equal(found.double() + 1, stored.double())


def test_a_norm_that_training_changed_is_refused_where_its_digits_would_be_lost(tmp_path: Path) -> None:
    """0.298828125 has eight digits, and less one it has nine."""
    source = gemma(tmp_path, 0.298828125)
    with pytest.raises(CheckpointError) as refused:
        to_huggingface(source, tmp_path / "bf16", "bf16")
    assert WRITTEN in refused.value.problem
    assert "1 of its numbers, computed from weights in bf16, are no numbers of bf16; the first is -0.701171875" in str(
        refused.value
    )
    assert "weight_data_type=fp32" in str(refused.value.hint)
    made = to_huggingface(source, tmp_path / "fp32", "fp32")
    assert made[WRITTEN][5].double() + 1 == 0.298828125


def test_a_model_whose_every_weight_is_rounded_is_not_refused(tmp_path: Path) -> None:
    made = to_huggingface(gemma(tmp_path, 0.3001, torch.float32), tmp_path / "bf16", "bf16")
    assert made[WRITTEN][5] == torch.tensor(np.float32(0.3001) - 1).to(torch.bfloat16)


def test_a_layer_norm_1p_goes_to_gpt2_in_fp32_alone(tmp_path: Path) -> None:
    """GPT-2 multiplies by the weights as they are: of one plus a small number in bf16 nothing is left in bf16."""
    import io
    import tarfile

    import yaml
    from support.checkpoints.nemo_archive import write_nemo

    with tarfile.open(NEMO / "gpt_O2_bf16.nemo") as tar:
        files = {member.name.removeprefix("./"): tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]
    config = {**yaml.safe_load(files.pop("model_config.yaml")), "normalization": "layernorm1p"}
    state = torch.load(io.BytesIO(files.pop("model_weights.ckpt")), weights_only=True)
    norms = [key for key in state if "layernorm" in key and key.endswith("weight")]
    for key in norms:
        state[key] = (state[key].float() - 0.99).to(torch.bfloat16)
    source = write_nemo(tmp_path / "1p.nemo", config, {"model_weights.ckpt": state}, files=files)
    with pytest.raises(CheckpointError, match=r"ln_.*no numbers of bf16"):
        to_huggingface(source, tmp_path / "bf16", "bf16")
    made = to_huggingface(source, tmp_path / "fp32", "fp32")
    stored = torch.cat([state[key].float() + 1 for key in norms])
    written = torch.cat([value for key, value in made.items() if "ln_" in key and key.endswith("weight")])
    assert torch.equal(written.sort().values, stored.sort().values)
