"""Checkpoints of Hugging Face as other programs save them; transformers' logits are the judge."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from support.engines.stranger import engine_of, log_probs, log_probs_of
from support.tiny_models.huggingface_models import IDS, build, save, write_tokenizer
from support.tiny_models.t5_models import huggingface_t5
from transformers import AutoModelForCausalLM

from export_scripts.checkpoints.formats import find_archive
from export_scripts.conversion.plan.check import inspect_source
from handover.errors import CheckpointError, ConfigError, exit_status

PROMPT = [11, 3, 95, 1, 42, 17, 8]
FAMILIES = ("gpt2", "opt", "bloom", "xglm", "gptj", "gpt_neox", "gpt_bigcode")
OPT_350M = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}


def by_save_model(model: Any, path: Path) -> None:
    """Each tensor once, under the name that comes first in the alphabet."""
    save_model(model, str(path / "model.safetensors"), metadata={"format": "pt"})


def by_state_dict(model: Any, path: Path) -> None:
    """Every tensor under each of its names."""
    torch.save(model.state_dict(), path / "pytorch_model.bin")


def by_hand(model: Any, path: Path) -> None:
    """Each tensor once, its other names lost, without metadata."""
    seen: set[int] = set()
    state = {k: v for k, v in reversed(list(model.state_dict().items()))}
    once = {k: v for k, v in state.items() if not (v.data_ptr() in seen or seen.add(v.data_ptr()))}  # type: ignore[func-returns-value]
    save_file({key: value.clone() for key, value in once.items()}, str(path / "model.safetensors"))


CASES = [
    *((family, {}, how) for family in FAMILIES for how in (by_save_model,)),
    ("gpt_neox", {}, by_state_dict),
    ("opt", {}, by_state_dict),
    ("gpt2", {}, by_hand),
    ("opt", OPT_350M, by_save_model),
    ("gpt_neox", {"tie_word_embeddings": True}, by_save_model),
]


@pytest.mark.parametrize(
    ("family", "changes", "write"), CASES, ids=[f"{f}-{''.join(c)[:9]}-{w.__name__}" for f, c, w in CASES]
)
def test_files_that_transformers_loads_compute_the_same(
    family: str, changes: dict[str, Any], write: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    model = build(family, **changes)
    model.config.save_pretrained(source)
    write_tokenizer(source)
    write(model, source)
    judge = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with engine_of(source, tmp_path) as engine:
        assert np.abs(log_probs(engine, PROMPT) - log_probs_of(judge, PROMPT)).max() < 1e-4


def test_a_t5_by_save_model_is_read(tmp_path: Path) -> None:
    model = huggingface_t5()
    model.config.save_pretrained(tmp_path)
    by_save_model(model, tmp_path)
    source = inspect_source(tmp_path, 1, "fp32")
    assert np.array_equal(source.tensors["shared.weight"].parts()[0], model.shared.weight.detach().numpy())


def test_a_name_before_every_key_is_the_wrappers(tmp_path: Path) -> None:
    model = save("gpt2", tmp_path / "source")
    for file in (tmp_path / "source").glob("*.safetensors"):
        file.unlink()
    state = {f"module.{key}": value for key, value in model.state_dict().items()}
    torch.save(state, tmp_path / "source/pytorch_model.bin")
    with engine_of(tmp_path / "source", tmp_path) as engine:
        assert np.abs(log_probs(engine, PROMPT) - log_probs_of(model, PROMPT)).max() < 1e-4


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    model = save("gpt_neox", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    state = dict(model.state_dict())
    torch.save({**state, "embed_out.weight": state["lm_head.weight"] + 1}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="two names, lm_head.weight and embed_out.weight"):
        inspect_source(tmp_path, 1, "fp32")


def hub_cache(path: Path, *revisions: str, main: str | None = None) -> Path:
    """A folder of huggingface_hub's cache: links in snapshots/<revision>/ to blobs/."""
    save("gpt2", path / "made")
    folder = path / "models--org--name"
    (folder / "blobs").mkdir(parents=True)
    for file in (path / "made").iterdir():
        shutil.move(file, folder / "blobs" / file.name)
    for revision in revisions:
        (folder / "snapshots" / revision).mkdir(parents=True)
        for blob in (folder / "blobs").iterdir():
            os.symlink(f"../../blobs/{blob.name}", folder / "snapshots" / revision / blob.name)
    if main:
        (folder / "refs").mkdir()
        (folder / "refs/main").write_text(main)
    return folder


def test_the_hubs_cache_of_a_model_is_the_model(tmp_path: Path) -> None:
    folder = hub_cache(tmp_path, "0a", "1b", main="1b")
    assert find_archive(folder).path == folder / "snapshots/1b"
    assert inspect_source(folder, 1, "fp32").dims.axis_size("vocab_size") == 96
    (folder / "refs/main").unlink()
    with pytest.raises(CheckpointError, match="with 2 snapshots") as refused:
        find_archive(folder)
    assert str(folder / "snapshots/0a") in str(refused.value)


@pytest.mark.parametrize("within", ["config.json beside it", "nothing beside it"])
def test_a_file_of_weights_is_not_a_checkpoint(within: str, tmp_path: Path) -> None:
    save("gpt2", tmp_path / "m", tokenizer=False)
    if within != "config.json beside it":
        (tmp_path / "m/config.json").unlink()
    with pytest.raises(CheckpointError) as refused:
        inspect_source(tmp_path / "m/model.safetensors", 1, "fp32")
    said = f"is one file of the checkpoint {tmp_path / 'm'}" if "config" in within else "without its configuration"
    assert said in str(refused.value)


REASONS = {
    "codegen": "FasterTransformer's gptj computes the same",
    "falcon": "one key and value for many heads",
    "mpt": "ALiBi with slopes of its own",
    "bert": "it is an encoder, which generates nothing",
    "gpt_neo": "attention_types  (every layer sees all positions)\n  its scores are not divided by the root",
}


@pytest.mark.parametrize("model_type", REASONS)
def test_the_reason_is_said(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **IDS}))
    with pytest.raises(CheckpointError) as refused:
        inspect_source(tmp_path, 1, "fp32")
    assert REASONS[model_type] in str(refused.value)


def test_a_program_names_itself_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["parity"])

    def fail(argv: object) -> None:
        raise ConfigError("parity: output_length is 0")

    assert exit_status(fail, "parity") == 1
    assert capsys.readouterr().err == "parity: output_length is 0\n"
