"""The rows with which NeMo pads a T5's vocabulary are cut for transformers, and its sentinels are tokens there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints.llama_files import sentencepiece_model
from support.checkpoints.nemo_archive import write_nemo
from support.tiny_models.t5_models import (
    HEADS,
    VOCAB,
    Saving,
    huggingface_t5,
    logits_of,
    nemo_states,
    plain_from_huggingface,
    relative_config,
)

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

ROWS, SENTINELS, PADDING = VOCAB + 16, 10, 7
PIECES = ROWS - PADDING - SENTINELS - 4  # NeMo adds <cls>, <sep>, <mask> and <pad>; <s> and </s> are pieces


def write_t5(folder: Path, is_untied: bool, **tokenizer: Any) -> tuple[Any, Path]:
    given: dict[str, Any] = {"vocab_size": ROWS, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 4}
    model = huggingface_t5(is_multilingual=True, is_untied=is_untied, **given)
    saving = Saving(tensor=2)
    states = nemo_states(plain_from_huggingface(model), HEADS, saving)
    said = {"library": "sentencepiece", "type": None, "model": "nemo:spm.model", "sentencepiece_legacy": True}
    config = {**relative_config(saving, "geglu"), "tokenizer": {**said, "num_sentinel_tokens": SENTINELS, **tokenizer}}
    return model, write_nemo(folder / "t5.nemo", config, states, files={"spm.model": sentencepiece_model(PIECES)})


@pytest.mark.parametrize("is_untied", [False, True])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_padded_rows_are_cut_and_sentinels_are_tokens(
    is_untied: bool, is_reversed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, path = write_t5(tmp_path, is_untied, add_sentinel_tokens_in_reverse_order=is_reversed)
    convert(ConvertArguments(path, tmp_path / "out", weight_data_type="fp32", format="huggingface"))
    rows = ROWS - PADDING
    said = f"the tokenizer has {rows} tokens: {PADDING} rows of padding of the {ROWS} are left out"
    assert said in capsys.readouterr().err
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == rows
    made = logits_of(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval())
    assert made.shape[-1] == rows
    assert np.abs(made - logits_of(model)[..., :rows]).max() < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    order = range(SENTINELS)[:: -1 if is_reversed else 1]
    ids = [tokenizer.convert_tokens_to_ids(f"<extra_id_{number}>") for number in order]
    assert ids == list(range(rows - SENTINELS, rows))
    assert ids[3] in tokenizer(f"abc <extra_id_{order[3]}> def").input_ids


@pytest.mark.parametrize(
    "tokenizer", [{"add_sentinel_tokens_first": True}, {"num_sentinel_tokens": SENTINELS + PADDING}]
)
def test_rows_are_kept_where_tokens_may_stand_in_them(tokenizer: dict[str, Any], tmp_path: Path) -> None:
    _, path = write_t5(tmp_path, False, **tokenizer)
    convert(ConvertArguments(path, tmp_path / "out", weight_data_type="fp32", format="huggingface"))
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == ROWS
