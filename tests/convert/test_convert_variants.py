"""NeMo GPT's older orders and other splits, each against a numpy computation of the source itself."""

from __future__ import annotations

import configparser
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.distributed_checkpoints import nemo2
from support.checkpoints.nemo_archive import (
    HEAD_SIZE,
    HEADS,
    INTER,
    LAYERS,
    POSITIONS,
    VOCAB,
    gpt_config,
    gpt_state,
    write_gpt,
    write_nemo,
)
from support.checkpoints.nemo_samples import unpacked
from support.shards.reference_forward import forward
from tokenizers import Tokenizer, models

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

IDS = np.arange(POSITIONS)[None]


def run(source: Path, output: Path, ranks: int = 1) -> Path:
    convert(ConvertArguments(source, output, ranks, "fp32"))
    return output


def random_state(seed: int = 0, **sizes: int) -> dict[str, Any]:
    """A legacy state with random weights, of other sizes if they are given."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(value.shape, generator=generator) / 4 if isinstance(value, torch.Tensor) else value
        for key, value in gpt_state().items()
    }


def by_blocks(fused: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """From [heads, 3, size] rows to each rank's [3, heads, size], as ``megatron_legacy`` keeps them."""
    heads = fused.reshape(HEADS, 3, HEAD_SIZE, *fused.shape[1:])
    return [part.swapaxes(0, 1).reshape(-1, *fused.shape[1:]) for part in heads.chunk(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_legacy_is_another_order_of_the_same_function(ranks: int, tmp_path: Path) -> None:
    state = random_state()
    expected = forward(run(write_gpt(tmp_path / "new.nemo", state), tmp_path / "new"), IDS)
    files: dict[str, dict[str, Any]] = {}
    for rank in range(ranks):
        old = {}
        for key, value in state.items():
            name = key.replace(".encoder.", ".transformer.").replace(".self_attention.", ".attention.")
            if "query_key_value" in key and isinstance(value, torch.Tensor):
                old[name] = by_blocks(value, ranks)[rank]
            elif isinstance(value, torch.Tensor) and ranks > 1:
                old[name] = rank_of(key, value, ranks, rank)
            else:
                old[name] = value
        files[f"mp_rank_{rank:02d}/model_weights.ckpt" if ranks > 1 else "model_weights.ckpt"] = old
    config = gpt_config(megatron_legacy=True, tensor_model_parallel_size=ranks)
    root = run(write_nemo(tmp_path / "old.nemo", config, files), tmp_path / "old", 4)
    assert np.abs(forward(root, IDS) - expected).max() < 1e-4


def rank_of(key: str, value: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    if "dense_h_to_4h" in key or "word_embeddings" in key:
        return value.chunk(ranks, 0)[rank].clone()
    if key.endswith(("dense.weight", "4h_to_h.weight")):
        return value.chunk(ranks, 1)[rank].clone()
    return value


def test_layernorm1p_with_legacy_keys(tmp_path: Path) -> None:
    state = random_state()
    stored = {k: v - 1 if k.endswith("layernorm.weight") else v for k, v in state.items()}
    expected = forward(run(write_gpt(tmp_path / "plain.nemo", state), tmp_path / "plain"), IDS)
    source = write_gpt(tmp_path / "1p.nemo", stored, normalization="layernorm1p")
    assert np.abs(forward(run(source, tmp_path / "1p", 2), IDS) - expected).max() < 1e-4


def wide_state() -> dict[str, torch.Tensor]:
    """Six heads, so that two training ranks become three."""
    generator = torch.Generator().manual_seed(6)
    hidden = 6 * HEAD_SIZE

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 4

    base = "model.language_model."
    state = {f"{base}embedding.word_embeddings.weight": fresh(VOCAB, hidden)}
    state[f"{base}embedding.position_embeddings.weight"] = fresh(POSITIONS, hidden)
    for layer in range(LAYERS):
        prefix = f"{base}encoder.layers.{layer}."
        sizes = {"self_attention.query_key_value": (3 * hidden, hidden), "self_attention.dense": (hidden, hidden)}
        sizes |= {"mlp.dense_h_to_4h": (INTER, hidden), "mlp.dense_4h_to_h": (hidden, INTER)}
        for name, (rows, columns) in sizes.items():
            state |= {f"{prefix}{name}.weight": fresh(rows, columns), f"{prefix}{name}.bias": fresh(rows)}
        for name in ("input_layernorm", "post_attention_layernorm"):
            state |= {f"{prefix}{name}.weight": fresh(hidden), f"{prefix}{name}.bias": fresh(hidden)}
    return state | {f"{base}encoder.final_layernorm.{part}": fresh(hidden) for part in ("weight", "bias")}


def test_two_training_ranks_become_three(tmp_path: Path) -> None:
    state, config = wide_state(), gpt_config(hidden_size=6 * HEAD_SIZE, num_attention_heads=6)
    whole = write_nemo(tmp_path / "one.nemo", config, {"model_weights.ckpt": state})
    files = {
        f"mp_rank_{rank:02d}/model_weights.ckpt": {
            key: value.chunk(2)[rank].clone() if "query_key_value" in key else rank_of(key, value, 2, rank)
            for key, value in state.items()
        }
        for rank in range(2)
    }
    split = write_nemo(tmp_path / "two.nemo", {**config, "tensor_model_parallel_size": 2}, files)
    expected, made = run(whole, tmp_path / "1", 3), run(split, tmp_path / "2", 3)
    for file in expected.glob("*.bin"):
        assert file.read_bytes() == (made / file.name).read_bytes(), file.name
    assert np.abs(forward(made, IDS) - forward(run(whole, tmp_path / "0"), IDS)).max() < 1e-4
    with pytest.raises(CheckpointError, match="tensor_para_size 4 does not divide the model's 6 heads"):
        inspect_source(split, 4, "fp32")


def test_parts_that_end_within_a_head(tmp_path: Path) -> None:
    state = wide_state()
    files = {
        f"mp_rank_{rank:02d}/model_weights.ckpt": {
            key: value.chunk(4)[rank].clone() if "query_key_value" in key else rank_of(key, value, 4, rank)
            for key, value in state.items()
        }
        for rank in range(4)
    }
    config = gpt_config(hidden_size=6 * HEAD_SIZE, num_attention_heads=6, tensor_model_parallel_size=4)
    with pytest.raises(CheckpointError, match="lies in 4 parts, which cannot hold whole ones of 6 heads"):
        inspect_source(write_nemo(tmp_path / "g.nemo", config, files), 1, "fp32")


def write_description(folder: Path, prefix: str = "") -> None:
    """A tokenizer.json of the tokenizers library, and the file that names its special tokens."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / f"{prefix}tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    (folder / f"{prefix}tokenizer_config.json").write_text(json.dumps(names))


def special(root: Path) -> tuple[str, str]:
    parser = configparser.ConfigParser()
    parser.read(root / "config.ini")
    return parser["gpt"]["start_id"], parser["gpt"]["end_id"]


def test_nemo2_with_a_tokenizer_json(tmp_path: Path) -> None:
    source = nemo2(tmp_path)
    folder = source / "context/nemo_tokenizer"
    for file in folder.iterdir():
        file.unlink()
    write_description(folder)
    root = run(source, tmp_path / "out")
    assert special(root) == ("2", "3")
    assert (root / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_nemo1_with_a_name_of_hugging_faces(tmp_path: Path) -> None:
    tokenizer = {"library": "huggingface", "type": "EleutherAI/gpt-neox-20b", "vocab_file": None, "merge_file": None}
    source = write_nemo(
        tmp_path / "g.nemo", gpt_config(tokenizer=tokenizer), {"model_weights.ckpt": gpt_state()}, files={}
    )
    with pytest.raises(CheckpointError, match="gpt-neox-20b and does not hold its files"):
        inspect_source(source, 1, "fp32")
    tree = unpacked(source, tmp_path / "tree")
    write_description(tree)
    assert special(run(tree, tmp_path / "out")) == ("2", "3")
    (tree / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="names the end token"):
        inspect_source(tree, 1, "fp32")
    (tree / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer.json has no model"):
        inspect_source(tree, 1, "fp32")
