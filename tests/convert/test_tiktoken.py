"""NeMo's tiktoken vocabularies as tokenizer.json: tiktoken's own ids, through every tokenizer that reads the file."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.nemo_archive import gpt_config, gpt_state, write_nemo
from support.measurements.tiktoken_vocabulary import DATA

from evaluation.client.tokenizer import load_tokenizer
from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.checkpoints.tokenizers.nemo import vocabulary_size
from export_scripts.checkpoints.user_files import GivenFiles
from export_scripts.convert import convert
from export_scripts.repository.tokenizer_models.slipway_tokenizer import load_tokenizer as load_served_tokenizer
from handover.errors import CheckpointError

STORED: dict[str, Any] = json.loads(DATA.read_text())
CASES = [(case["text"], [1000 + rank for rank in case["ranks"]]) for case in STORED["cases"]]
VOCABULARY = json.dumps(STORED["vocabulary"]).encode()
LIBRARY = {"library": "tiktoken", "type": None, "model": "nemo:abc_vocab.json"}


def converted(tmp_path: Path, vocabulary: bytes = VOCABULARY) -> Path:
    # The embedding of the tiny model has no row for these tokens; the shards are not asked here.
    state = gpt_state()
    key = "model.language_model.embedding.word_embeddings.weight"
    state[key] = state[key].repeat(160, 1)
    config = gpt_config(tokenizer=LIBRARY)
    write_nemo(tmp_path / "gpt.nemo", config, {"model_weights.ckpt": state}, files={"0123_abc_vocab.json": vocabulary})
    convert(ConvertArguments(tmp_path / "gpt.nemo", tmp_path / "out", 1, "fp32"))
    return tmp_path / "out"


def test_ids_are_tiktokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    root = converted(tmp_path)
    assert "start_id = 1\n" in (root / "config.ini").read_text() and "end_id = 2\n" in (root / "config.ini").read_text()
    asked, served = load_tokenizer(root), load_served_tokenizer(root)
    (tmp_path / "hub").mkdir()
    (root / "tokenizer.json").rename(tmp_path / "hub/tokenizer.json")
    transformers = AutoTokenizer.from_pretrained(tmp_path / "hub")
    for text, ids in CASES:
        assert asked.encode(text) == served.encode(text) == ids, text
        assert asked.decode(ids) == served.decode(ids) == text
        if "<" not in text:  # a special token's name in a text is the token itself in transformers
            assert transformers(text)["input_ids"] == ids, text
            assert transformers.decode(ids) == text
    assert transformers.convert_tokens_to_ids(["<unk>", "<s>", "</s>", "<SPECIAL_999>"]) == [0, 1, 2, 999]


def test_the_vocabularys_size_counts_special_tokens(tmp_path: Path) -> None:
    converted(tmp_path)
    source = open_source(find_archive(tmp_path / "gpt.nemo"))
    assert vocabulary_size(source.archive, source.tokenizer) == 1000 + len(STORED["vocabulary"])


def changed(number: int, **values: Any) -> bytes:
    entries = [dict(entry) for entry in STORED["vocabulary"]]
    entries[number] |= values
    return json.dumps(entries).encode()


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        (changed(300, rank=7), "entry 300 has the rank 7"),
        (changed(300, token_bytes="not base64"), "entry 300: token_bytes is not base64"),
        (changed(65, token_bytes=base64.b64encode(b"AB").decode()), "does not begin with the 256 bytes"),
        (b'{"a": 1}', "is {'a': 1}, not a list"),
        (b"[1]", "entry 0 is 1, not a mapping"),
    ],
)
def test_damaged_vocabularies_are_refused(vocabulary: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        converted(tmp_path, vocabulary)


def test_a_tokenizer_that_is_only_named_is_asked_for_and_taken(tmp_path: Path) -> None:
    config = gpt_config(tokenizer={"library": "huggingface", "type": "meta-llama/Meta-Llama-3-8B"})
    model = write_nemo(tmp_path / "gpt.nemo", config, {"model_weights.ckpt": gpt_state()}, files={})
    with pytest.raises(CheckpointError, match="names the tokenizer meta-llama/Meta-Llama-3-8B and does not") as caught:
        open_source(find_archive(model))
    assert "export.model.tokenizer=PATH" in str(caught.value.hint)
    given = tmp_path / "given"
    given.mkdir()
    words = {"hello": 0, "</s>": 1, "<s>": 2}
    (given / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": words, "merges": []}}))
    with pytest.raises(CheckpointError, match="names the end token"):
        open_source(find_archive(model, GivenFiles(tokenizer=given)))
    (given / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    manifest = convert(ConvertArguments(model, tmp_path / "out", 1, "fp32", tokenizer=given))
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()
    assert "start_id = 2\n" in (tmp_path / "out/config.ini").read_text()
    assert manifest.made_from["tokenizer"] == str(given)


@pytest.mark.parametrize("is_file", [True, False])
def test_other_forms_are_taken_too(is_file: bool, tmp_path: Path) -> None:
    model = write_nemo(tmp_path / "gpt.nemo", gpt_config(), {"model_weights.ckpt": gpt_state()})
    given = tmp_path / "given"
    given.mkdir()
    (given / "any_name.json").write_bytes(VOCABULARY)
    source = open_source(find_archive(model, GivenFiles(tokenizer=given / "any_name.json" if is_file else given)))
    assert source.tokenizer.library == "tiktoken" and source.ids.end_id == 2
    (given / "any_name.json").write_bytes(b"[]")
    with pytest.raises(CheckpointError, match="holds any_name.json, and no tokenizer that is read"):
        open_source(find_archive(model, GivenFiles(tokenizer=given)))


def test_a_compressed_checkpoint_is_unpacked_first(tmp_path: Path) -> None:
    model = write_nemo(tmp_path / "gpt.nemo", gpt_config(), {"model_weights.ckpt": gpt_state()}, mode="w:gz")
    (tmp_path / "any_name.json").write_bytes(VOCABULARY)
    with pytest.raises(CheckpointError, match="is compressed, and an adapter or a tokenizer is given"):
        find_archive(model, GivenFiles(tokenizer=tmp_path / "any_name.json"))


def test_shards_keep_their_own_tokenizer(tmp_path: Path) -> None:
    root = converted(tmp_path)
    with pytest.raises(CheckpointError, match="export.model.tokenizer is not taken for"):
        open_source(find_archive(root, GivenFiles(tokenizer=root / "tokenizer.json")))
