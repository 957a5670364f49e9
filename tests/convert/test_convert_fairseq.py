"""fairseq's XGLM and its SentencePiece model, against transformers."""

from __future__ import annotations

import configparser
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import transformers
from support.checkpoints.fairseq_checkpoints import write
from support.shards.decoder_forward import forward
from support.tiny_models.huggingface_models import VOCAB, build, logits, save

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.tokenizers.fairseq_pieces import with_fairseq_ids
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from export_scripts.repository.tokenizer_models.slipway_tokenizer import load_tokenizer
from handover.errors import CheckpointError

TEXTS = ["the cat sat on a mat", "  two  dogs ran", "xyz?", ""]


@pytest.fixture(scope="module")
def pieces() -> bytes:
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "a dog ran to the cat", "two dogs sat on a mat"] * 20),
        model_writer=stream,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return stream.getvalue()


@pytest.fixture(scope="module")
def model() -> Any:
    return build("xglm", activation_function="relu")


@pytest.mark.parametrize("form", ["cfg", "args"])
def test_shards_compute_transformers_logits(form: str, model: Any, pieces: bytes, tmp_path: Path) -> None:
    source = write(tmp_path / "564M", model, pieces, form)
    convert(ConvertArguments(source, tmp_path / "2-gpu", 2, "fp32"))
    input_ids = np.array([[11, 3, 95, 0, 42, 17, 17, 8]])
    assert np.abs(forward(tmp_path / "2-gpu", input_ids) - logits(model, input_ids)).max() < 1e-4
    ini = configparser.ConfigParser()
    ini.read(tmp_path / "2-gpu/config.ini")
    assert [ini["gpt"].getint(key) for key in ("start_id", "end_id", "vocab_size")] == [0, 2, VOCAB]


def test_a_head_that_differs_from_the_embedding_is_the_head(pieces: bytes, tmp_path: Path) -> None:
    """Although the arguments say that the two are shared."""
    untied = build("xglm", activation_function="relu", tie_word_embeddings=False)
    source = write(tmp_path / "564M", untied, pieces)
    convert(ConvertArguments(source, tmp_path / "1-gpu", 1, "fp32"))
    input_ids = np.array([[11, 3, 95, 0, 42, 17, 17, 8]])
    assert np.abs(forward(tmp_path / "1-gpu", input_ids) - logits(untied, input_ids)).max() < 1e-4


def test_bytes_are_those_of_the_same_model_from_hugging_face(model: Any, tmp_path: Path) -> None:
    save("xglm", tmp_path / "hub", activation_function="relu")
    convert(ConvertArguments(tmp_path / "hub", tmp_path / "a", 2, "fp16"))
    convert(ConvertArguments(write(tmp_path / "564M", model), tmp_path / "b", 2, "fp16"))
    made = [{file.name: file.read_bytes() for file in (tmp_path / side).glob("*.bin")} for side in "ab"]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_learned_pos": True}, "decoder_learned_pos: True"),
        ({"decoder_normalize_before": False}, "decoder_normalize_before: False"),
        ({"scale_heads": True}, "scale_heads: True"),
        ({"activation_fn": "swish"}, "activation_function: swish"),
        ({"decoder_layers": 3}, "model.layers.2.attention.dense.weight"),
    ],
)
def test_other_models_of_fairseq_are_refused(changes: dict[str, Any], words: str, model: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        inspect_source(write(tmp_path / "m", model, **changes), 1, "fp32")
    assert words in str(refused.value)


def test_ids_of_pieces_are_transformers(model: Any, pieces: bytes, tmp_path: Path) -> None:
    """The tokenizer that is served gives the ids of transformers' XGLMTokenizer over the same pieces."""
    plain = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    others = [(plain.id_to_piece(i), plain.get_score(i)) for i in range(3, plain.get_piece_size())]
    oracle = transformers.XGLMTokenizer(vocab=[*special, *others])
    convert(ConvertArguments(write(tmp_path / "m", model, pieces), tmp_path / "out", 1, "fp32"))
    ours = load_tokenizer(tmp_path / "out")
    for text in TEXTS:
        ids = oracle.encode(text.strip(), add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.encode(text) == [i + 1 if i > 2 else 3 for i in plain.encode(text)]
        assert ours.decode(ours.encode(text)) == plain.decode(plain.encode(text))
    changed = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out/tokenizer.model"))
    assert (changed.bos_id(), changed.pad_id(), changed.eos_id(), changed.unk_id()) == (0, 1, 2, 3)
    assert changed.get_piece_size() == plain.get_piece_size() + 8
    assert changed.id_to_piece(changed.get_piece_size() - 1) == "<madeupword6>"
    assert oracle.convert_tokens_to_ids("<madeupword6>") == changed.get_piece_size() - 1


def test_damaged_pieces_are_refused(pieces: bytes) -> None:
    for damaged in (b"", pieces[:300], b"\x08\x01" + pieces, pieces[20:]):
        with pytest.raises(CheckpointError, match=r"sentencepiece\.bpe\.model"):
            with_fairseq_ids(damaged)
