"""The exact GELU, whose name FasterTransformer has for its tanh form: kept in the shards, computed, given back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.engines.network_runs import answers_logits, open_network, prefill_logits
from support.tiny_models.huggingface_models import save
from support.tiny_models.t5_models import DECODER_IDS, ENCODER_IDS, huggingface_t5, logits_of

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

IDS = torch.arange(3, 19)[None]
MODELS = {
    "gpt2": ("activation_function", "GPT"),
    "gptj": ("activation_function", "GPT-J"),
    "gpt_neox": ("hidden_act", "GPT-NeoX"),
}


def converted(source: Path, output: Path, ranks: int = 1, **more: str) -> Path:
    convert(ConvertArguments(source, output, ranks, "fp32", processes=1, **more))  # type: ignore[arg-type]
    return output


@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_is_computed_with_it_and_goes_back_with_it(name: str, tmp_path: Path) -> None:
    key, model_type = MODELS[name]
    model = save(name, tmp_path / "source", **{key: "gelu"})
    shards = converted(tmp_path / "source", tmp_path / "1-gpu")
    with torch.no_grad():
        wanted = model(IDS).logits
    again = converted(shards, tmp_path / "2-gpu", 2)
    for directory, ranks in ((shards, 1), (again, 2)):
        made = prefill_logits(open_network(directory, ranks, model_type), IDS)[..., : wanted.shape[-1]]
        assert (made - wanted).abs().max() < 5e-5
    hub = converted(again, tmp_path / "hub", format="huggingface")
    assert json.loads((hub / "config.json").read_text())[key] == "gelu"


@pytest.mark.parametrize("function", ["gelu", "gated-gelu_python"])
def test_a_t5_is_computed_with_it_and_goes_back_with_it(function: str, tmp_path: Path) -> None:
    model = huggingface_t5(feed_forward_proj=function)
    model.save_pretrained(tmp_path / "source")
    shards = converted(tmp_path / "source", tmp_path / "1-gpu")
    ids, rows = torch.from_numpy(DECODER_IDS), len(ENCODER_IDS)
    lengths = torch.full((rows,), ENCODER_IDS.shape[1])
    made = answers_logits(open_network(shards, 1, "T5"), torch.from_numpy(ENCODER_IDS), lengths, ids, ids.shape[1])
    assert (made - torch.from_numpy(logits_of(model))).abs().max() < 5e-5
    hub = converted(shards, tmp_path / "hub", format="huggingface")
    assert json.loads((hub / "config.json").read_text())["feed_forward_proj"] == function
