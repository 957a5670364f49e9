"""A draft model in a model repository: linked, proved before serving, and one of the model's own vocabulary."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines.asking import CPU, ask, generated
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.huggingface_models import write_tokenizer
from support.tiny_models.llama_models import save

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import read_settings
from deployment.proof.served_models import find_served_models
from deployment.proof.weights import prove_weights
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from export_scripts.repository.pbtxt import parse
from handover.errors import ArtefactError, ConfigError
from handover.manifest import Manifest

LAYERS = {"num_hidden_layers": 1}


@pytest.mark.parametrize("form", ["huggingface", "fastertransformer"])
def test_it_is_linked_proved_and_served(form: str, tmp_path: Path) -> None:
    model = save("llama", tmp_path / "source")
    save("llama", tmp_path / "draft", **LAYERS)
    for root in (tmp_path / "source", tmp_path / "draft"):
        write_tokenizer(root)
    convert(ConvertArguments(tmp_path / "source", tmp_path / "model", weight_data_type="fp32", format=form))
    arguments = ExportArguments(tmp_path / "model", tmp_path / "repository", "mine", 1, 1, "fp32", 0, 0, 8)
    manifest = build_repository(replace(arguments, speculation="draft", draft_model=tmp_path / "draft"))
    assert manifest.problems(arguments.output) == []
    assert Manifest.read(arguments.output).made_from["draft_model"] == str(tmp_path / "draft")
    (held,) = arguments.output.glob("fastertransformer/1/*/draft")
    assert {each.name for each in held.iterdir()} >= {"config.json", "model.safetensors"}
    for copy in arguments.output.glob("*/1/*/draft/model.safetensors"):
        assert copy.samefile(tmp_path / "draft/model.safetensors")

    config = parse((arguments.output / "fastertransformer/config.pbtxt").read_text())
    told = {key: value.string_value for key, value in config.parameters.items()}
    settings = read_settings(told, arguments.output / "fastertransformer", "1")
    engine = open_engine(replace(settings, cpu_threads=1, kv_cache_bytes=1 << 22), CPU)
    (outputs,) = engine.generate([engine.parse(ask([[5, 9, 33]], 40, end_id=NEVER))])
    assert generated(outputs) == argmaxes(model, [5, 9, 33], generated(outputs)) and engine.metrics.drafts > 0
    engine.close()

    (served, *_) = find_served_models(arguments.output)
    prove_weights(served, arguments.output)
    weights = held / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()  # it is a link
    weights.write_bytes(content)
    with pytest.raises(ArtefactError, match="draft/model.safetensors"):
        prove_weights(served, arguments.output)


def test_one_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save("llama", tmp_path / "source")
    write_tokenizer(tmp_path / "source")
    convert(ConvertArguments(tmp_path / "source", tmp_path / "model", weight_data_type="fp32", format="huggingface"))
    arguments = ExportArguments(tmp_path / "model", tmp_path / "repository", "mine", 1, 1, "fp32", 0, 0, 8)
    for speculation, draft in (("draft", None), (None, tmp_path), ("ngram", tmp_path)):
        with pytest.raises(ConfigError, match="one needs the other"):
            replace(arguments, speculation=speculation, draft_model=draft)

    def refuse(problem: str) -> None:
        with pytest.raises(ArtefactError, match=problem):
            build_repository(replace(arguments, speculation="draft", draft_model=tmp_path / "draft"))
        assert not arguments.output.exists()

    refuse("has no config.json")
    save("llama", tmp_path / "draft", vocab_size=119, **LAYERS)
    refuse("119 tokens, and the model 120")
    shutil.rmtree(tmp_path / "draft")
    save("nemotron_h", tmp_path / "draft")
    write_tokenizer(tmp_path / "draft")
    refuse("the draft model's layers keep states")
    shutil.rmtree(tmp_path / "draft")
    save("llama", tmp_path / "draft", **LAYERS)
    refuse("no tokenizer that could be compared")
    write_tokenizer(tmp_path / "draft")
    vocabulary = json.loads((tmp_path / "draft/vocab.json").read_text())
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (tmp_path / "draft/vocab.json").write_text(json.dumps(vocabulary))
    refuse("2 tokens have other ids than in .*'A' is 32 and here 33, 'B' is 33 and here 32")
    write_tokenizer(tmp_path / "draft")
    (tmp_path / "draft/model.safetensors").unlink()
    refuse("unusable in|model.safetensors")
