"""The engine over Hugging Face directories, against transformers and against the shards of the same Llama."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines.asking import CPU
from support.engines.hub_served import check_served, opened
from support.engines.network_runs import FP32, open_network, prefill_logits
from support.shards.llama_shards import shards_of
from support.tiny_models.llama_models import VOCAB, save
from torch import Tensor

from backends.fastertransformer.engine.errors import ConfigJsonError, EngineError, WeightsError
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.hub_reader import HubReader
from backends.fastertransformer.engine.model.shards import Piece, Shards, mapped, planned
from backends.fastertransformer.engine.model.staging import StagedFiles
from backends.fastertransformer.engine.model.weights import load_weights, read_model
from backends.fastertransformer.engine.ops.linear import Linear, Norm
from backends.fastertransformer.engine.parallel.partition import Partition
from backends.fastertransformer.engine.settings import find_checkpoint
from ft_format.weight_format import INT8
from models.described import find_model_tensors

RELATIVES = [
    *("llama31", "llama32", "mistral", "nemotron", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "olmo2"),
    *("starcoder2", "llama_yarn", "llama_dynamic", "llama_longrope"),
    *("granite", "smollm3", "exaone4", "exaone4_full"),
]
PARTS = {"pieces": ("_PIECE_BYTES", 1000), "parts": ("_PART_BYTES", 3000)}
INDEX = "model.safetensors.index.json"
YARN = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor below a model's weights, in their order; packed ones as they were."""
    if isinstance(value, Linear):
        dense = value.panels.dense() if value.panels else value.weight
        yield from (dense.to_dense() if dense.is_mkldnn else dense, *tensors_of(value.bias))
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        yield from (tensor for each in value for tensor in tensors_of(each))
    elif is_dataclass(value) or isinstance(value, Norm):
        yield from (tensor for each in fields(value) for tensor in tensors_of(getattr(value, each.name)))


def weights_of(directory: Path, ranks: int, rank: int | None, **precision: Any) -> list[Tensor]:
    config = read_config(directory, "Llama", ranks if rank is not None else 1)
    partition = Partition(range(config.num_layer), rank)
    return list(tensors_of(load_weights(directory, config, ranks, replace(FP32, **precision), CPU, partition)))


@pytest.mark.parametrize("is_tied", [False, True])
def test_each_rank_has_the_weights_that_it_has_of_shards(is_tied: bool, tmp_path: Path) -> None:
    """Bit by bit, so that it computes the same; eight ranks share four heads of keys and values."""
    for ranks in (2, 8):
        shards, _ = shards_of("llama", tmp_path, ranks, tie_word_embeddings=is_tied)
        for rank in (None, 0, 1) if ranks == 2 else (0, 3, 7):
            found, expected = (weights_of(path, ranks, rank) for path in (tmp_path / "hub", shards))
            assert len(found) == len(expected) > 15
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", RELATIVES)
def test_a_server_gives_transformers_tokens_and_log_probabilities(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    engine = opened(tmp_path)
    check_served(engine, model)
    engine.close()


def test_two_processes_give_transformers_tokens_and_log_probabilities(tmp_path: Path) -> None:
    """Each reads its slices; the ends of a text are those that generation_config.json names."""
    model = save("gemma2", tmp_path, num_key_value_heads=1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9], "bos_token_id": 5}')
    engine = opened(tmp_path, 2)
    assert (engine.config.start_id, engine.config.end_id) == (5, 7)
    assert engine._steps.cache.shape.layers[0].head_num == 1
    check_served(engine, model)
    engine.close()


def logits(directory: Path) -> Tensor:
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    return prefill_logits(open_network(directory, 1, "Llama"), ids)


def split(directory: Path, files: int) -> None:
    """Spread the tensors over several files with an index, as transformers saves large models."""
    tensors = list(load_file(directory / "model.safetensors").items())
    (directory / "model.safetensors").unlink()
    names = [f"model-0000{number + 1}-of-0000{files}.safetensors" for number in range(files)]
    for number, name in enumerate(names):
        save_file(dict(tensors[number::files]), directory / name)
    weight_map = {key: names[number % files] for number, (key, _) in enumerate(tensors)}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_files_of_a_hubs_cache_are_read_through_their_links(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "whole")
    expected = logits(tmp_path / "whole")
    split(tmp_path / "whole", 3)
    blobs, snapshot, linked = (tmp_path / name for name in ("hub/blobs", "hub/snapshots/1f", "linked"))
    for path in (blobs, snapshot, linked):
        path.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "whole").iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
        os.link(blobs / str(number), linked / path.name)
    assert torch.equal(logits(snapshot), expected)
    assert torch.equal(logits(linked), expected)


def test_each_tensor_has_the_type_that_its_file_says(tmp_path: Path) -> None:
    """Mixed types, one of them behind an odd number of halves: what is read is what the file holds, in fp32."""
    save("qwen2", tmp_path)
    path = tmp_path / "model.safetensors"
    types = [torch.float32, torch.bfloat16, torch.float16]
    mixed = {key: each.to(types[number % 3]) for number, (key, each) in enumerate(sorted(load_file(path).items()))}
    odd = {"model.norm.weight": mixed["model.norm.weight"][:63].half()}
    save_file({key: each.float() for key, each in mixed.items()}, path)
    expected = logits(tmp_path)
    save_file(mixed, path)
    assert torch.equal(logits(tmp_path), expected)
    header = {"a": {"dtype": "F16", "shape": [63], "data_offsets": [0, 126]}}
    content, offset = b"".join(raw(each) for each in odd.values()), 126
    for key, each in mixed.items():
        kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[each.dtype]
        header[key] = {"dtype": kind, "shape": list(each.shape), "data_offsets": [offset, offset + each.nbytes]}
        content, offset = content + raw(each), offset + each.nbytes
    header["model.layers.0.self_attn.rotary_emb.inv_freq"] = header.pop("a")
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    assert torch.equal(logits(tmp_path), expected)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_tied_head_may_be_there_or_the_embedding_be_called_by_its_name(tmp_path: Path) -> None:
    save("gemma", tmp_path)
    expected, path = logits(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    table = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, "lm_head.weight": table}, path)
    assert torch.equal(logits(tmp_path), expected)
    save_file({**tensors, "model.embed_tokens.weight": table, "lm_head.weight": table.flip(0)}, path)
    assert torch.equal(logits(tmp_path), expected.flip(-1))


def test_int8_weights_are_those_of_the_shards(tmp_path: Path) -> None:
    shards, _ = shards_of("llama", tmp_path, 2)
    found, expected = (weights_of(path, 2, 1, weights=INT8) for path in (tmp_path / "hub", shards))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.int8 in {each.dtype for each in found}


def test_columns_are_staged_as_the_file_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.fastertransformer.engine.model import staging

    for constant, size in PARTS.values():
        monkeypatch.setattr(staging, constant, size)
    content = np.random.default_rng(0).standard_normal((61, 40), np.float32)
    (tmp_path / "file").write_bytes(bytes(10) + content.tobytes())
    columns = Piece("columns", (61, 13), torch.float32, "file", 10 + 4 * 20, 160)
    rows = Piece("rows", (9, 40), torch.float32, "file", 10 + 160 * 50)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with StagedFiles(tmp_path, device) as files:
        pieces = files.in_order([columns, rows])
        np.testing.assert_array_equal(pieces(columns).cpu().numpy(), content[:, 20:33])
        np.testing.assert_array_equal(pieces(rows).cpu().numpy(), content[50:59])


@pytest.mark.parametrize("rank", [None, 0, 7])
def test_staged_slices_are_the_mapped_ones(rank: int | None, tmp_path: Path) -> None:
    """As a GPU's are read ahead: in the order in which they are planned."""
    save("qwen2", tmp_path)
    config, partition = read_config(tmp_path, "Llama", 1 if rank is None else 8), Partition(range(2), rank)
    located = find_model_tensors(tmp_path, config.decoder, WeightsError)

    def read(shards: Shards, device: torch.device = CPU) -> list[Tensor]:
        reader = HubReader(located, config, 8, FP32, device, False, rank, shards)
        return list(tensors_of(read_model(reader, config, partition, True)))

    order: list[Piece] = []
    read(planned(order), torch.device("meta"))
    with StagedFiles(tmp_path, CPU) as files:
        staged = read(files.in_order(order))
    assert all(torch.equal(one, other) for one, other in zip(staged, read(mapped(tmp_path)), strict=True))


def test_a_file_of_columns_that_is_cut_short_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.fastertransformer.engine.model import staging

    (tmp_path / "cut").write_bytes(bytes(900))
    columns = Piece("columns", (61, 13), torch.float32, "cut", 10, 160)
    with StagedFiles(tmp_path, CPU) as files, pytest.raises(WeightsError, match="cut: 900 bytes, expected 9662"):
        files.in_order([columns])(columns)
    monkeypatch.setattr(staging, "check_file", lambda *_: None)  # it was whole then
    with StagedFiles(tmp_path, CPU) as files, pytest.raises(WeightsError, match="has become shorter"):
        files.in_order([columns])(columns)


def weights_refusal(directory: Path) -> str:
    with pytest.raises(WeightsError) as refused:
        open_network(directory, 1, "Llama")
    return str(refused.value)


def test_tensors_that_are_not_the_models_are_named(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    norm, up = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    whole = {key: each for key, each in tensors.items() if key != norm}
    save_file({**whole, up: whole[up][1:].clone(), "model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}, path)
    said = weights_refusal(tmp_path)
    assert f"3 tensors are unusable in {tmp_path}" in said and f"{norm}: missing" in said
    assert f"{up}: [95, 64], expected [96, 64]" in said
    assert "q_proj.bias: the model that config.json describes has none" in said
    save_file({**tensors, norm: torch.zeros(64, dtype=torch.int8)}, path)
    assert f"{norm}: of type I8; legal are fp32, fp16, bf16" in weights_refusal(tmp_path)


def test_weights_that_are_damaged_or_elsewhere_are_refused(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    content = path.read_bytes()
    for cut in (0, 7, 200, len(content) - 1):
        path.write_bytes(content[:cut])
        assert "model.safetensors is truncated" in weights_refusal(path.parent)
    path.rename(tmp_path / "outside.safetensors")
    assert f"has neither model.safetensors nor {INDEX}" in weights_refusal(path.parent)
    (path.parent / INDEX).write_text('{"weight_map": {"model.norm.weight": "../outside.safetensors"}}')
    assert "names ../outside.safetensors, outside of the directory" in weights_refusal(path.parent)
    (path.parent / INDEX).write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
    assert "gone.safetensors cannot be read: No such file" in weights_refusal(path.parent)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "llama4",
            {"rope_parameters": YARN},
            "a factor of rotated queries and keys  .norms without weights, behind it",
        ),
        ("llama", {"model_type": "gpt_bigcode"}, "model_type is 'gpt_bigcode'; known are llama, mistral"),
        ("llama", {"num_attention_heads": 7}, "num_key_value_heads 4 does not divide 7 heads"),
        ("llama", {"bos_token_id": "x"}, "bos_token_id is 'x', not a number"),
    ],
)
def test_models_that_the_engine_does_not_compute_are_refused(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save(name, tmp_path)
    (tmp_path / "generation_config.json").unlink()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigJsonError, match=words):
        read_config(tmp_path, "Llama")


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("llama", 3, "3 ranks cannot share 8 heads, 4 heads of keys and values and a middle of 96$"),
    ],
)
def test_ranks_that_cannot_share_a_layer_are_refused(name: str, ranks: int, words: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    with pytest.raises(WeightsError, match=words):
        weights_of(tmp_path, ranks, 0)


def test_made_up_weights_need_a_description_alone(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = read_config(tmp_path, "Llama", 2)
    part = Partition(range(1), 1)
    weights = load_weights(tmp_path, config, 2, FP32, CPU, part, are_made_up=True)
    assert weights.decoder and len(weights.decoder.layers) == 1 and weights.token_embedding.shape == (VOCAB, 64)


def test_a_directory_is_found_where_shards_are(tmp_path: Path) -> None:
    (tmp_path / "1/huggingface").mkdir(parents=True)
    with pytest.raises(EngineError, match=r"no config.ini or config.json in"):
        find_checkpoint("1/huggingface", tmp_path, "1", 2)
    (tmp_path / "1/huggingface/config.json").write_text("{}")
    assert find_checkpoint("1/huggingface", tmp_path, "1", 2) == tmp_path / "1/huggingface"
