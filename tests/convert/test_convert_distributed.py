"""Distributed checkpoints: what NeMo and megatron-core wrote, cut by other training ranks, and damaged."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from support.checkpoints.distributed_checkpoints import ZARR, nemo2
from support.checkpoints.megatron_core import IDS, LOGITS, assert_nemos_logits, cut, run
from support.checkpoints.nemo_archive import NEMO
from support.checkpoints.nemo_samples import restore, unpacked
from support.shards.reference_forward import forward

from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.files.distributed import open_distributed
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.tensors.mapped import Reader, map_record
from export_scripts.weights.schema import ModelDims
from handover.errors import CheckpointError

DIMS = ModelDims(4, 16, 256, num_layer=4, max_pos_seq_len=32, vocab_size=1024)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["archive", "directory", "gzipped"])
def test_zarr_computes_nemos_logits(form: str, ranks: int, tmp_path: Path) -> None:
    source = restore(ZARR, tmp_path)
    if form == "directory":
        source = unpacked(source, tmp_path / "tree")
    if form == "gzipped":
        tree = unpacked(source, tmp_path / "tree")
        with tarfile.open(source, "w:gz") as tar:
            tar.add(tree, arcname=".")
    assert_nemos_logits(run(source, tmp_path / "out", ranks), ranks)


@pytest.mark.parametrize("ranks", [1, 4])
def test_nemo2_computes_megatron_cores_logits(ranks: int, tmp_path: Path) -> None:
    assert_nemos_logits(run(nemo2(tmp_path), tmp_path / "out", ranks), ranks)


def test_torch_dist_in_a_tar(tmp_path: Path) -> None:
    tree = nemo2(tmp_path)
    with tarfile.open(tmp_path / "gpt.nemo", "w") as tar:
        tar.add(tree, arcname=".")
    assert_nemos_logits(run(tmp_path / "gpt.nemo", tmp_path / "out"), 1)


def test_reading_maps_the_files_and_copies_nothing(tmp_path: Path) -> None:
    archives = (open_archive(restore(ZARR, tmp_path)), open_archive(nemo2(tmp_path)))
    for archive, folder in zip(archives, ("model_weights/", "weights/"), strict=True):
        state = open_distributed(archive, folder)
        for key, tensor in state.tensors(lambda _: None).items():
            for part in tensor.parts():
                base: Any = part
                while not isinstance(base, np.memmap):
                    assert base.base is not None, key
                    base = base.base


def expected_tensors(tmp_path: Path) -> dict[str, np.ndarray]:
    """NeMo's plain file of the same model, read by torch."""
    tree = unpacked(restore("gpt_mcore_te_plain.nemo", tmp_path), tmp_path / "plain")
    with torch.serialization.safe_globals([io.BytesIO]):
        state = torch.load(tree / "model_weights.ckpt", weights_only=True)
    return {key: value.numpy() for key, value in state.items() if isinstance(value, torch.Tensor)}


def write_zarr(
    root: Path, tensors: dict[str, np.ndarray], ranks: int, dtype: str = "<f4", separator: str = "."
) -> None:
    """Write stacked arrays by zarr's specification, cut as tensor-parallel ranks cut them."""
    layers: dict[str, list[np.ndarray]] = {}
    for key, value in tensors.items():
        before, _, after = key.partition(".layers.")
        name = f"{before}.layers.{after.partition('.')[2]}" if after else key
        layers.setdefault(name, []).append(value)
    for name, values in layers.items():
        is_stacked = ".layers." in name
        part = cut(name, torch.from_numpy(values[0]), ranks, 0).shape
        array = np.stack(values) if is_stacked else values[0]
        sizes = (1, *part) if is_stacked else tuple(part)
        folder = root / name
        folder.mkdir(parents=True)
        header = {"chunks": sizes, "compressor": None, "dtype": dtype, "fill_value": None, "filters": None}
        header |= {"order": "C", "shape": array.shape, "zarr_format": 2, "dimension_separator": separator}
        (folder / ".zarray").write_text(json.dumps(header))
        for place in np.ndindex(*(full // size for full, size in zip(array.shape, sizes, strict=True))):
            block = array[tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, sizes, strict=True))]
            file = folder / separator.join(map(str, place))
            file.parent.mkdir(parents=True, exist_ok=True)
            content = block if dtype == "<f4" else torch.from_numpy(block.copy()).bfloat16().view(torch.int16).numpy()
            file.write_bytes(np.ascontiguousarray(content).tobytes())


def with_zarr(tmp_path: Path, ranks: int, **options: Any) -> Path:
    tree = unpacked(restore(ZARR, tmp_path), tmp_path / "tree")
    for folder in (tree / "model_weights").iterdir():
        if folder.is_dir():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    write_zarr(tree / "model_weights", expected_tensors(tmp_path), ranks, **options)
    return tree


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("separator", [".", "/"])
def test_zarr_chunks_of_several_training_ranks(ranks: int, separator: str, tmp_path: Path) -> None:
    tree = with_zarr(tmp_path, ranks, separator=separator)
    assert np.abs(forward(run(tree, tmp_path / "out", 2), IDS) - LOGITS).max() < 1e-4


def test_zarr_in_bfloat16(tmp_path: Path) -> None:
    run(with_zarr(tmp_path, 2, dtype="bfloat16"), tmp_path / "out")
    words = torch.from_numpy(expected_tensors(tmp_path)["model.embedding.word_embeddings.weight"])
    written = np.fromfile(tmp_path / "out/model.wte.bin", "<f4").reshape(words.shape)
    assert (written == words.bfloat16().float().numpy()).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compressor": {"id": "blosc"}}, "its chunks are compressed (blosc)"),
        ({"order": "F"}, "not an array that megatron-core writes"),
        ({"zarr_format": 3}, "not an array that megatron-core writes"),
        ({"chunks": [1, 128, 64]}, "has 65536 bytes instead of 32768"),
        ({"shape": [5, 256, 64]}, "chunk model_weights/model.decoder.layers.mlp.linear_fc1.weight/4.0.0 is missing"),
    ],
)
def test_zarr_arrays_that_are_not_read(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    tree = unpacked(restore(ZARR, tmp_path), tmp_path / "tree")
    file = tree / "model_weights/model.decoder.layers.mlp.linear_fc1.weight/.zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError) as refused:
        inspect_source(tree, 1, "fp32")
    assert words in str(refused.value)


@pytest.mark.parametrize("prefix", ["model.", "model.module."])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_dist_in_a_nemo_of_1_x(prefix: str, tmp_path: Path) -> None:
    """NeMo 1.22 and later write it with ``dist_ckpt_format: torch_dist``; with O2 the wrapper's name is in the keys."""
    tree = unpacked(restore("gpt_mcore_te_plain.nemo", tmp_path), tmp_path / "tree")
    (tree / "model_weights.ckpt").unlink()
    values = {
        key.replace("model.", prefix, 1): torch.from_numpy(value) for key, value in expected_tensors(tmp_path).items()
    }
    dcp.save(values, checkpoint_id=tree / "model_weights", no_dist=True)
    assert np.abs(forward(run(tree, tmp_path / "out", 2), IDS) - LOGITS).max() < 1e-4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_dist_chunks_of_any_shape_are_put_together(tmp_path: Path) -> None:
    """torch's own writer cuts as it likes; here every tensor is one chunk of all layers."""
    root = nemo2(tmp_path)
    layers: dict[str, list[torch.Tensor]] = {}
    for key, value in expected_tensors(tmp_path).items():
        before, _, after = key.removeprefix("model.").partition(".layers.")
        name = f"{before}.layers.{after.partition('.')[2]}" if after else before
        layers.setdefault(f"module.{name}", []).append(torch.from_numpy(value.copy()))
    state = {key: torch.stack(values) if ".layers." in key else values[0] for key, values in layers.items()}
    state["optimizer.state.exp_avg.module.decoder.layers.mlp.linear_fc1.weight"] = torch.zeros(3)
    for file in (root / "weights").iterdir():
        file.unlink()
    dcp.save(state, checkpoint_id=root / "weights", no_dist=True)
    assert np.abs(forward(run(root, tmp_path / "out"), IDS) - LOGITS).max() < 1e-4


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "common.pt", "metadata.json"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_truncated_torch_dist_never_becomes_a_checkpoint(name: str, keep: float, tmp_path: Path) -> None:
    root = nemo2(tmp_path)
    file = root / "weights" / name
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    with pytest.raises(CheckpointError):
        run(root, tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_flipped_bits_of_the_metadata_never_read_elsewhere(tmp_path: Path) -> None:
    root = nemo2(tmp_path)
    file = root / "weights/.metadata"
    content = file.read_bytes()
    rng = np.random.default_rng(0)
    for position in rng.integers(0, len(content), 40):
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        try:
            state = open_distributed(open_archive(root), "weights/").tensors(lambda _: None)
            for tensor in state.values():
                if tensor.data_type == "fp32":
                    assert tensor.parts()[0].dtype == np.float32
        except CheckpointError:
            pass


class VerifiedMeanwhile(set):  # type: ignore[type-arg]
    """A set of verified records into which another thread puts every record while this one sums it up."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __contains__(self, key: object) -> bool:
        self.asked += 1
        return self.asked > 2


def test_two_threads_that_check_one_record_do_not_disturb_each_other(tmp_path: Path) -> None:
    """All layers of a tensor may lie in one record, and each layer is read by another thread."""
    content = np.arange(8 << 20, dtype=np.uint8)
    content.tofile(tmp_path / "record")
    record = map_record(tmp_path / "record", 0, content.size, zlib.crc32(content.tobytes()))
    Reader(1 << 20, VerifiedMeanwhile()).verify(record[-10:])
    with pytest.raises(CheckpointError, match="is damaged"):
        Reader(1 << 20, set()).verify(map_record(tmp_path / "record", 0, content.size, 1)[-10:])


class Evil:
    def __reduce__(self) -> Any:
        return (eval, ("1 / 0",))


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_pickles_that_would_run_code_are_refused(name: str, tmp_path: Path) -> None:
    root = nemo2(tmp_path)
    if name == ".metadata":
        (root / "weights/.metadata").write_bytes(pickle.dumps(Evil()))
    else:
        torch.save({"args": Evil()}, root / "weights/common.pt")
    with pytest.raises(CheckpointError, match=r"names (builtins|__builtin__)\.eval"):
        inspect_source(root, 1, "fp32")


def test_metadata_that_name_a_file_elsewhere(tmp_path: Path) -> None:
    root = nemo2(tmp_path)
    file = root / "weights/.metadata"
    file.write_bytes(file.read_bytes().replace(b"__0_0.distcp", b"../../passwd"))
    with pytest.raises(CheckpointError, match="is not within weights/../../passwd"):
        inspect_source(root, 1, "fp32")


def test_a_tensor_in_common_pt_is_not_dropped(tmp_path: Path) -> None:
    root = nemo2(tmp_path)
    content = {"state_dict": {"module.extra": torch.ones(2)}, "optimizer": {"exp_avg": torch.ones(2)}}
    torch.save(content, root / "weights/common.pt")
    with pytest.raises(CheckpointError) as refused:
        inspect_source(root, 1, "fp32")
    assert "1 differences from megatron-core GPT" in str(refused.value)
    assert "state_dict.module.extra  [2]  has no rule" in str(refused.value)


def test_another_backend(tmp_path: Path) -> None:
    root = nemo2(tmp_path)
    (root / "weights/metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}')
    with pytest.raises(CheckpointError, match="backend 'fsdp_dtensor' are not read"):
        inspect_source(root, 1, "fp32")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position_embedding_type": "mrope"}, "position_embedding_type: mrope"),
        ({"position_embedding_type": "rope", "rotary_interleaved": True}, "rotary_interleaved: True"),
        ({"normalization": "RMSNorm"}, "normalization: rmsnorm"),
        ({"gated_linear_unit": True}, "activation: gated gelu"),
        ({"activation_func": {"_target_": "torch.nn.functional.silu"}}, "activation: silu"),
        ({"num_moe_experts": 8}, "num_moe_experts: 8"),
        ({"qk_layernorm": True}, "qk_layernorm: True"),
        ({"window_size": [128, 0]}, "window_size: [128, 0]"),
    ],
)
def test_nemo2_models_that_cannot_be_expressed(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        inspect_source(nemo2(tmp_path, **change), 1, "fp32")
    assert words in str(refused.value)


def test_nemo2_dimensions_and_norms(tmp_path: Path) -> None:
    assert inspect_source(nemo2(tmp_path), 2, "fp32").dims == DIMS


def test_nemo2_without_its_configuration(tmp_path: Path) -> None:
    root = nemo2(tmp_path)
    (root / "context/model.yaml").unlink()
    with pytest.raises(CheckpointError, match="has no context/model.yaml"):
        inspect_source(root, 1, "fp32")


@pytest.mark.parametrize("files", ["sentencepiece", "loose"])
def test_nemo2_tokenizers(files: str, tmp_path: Path) -> None:
    root = nemo2(tmp_path)
    settings = yaml.safe_load((root / "context/model.yaml").read_text())
    prefix = "nemo.collections.common.tokenizers."
    if files == "sentencepiece":
        with tarfile.open(NEMO / "gpt_spm.nemo") as tar:
            member = next(m for m in tar if m.name.endswith("spm.model"))
            (root / "context/spm.model").write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
        target = f"{prefix}sentencepiece_tokenizer.SentencePieceTokenizer"
        settings["tokenizer"] = {"_target_": target, "model_path": "spm.model"}
        expected = "tokenizer.model"
    else:
        for name in ("vocab.json", "merges.txt"):
            (root / "context/nemo_tokenizer" / name).rename(root / "context" / name)
        settings["tokenizer"] |= {"vocab_file": "vocab.json", "merges_file": "merges.txt"}
        expected = "merges.txt"
    (root / "context/model.yaml").write_text(yaml.safe_dump(settings))
    assert (run(root, tmp_path / "out") / expected).is_file()
