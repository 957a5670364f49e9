"""The conversion against what others computed: FasterTransformer's bytes and NeMo's logits."""

from __future__ import annotations

import configparser
import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints.nemo_archive import (
    DATA,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    INTER,
    NEMO,
    gpt_config,
    gpt_state,
    write_gpt,
    write_nemo,
)
from support.shards.reference_forward import forward

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert, main
from handover.manifest import Manifest

FT = json.loads((DATA / "ft_gpt122_digests.json").read_text())
# The three archives hold the same model, trained with different parallelism.
SAME_MODEL = ["gpt122_tp1_pp1", "gpt_tp2_pp1", "gpt_tp1_pp2"]


def run(checkpoint: Path, output: Path, ranks: int = 1, data_type: str = "fp32", workers: int = 2) -> Manifest:
    return convert(ConvertArguments(checkpoint, output, ranks, data_type, processes=workers))


def digests(root: Path) -> dict[str, str]:
    return {p.name: "sha256:" + hashlib.sha256(p.read_bytes()).hexdigest() for p in root.iterdir() if p.is_file()}


def assert_same_as_fastertransformer(root: Path, oracle: str) -> None:
    made = digests(root)
    assert set(made) - set(FT[oracle]["files"]) == {"config.ini", "manifest.json"}
    assert {name: made[name] for name in FT[oracle]["files"]} == FT[oracle]["files"]
    config = configparser.ConfigParser()
    config.read(root / "config.ini")
    written = list(config["gpt"].items())
    assert written[: len(FT[oracle]["config"])] == list(FT[oracle]["config"].items())


# Numbers are rounded before they are cut.
@pytest.mark.in_ci(when=lambda at: at.data_type == "fp32" or at.ranks == 2)
@pytest.mark.parametrize("name", SAME_MODEL)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("data_type", ["fp32", "fp16"])
def test_every_byte_is_that_of_fastertransformers_converter(
    name: str, ranks: int, data_type: str, tmp_path: Path
) -> None:
    run(NEMO / f"{name}.nemo", tmp_path / "out", ranks, data_type)
    assert_same_as_fastertransformer(tmp_path / "out", f"{data_type}/{ranks}-gpu")


# The bytes of every number of ranks are compared above, but for the untied one's.
@pytest.mark.in_ci(when=lambda at: at.ranks == 2 or at.name == "gpt_untied")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", [*SAME_MODEL, "gpt_spm", "gpt_untied"])
def test_shards_compute_nemos_logits(name: str, ranks: int, tmp_path: Path) -> None:
    run(NEMO / f"{name}.nemo", tmp_path / "out", ranks)
    logits = forward(tmp_path / "out", np.load(NEMO / f"{name}.input_ids.npy"))
    assert np.abs(logits - np.load(NEMO / f"{name}.logits.npy")).max() < 1e-4


def test_bf16_checkpoint_computes_nearly_nemos_bf16_logits(tmp_path: Path) -> None:
    run(NEMO / "gpt_O2_bf16.nemo", tmp_path / "out", 2, "fp32")
    logits = forward(tmp_path / "out", np.load(NEMO / "gpt_O2_bf16.input_ids.npy"))
    expected = np.load(NEMO / "gpt_O2_bf16.logits.npy")
    # NeMo computed in bf16, which keeps 8 bits of a number.
    assert np.abs(logits - expected).max() < 2**-5 * np.abs(expected).max()


@pytest.mark.parametrize("data_type", ["fp32", "fp16", "bf16"])
def test_bf16_weights_are_cast_as_torch_casts_them(data_type: str, tmp_path: Path) -> None:
    run(NEMO / "gpt_O2_bf16.nemo", tmp_path / "out", 1, data_type)
    state = load_with_torch(NEMO / "gpt_O2_bf16.nemo")
    weight = state["model.language_model.embedding.word_embeddings.weight"]
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[data_type]
    expected = weight.to(dtype).view(torch.uint8).numpy().tobytes()
    assert (tmp_path / "out/model.wte.bin").read_bytes() == expected


def load_with_torch(archive: Path) -> dict[str, torch.Tensor]:
    with tarfile.open(archive) as tar:
        content = tar.extractfile("./model_weights.ckpt")
        assert content is not None
        return torch.load(io.BytesIO(content.read()), weights_only=True)


def test_tensor_and_pipeline_parallel_training_ranks_are_joined(tmp_path: Path) -> None:
    """Cut gpt_tp2_pp1 into two pipeline stages, as NeMo writes them, and convert that."""
    with tarfile.open(NEMO / "gpt_tp2_pp1.nemo") as tar:
        tar.extractall(tmp_path / "source", filter="data")
    config = (tmp_path / "source/model_config.yaml").read_text()
    tree = tmp_path / "tree"
    for rank in range(2):
        state = torch.load(tmp_path / f"source/mp_rank_{rank:02d}/model_weights.ckpt", weights_only=True)
        for stage in range(2):
            folder = tree / f"tp_rank_{rank:02d}_pp_rank_{stage:03d}"
            folder.mkdir(parents=True)
            torch.save(pipeline_stage(state, stage), folder / "model_weights.ckpt")
    config = config.replace("pipeline_model_parallel_size: 1", "pipeline_model_parallel_size: 2", 1)
    (tree / "model_config.yaml").write_text(config)
    for file in (tmp_path / "source").glob("*_*.*"):
        if file.name != "model_config.yaml":
            file.rename(tree / file.name)
    run(tree, tmp_path / "out", 4, "fp16")
    assert_same_as_fastertransformer(tmp_path / "out", "fp16/4-gpu")


def pipeline_stage(state: dict[str, torch.Tensor], stage: int) -> dict[str, torch.Tensor]:
    """Half of the four layers, counted from 0 again; the first stage embeds, the last has norm and tied copy."""
    result = {}
    for key, value in state.items():
        if ".layers." in key:
            layer = int(key.split(".layers.")[1].split(".")[0])
            if layer // 2 == stage:
                result[key.replace(f".layers.{layer}.", f".layers.{layer % 2}.")] = value
        elif (stage == 0) == ("embedding" in key):
            result[key] = value
    if stage == 1:
        result["model.word_embeddings.weight"] = state["model.language_model.embedding.word_embeddings.weight"]
    return result


@pytest.mark.parametrize("form", ["unpacked", "beside_other_files", "gzipped"])
def test_other_forms_of_the_archive_give_the_same_bytes(form: str, tmp_path: Path) -> None:
    archive, source = NEMO / "gpt122_tp1_pp1.nemo", tmp_path / "source"
    source.mkdir()
    if form == "beside_other_files":
        (source / "gpt.nemo").write_bytes(archive.read_bytes())
        (source / "notes.txt").write_text("trained on Tuesday")
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
    if form == "gzipped":
        with tarfile.open(tmp_path / "gpt.nemo", "w:gz") as tar:
            tar.add(source, arcname=".")
        source = tmp_path / "gpt.nemo"
    run(source, tmp_path / "out", 2, "fp16")
    assert_same_as_fastertransformer(tmp_path / "out", "fp16/2-gpu")
    assert not list((tmp_path / "out").glob(".*")), "nothing is left of the work"


def test_keys_with_the_o2_wrappers_name_are_the_same_model(tmp_path: Path) -> None:
    plain = gpt_state()
    wrapped = {key.replace("model.", "model.module.", 1): value for key, value in plain.items()}
    expected = run(write_gpt(tmp_path / "plain.nemo", plain), tmp_path / "plain", 2)
    assert run(write_gpt(tmp_path / "o2.nemo", wrapped), tmp_path / "o2", 2).digest == expected.digest


def test_missing_biases_are_zeros(tmp_path: Path) -> None:
    state = {key: value for key, value in gpt_state().items() if not key.endswith("bias")}
    run(write_gpt(tmp_path / "gpt.nemo", state, bias=False), tmp_path / "out", 2)
    for name, size in (("attention.query_key_value.bias.1", 3 * HIDDEN // 2), ("mlp.dense_4h_to_h.bias", HIDDEN)):
        assert np.fromfile(tmp_path / f"out/model.layers.1.{name}.bin", "<f4").tolist() == [0.0] * size
    assert len(list((tmp_path / "out").glob("model.layers.0.*"))) == len(
        list((tmp_path / "out").glob("model.layers.1.*"))
    )


def test_untied_head_is_written_as_it_is(tmp_path: Path) -> None:
    run(NEMO / "gpt_untied.nemo", tmp_path / "out", 2)
    head = load_with_torch(NEMO / "gpt_untied.nemo")["model.language_model.output_layer.weight"]
    assert (tmp_path / "out/model.lm_head.weight.bin").read_bytes() == head.numpy().tobytes()


def test_shards_are_split_by_heads_and_by_features(tmp_path: Path) -> None:
    """The published layout, element by element, on a tensor whose elements are all different."""
    state = gpt_state()
    run(write_gpt(tmp_path / "gpt.nemo", state), tmp_path / "out", 2)
    prefix = "model.language_model.encoder.layers.1."
    fused = state[f"{prefix}self_attention.query_key_value.weight"].tolist()
    up = state[f"{prefix}mlp.dense_h_to_4h.weight"].tolist()
    down = state[f"{prefix}mlp.dense_4h_to_h.weight"].tolist()
    for rank in range(2):
        heads = range(rank * HEADS // 2, (rank + 1) * HEADS // 2)
        expected = [
            fused[head * 3 * HEAD_SIZE + block * HEAD_SIZE + element][column]
            for column in range(HIDDEN)
            for block in range(3)
            for head in heads
            for element in range(HEAD_SIZE)
        ]
        assert read(tmp_path, f"attention.query_key_value.weight.{rank}") == expected
        features = range(rank * INTER // 2, (rank + 1) * INTER // 2)
        expected = [up[feature][column] for column in range(HIDDEN) for feature in features]
        assert read(tmp_path, f"mlp.dense_h_to_4h.weight.{rank}") == expected
        expected = [down[row][feature] for feature in features for row in range(HIDDEN)]
        assert read(tmp_path, f"mlp.dense_4h_to_h.weight.{rank}") == expected


def read(tmp_path: Path, name: str) -> list[float]:
    return np.fromfile(tmp_path / f"out/model.layers.1.{name}.bin", "<f4").tolist()


def test_manifest_lists_every_file_with_shape_and_origin(tmp_path: Path) -> None:
    run(NEMO / "gpt122_tp1_pp1.nemo", tmp_path / "out", 2, "fp16")
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.kind == "ft_checkpoint"
    assert manifest.problems(tmp_path / "out") == []
    assert {record.path for record in manifest.files} == set(digests(tmp_path / "out")) - {"manifest.json"}
    records = {record.path: record for record in manifest.files}
    assert records["model.layers.0.attention.query_key_value.weight.1.bin"].shape == (64, 3, 32)
    assert records["model.layers.0.mlp.dense_4h_to_h.weight.0.bin"].shape == (128, 64)
    assert records["model.wte.bin"].dtype == "fp16"
    assert records["vocab.json"].shape is None
    assert manifest.made_from["tensor_para_size"] == 2
    assert manifest.made_from["checkpoint"].endswith("gpt122_tp1_pp1.nemo")


def test_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    one = run(NEMO / "gpt_tp2_pp1.nemo", tmp_path / "one", 4, "fp16", workers=1)
    many = run(NEMO / "gpt_tp2_pp1.nemo", tmp_path / "many", 4, "fp16", workers=8)
    assert one.digest == many.digest


def test_exact_gelu_is_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(write_gpt(tmp_path / "gpt.nemo", bias_activation_fusion=False), tmp_path / "out")
    assert "exact GELU" in capsys.readouterr().err
    run(write_gpt(tmp_path / "gpt2.nemo", bias_activation_fusion=False, openai_gelu=True), tmp_path / "out2")
    assert "GELU" not in capsys.readouterr().err


def test_command_line_shows_progress_in_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = write_nemo(tmp_path / "a b;c.nemo", gpt_config(), {"model_weights.ckpt": gpt_state()})
    main([f"--checkpoint={archive}", f"--output={tmp_path / 'out'}", "--tensor-para-size=1", "--weight-data-type=fp32"])
    size_bytes = sum(p.stat().st_size for p in (tmp_path / "out").glob("*.bin"))
    assert f"28/28 tensors  {size_bytes / 1000:.1f} KB of {size_bytes / 1000:.1f} KB" in capsys.readouterr().err
