"""``tokenizer.json``: from the checkpoint to the served models and the evaluation, against transformers' ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_models.huggingface_models import save
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from evaluation.client.tokenizer import load_tokenizer as load_for_evaluation
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from export_scripts.repository.tokenizer_models.slipway_tokenizer import load_tokenizer

TEXTS = ["the world don't end 12345", " Grüße, 世界! 👍\n\n", "if x:\n        return\t1"]
END = "<|endoftext|>"


def byte_level() -> Tokenizer:
    """As GPT-NeoX's: byte-level BPE, added tokens of spaces, and a start token that it puts before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    tokenizer.add_tokens([AddedToken(" " * 4, normalized=False, special=False), AddedToken("é", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    tokenizer.enable_truncation(3)
    return tokenizer


def with_byte_pieces() -> Tokenizer:
    """As LLaMA's and XGLM's: marks for spaces, and pieces for single bytes."""
    pieces = {END: 0, "<unk>": 1, "▁": 2, "▁world": 3, "don": 4, "▁the": 5}
    pieces |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([END])
    return tokenizer


KINDS = {"byte level": byte_level, "byte pieces": with_byte_pieces}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    KINDS[request.param]().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers_and_give_the_text_back(folder: Path, text: str) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    expected = oracle(text, add_special_tokens=False, truncation=False)["input_ids"]
    for tokenizer in (load_tokenizer(folder), load_for_evaluation(folder)):
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == oracle.decode(expected) == text
    assert load_for_evaluation(folder / "tokenizer.json").encode(text) == expected


def test_a_special_tokens_name_is_plain_text(folder: Path) -> None:
    for tokenizer in (load_tokenizer(folder), load_for_evaluation(folder)):
        ids = tokenizer.encode(f"the {END} end")
        assert 0 not in ids
        assert tokenizer.decode(ids) == f"the {END} end"
        assert tokenizer.decode([0]) == END


@pytest.mark.parametrize("text", [*TEXTS, "é 世"])
def test_text_of_the_first_tokens_begins_the_text_of_all(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text)
    for count in range(len(ids)):
        assert text.startswith(tokenizer.decode(ids[:count]))
    assert tokenizer.decode(ids) == text


def test_t5s_marks_for_gaps_are_themselves(tmp_path: Path) -> None:
    """As transformers has them: text with gaps goes in, and what fills them comes out between the marks."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -1.0), ("▁cat", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>", *(AddedToken(f"<extra_id_{i}>", normalized=False) for i in (1, 0))])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = "the <extra_id_0> cat<extra_id_1>"
    expected = oracle(text, add_special_tokens=False)["input_ids"]
    assert {6, 7} <= set(expected)
    for each in (load_tokenizer(tmp_path), load_for_evaluation(tmp_path)):
        assert each.encode(text) == expected
        assert each.decode(expected) == oracle.decode(expected)


def test_ids_beyond_the_vocabulary_stand_for_nothing(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([*tokenizer.encode("the world"), 5000]) == "the world"


def test_it_goes_before_the_other_files(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "vocab.json").write_text(json.dumps({"t": 0, "h": 1, "e": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    for tokenizer in (load_tokenizer(tmp_path), load_for_evaluation(tmp_path)):
        assert len(tokenizer.encode("if x:        return")) < 20
        assert tokenizer.decode(tokenizer.encode("    ")) == "    "


def test_conversion_takes_it_along(tmp_path: Path) -> None:
    save("gpt_neox", tmp_path / "source", tokenizer=False)
    byte_level().save(str(tmp_path / "source/tokenizer.json"))
    manifest = convert(ConvertArguments(tmp_path / "source", tmp_path / "1-gpu", 1, "fp32", processes=1))
    assert "tokenizer.json" in {record.path for record in manifest.files}
    assert load_tokenizer(tmp_path / "1-gpu").decode([0]) == END


def test_a_checkpoint_without_tokenizer_is_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("gpt2", tmp_path / "source", tokenizer=False)
    convert(ConvertArguments(tmp_path / "source", tmp_path / "1-gpu", 1, "fp32", processes=1))
    assert "no tokenizer lies beside the weights" in capsys.readouterr().err
