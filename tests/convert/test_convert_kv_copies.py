"""More ranks than heads of keys and values: each rank has a copy, and the shards are the model still."""

from __future__ import annotations

import configparser
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.llama_sources import Case, write_source
from support.shards.llama_shards_forward import forward
from support.tiny_models.llama_models import HEADS, VOCAB, input_ids, logits, save

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

MODELS = [("llama", 2, 4), ("llama", 4, 8), ("llama", 1, 2), ("llama_linear", 1, 8)]


def run(source: Path, output: Path, ranks: int, data_type: str = "fp32", **changes: object) -> Path:
    convert(ConvertArguments(source, output, ranks, data_type, processes=1, **changes))  # type: ignore[arg-type]
    return output


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir() if path.suffix in (".bin", ".ini")}


def keys(root: Path) -> dict[str, str]:
    parser = configparser.ConfigParser()
    parser.read(root / "config.ini")
    return dict(parser["llama"])


@pytest.mark.parametrize(("name", "kv_heads", "ranks"), MODELS)
def test_every_rank_has_what_it_needs(name: str, kv_heads: int, ranks: int, tmp_path: Path) -> None:
    """The oracle's ranks have their own files alone; a loader that knows of no copies finds as many heads as ranks."""
    model = save(name, tmp_path / "hub", num_key_value_heads=kv_heads)
    root = run(tmp_path / "hub", tmp_path / f"{ranks}-gpu", ranks)
    assert (keys(root)["kv_head_num"], keys(root)["kv_head_copies"]) == (str(ranks), str(ranks // kv_heads))
    wanted = logits(model)
    assert wanted.std() > 0.1
    assert float(np.abs(forward(root, input_ids())[..., :VOCAB] - wanted).max()) < 1e-4


# As many copies as there can be, of one head.
@pytest.mark.in_ci(when=lambda at: at.kv_heads == 1)
@pytest.mark.parametrize(("name", "kv_heads", "ranks"), MODELS)
def test_the_way_back_gives_the_same_bytes(name: str, kv_heads: int, ranks: int, tmp_path: Path) -> None:
    save(name, tmp_path / "hub", torch.bfloat16, num_key_value_heads=kv_heads)
    shards = run(tmp_path / "hub", tmp_path / "shards", ranks, "bf16")
    again = run(shards, tmp_path / "again", 1, "bf16", format="huggingface")
    wanted, made = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hub", again))
    assert made.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(wanted[key], made[key])] == []
    for other in (1, 2, 8):
        direct = contents(run(tmp_path / "hub", tmp_path / f"direct{other}", other, "bf16"))
        assert contents(run(shards, tmp_path / f"cut{other}", other, "bf16")) == direct
        back = contents(run(tmp_path / f"direct{other}", tmp_path / f"back{other}", ranks, "bf16"))
        assert back == contents(shards)


@pytest.mark.parametrize(
    "source",
    [
        Case("llama", "core", 4, 2),
        Case("llama_linear", "core", 2, 2),
        Case("llama", "torch_dist", 2),
        Case("llama", "NeMo 2"),
    ],
    ids=str,
)
def test_fused_rows_of_nemo_give_the_shards_of_the_hub(source: Case, tmp_path: Path) -> None:
    save(source.name, tmp_path / "hub")
    nemo = write_source(source, tmp_path / "source")
    ours, theirs = (contents(run(path, tmp_path / path.stem / "8", HEADS)) for path in (nemo, tmp_path / "hub"))
    names = [name for name in theirs if ".layers." in name]
    assert len(names) > 8 and [name for name in names if ours[name] != theirs[name]] == []


def test_prefix_prompts_are_copied_too(tmp_path: Path) -> None:
    save("llama", tmp_path / "hub", num_key_value_heads=2)
    shards = run(tmp_path / "hub", tmp_path / "one", 1)
    prefix = np.random.default_rng(2).normal(0, 1, (2, 2, 2, 6, 8)).astype(np.float32)  # layers, k and v, heads
    prefix.tofile(shards / "model.prefix_prompt.squad.weight.0.bin")
    (shards / "manifest.json").unlink()
    with (shards / "config.ini").open("a") as ini:
        ini.write("num_tasks = 1\nprompt_learning_type = 2\n[task_0]\ntask_name = squad\nprompt_length = 6\n")
    four = run(shards, tmp_path / "four", 4)
    for rank in range(4):
        found = np.fromfile(four / f"model.prefix_prompt.squad.weight.{rank}.bin", np.float32)
        np.testing.assert_array_equal(found, prefix[:, :, rank // 2].flatten())
    again = contents(run(four, tmp_path / "again", 1))
    assert again["model.prefix_prompt.squad.weight.0.bin"] == prefix.tobytes()


def test_ranks_that_neither_divide_nor_multiply_the_heads_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path, hidden_size=96, num_attention_heads=12, num_key_value_heads=4)
    words = r"tensor_para_size 6 neither divides kv_head_num 4 nor is a multiple of it\n.*legal: 1, 2, 4, 12"
    with pytest.raises(CheckpointError, match=words):
        inspect_source(tmp_path, 6, "fp32")


@pytest.mark.parametrize("value", ["0", "3"])
def test_copies_that_cannot_be_are_refused(value: str, tmp_path: Path) -> None:
    save("llama", tmp_path / "hub")
    root = run(tmp_path / "hub", tmp_path / "shards", 1)
    (root / "manifest.json").unlink()
    with (root / "config.ini").open("a") as ini:
        ini.write(f"kv_head_copies = {value}\n")
    with pytest.raises(CheckpointError, match="kv_head_copies"):
        inspect_source(root, 1, "fp32")
