"""Weights that are made up to measure a shape: what they are, and that everything made from them says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.engines.asking import ask, generated
from support.servers.fake_triton import FakeTriton, count_up
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import Settings
from evaluation import benchmark
from evaluation.arguments import BenchmarkArguments
from evaluation.report.data import collect_findings
from evaluation.speed.tables.table import STATIC_TABLE
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.endpoint import Endpoint
from handover.errors import CheckpointError
from handover.manifest import Manifest

SHAPE = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 160, "kv_channels": None,
    "max_position_embeddings": 48, "encoder_seq_length": 48, "vocab_size": 384,
}  # fmt: skip


def described(directory: Path, **changes: object) -> Path:
    path = directory / "model_config.yaml"
    path.write_text(yaml.safe_dump(SHAPE | changes))
    return path


def made(directory: Path, ranks: int = 1, data_type: str = "fp32") -> Path:
    output = directory / f"{ranks}-gpu"
    convert(ConvertArguments(described(directory), output, ranks, data_type, 2, random_weights=True))
    return output


def continuation(shards: Path, ranks: int) -> tuple[list[int], np.ndarray]:
    engine = open_engine(Settings(shards, ranks, 1, "fp32", 1, kv_cache_bytes=1 << 20), torch.device("cpu"))
    tensors = ask([[5, 9, 300]], 8, is_return_log_probs=True, runtime_top_p=1e-7)
    outputs = engine.generate([engine.parse(tensors)])[0]
    return generated(outputs), outputs["output_log_probs"][0, 0]


def test_the_weights_are_those_of_a_training_that_begins(tmp_path: Path) -> None:
    shards = made(tmp_path)
    matrix = np.fromfile(shards / "model.layers.1.mlp.dense_h_to_4h.weight.0.bin", "<f4")
    assert matrix.size == 64 * 160
    assert abs(float(matrix.mean())) < 5 * 0.02 / matrix.size**0.5  # five standard errors
    assert float(matrix.std()) == pytest.approx(0.02, rel=0.04)
    other = np.fromfile(shards / "model.layers.0.mlp.dense_h_to_4h.weight.0.bin", "<f4")
    assert abs(float(np.corrcoef(matrix, other)[0, 1])) < 0.05
    assert set(np.fromfile(shards / "model.final_layernorm.weight.bin", "<f4")) == {1.0}
    assert set(np.fromfile(shards / "model.layers.0.attention.query_key_value.bias.0.bin", "<f4")) == {0.0}


def test_every_tensor_parallelism_cuts_the_same_model(tmp_path: Path) -> None:
    tokens, log_probs = continuation(made(tmp_path), 1)
    cut, cut_log_probs = continuation(made(tmp_path, 2), 2)
    assert tokens == cut and len(tokens) == 8
    assert np.isfinite(log_probs).all() and (log_probs < 0).all()
    np.testing.assert_allclose(log_probs, cut_log_probs, atol=1e-4)


def test_any_text_has_a_token_for_each_byte(tmp_path: Path) -> None:
    shards = made(tmp_path)
    text = "Grüße, \x00\n\t世界 🙂"
    tokenizer = Tokenizer(models.BPE.from_file(str(shards / "vocab.json"), str(shards / "merges.txt")))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == SHAPE["vocab_size"]


def test_the_mark_goes_with_the_weights_to_the_report(tmp_path: Path) -> None:
    shards = made(tmp_path, 2)
    cut = tmp_path / "cut"
    convert(ConvertArguments(shards, cut, 4, "fp16", 1))
    repository = tmp_path / "run" / "model_repo"
    build_repository(ExportArguments(cut, repository, "shape", 4, 1, "fp32", 0, 0, max_batch_size=4))
    assert [Manifest.read(path).made_from["random_weights"] for path in (shards, cut, repository)] == [True] * 3
    with FakeTriton(count_up) as fake:
        endpoint = tmp_path / "endpoint.json"
        digest = Manifest.read(repository).digest
        Endpoint("127.0.0.1", grpc_port=fake.port, model_repository=str(repository), model_digest=digest).write(
            endpoint
        )
        output = tmp_path / "run" / "benchmark" / "static"
        benchmark.main(BenchmarkArguments(str(endpoint), output, batch_sizes=(1,), lengths=((3, 2),)).to_argv())
    assert [row.is_random_weights for row in STATIC_TABLE.read(output / "benchmark.csv")] == [True]
    remarks = collect_findings(tmp_path / "run", "shape", tmp_path / "stages.json").remarks
    assert "The benchmark static was measured on random weights." in remarks


def test_weights_that_were_trained_carry_no_mark(tmp_path: Path) -> None:
    shards = made(tmp_path)
    plain = shutil.copytree(shards, tmp_path / "plain")
    (plain / "manifest.json").unlink()  # nothing says that these are random
    convert(ConvertArguments(plain, tmp_path / "out", 1, "fp32", 1))
    assert "random_weights" not in Manifest.read(tmp_path / "out").made_from


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 200}, "vocab_size is 200"),
        ({"vocab_size": None}, "does not say vocab_size"),
        ({"activation": "swiglu"}, "activation"),
        ({"num_attention_heads": 5}, "head"),
    ],
)
def test_what_cannot_be_made_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        convert(ConvertArguments(described(tmp_path, **changes), tmp_path / "out", 1, "fp32", random_weights=True))
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_no_description(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="made of a description"):
        convert(ConvertArguments(made(tmp_path), tmp_path / "out", 1, "fp32", random_weights=True))
