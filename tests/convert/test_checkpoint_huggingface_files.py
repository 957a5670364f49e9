"""Weight files of the hub, against the libraries that write them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.files.safetensors_file import read_safetensors
from export_scripts.checkpoints.huggingface.files import open_model_weights, open_weights, read_config
from handover.errors import CheckpointError

STATE = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "b": torch.tensor([1.5, -2.0, 3.1415]).to(torch.bfloat16),
    "odd": torch.arange(5, dtype=torch.int8),  # what follows begins at an odd byte
    "half": torch.tensor([[0.1], [65504.0]], dtype=torch.float16),
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_every_tensor_is_mapped_as_it_was_saved(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = read_safetensors(open_archive(tmp_path), "model.safetensors")
    assert {key: (tensor.shape, tensor.data_type) for key, tensor in tensors.items()} == {
        "a": ((2, 3), "fp32"),
        "b": ((3,), "bf16"),
        "odd": ((5,), "I8"),
        "half": ((2, 1), "fp16"),
    }
    for key in ("a", "b", "half"):
        (part,) = tensors[key].parts()
        assert isinstance(part, np.memmap)
        assert not part.flags.writeable
        assert part.tobytes() == raw(STATE[key])


def test_a_torch_file_gives_the_same_tensors(tmp_path: Path) -> None:
    torch.save({**STATE, "step": 3}, tmp_path / "pytorch_model.bin")
    weights = open_weights(open_archive(tmp_path))
    assert weights.other_keys == ("step",)
    assert weights.tensors["b"].parts()[0].tobytes() == raw(STATE["b"])
    assert (weights.tensors["a"].shape, weights.tensors["a"].axis) == ((2, 3), None)


def write_shards(path: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Two shards and their index, as transformers writes them."""
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    names = [f"{stem}-0000{number}-of-00002{suffix}" for number in (1, 2)]
    shards = [{"a": STATE["a"]}, {"b": STATE["b"], "half": STATE["half"]}]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, path / name) if suffix == ".safetensors" else torch.save(shard, path / name)
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index = {"metadata": {"total_size": 34}, "weight_map": weight_map}
    (path / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    return weight_map


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_are_one_model(suffix: str, tmp_path: Path) -> None:
    write_shards(tmp_path, suffix)
    weights = open_weights(open_archive(tmp_path))
    assert {key: tensor.parts()[0].tobytes() for key, tensor in weights.tensors.items()} == {
        key: raw(STATE[key]) for key in ("a", "b", "half")
    }


def test_an_index_may_name_its_shards_as_paths(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    names = {key: f"./{name}" for key, name in weight_map.items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert open_weights(open_archive(tmp_path)).tensors.keys() == {"a", "b", "half"}


def test_the_file_that_the_configuration_names_goes_before_others(tmp_path: Path) -> None:
    """As in transformers: ``transformers_weights``."""
    save_file({"a": STATE["a"]}, tmp_path / "model.safetensors")
    save_file({"b": STATE["b"]}, tmp_path / "other.safetensors")
    archive = open_archive(tmp_path)
    assert open_model_weights(archive, {"transformers_weights": "other.safetensors"}).tensors.keys() == {"b"}
    assert open_model_weights(archive, {}).tensors.keys() == {"a"}
    with pytest.raises(
        CheckpointError, match=r"transformers_weights of config.json is \.\./x.safetensors, and no such"
    ):
        open_model_weights(archive, {"transformers_weights": "../x.safetensors"})


def linked(folder: Path, target: Path) -> Path:
    """A directory whose chat template is a link."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("of a template")
    (folder / "chat_template.jinja").symlink_to(target)
    return folder


def test_a_text_that_is_a_link_to_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    path = linked(tmp_path / "model", tmp_path / "private/notes")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is a link to .*/private/notes, outside"):
        read_config(open_archive(path))


def test_links_that_downloads_make_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    for path in (
        linked(cache / "snapshots/1f2e", cache / f"blobs/{'a' * 40}"),
        linked(tmp_path / "local", cache / f"blobs/{'b' * 64}"),
        linked(tmp_path / "own", tmp_path / "own/files/template"),
    ):
        assert read_config(open_archive(path)) == {}
    (tmp_path / "alias").symlink_to(tmp_path / "own")
    assert read_config(open_archive(tmp_path / "alias")) == {}


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        open_weights(open_archive(path))
    return str(refused.value)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = refusal(tmp_path)
    assert "lacks 1 of the 2 shards" in message
    assert "model-00002-of-00002.safetensors" in message


def test_index_and_shards_name_the_same_keys(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    weight_map["c"] = weight_map["a"]
    del weight_map["half"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    message = refusal(tmp_path)
    assert "differ in 2 keys" in message
    assert "c  is not in model-00001" in message
    assert "half  is in model-00002-of-00002.safetensors and not in the index" in message


def test_an_index_cannot_reach_outside_of_the_checkpoint(tmp_path: Path) -> None:
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    save_file(STATE, tmp_path / "outside.safetensors")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    assert "lacks 1 of the 1 shards" in refusal(inside)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', "nonsense", '{"weight_map": {"a": 1}}'])
def test_damaged_index(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(tmp_path)


def test_weights_in_other_formats_are_named(tmp_path: Path) -> None:
    (tmp_path / "tf_model.h5").write_bytes(b"x")
    assert "has no weights that are read; it has tf_model.h5" in refusal(tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 7, 20, 200, -1])
def test_truncated_files(cut: int, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:cut])
    assert "model.safetensors" in refusal(tmp_path)


def write_header(path: Path, header: str, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [2],'
        ' "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "a": {"dtype": "U8", "shape": [4],'
        ' "data_offsets": [4, 8]}}',
        '{"a": {"dtype": "F32"}}',
        '{"a": 3}',
        "[]",
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0',
    ],
)
def test_headers_that_lie(header: str, tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", header, bytes(8))
    assert "model.safetensors" in refusal(tmp_path)


def test_flipped_bytes_of_the_header_never_map_foreign_bytes(tmp_path: Path) -> None:
    """Whatever a flipped byte does, it is refused or the tensors still cover the file exactly once."""
    path = tmp_path / "model.safetensors"
    save_file(STATE, path)
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    accepted = 0
    for position in range(8 + header_bytes):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        try:
            tensors = read_safetensors(open_archive(tmp_path), "model.safetensors")
        except CheckpointError:
            continue
        accepted += 1
        assert min(tensor.offset for tensor in tensors.values()) >= 8 + header_bytes
    assert 0 < accepted < header_bytes


def test_adapters_and_quantised_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "big/model"}')
    with pytest.raises(CheckpointError, match="holds an adapter of big/model, not a model"):
        read_config(open_archive(tmp_path))
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "bits": 4}}')
    with pytest.raises(CheckpointError, match=r"is quantised \(gptq\)"):
        read_config(open_archive(tmp_path))
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(CheckpointError, match=r"config.json is not JSON"):
        read_config(open_archive(tmp_path))
