"""A training's directory of steps: NeMo-RL's, AutoModel's, Megatron's; and weights in parts with the hub's names."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from support.checkpoints.dcp_checkpoints import write_bridge, write_by_ranks, write_lm
from support.checkpoints.llama_files import write_huggingface_tokenizer
from support.tiny_models.llama_models import save, saved, tensors

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.digests import files_of
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.convert import convert
from export_scripts.weights.matching import match
from handover.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROWS = 121  # an odd number, so that two ranks hold different numbers of them
MODEL = "acme/tiny-llama"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as transformers saves it."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    save("llama", folder, vocab_size=ROWS)
    write_huggingface_tokenizer(folder.parent / "tokenizer", ROWS)
    return folder


@pytest.fixture(scope="module")
def parts(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in the parts of two ranks."""
    write_by_ranks(hub, output := tmp_path_factory.mktemp("parts"))
    return output


def nemo_rl(run: Path, hub: Path, weights: Path, step: int = 10, inner: str = "", has_config: bool = True) -> Path:
    """One step as NeMo-RL leaves it; the user has put ``config.json`` beside the weights."""
    root = run / f"step_{step}"
    place = root / "policy/weights" / inner
    shutil.copytree(weights, place)
    shutil.copytree(hub.parent / "tokenizer", root / "policy/tokenizer")
    (root / "policy/optimizer").mkdir()
    (root / "policy/optimizer/.metadata").write_bytes(b"not the model's")
    (root / "training_info.json").write_text("{}")
    (root / "config.yaml").write_text(yaml.safe_dump({"policy": {"model_name": MODEL, "hf_config_overrides": {}}}))
    if has_config:
        shutil.copy(hub / "config.json", place)
    return root


def automodel(run: Path, hub: Path, weights: Path, step: int = 20) -> Path:
    """One step as AutoModel leaves it: with safetensors it writes the hub's files, with distributed ones none."""
    root = run / f"epoch_0_step_{step}"
    shutil.copytree(weights, root / "model")
    shutil.copytree(hub.parent / "tokenizer", root / "model/.hf_metadata")
    shutil.copy(hub / "config.json", root / "model/.hf_metadata")
    (root / "model/.hf_metadata/fqn_to_file_index_mapping.json").write_text("{}")
    (root / "optim").mkdir()
    (root / "config.yaml").write_text(yaml.safe_dump({"model": {"pretrained_model_name_or_path": MODEL}}))
    (run / "LATEST").unlink(missing_ok=True)
    (run / "LATEST").symlink_to(root.name)
    return root


def assert_the_hubs(path: Path, output: Path, hub: Path) -> None:
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        convert(ConvertArguments(path, output / name, 1, name, format="huggingface"))
        wanted, made = tensors(hub), tensors(output / name)
        assert made.keys() == wanted.keys()
        assert not [key for key, value in wanted.items() if not torch.equal(made[key], value.to(dtype))]
        assert (output / name / "tokenizer.json").is_file()


@pytest.mark.parametrize(("form", "inner"), [("nested", ""), ("flat", "model"), ("safetensors", "model")])
def test_nemo_rls(form: str, inner: str, hub: Path, parts: Path, tmp_path: Path) -> None:
    step = nemo_rl(tmp_path / "run", hub, parts / form, inner=inner)
    assert_the_hubs(tmp_path / "run", tmp_path / "hub", hub)
    for path in (step, step / "policy", step / "policy/weights", step / "policy/weights" / inner):
        source = open_source(find_archive(path))
        assert match(source.schema(), source.source_map, source.dims, source.tensors, source.other_keys)
        assert source.tokenizer.members["tokenizer.json"] == "tokenizer.json"
        assert not any("optimizer" in name for name in files_of(source.archive))


def test_automodels(hub: Path, parts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    automodel(run, hub, parts / "flat", step=10)
    step = automodel(run, hub, parts / "safetensors")
    assert_the_hubs(run, tmp_path / "hub", hub)
    (said,) = (each for each in open_source(find_archive(run)).remarks if "is taken" in each)
    assert said == f"epoch_0_step_20 is taken, which LATEST names of 2 steps in {run}"
    for path in (step, step / "model", run / "epoch_0_step_10"):
        assert open_source(find_archive(path)).tokenizer.members
    shutil.copytree(hub, step / "model/consolidated")
    archive = find_archive(run)
    assert archive.path == step / "model/consolidated" and "model.safetensors" in archive


def test_nemo_rls_with_megatron(tmp_path: Path) -> None:
    """Megatron-Bridge's directory, whose tokenizer lies above."""
    write_bridge(tmp_path / "bridge", source := saved("qwen3", torch.bfloat16), 2)
    (tmp_path / "bridge/iter_0000007").rename(tmp_path / "bridge/iter_0000000")
    (tmp_path / "bridge/latest_checkpointed_iteration.txt").write_text("0")
    shutil.move(tmp_path / "bridge/iter_0000000/tokenizer", tmp_path / "tokenizer")
    step = nemo_rl(tmp_path / "run", tmp_path / "no model", tmp_path / "bridge", has_config=False)
    convert(ConvertArguments(tmp_path / "run", tmp_path / "out", 1, "bf16", format="huggingface"))
    made = tensors(tmp_path / "out")
    assert not [key for key, value in source.tensors.items() if not torch.equal(made[key], value)]
    inner = open_source(find_archive(step / "policy/weights/iter_0000000"))
    assert inner.tokenizer.members["tokenizer.json"] == "tokenizer/tokenizer.json"


def test_the_newest_step_is_taken_and_said_and_another_by_its_path(hub: Path, parts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (9, 10):
        nemo_rl(run, hub, parts / "flat", step)
    (run / "tmp_step_11/policy").mkdir(parents=True)
    found = open_source(find_archive(run))
    assert found.archive.path == run / "step_10/policy/weights"
    assert f"step_10 is taken, the newest of 2 steps in {run}" in found.remarks
    assert find_archive(run / "step_9").path == run / "step_9/policy/weights"


def no_metadata(step: Path) -> None:
    (step / "policy/weights/.metadata").unlink()


def marked(step: Path) -> None:
    (step / ".incomplete").touch()


@pytest.mark.parametrize("damage", [no_metadata, marked])
def test_an_interrupted_newest_step_is_an_error_that_names_the_last_complete_one(
    damage: Callable[[Path], None], hub: Path, parts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step in (8, 9, 10):
        nemo_rl(run, hub, parts / "flat", step)
    damage(run / "step_10")
    with pytest.raises(CheckpointError, match=f"step_10, the newest step, is incomplete.*\n?.*give {run}/step_9"):
        find_archive(run)
    with pytest.raises(CheckpointError, match="step_10"):
        find_archive(run / "step_10")
    assert find_archive(run / "step_9")


def test_a_link_out_of_a_step_is_refused(hub: Path, parts: Path, tmp_path: Path) -> None:
    step = nemo_rl(tmp_path / "run", hub, parts / "flat")
    (tmp_path / "secret").write_text("{}")
    (step / "policy/tokenizer/added_tokens.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=f"added_tokens.json is a link to {tmp_path}/secret, outside of"):
        find_archive(step)


def test_a_pointer_to_nothing_is_an_error(hub: Path, parts: Path, tmp_path: Path) -> None:
    automodel(run := tmp_path / "run", hub, parts / "safetensors")
    (run / "LATEST").unlink()
    (run / "LATEST.txt").write_text("epoch_3_step_999")
    with pytest.raises(CheckpointError, match="LATEST names epoch_3_step_999, which is not there"):
        find_archive(run)


@pytest.mark.parametrize("form", ["nested", "safetensors"])
def test_a_missing_config_json_is_asked_for_by_name(form: str, hub: Path, parts: Path, tmp_path: Path) -> None:
    step = nemo_rl(tmp_path / "run", hub, parts / form, has_config=False)
    asked = f"copy config.json of {MODEL} into {step}/policy/weights"
    with pytest.raises(CheckpointError, match=f"no config.json.*\n?.*{asked}"):
        open_source(find_archive(tmp_path / "run"))
    with pytest.raises(CheckpointError, match="no config.json.*\n?.*of the model that the training began with"):
        open_source(find_archive(Path(shutil.copytree(parts / "flat", tmp_path / "elsewhere"))))


def test_what_nemo_rl_sets_in_the_configuration_is_honoured_and_said(hub: Path, parts: Path, tmp_path: Path) -> None:
    step = nemo_rl(tmp_path / "run", hub, parts / "flat")
    (step / "config.yaml").write_text(yaml.safe_dump({"policy": {"hf_config_overrides": {"rms_norm_eps": 0.25}}}))
    found = open_source(find_archive(step))
    assert found.dims.norms.eps == 0.25  # type: ignore[attr-defined]
    assert "config.yaml sets rms_norm_eps of config.json (hf_config_overrides)" in found.remarks


@pytest.mark.parametrize(("name", "found"), [("shard-00001", "do not make up"), ("shard-00002", "instead of")])
def test_a_ranks_missing_safetensors_are_found_out(
    name: str, found: str, hub: Path, parts: Path, tmp_path: Path
) -> None:
    step = automodel(tmp_path / "run", hub, parts / "safetensors")
    next((step / "model").glob(f"{name}*")).unlink()
    with pytest.raises(CheckpointError, match=found):
        source = open_source(find_archive(step))
        match(source.schema(), source.source_map, source.dims, source.tensors, source.other_keys)


def test_a_shard_that_does_not_say_where_its_tensors_belong(hub: Path, parts: Path, tmp_path: Path) -> None:
    step = automodel(tmp_path / "run", hub, parts / "safetensors")
    shutil.copy(hub / "model.safetensors", step / "model/shard-00003-model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="does not say where its tensors belong"):
        open_source(find_archive(step))


def test_megatron_bridges_own_state_names_an_iteration_where_there_is_no_tracker(tmp_path: Path) -> None:
    run = write_bridge(tmp_path / "run", saved("qwen3", torch.bfloat16), 1)
    (run / "latest_checkpointed_iteration.txt").unlink()
    (run / "iter_0000009").mkdir()
    (run / "iter_0000009/__0_0.distcp").write_bytes(b"cut off")
    last = f"give {run}/iter_0000007"
    with pytest.raises(CheckpointError, match=f"iter_0000009, the newest step, is incomplete.*\n?.*{last}"):
        find_archive(run)
    torch.save({"step": torch.tensor(7, dtype=torch.int32)}, run / "latest_train_state.pt")
    (said,) = (each for each in open_source(find_archive(run)).remarks if "is taken" in each)
    assert "iter_0000007 is taken, which latest_train_state.pt names of 2 steps" in said
    assert said.endswith("newer and left out: iter_0000009")
    torch.save({"step": torch.tensor([7, 8])}, run / "latest_train_state.pt")
    with pytest.raises(CheckpointError, match="latest_train_state.pt holds no single number"):
        find_archive(run)


def test_of_megatrons_iterations_the_newest_complete_one_is_taken(tmp_path: Path) -> None:
    run = write_lm(tmp_path / "run", saved("llama"), 1)
    shutil.copytree(run / "iter_0000500", run / "iter_0000400")
    found = open_source(find_archive(run))
    said = f"iter_0000500 is taken, which latest_checkpointed_iteration.txt names of 2 steps in {run}"
    assert said in found.remarks
    assert not any(name.startswith("iter_0000400") for name in files_of(found.archive))
    (run / "latest_checkpointed_iteration.txt").unlink()
    assert f"iter_0000500 is taken, the newest of 2 steps in {run}" in open_source(find_archive(run)).remarks
    (run / "iter_0000500/.metadata").unlink()
    last = f"give {run}/iter_0000400"
    with pytest.raises(CheckpointError, match=f"iter_0000500, the newest step, is incomplete.*\n?.*{last}"):
        find_archive(run)
