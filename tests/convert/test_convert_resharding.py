"""An FT checkpoint cut for other ranks: the bytes of a conversion to those ranks, FasterTransformer's or ours."""

from __future__ import annotations

import configparser
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints.nemo_archive import DATA, NEMO
from support.tiny_models.huggingface_models import HIDDEN, save
from support.tiny_models.t5_models import huggingface_t5

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

FT_GPT = json.loads((DATA / "ft_gpt122_digests.json").read_text())
FT_T5 = json.loads((DATA / "ft_t5_abs_digests.json").read_text())
# Family and changes of a tiny Hugging Face model; t5 ones come from another module.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "bloom": ("bloom", {"tie_word_embeddings": False}),
    "gptj": ("gptj", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox_serial": ("gpt_neox", {"use_parallel_residual": False}),
    "t5": ("t5", {}),
    "mt5": ("t5", {"is_multilingual": True, "is_untied": True, "feed_forward_proj": "gated-gelu"}),
}


def run(checkpoint: Path, output: Path, ranks: int = 1, data_type: str = "fp32") -> Path:
    convert(ConvertArguments(checkpoint, output, ranks, data_type))
    return output


def content(root: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in root.iterdir() if p.suffix == ".bin"}


def digests(root: Path) -> dict[str, str]:
    return {p.name: "sha256:" + hashlib.sha256(p.read_bytes()).hexdigest() for p in root.iterdir()}


def write_config(root: Path, sections: dict[str, dict[str, str]]) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_dict(sections)
    with (root / "config.ini").open("w") as stream:
        parser.write(stream)


def read_config(root: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(root / "config.ini")
    return {name: dict(parser[name]) for name in parser.sections()}


def as_fastertransformer_left_it(root: Path, sections: dict[str, dict[str, str]]) -> Path:
    """The directory with its converter's own config.ini, and no manifest."""
    (root / "manifest.json").unlink()
    write_config(root, sections)
    return root


@pytest.mark.parametrize(("old", "new", "data_type"), [(1, 4, "fp32"), (4, 2, "fp32"), (2, 4, "fp16"), (4, 1, "fp16")])
def test_gpt_of_fastertransformers_converter(old: int, new: int, data_type: str, tmp_path: Path) -> None:
    """From its fp32 bytes at one number of ranks to its bytes at another; config.ini in its dialect."""
    sections = {"gpt": FT_GPT[f"fp32/{old}-gpu"]["config"]}
    given = as_fastertransformer_left_it(run(NEMO / "gpt122_tp1_pp1.nemo", tmp_path / "given", old), sections)
    assert {name: digests(given)[name] for name in FT_GPT[f"fp32/{old}-gpu"]["files"]} == FT_GPT[f"fp32/{old}-gpu"][
        "files"
    ]
    out, oracle = run(given, tmp_path / "out", new, data_type), FT_GPT[f"{data_type}/{new}-gpu"]
    made = digests(out)
    assert made.keys() - oracle["files"].keys() == {"config.ini", "manifest.json"}
    assert {name: made[name] for name in oracle["files"]} == oracle["files"]
    assert read_config(out) == {"gpt": oracle["config"]}


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1)])
def test_t5_of_fastertransformers_converter(old: int, new: int, tmp_path: Path) -> None:
    given = run(NEMO / "t5_abs.nemo", tmp_path / "given", old)
    as_fastertransformer_left_it(given, FT_T5[f"fp32/{old}-gpu"]["config"])
    out, oracle = run(given, tmp_path / "out", new), FT_T5[f"fp32/{new}-gpu"]
    made = digests(out)
    assert made.keys() - oracle["files"].keys() == {"config.ini", "manifest.json"}
    assert {name: made[name] for name in oracle["files"]} == oracle["files"]
    assert read_config(out) == oracle["config"]


@pytest.mark.parametrize("name", MODELS)
def test_around_and_back_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    if family == "t5":
        huggingface_t5(**changes).save_pretrained(tmp_path / "hf")
    else:
        save(family, tmp_path / "hf", **changes)
    first = run(tmp_path / "hf", tmp_path / "1")
    two = run(first, tmp_path / "2", 2)
    four = run(two, tmp_path / "4", 4)
    assert content(four) == content(run(tmp_path / "hf", tmp_path / "direct", 4))
    assert content(run(four, tmp_path / "back", 1)) == content(first)
    assert read_config(tmp_path / "back") == read_config(first)
    tokenizers = {p.name for p in first.iterdir()} - content(first).keys()
    assert {p.name for p in (tmp_path / "back").iterdir()} - content(first).keys() == tokenizers


def test_what_no_loader_reads_is_left_behind(tmp_path: Path) -> None:
    """FasterTransformer's converters leave biases beside their sum (GPT-NeoX) and an embedding turned around (T5)."""
    save("gpt_neox", tmp_path / "hf")
    given = run(tmp_path / "hf", tmp_path / "given", 2)
    for name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias"):
        np.zeros(HIDDEN, "<f4").tofile(given / f"model.layers.1.{name}.bin")
    (given / "manifest.json").unlink()
    assert content(run(given, tmp_path / "out", 1)) == content(run(tmp_path / "hf", tmp_path / "direct", 1))
    huggingface_t5().save_pretrained(tmp_path / "t5")
    given = run(tmp_path / "t5", tmp_path / "given_t5")
    (given / "lm_head.weight.bin").unlink()  # FasterTransformer takes the embedding then
    (given / "shared.weight.bin").write_bytes(b"anything")
    (given / "manifest.json").unlink()
    made = content(run(given, tmp_path / "out_t5", 2)).keys()
    assert made == content(run(tmp_path / "t5", tmp_path / "direct_t5", 2)).keys() - {"lm_head.weight.bin"}


def test_tables_of_prompts_are_carried_along(tmp_path: Path) -> None:
    given = run(NEMO / "gpt122_tp1_pp1.nemo", tmp_path / "given", 2)
    sections = read_config(given)
    width = int(sections["gpt"]["head_num"]) * int(sections["gpt"]["size_per_head"])
    table = np.arange(5 * width, dtype="<f4")
    table.tofile(given / "model.prompt_table.squad.weight.bin")
    sections["gpt"] |= {"num_tasks": "1", "prompt_learning_type": "3", "prompt_learning_start_id": "1000"}
    sections["task_0"] = {"task_name": "squad", "prompt_length": "5"}
    out = run(as_fastertransformer_left_it(given, sections), tmp_path / "out", 4, "fp16")
    assert np.fromfile(out / "model.prompt_table.squad.weight.bin", "<f2").tolist() == table.astype("<f2").tolist()
    assert read_config(out)["task_0"] == {"task_name": "squad", "prompt_length": "5"}
    assert read_config(out)["gpt"]["num_tasks"] == "1"


@pytest.fixture
def given(tmp_path: Path) -> Path:
    return run(NEMO / "gpt122_tp1_pp1.nemo", tmp_path / "given", 2)


def refusal(root: Path) -> str:
    (root / "manifest.json").unlink(missing_ok=True)  # which would be the first to tell
    with pytest.raises(CheckpointError) as refused:
        inspect_source(root, 1, "fp32")
    return str(refused.value)


def test_every_file_that_does_not_fit_is_named(given: Path) -> None:
    (given / "model.layers.1.attention.dense.bias.bin").unlink()
    (given / "model.layers.2.mlp.dense_h_to_4h.weight.1.bin").unlink()
    (given / "model.wte.bin").write_bytes(b"\0" * 40)
    (given / "model.layers.9.attention.dense.bias.bin").write_bytes(b"\0" * 256)
    (given / "model.layers.0.attention.dense.weight.1.q.bin").write_bytes(b"\0")
    message = refusal(given)
    assert "5 files are not what config.ini says" in message
    assert "model.layers.1.attention.dense.bias.bin  is missing" in message
    assert "model.layers.2.mlp.dense_h_to_4h.weight.1.bin  is missing" in message
    assert "model.wte.bin  has 40 bytes, not 262144: fp32, 2 ranks" in message
    assert "model.layers.9.attention.dense.bias.bin  belongs to no tensor of this model" in message
    assert "model.layers.0.attention.dense.weight.1.q.bin  belongs to no tensor" in message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("weight_data_type", "fp16", "model.wte.bin  has 262144 bytes, not 131072: fp16, 2 ranks"),
        ("weight_data_type", "int8", "[gpt] weight_data_type = int8 is none of fp32, fp16, bf16"),
        ("num_layer", "3", "model.layers.3.input_layernorm.weight.bin  belongs to no tensor"),
        ("tensor_para_size", "4", "config.ini says tensor_para_size 4; there are files of 2"),
        ("head_num", "many", "[gpt] head_num = many is not a whole number of at least 1"),
        (
            "has_post_decoder_layernorm",
            "perhaps",
            "[gpt] has_post_decoder_layernorm = perhaps is none of 1, true, yes, on",
        ),
        ("num_tasks", "2", "has no section [task_0]; it has ['gpt']"),
    ],
)
def test_config_ini_that_does_not_fit_is_refused(key: str, value: str, words: str, given: Path) -> None:
    sections = read_config(given)
    sections["gpt"][key] = value
    write_config(given, sections)
    assert words in refusal(given)


def test_config_ini_of_no_family_is_refused(given: Path) -> None:
    write_config(given, {"bert": {"num_layer": "2"}})
    assert "config.ini has the sections bert" in refusal(given)
    (given / "config.ini").write_text("no section\n")
    assert "config.ini cannot be read" in refusal(given)


def test_a_file_that_differs_from_the_manifest_is_never_copied(given: Path, tmp_path: Path) -> None:
    """Without shapes a flipped bit shows nowhere else."""
    file = given / "model.layers.1.mlp.dense_h_to_4h.weight.1.bin"
    damaged = bytearray(file.read_bytes())
    damaged[777] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="dense_h_to_4h.weight.1.bin is damaged"):
        run(given, tmp_path / "out", 1)
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_checkpoint_is_never_its_own_output(given: Path, tmp_path: Path) -> None:
    before = digests(given)
    (tmp_path / "link").symlink_to(given)
    with pytest.raises(CheckpointError, match="is the checkpoint and the output"):
        run(given, tmp_path / "link", 1)
    assert digests(given) == before


def test_ranks_must_divide_the_heads(given: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor_para_size 8 does not divide the model's 4 heads"):
        inspect_source(given, 8, "fp32")
