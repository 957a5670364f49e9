"""GPT-J's original checkpoint: the same function as a Hugging Face GPT-J whose weights are written in that layout."""

from __future__ import annotations

import configparser
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.checkpoints.gptj_slim_checkpoints import SHARDS, rounded_model, write_slim
from support.shards.decoder_forward import forward
from support.tiny_models.huggingface_models import HEADS, HIDDEN, VOCAB, logits

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints import gptj_slim
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from export_scripts.weights.settings import Settings
from handover.errors import CheckpointError

DATA = Path(__file__).parents[1] / "data"
INPUT_IDS = np.array([[11, 3, 95, 0, 42, 17, 17, 8]])


@pytest.fixture(scope="module")
def model() -> Any:
    return rounded_model()


@pytest.fixture(scope="module")
def slim(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_slim(model, tmp_path_factory.mktemp("slim") / "step_383500", np.full(HIDDEN, 1 / 16, np.float32))


def run(source: Path, folder: Path, ranks: int, data_type: str = "fp32") -> Path:
    convert(ConvertArguments(source, folder / f"{ranks}-gpu", ranks, data_type, processes=1))
    return folder / f"{ranks}-gpu"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_compute_transformers_logits(model: Any, slim: Path, ranks: int, tmp_path: Path) -> None:
    expected = logits(model, INPUT_IDS)
    assert np.abs(forward(run(slim, tmp_path, ranks), INPUT_IDS) - expected).max() < 1e-4 * np.abs(expected).max()


def test_bytes_are_those_of_the_same_model_from_hugging_face(model: Any, slim: Path, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "source")
    mine, other = run(slim, tmp_path / "a", 2), run(tmp_path / "source", tmp_path / "b", 2)
    assert {p.name: p.read_bytes() for p in mine.glob("*.bin")} == {p.name: p.read_bytes() for p in other.glob("*.bin")}


def test_every_byte_is_that_of_fastertransformers_converter(tmp_path: Path) -> None:
    expected = json.loads((DATA / "ft_gptj_slim_digests.json").read_text())
    source = write_slim(
        rounded_model(2, heads=8), tmp_path / "slim", np.full(HIDDEN, 1 / 16, np.float32), shards=8, a_file=7
    )
    for case, files in expected["files"].items():
        root = run(source, tmp_path, int(case.removesuffix("-gpu")))
        assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.glob("*.bin")} == files


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        inspect_source(path, 1, "fp32")
    return str(refused.value)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_slim(rounded_model(1), tmp_path / "slim", np.zeros(HIDDEN, np.float32))


def test_dimensions(small: Path) -> None:
    dims = inspect_source(small.parent, 1, "bf16").dims
    names = ("vocab_size", "num_layer", "inter_size", "head_num", "rotary_embedding")
    assert [dims.axis_size(name) for name in names] == [VOCAB, 1, 4 * HIDDEN, HEADS, 4]


def test_unknown_number_of_heads(small: Path) -> None:
    (small / "config.json").unlink()
    assert "1 layers of width 32 are not GPT-J-6B" in refusal(small)


@pytest.mark.parametrize("shard", [0, 1, 3])
def test_missing_shards(shard: int, small: Path) -> None:
    for file in (small / f"shard_{shard}").iterdir():
        file.unlink()
    # Without the last shard the heads do not lie whole in the others.
    expected = {0: "lacks shard_0", 1: "lacks shard_1", 3: "n_heads 4 cannot lie whole in 3 shards"}[shard]
    assert expected in refusal(small)


def test_missing_file_of_a_shard(small: Path) -> None:
    (small / "shard_2/1.npz").unlink()
    assert "the shards have 16, 16, 5, 16 arrays" in refusal(small)


def test_checkpoint_with_more_than_weights(small: Path) -> None:
    for shard in range(SHARDS):
        np.savez(small / f"shard_{shard}/4.npz", np.zeros(3, np.float32))
    assert "17 arrays, where a slim GPT-J has 6 and 10 for each layer" in refusal(small)


def test_parts_that_do_not_fit_together(small: Path) -> None:
    np.savez(small / "shard_1/3.npz", np.zeros(3, np.float32))
    assert "parts of ln_f.weight do not fit together" in refusal(small)


@pytest.mark.parametrize("cut", [0, 30, 100, 2000, -1])
def test_truncated_file(cut: int, small: Path) -> None:
    path = small / "shard_1/0.npz"
    path.write_bytes(path.read_bytes()[:cut])
    assert "shard_1/0.npz is truncated" in refusal(small)


def test_compressed_files_and_pickled_objects(small: Path) -> None:
    np.savez_compressed(small / "shard_1/0.npz", *[np.zeros(3, np.float32)] * 5)
    assert "is compressed" in refusal(small)
    np.savez(small / "shard_1/0.npz", np.array([{}], dtype=object))
    assert "shard_1/0.npz" in refusal(small)


def test_a_flipped_bit_is_found(small: Path, tmp_path: Path) -> None:
    path = small / "shard_1/0.npz"
    content = bytearray(path.read_bytes())
    content[content.index(b"PK", 900) - 5] ^= 4  # in the last element of the first large array
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"0.npz is damaged"):
        run(small, tmp_path / "out", 1)
    assert not (tmp_path / "out/1-gpu/manifest.json").exists()


def test_gptj_6b_is_known_by_its_size() -> None:
    """The numbers that FasterTransformer's gptj_ckpt_convert.py writes into config.ini."""
    stacked = {"wte.weight": (50400, 4096), "h.0.mlp.in.weight": (4096, 16384)}
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in stacked.items()}
    dims = gptj_slim._dims(Settings({}), 28, tensors, shards=8)  # type: ignore[arg-type]
    expected = {"head_num": 16, "size_per_head": 256, "inter_size": 16384, "num_layer": 28, "vocab_size": 50400}
    assert {name: dims.axis_size(name) for name in expected} == expected
    assert (dims.rotary_embedding, dims.hidden_units) == (64, 4096)


def test_ids_are_gpt2s_where_nothing_says_otherwise(small: Path, tmp_path: Path) -> None:
    (small / "config.json").write_text(json.dumps({"n_heads": HEADS, "pe_rotary_dims": 4}))
    config = configparser.ConfigParser()
    config.read(run(small, tmp_path / "out", 1) / "config.ini")
    ids = (config["gptj"]["start_id"], config["gptj"]["end_id"])
    assert ids == ("0", "50256"), "GPT-2's last token is none of 96"


def test_heads_that_shards_would_cut(tmp_path: Path) -> None:
    path = write_slim(rounded_model(), tmp_path / "slim", np.full(HIDDEN, 1 / 16, np.float32))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "n_heads": SHARDS // 2}))
    with pytest.raises(CheckpointError, match=f"cannot lie whole in {SHARDS} shards"):
        inspect_source(path, 1, "fp32")
