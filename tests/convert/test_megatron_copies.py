"""What Megatron saves more than once: a copy that differs from what is read is refused, or said."""

from __future__ import annotations

import io
import tarfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.checkpoints.llama_configs import megatron_lm, nemo1, padded_vocabulary
from support.checkpoints.llama_files import (
    chunked,
    sentencepiece_model,
    write_archive,
    write_megatron_lm,
    write_megatron_lm_tree,
    write_torch_dist,
)
from support.checkpoints.llama_state import core_state
from support.checkpoints.nemo_archive import NEMO, load_file, write_nemo
from support.tiny_models.llama_models import saved
from support.tiny_models.t5_models import HEADS, VOCABULARY, Saving, huggingface_t5, nemo_states, plain_from_huggingface
from support.tiny_models.t5_models import relative_config as t5_config

from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.formats import open_source
from handover.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
COPY, WORDS = "word_embeddings.weight", "embedding.word_embeddings.weight"


def published(path: Path, moved: Mapping[str, float], mode: str = "w") -> Path:
    """NeMo's own checkpoint of two pipeline stages, some tensors of the second moved."""
    source = NEMO / "gpt_tp1_pp2.nemo"
    names = [f"tp_rank_00_pp_rank_{stage:03d}/model_weights.ckpt" for stage in range(2)]
    states = {name: torch.load(io.BytesIO(load_file(source, name)), weights_only=False) for name in names}
    for key, change in moved.items():
        states[names[1]][key] = states[names[1]][key] + change
    with tarfile.open(source) as tar:
        others = [member.name for member in tar if member.isfile() and member.name.endswith((".json", ".txt"))]
    files = {name.removeprefix("./"): load_file(source, name) for name in others}
    return write_nemo(path, yaml.safe_load(load_file(source, "model_config.yaml")), states, mode, files)


def test_the_last_stages_copy_of_a_tied_embedding_must_be_one(tmp_path: Path) -> None:
    assert open_source(open_archive(published(tmp_path / "same.nemo", {}))).remarks == ()
    moved = published(tmp_path / "moved.nemo", {f"model.{COPY}": 1e-3})
    with pytest.raises(
        CheckpointError, match=rf"model.{COPY} differs from model.language_model.{WORDS}, whose copy it"
    ):
        open_source(open_archive(moved))


def test_a_compressed_archive_is_compared_by_its_checksums(tmp_path: Path) -> None:
    assert open_source(open_archive(published(tmp_path / "same.nemo", {}, "w:gz"))).remarks == ()
    with pytest.raises(CheckpointError, match="compressed and holds a tensor twice, which may differ"):
        open_source(open_archive(published(tmp_path / "moved.nemo", {f"model.{COPY}": 1e-3}, "w:gz")))


@pytest.mark.parametrize("form", ["archive", "Megatron-LM", "torch_dist"])
def test_a_head_of_megatron_core_that_is_said_to_be_tied_must_be_the_embedding(form: str, tmp_path: Path) -> None:
    source = saved("llama32")
    for moved in (0.0, 1.0):
        path = tmp_path / f"{moved}"
        state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 2))
        state["output_layer.weight"] = state[WORDS].clone()
        state["output_layer.weight"][-1, -1] += moved  # of the last tensor-parallel rank alone
        if form == "archive":
            path = write_archive(tmp_path / f"{moved}.nemo", nemo1(source.config, (2, 2)), state, (2, 2))
        elif form == "torch_dist":
            common = {"args": Namespace(**megatron_lm(source.config)), "checkpoint_version": 3.0}
            write_torch_dist(write_megatron_lm_tree(path), chunked(state, 2), "", common)
        else:
            write_megatron_lm(path, megatron_lm(source.config, (2, 2)), state, (2, 2))
            (path / "tokenizer.model").write_bytes(sentencepiece_model())
        if not moved:
            assert open_source(open_archive(path)).dims.has_tied_head  # type: ignore[attr-defined]
            continue
        with pytest.raises(CheckpointError, match=rf"output_layer.weight differs from (model\.)?{WORDS}"):
            open_source(open_archive(path))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (COPY, f"enc_dec_model.{COPY} differs from enc_dec_model.encoder_embedding.{COPY}"),
        (f"decoder_embedding.{COPY}", f"decoder_embedding.{COPY} differs from enc_dec_model.encoder_embedding.{COPY}"),
    ],
)
def test_a_t5_has_one_embedding(key: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_source(open_archive(t5(tmp_path, lambda state: f"enc_dec_model.{key}" in state, f"enc_dec_model.{key}")))


def test_what_every_stage_or_rank_holds_is_compared_and_said(tmp_path: Path) -> None:
    table = "enc_dec_model.decoder_relative_position_embedding.relative_position_embedding.weight"
    found = open_source(open_archive(t5(tmp_path, lambda state: table in state, table)))
    assert [each for each in found.remarks if each.startswith("the training's ranks hold different") and table in each]
    source, grid = saved("llama"), (2, 1)
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 2))
    path = write_megatron_lm(tmp_path / "mlm", megatron_lm(source.config, grid), state, grid)
    (path / "tokenizer.model").write_bytes(sentencepiece_model())
    assert open_source(open_archive(path)).remarks == ()
    (file,) = path.glob("*/mp_rank_01/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    norms: dict[str, Any] = content["model"]
    norms["decoder.final_layernorm.weight"] = norms["decoder.final_layernorm.weight"] + 0.5
    torch.save(content, file)
    (said,) = open_source(open_archive(path)).remarks
    assert said.startswith("the training's ranks hold different values of decoder.final_layernorm.weight, which")


def t5(folder: Path, has: Any, key: str) -> Path:
    """NeMo's files of a T5 of four pipeline stages; the last stage that fits has a tensor of its own."""
    saving = Saving(pipeline=4)
    model = huggingface_t5(is_multilingual=True, feed_forward_proj="gated-gelu", num_decoder_layers=4)
    states = nemo_states(plain_from_huggingface(model), HEADS, saving)
    last = [state for state in states.values() if has(state)][-1]
    last[key] = last[key] + 0.5
    return write_nemo(folder / "t5.nemo", t5_config(saving, "geglu"), states, files=VOCABULARY)
