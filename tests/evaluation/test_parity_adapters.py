"""An adapter that is served by name, against its checkpoint with that adapter: held by transformers' class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.measurements.parity_runs import GPT_INPUTS, run, serve
from support.tiny_models.llama_models import input_ids, save
from support.tiny_models.low_rank import draw, merged, write

from evaluation.parity.references import open_reference
from evaluation.tasks.metric import FAILS, HOLDS
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_an_adapter_holds_against_its_own_source_and_no_other(tmp_path: Path) -> None:
    source, hub, model = tmp_path / "source", tmp_path / "hub", save("llama", tmp_path / "source")
    pairs = [draw(model, seed) for seed in range(2)]
    paths = [write(tmp_path / f"a{seed}", each, lora_alpha=6) for seed, each in enumerate(pairs)]
    reference, _ = open_reference(source, "auto", tmp_path / "scratch", served=paths[0])
    assert "transformers" in reference.name and reference.name.endswith(f"with {paths[0]} merged")
    assert not (tmp_path / "scratch").exists()
    with torch.no_grad():
        expected = merged(model, pairs[0], 1.5)(torch.as_tensor(input_ids())).logits.log_softmax(-1).numpy()
    for ids, row in zip(input_ids().tolist(), expected, strict=True):
        np.testing.assert_allclose(reference.log_probs(ids[:3], ids[3:]), row[:-1], atol=1e-5)

    convert(ConvertArguments(source, hub, weight_data_type="fp32", format="huggingface"))
    for name, each in zip(("mine", "other"), pairs, strict=True):
        write(hub / "adapters" / name, each, lora_alpha=6)
    with serve(hub, "Llama", (*GPT_INPUTS, "lora_name")) as fake:
        sound = run(fake, source, tmp_path, lora_name="mine", lora_path=paths[0])
        assert sound["verdict"] == HOLDS and sound["adapter"] == "mine" and 0 < sound["max_log_prob_difference"] < 1e-4
        assert "adapter" not in run(fake, source, tmp_path)
        for asked in ({"lora_name": "mine", "lora_path": paths[1]}, {"lora_name": "other", "lora_path": paths[0]}):
            assert run(fake, source, tmp_path, **asked)["verdict"] == FAILS
        with pytest.raises(ConfigError, match="compares with the one that was exported"):
            run(fake, source, tmp_path, lora_name="mine")
        with pytest.raises(ConfigError, match="reference=engine computes no adapter"):
            run(fake, source, tmp_path, lora_name="mine", lora_path=paths[0], reference="engine")
