"""What each token stands for in bytes: the texts of a tokenizer's own library are what its tokens' bytes make."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from backends.fastertransformer.engine.errors import RequestError
from backends.fastertransformer.engine.grammar.vocabulary import read_token_bytes

LINES = [
    '{"name": "Zoë", "age": 12}',
    "the cat sat on  the mat.",
    "naïve café 日本語 ✓",
    "a\tb\nc",
    "\x00\x7f\x85ÿ",
] * 20
TEXTS = [*LINES[:5], "unseen: Ω≈ç 🎉 \u2028", "  two spaces", "x"]
Encode = Callable[[str], list[int]]


def byte_level(directory: Path) -> tuple[Encode, int]:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=letters, special_tokens=["<end>"])
    made.train_from_iterator(LINES, trainer)
    made.add_tokens(["<|plain|>"])
    made.save(str(directory / "tokenizer.json"))
    return lambda text: made.encode(text).ids, made.get_vocab_size()


def byte_pairs(directory: Path) -> tuple[Encode, int]:
    encode, size = byte_level(directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    return encode, size


def byte_fallback(directory: Path) -> tuple[Encode, int]:
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    replace = decoders.Replace("\u2581", " ")
    made.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=330, special_tokens=special[:2]))
    content = json.loads(made.to_str())
    vocabulary = content["model"]["vocab"]
    for piece in special[2:]:
        vocabulary.setdefault(piece, len(vocabulary))
    (directory / "tokenizer.json").write_text(json.dumps(content))
    loaded = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return lambda text: loaded.encode(text).ids, len(vocabulary)


def unigram(directory: Path) -> tuple[Encode, int]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES[:4] * 9), model_writer=model, vocab_size=330, byte_fallback=True, model_type="bpe",
        normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    made = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    return lambda text: made.encode(text, out_type=int), made.get_piece_size()


@pytest.mark.parametrize("make", [byte_level, byte_pairs, byte_fallback, unigram])
def test_the_bytes_of_a_texts_tokens_are_the_text(make: Callable[[Path], tuple[Encode, int]], tmp_path: Path) -> None:
    encode, size = make(tmp_path)
    found = read_token_bytes(tmp_path, size + 5)
    assert len(found) == size + 5 and found[size:] == [b""] * 5
    for text in TEXTS:
        assert b"".join(found[token] for token in encode(text)).decode() == text
    assert len({token for text in TEXTS for token in encode(text)}) > 20


def test_special_tokens_stand_for_no_text_and_added_ones_for_theirs(tmp_path: Path) -> None:
    encode, size = byte_level(tmp_path)
    found = read_token_bytes(tmp_path, size)
    assert found[encode("<end>")[0]] == b""
    assert b"<|plain|>" in found and b"<end>" not in found


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_tokens_that_stand_for_no_bytes_are_refused(decoder: object, tmp_path: Path) -> None:
    content = {"model": {"type": "WordPiece", "vocab": {"a": 0}}, "decoder": decoder, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(RequestError, match=r"decoder (none|WordPiece), whose tokens do not stand for bytes"):
        read_token_bytes(tmp_path, 5)
