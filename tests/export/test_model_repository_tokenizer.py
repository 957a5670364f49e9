"""What runs in pre- and postprocessing, against Hugging Face's GPT-2, SentencePiece and hand arithmetic."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from support.shards.ft_checkpoint_maker import make_ft_checkpoint
from transformers import GPT2Tokenizer

from export_scripts.repository.tokenizer_models.slipway_tokenizer import (
    decode_rows,
    encode_prompts,
    load_tokenizer,
    read_texts,
)
from export_scripts.repository.tokenizer_models.slipway_words import encode_word_lists

TEXTS = [
    "the world",
    " the the\n\nworld's  end ",
    "Grüße, 世界! 👍",
    "don't <|endoftext|> 12345",
    "\t\x00tab and nul",
]


class Letters:
    """One id a letter: a = 1."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 96 for letter in text if letter.isalpha()]

    def decode(self, ids: object) -> str:
        return "".join(chr(96 + i) if 0 < i < 27 else "#" for i in ids)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ft_checkpoint(tmp_path_factory.mktemp("gpt2") / "1-gpu")


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("spm")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:3] * 20), model_writer=model, vocab_size=50, hard_vocab_limit=False
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    return directory


@pytest.fixture(scope="module")
def byte_spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It knows the letters of English only; every other character is made of byte pieces."""
    directory = tmp_path_factory.mktemp("byte_spm")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the world don't end 12345", "Gruß, e!"] * 20), model_writer=model, vocab_size=300,
        hard_vocab_limit=False, byte_fallback=True, character_coverage=1.0,
    )  # fmt: skip
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    return directory


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_ids_are_those_of_hugging_face(gpt2: Path, text: str) -> None:
    reference = GPT2Tokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    expected = reference.convert_tokens_to_ids(
        [piece for word in text.split("<|endoftext|>") for piece in reference.tokenize(word)]
    )
    tokenizer = load_tokenizer(gpt2)
    if "<|endoftext|>" not in text:  # there it is plain text, not the special token
        assert tokenizer.encode(text) == expected
    assert 0 not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_ids_are_the_librarys(spm: Path, text: str) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_file=str(spm / "tokenizer.model"))
    tokenizer = load_tokenizer(spm)
    assert tokenizer.encode(text) == reference.encode(text, out_type=int)
    assert tokenizer.decode(reference.encode(text)) == reference.decode(reference.encode(text))


def test_ids_of_the_padded_vocabulary_stand_for_nothing(gpt2: Path, spm: Path) -> None:
    for directory in (gpt2, spm):
        tokenizer = load_tokenizer(directory)
        ids = tokenizer.encode("the world")
        assert tokenizer.decode([*ids, 1_000, 51_199, 4_294_967_295]) == tokenizer.decode(ids)


def whole_characters(data: bytes) -> str:
    """The text of the longest beginning that is UTF-8."""
    for end in range(len(data), max(-1, len(data) - 4), -1):
        try:
            return data[:end].decode("utf-8")
        except UnicodeDecodeError:
            continue
    raise AssertionError("not UTF-8 cut short")


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_so_far_never_splits_a_character_of_byte_level_bpe(gpt2: Path, text: str) -> None:
    reference = GPT2Tokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    tokenizer = load_tokenizer(gpt2)
    ids = tokenizer.encode(text)
    for count in range(len(ids) + 1):
        letters = "".join(reference.convert_ids_to_tokens(ids[:count]))  # one a byte
        assert tokenizer.decode(ids[:count]) == whole_characters(text.encode()[: len(letters)])


@pytest.mark.parametrize("text", TEXTS[:4])
def test_the_text_so_far_never_splits_a_character_of_byte_pieces(byte_spm: Path, text: str) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_file=str(byte_spm / "tokenizer.model"))
    tokenizer = load_tokenizer(byte_spm)
    ids = tokenizer.encode(text)
    whole = reference.decode(ids)
    assert "世" in whole if "世" in text else "\ufffd" not in whole
    texts = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    assert texts[-1] == whole
    assert all(whole.startswith(part) and "\ufffd" not in part for part in texts)
    assert any(reference.is_byte(id_) for id_ in ids) == ("世" in text or "\n" in text or "<" in text)


def test_bytes_that_are_no_utf8_are_shown_once_it_is_certain(gpt2: Path) -> None:
    reference = GPT2Tokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    tokenizer = load_tokenizer(gpt2)
    cut = [*tokenizer.encode("世")[:2], *tokenizer.encode("a")]
    assert tokenizer.decode(cut) == reference.decode(cut) == "\ufffda"
    assert tokenizer.decode(cut[:2]) == ""


def test_no_tokenizer_is_an_error_that_names_the_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"vocab\.json and merges\.txt nor tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_prompts_are_padded_with_the_start_id_and_an_empty_one_is_the_start_id() -> None:
    ids, lengths = encode_prompts(Letters(), ["abc", "", "z"], start_id=50, end_id=60)
    assert ids.tolist() == [[1, 2, 3], [50, 50, 50], [26, 50, 50]]
    assert lengths.tolist() == [[3], [1], [1]]
    assert ids.dtype == lengths.dtype == np.uint32


def test_word_lists_have_fasterTransformers_layout() -> None:  # noqa: N802
    # Worked by hand from the layout: all ids, padded with 0; end offsets, padded with -1.
    rows = ["ab,c", "", "xyz", '"a,b"', "a,,b"]
    assert encode_word_lists(Letters(), rows).tolist() == [
        [[1, 2, 3], [2, 3, -1]],
        [[0, 0, 0], [-1, -1, -1]],
        [[24, 25, 26], [3, -1, -1]],
        [[1, 2, 0], [2, -1, -1]],
        [[1, 2, 0], [1, 2, -1]],
    ]
    assert encode_word_lists(Letters(), ["", ""]).tolist() == [[[0], [-1]], [[0], [-1]]]
    assert encode_word_lists(Letters(), [""]).dtype == np.int32


def test_a_space_after_a_comma_belongs_to_the_word(gpt2: Path) -> None:
    tokenizer = load_tokenizer(gpt2)
    words = encode_word_lists(tokenizer, ["the, the"])[0]
    assert words[0].tolist() == [*tokenizer.encode("the"), *tokenizer.encode(" the")]


def test_text_ends_where_the_generation_ended() -> None:
    tokens = np.array([[[1, 2, 3, 9, 0, 0]], [[4, 5, 0, 0, 0, 0]], [[6, 0, 0, 0, 0, 0]]], dtype=np.uint32)
    inputs = np.array([[2], [1], [2]], dtype=np.int32)
    lengths = np.array([[4], [3], [2]], dtype=np.uint32)
    # Row 0: two generated. Row 1: one, then the end token. Row 2: the prompt itself ends with that id.
    assert decode_rows(Letters(), tokens, inputs, lengths, end_id=0) == ["abci", "de", "f#"]
    assert decode_rows(Letters(), tokens, inputs, None, end_id=0) == ["abci##", "de####", "f#####"]


def test_beams_are_flattened_row_by_row() -> None:
    tokens = np.array([[[1], [2]], [[3], [4]]], dtype=np.uint32)
    ones = np.ones((2, 2), dtype=np.uint32)
    assert decode_rows(Letters(), tokens, ones, ones, end_id=0) == ["a", "b", "c", "d"]


def test_only_one_text_a_row_is_taken() -> None:
    assert read_texts(np.array([[b"\xc3\xa9"], ["x"]], dtype=object), "QUERY") == ["é", "x"]
    with pytest.raises(ValueError, match=r"QUERY must have the shape \[batch, 1\], not \[1, 2\]"):
        read_texts(np.array([["a", "b"]], dtype=object), "QUERY")


def test_a_text_that_is_no_utf8_or_too_long_is_refused_by_its_row() -> None:
    with pytest.raises(ValueError, match="QUERY of row 1 is not UTF-8: byte 0xff at 2"):
        read_texts(np.array([["a"], [b"ab\xff"]], dtype=object), "QUERY")
    long = np.array([["é" * 50], ["x"]], dtype=object)
    assert read_texts(long, "QUERY", 100) == ["é" * 50, "x"]
    with pytest.raises(ValueError, match=r"QUERY of row 0 has 100 bytes; at most 99 .*max_text_bytes"):
        read_texts(long, "QUERY", 99)


def test_the_texts_behind_so_many_tokens_put_together_are_the_whole_text() -> None:
    tokens = np.array([[[1, 2, 3, 9, 0]]], dtype=np.uint32)
    inputs, parts = np.array([[2]]), []
    for start, length in ((2, 3), (3, 3), (3, 4), (4, 5)):  # an answer may be sent twice, or hold several tokens
        parts += decode_rows(Letters(), tokens, inputs, np.array([[length]]), 0, starts=np.array([[start]]))
    (whole,) = decode_rows(Letters(), tokens, inputs, np.array([[5]]), 0)
    assert "ab" + "".join(parts) == whole and parts[1] == ""
