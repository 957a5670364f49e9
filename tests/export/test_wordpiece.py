"""BERT's WordPiece, the usual tokenizer of NeMo's T5, from vocab.txt to the served models, against transformers."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
from support.checkpoints.nemo_archive import write_nemo
from support.tiny_models.t5_models import (
    HEADS,
    Saving,
    huggingface_t5,
    nemo_states,
    plain_from_huggingface,
    relative_config,
)
from transformers import BertTokenizer

from evaluation.client.tokenizer import load_tokenizer as load_for_evaluation
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from export_scripts.repository.tokenizer_models.slipway_tokenizer import load_tokenizer
from handover.errors import CheckpointError

LETTERS = "abcdehilmnorstuwéT世"
TOKENS = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "world", "don", "'", ".", ",", "!"]
TOKENS += ["##'", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
TEXTS = ["The world, the  world!", "don't end \n. é 世世", "a Théorem ☃", "[SEP] is text", "", "x" * 120]


@pytest.fixture(scope="module", params=["BertWordPieceCase", "BertWordPieceLowerCase"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertTokenizer]:
    """An FT checkpoint of a NeMo T5, and the tokenizer that it was trained with."""
    root = tmp_path_factory.mktemp("wordpiece")
    (root / "vocab.txt").write_text("\n".join(TOKENS) + "\n", encoding="utf-8")
    plain = plain_from_huggingface(huggingface_t5(num_decoder_layers=4))
    config = relative_config(Saving(), "relu")
    config["tokenizer"] = {"library": "megatron", "type": request.param, "vocab_file": "nemo:vocab.txt"}
    files = {"vocab.txt": (root / "vocab.txt").read_bytes()}
    archive = write_nemo(root / "t5.nemo", config, nemo_states(plain, HEADS, Saving()), files=files)
    convert(ConvertArguments(archive, root / "1-gpu", 1, "fp32", processes=1))
    return root / "1-gpu", BertTokenizer(str(root / "vocab.txt"), do_lower_case="Lower" in request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(converted: tuple[Path, BertTokenizer], text: str) -> None:
    folder, oracle = converted
    expected = oracle(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for tokenizer in (load_tokenizer(folder), load_for_evaluation(folder)):
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == oracle.decode(expected)
        assert tokenizer.decode([3, 6, 4, 0]) == oracle.decode([3, 6, 4, 0]) == "[CLS] the [SEP] [PAD]"


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_the_first_tokens_begins_the_text_of_all(converted: tuple[Path, BertTokenizer], text: str) -> None:
    tokenizer = load_tokenizer(converted[0])
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    assert all(whole.startswith(tokenizer.decode(ids[:count])) for count in range(len(ids) + 1))


def test_the_served_models_have_it(converted: tuple[Path, BertTokenizer], tmp_path: Path) -> None:
    folder, oracle = converted
    given = {"tensor_para_size": 1, "pipeline_para_size": 1, "data_type": "fp32", "int8_mode": 0}
    more = {"enable_custom_all_reduce": 0, "max_batch_size": 2, "max_queue_delay_us": 0}
    build_repository(ExportArguments(folder, tmp_path / "repository", "tiny", **given, **more))  # type: ignore[arg-type]
    for model in ("preprocessing", "postprocessing"):
        tokenizer = load_tokenizer(tmp_path / "repository" / model / "1")
        assert tokenizer.encode("the end") == oracle("the end", add_special_tokens=False)["input_ids"]


def test_a_decoder_begins_with_cls_and_ends_with_sep(converted: tuple[Path, BertTokenizer]) -> None:
    parser = configparser.ConfigParser()
    parser.read(converted[0] / "config.ini")
    oracle = converted[1]
    ids = [parser["decoder"].getint(key) for key in ("decoder_start_token_id", "eos_token_id", "pad_id")]
    assert ids == [oracle.cls_token_id, oracle.sep_token_id, oracle.pad_token_id]


def test_a_vocabulary_without_berts_tokens_is_refused_with_their_names(tmp_path: Path) -> None:
    states = nemo_states(plain_from_huggingface(huggingface_t5(num_decoder_layers=4)), HEADS, Saving())
    files = {"vocab.txt": b"a\nb\n"}
    archive = write_nemo(tmp_path / "t5.nemo", relative_config(Saving(), "relu"), states, files=files)
    with pytest.raises(CheckpointError, match=r"vocab\.txt lacks \[CLS\], \[SEP\], \[PAD\]"):
        inspect_source(archive, 1, "fp32")
