"""What a checkpoint holds and what its conversion takes, against figures worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.checkpoints.nemo_archive import NEMO, write_gpt
from support.tiny_models.huggingface_models import save

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.sizing import measure
from export_scripts.convert import convert
from export_scripts.inspect import main
from handover.errors import ArtefactError, CheckpointError
from handover.manifest import FILE_NAME

PROJECT = Path(__file__).resolve().parents[2]
# The 530 billion parameters of the GPT guide's table, trained with tensor parallelism 8 and 12 pipeline stages.
GPT_530B = {
    "num_layers": 105,
    "hidden_size": 20480,
    "ffn_hidden_size": 81920,
    "num_attention_heads": 128,
    "max_position_embeddings": 2048,
    "vocab_size": 51200,
    "tensor_model_parallel_size": 8,
    "pipeline_model_parallel_size": 12,
    "precision": "bf16",
    "megatron_amp_O2": True,
}


def description(path: Path, **changes: object) -> Path:
    path.write_text(yaml.safe_dump({**GPT_530B, **changes}))
    return path


def test_a_checkpoint_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(write_gpt(tmp_path / "gpt.nemo"))])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "format NeMo GPT with legacy keys" in lines
    assert "family gpt" in lines
    assert any(line.startswith("dimensions head_num 4 size_per_head 2 inter_size 12 num_layer 2") for line in lines)
    assert "ranks tensor_para_size can be 1, 2, 4" in lines
    key = "model.language_model.encoder.layers.{layer}.mlp.dense_h_to_4h.weight"
    assert f"{key} x2 fp32 [12, 8] model.layers.{{layer}}.mlp.dense_h_to_4h.weight" in lines


def test_an_ft_checkpoint_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "2-gpu"
    manifest = convert(ConvertArguments(write_gpt(tmp_path / "gpt.nemo"), output, 2, "fp16"))
    main([str(output)])
    shown = capsys.readouterr().out
    assert f"verified    {len(manifest.files)} files" in shown
    assert manifest.digest in shown

    shard = output / "model.layers.1.mlp.dense_4h_to_h.weight.1.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    (output / "notes.txt").write_text("left over")
    with pytest.raises(ArtefactError) as error:
        main([str(output)])
    assert "2 files are not those of its manifest" in error.value.problem
    assert f"{shard.name}  content differs" in error.value.problem
    assert "notes.txt  is not in the manifest" in error.value.problem

    shard.write_bytes(content[:-2])
    with pytest.raises(ArtefactError, match="dense_4h_to_h"):
        main([str(output)])


def test_an_ft_checkpoint_without_a_manifest_is_read_for_values_that_are_no_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "1-gpu"
    convert(ConvertArguments(write_gpt(tmp_path / "gpt.nemo"), output, 1, "fp32"))
    (output / FILE_NAME).unlink()
    main([str(output)])
    assert "every value finite; no manifest" in capsys.readouterr().out
    (output / "model.final_layernorm.bias.bin").write_bytes(torch.full((8,), torch.inf).numpy().tobytes())
    with pytest.raises(CheckpointError, match="model.final_layernorm.bias holds 8 values that are NaN or infinite"):
        main([str(output)])


def test_what_cannot_be_converted_is_said_with_status_1(tmp_path: Path) -> None:
    archive = write_gpt(tmp_path / "gpt.nemo", activation="swiglu")
    argv = [sys.executable, "-m", "export_scripts.inspect", str(archive)]
    run = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "activation: swiglu" in run.stderr


def test_530_billion_parameters_are_sized_from_their_description(tmp_path: Path) -> None:
    sizing = measure(description(tmp_path / "gpt3_530b.yaml"), 16, "fp16", 16)
    h, layers, vocab, positions = 20480, 105, 51200, 2048
    # Weights of a block: QKV 3 h h, dense h h, feed-forward 2 * 4 h h; biases 3 h + h + 4 h + h; two norms of 2 h.
    numbers = layers * (12 * h * h + 13 * h) + (vocab + positions) * h + 2 * h
    assert sizing.parameter_count == numbers
    assert sizing.written_bytes == sizing.read_bytes == 2 * numbers
    assert sizing.files_read == 8 * 12
    # Six of a block's twelve tensors are cut; four more tensors, config.ini, two files of the tokenizer, the manifest.
    assert sizing.files_written == layers * (6 * 16 + 6) + 4 + 1 + 2 + 1
    assert sizing.largest[1] == 2 * 4 * h * h
    assert sizing.memory_bytes < 1e9
    text = "\n".join(sizing.lines())
    assert "parameters  529.6 billion" in text
    assert "1.1 TB in 96 files" in text


def test_a_checkpoint_is_sized_as_it_is_converted(tmp_path: Path) -> None:
    archive = write_gpt(tmp_path / "gpt.nemo")
    sizing = measure(archive, 2, "fp16", 2)
    manifest = convert(ConvertArguments(archive, tmp_path / "out", 2, "fp16"))
    shards = [record for record in manifest.files if record.path.endswith(".bin")]
    assert sizing.written_bytes == sum(record.size_bytes for record in shards)
    assert sizing.files_written == len(manifest.files) + 1
    assert sizing.read_bytes == 2 * sizing.written_bytes, "fp32 becomes fp16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "does not say vocab_size"),
        ({"activation": "swiglu"}, "activation: swiglu"),
        ({"num_attention_heads": 100}, "hidden_size 20480 is not a multiple of num_attention_heads 100"),
        ({"num_attention_heads": 40}, "tensor_para_size 16 does not divide the model's 40 heads"),
    ],
)
def test_a_description_is_checked_as_a_checkpoint_is(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        measure(description(tmp_path / "model.yaml", **changes), 16, "fp16", 16)


def test_a_dry_run_says_what_the_conversion_of_a_description_takes(tmp_path: Path) -> None:
    path = description(tmp_path / "gpt3_530b.yaml")
    common = [f"base_results_dir={tmp_path}", "cluster=interactive", "stages=[convert]"]
    common += [f"export.model.checkpoint_path={path}", "export.model.tensor_model_parallel_size=16"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(PROJECT / "main.py"), *common, *more]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)

    shown = run("dry_run=true")
    assert shown.returncode == 0, shown.stderr
    assert "convert: reads       1.1 TB in 96 files" in shown.stdout
    assert '"stage": "convert"' in shown.stdout
    refused = run()
    assert refused.returncode == 1
    assert "is the description of a checkpoint" in refused.stderr
    assert "dry_run=true" in refused.stderr


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("opt", {"do_layer_norm_before": False}),
        ("gpt2", {"layer_norm_epsilon": 1e-3}),
        ("bloom", {}),
        ("gptj", {}),
        ("gpt_neox", {"use_parallel_residual": False}),
    ],
)
def test_an_ft_checkpoint_has_the_dimensions_that_it_was_made_with(
    family: str, changes: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(family, tmp_path / "source", **changes)
    convert(ConvertArguments(tmp_path / "source", tmp_path / "out", 1, "fp32"))
    said = [dimensions(path, capsys) for path in (tmp_path / "source", tmp_path / "out")]
    assert said[0] == said[1]


def test_an_ft_t5_has_the_dimensions_that_it_was_made_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(ConvertArguments(NEMO / "t5_abs.nemo", tmp_path / "out", 1, "fp32"))
    said = [dimensions(path, capsys) for path in (NEMO / "t5_abs.nemo", tmp_path / "out")]
    assert said[0] == said[1]


def dimensions(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    main([str(path)])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  dimensions"))
    return line
