"""Tokenizers against the libraries' own implementations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import ByteLevelBPETokenizer

from evaluation.client.tokenizer import load_tokenizer
from export_scripts.repository.tokenizer_models.slipway_tokenizer import load_tokenizer as served_tokenizer
from handover.errors import ArtefactError

PROJECT = Path(__file__).resolve().parents[2]
TEXTS = [
    json.loads(line)["text"]
    for line in (PROJECT / "examples" / "data" / "lambada_subset.jsonl").read_text(encoding="utf-8").splitlines()[:60]
]
AWKWARD = ["", " leading", "two  spaces\n\nand lines", "“curly” – é 漢字 🙂", "<|endoftext|> is text", "don't"]


def test_byte_level_bpe_agrees_with_hugging_face_gpt2(tmp_path: Path) -> None:
    from transformers import GPT2TokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, vocab_size=600, show_progress=False)
    trained.save_model(str(tmp_path))
    oracle = GPT2TokenizerFast(vocab=str(tmp_path / "vocab.json"), merges=str(tmp_path / "merges.txt"))
    tokenizer = load_tokenizer(tmp_path)
    for text in [*TEXTS, *AWKWARD[:4], AWKWARD[5]]:
        assert tokenizer.encode(text) == oracle(text, add_special_tokens=False)["input_ids"]
    for text in [*TEXTS, *AWKWARD]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_fastertransformers_own_file_names_are_found(tmp_path: Path) -> None:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, vocab_size=300, show_progress=False)
    trained.save_model(str(tmp_path), "gpt2")
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("a word")) == "a word"


@pytest.mark.parametrize("as_file", [False, True])
def test_sentencepiece_is_read_from_a_directory_or_a_file(tmp_path: Path, as_file: bool) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXTS).replace("\n\n", "\n"))
    SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300, minloglevel=2
    )
    model = tmp_path / "tokenizer.model"
    oracle = SentencePieceProcessor(model_file=str(model))
    tokenizer = load_tokenizer(model if as_file else tmp_path)
    assert tokenizer.encode(TEXTS[0]) == oracle.encode(TEXTS[0])
    assert tokenizer.decode(tokenizer.encode("a guardian angel")) == "a guardian angel"


def test_a_directory_without_tokenizer_says_what_it_should_hold(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="holds no tokenizer") as raised:
        load_tokenizer(tmp_path)
    assert "vocab.json" in raised.value.hint
    assert "tokenizer.model" in raised.value.hint


def test_a_damaged_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(ArtefactError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_the_name_of_a_special_token_is_text_where_the_vocabulary_has_it_as_a_piece(tmp_path: Path) -> None:
    """The served tokenizer takes it so; else an evaluated text would be another one than the server's."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -1.0) for letter in "▁a</s>")]
    pipeline = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab=pieces, unk_id=2))
    pipeline.add_special_tokens([tokenizers.AddedToken("</s>", special=True)])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert 1 not in load_tokenizer(tmp_path).encode("a</s>a")
    assert load_tokenizer(tmp_path).encode("a</s>a") == served_tokenizer(tmp_path).encode("a</s>a")
