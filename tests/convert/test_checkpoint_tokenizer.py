"""Tokenizer files and special ids, against Hugging Face's tokenizer and FasterTransformer's rules."""

from __future__ import annotations

import configparser
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from support.checkpoints.nemo_archive import NEMO, gpt_config, gpt_state, write_nemo

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from handover.errors import CheckpointError


def ids_of(path: Path, tmp_path: Path) -> tuple[int, int]:
    convert(ConvertArguments(path, tmp_path / "out", 1, "fp32"))
    parser = configparser.ConfigParser()
    parser.read(tmp_path / "out/config.ini")
    return parser["gpt"].getint("start_id"), parser["gpt"].getint("end_id")


def write(path: Path, files: dict[str, bytes], **tokenizer: Any) -> Path:
    """Write a checkpoint with room for 64 tokens."""
    config, state = gpt_config(tokenizer={**gpt_config()["tokenizer"], **tokenizer}), gpt_state()
    name = "model.language_model.embedding.word_embeddings.weight"
    state[name] = state[name][:1].repeat(64, 1)
    return write_nemo(path, config, {"model_weights.ckpt": state}, files=files)


@pytest.mark.parametrize(
    "vocabulary", [{"a": 0, "b": 1, "<|endoftext|>": 2, "c": 3}, {"a": 0, "b": 1, "c": 2}], ids=["with", "without"]
)
def test_gpt2_ids_are_hugging_faces(vocabulary: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text(json.dumps(vocabulary))
    (tmp_path / "m.txt").write_text("#version: 0.2\n")
    oracle = transformers.GPT2Tokenizer(str(tmp_path / "v.json"), str(tmp_path / "m.txt"))
    files = {"vocab.json": json.dumps(vocabulary).encode(), "merges.txt": b"#version: 0.2\n"}
    assert ids_of(write(tmp_path / "gpt.nemo", files), tmp_path) == (oracle.bos_token_id, oracle.eos_token_id)


def test_sentencepiece_ids_are_those_of_the_model(tmp_path: Path) -> None:
    """FasterTransformer's T5 converter wrote 1 and 2 for the same SentencePiece model."""
    assert ids_of(NEMO / "gpt_spm.nemo", tmp_path) == (1, 2)
    with tarfile.open(NEMO / "gpt_spm.nemo") as tar:
        (member,) = (member for member in tar if member.name.endswith("spm.model"))
        content = tar.extractfile(member)
        assert content is not None
        assert (tmp_path / "out/tokenizer.model").read_bytes() == content.read()


@pytest.mark.parametrize(
    ("options", "added"),
    [
        # <cls>, <sep>, <mask> come first; then <pad>, <bos>, <eos> where the model has none. FasterTransformer takes
        # an id of 0 for a missing one.
        ({"bos_id": -1, "eos_id": -1, "pad_id": -1}, (4, 5)),
        ({"bos_id": -1, "eos_id": 1, "pad_id": 2}, (3, None)),
        ({"bos_id": -1, "eos_id": -1, "user_defined_symbols": ["<mask>", "<eos>"]}, (3, None)),
    ],
)
def test_missing_special_tokens_follow_the_pieces(
    options: dict[str, Any], added: tuple[int, int | None], tmp_path: Path
) -> None:
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abcdefgh hgfedcba"] * 10),
        model_writer=stream,
        vocab_size=16,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
    count = pieces.get_piece_size()
    path = write(tmp_path / "gpt.nemo", {"t.model": stream.getvalue()}, library="sentencepiece", model="nemo:t.model")
    end_id = pieces.piece_to_id("</s>") if options["eos_id"] == 1 else pieces.piece_to_id("<eos>")
    expected = tuple(end_id if offset is None else count + offset for offset in added)
    assert ids_of(path, tmp_path) == expected


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("nemo:vocab.json", "0123_vocab.json"),
        ("/artifacts/vocab.json", "vocab.json"),
        ("/home/someone/v.json", "ab_vocab.json"),
    ],
)
def test_files_are_found_whatever_the_configuration_calls_them(value: str, name: str, tmp_path: Path) -> None:
    files = {name: b'{"<|endoftext|>": 7}', "merges.txt": b"#merges"}
    assert ids_of(write(tmp_path / "gpt.nemo", files, vocab_file=value), tmp_path) == (7, 7)
    assert (tmp_path / "out/vocab.json").read_bytes() == files[name]
    assert (tmp_path / "out/merges.txt").read_bytes() == b"#merges"


@pytest.mark.parametrize(
    ("files", "tokenizer", "words"),
    [
        ({"merges.txt": b""}, {}, "tokenizer.vocab_file: nemo:vocab.json"),
        ({"vocab.json": b"{}", "a_merges.txt": b"", "b_merges.txt": b""}, {}, "a_merges.txt, b_merges.txt"),
        ({"vocab.json": b"[]", "merges.txt": b""}, {}, "vocab.json is [], not a mapping"),
        ({"vocab.json": b"{", "merges.txt": b""}, {}, "vocab.json is not JSON"),
        ({"t.model": b"junk"}, {"library": "sentencepiece", "model": "nemo:t.model"}, "is not a SentencePiece model"),
        ({}, {"library": "yttm", "type": None}, "tokenizer.library: yttm"),
        ({}, {"library": "megatron", "type": "megatron-bert-cased"}, "tokenizer.type: megatron-bert-cased"),
        (
            {"vocab.json": b"[PAD]\n[CLS]\n"},
            {"library": "megatron", "type": "BertWordPieceCase"},
            "vocab.json lacks",
        ),
    ],
)
def test_tokenizers_that_cannot_be_used(
    files: dict[str, bytes], tokenizer: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        inspect_source(write(tmp_path / "gpt.nemo", files, **tokenizer), 1, "fp32")
