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
import torch
from support.decoder_forward import forward
from support.huggingface_models import HEADS, HIDDEN, VOCAB, build, logits

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints import gptj_slim
from export_scripts.conversion.check import inspect_checkpoint
from export_scripts.convert import convert
from export_scripts.weights.architecture import Settings
from handover.errors import CheckpointError

DATA = Path(__file__).parents[1] / "data"
SHARDS, LAYERS = 4, 12  # layers are sorted as text: 0, 1, 10, 11, 2, ...
INPUT_IDS = np.array([[11, 3, 95, 0, 42, 17, 17, 8]])
CONFIG = {"pe_rotary_dims": 4, "eos_token_id": 7, "bos_token_id": 5}


def rounded_model(layers: int = LAYERS, heads: int = HEADS) -> Any:
    """A GPT-J whose weights are few enough bits to be the same in bf16 and fp16, even an eighth of them."""
    model = build("gptj", n_layer=layers, n_head=heads)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 128).round() / 128 + 0.0)  # no zero below zero
    return model


def bits(values: np.ndarray) -> np.ndarray:
    """Store as jax's bfloat16 comes out of numpy: two bytes of no kind."""
    upper = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return upper.astype(np.uint16).view("V2")


def write_slim(model: Any, path: Path, embedding_bias: np.ndarray, shards: int = SHARDS, a_file: int = 5) -> Path:
    """Write the layout that FasterTransformer's gptj_ckpt_convert.py reads, from a Hugging Face model."""
    state = {key.removeprefix("transformer."): value.numpy() for key, value in model.state_dict().items()}
    layers = model.config.n_layer
    for shard in range(shards):

        def cut(values: np.ndarray, axis: int, shard: int = shard) -> np.ndarray:
            return np.split(values, shards, axis)[shard]

        def kept(values: np.ndarray, shard: int = shard) -> np.ndarray:
            """Only shard 0's norms are trained."""
            return values if shard == 0 else np.full_like(values, round(float(values.mean())))

        arrays = [embedding_bias / shards, cut(state["wte.weight"] - embedding_bias, 0)]
        for layer in sorted(str(number) for number in range(layers)):
            w = {key.removeprefix(f"h.{layer}."): value for key, value in state.items() if f"h.{layer}." in key}
            arrays += [cut(w[f"attn.{name}_proj.weight"].T, 1) for name in ("q", "v", "k")]
            arrays += [cut(w["attn.out_proj.weight"].T, 0)]
            arrays += [cut(w["mlp.fc_in.bias"], 0), cut(w["mlp.fc_in.weight"].T, 1)]
            arrays += [w["mlp.fc_out.bias"] / shards, cut(w["mlp.fc_out.weight"].T, 0)]
            arrays += [kept(w["ln_1.bias"]), kept(w["ln_1.weight"])]
        arrays += [cut(state["lm_head.bias"], 0), cut(state["lm_head.weight"].T, 1)]
        arrays += [kept(state["ln_f.bias"]), kept(state["ln_f.weight"])]
        folder = path / f"shard_{shard}"
        folder.mkdir(parents=True)
        for number in range(0, -(-len(arrays) // a_file)):
            np.savez(folder / f"{number}.npz", *map(bits, arrays[number * a_file : (number + 1) * a_file]))
    (path / "config.json").write_text(json.dumps({**CONFIG, "n_heads": model.config.n_head}))
    return path


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
        inspect_checkpoint(path, 1, "fp32")
    return str(refused.value)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_slim(rounded_model(1), tmp_path / "slim", np.zeros(HIDDEN, np.float32))


def test_dimensions(small: Path) -> None:
    dims = inspect_checkpoint(small.parent, 1, "bf16")
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
        inspect_checkpoint(path, 1, "fp32")
