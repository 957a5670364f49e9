"""The Triton repository over a Hugging Face directory: one directory, hard links, proved and served as shards are."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.engines.asking import CPU, ask, generated
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.huggingface_models import write_tokenizer
from support.tiny_models.llama_hub_models import save_llama
from support.tiny_models.quantized_models import save_mxfp4

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import read_settings
from deployment.openai.texts.texts import load_texts
from deployment.proof.files import prove_files
from deployment.proof.served_models import find_served_models
from deployment.proof.weights import prove_weights
from deployment.triton.fitness import check_engine
from evaluation.client.tokenizer import load_tokenizer
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.conversion.write.journal import GROWING
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from export_scripts.repository.pbtxt import parse
from export_scripts.targets.huggingface import convert as target
from export_scripts.targets.huggingface.sizing import measure_huggingface
from handover.errors import ArtefactError
from handover.manifest import Manifest

WEIGHTS = "fastertransformer/1/huggingface/model.safetensors"


@pytest.fixture
def arguments(tmp_path: Path) -> ExportArguments:
    """A Qwen3 in the number type that is wanted, its conversion, and what exports it for two ranks."""
    save_llama("qwen3", tmp_path / "source")
    convert(ConvertArguments(tmp_path / "source", tmp_path / "hf", weight_data_type="fp32", format="huggingface"))
    return ExportArguments(tmp_path / "hf", tmp_path / "repository", "mine", 2, 1, "fp32", 0, 0, 8)


def test_source_directory_and_repository_are_one_file_of_weights(arguments: ExportArguments, tmp_path: Path) -> None:
    manifest = build_repository(arguments)
    weights = arguments.output / WEIGHTS
    for other in (tmp_path / "source", arguments.ft_checkpoint, arguments.output / "mine/1/huggingface"):
        assert weights.samefile(other / "model.safetensors")
    assert manifest.problems(arguments.output) == []
    assert manifest.made_from["huggingface_digest"] == Manifest.read(arguments.ft_checkpoint).digest
    served = transformers.AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32)
    source = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(served.parameters(), source.parameters(), strict=True))
    config = parse((arguments.output / "fastertransformer/config.pbtxt").read_text())
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert (parameters["model_checkpoint_path"], parameters["tensor_para_size"]) == ("1/huggingface", "2")
    assert (parameters["model_type"], config.default_model_filename) == ("Llama", "huggingface")


def test_it_is_proved_and_served_for_any_number_of_ranks(arguments: ExportArguments, tmp_path: Path) -> None:
    for ranks in (1, 4):  # the same directory: nothing is cut again
        repository = tmp_path / str(ranks)
        build_repository(replace(arguments, output=repository, tensor_para_size=ranks))
        (model,) = find_served_models(repository)
        assert (model.family, model.tensor_para_size, model.config["max_pos_seq_len"]) == ("llama", ranks, "64")
        check_engine(model, "slipway")
        assert prove_weights(model, repository) == 1
        prove_files(repository, [model], ())
    with pytest.raises(ArtefactError, match="which FasterTransformer does not read"):
        check_engine(model, "fastertransformer")
    with pytest.raises(ArtefactError, match="3 ranks cannot share 8 heads"):
        build_repository(replace(arguments, output=tmp_path / "3", tensor_para_size=3))


def test_experts_of_mxfp4_are_served_as_they_are(arguments: ExportArguments, tmp_path: Path) -> None:
    given = {"format": "huggingface", "quantization": "mxfp4"}
    write_tokenizer(save_mxfp4(tmp_path / "packed"))
    convert(ConvertArguments(tmp_path / "packed", tmp_path / "mxfp4", 1, "bf16", **given))
    asked = replace(arguments, ft_checkpoint=tmp_path / "mxfp4", data_type="bf16")
    build_repository(asked)
    (model,) = find_served_models(arguments.output)
    assert prove_weights(model, arguments.output) == 1
    for changes, words in (
        ({"tensor_para_size": 4}, "4 ranks cannot share experts of MXFP4 in groups of 32 of a middle of 64"),
        ({"int8_mode": 1}, "int8_mode with weights of MXFP4"),
        ({"fp8_activations": True}, "fp8_activations with weights of which none is FP8"),
    ):
        with pytest.raises(ArtefactError, match=words):
            build_repository(replace(asked, output=tmp_path / "other", **changes))


def test_a_server_of_it_gives_transformers_tokens(arguments: ExportArguments, tmp_path: Path) -> None:
    build_repository(arguments)
    engine_model = arguments.output / "fastertransformer"
    config = parse((engine_model / "config.pbtxt").read_text())
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    settings = replace(read_settings(parameters, engine_model, "1"), kv_cache_bytes=1 << 22)
    engine = open_engine(replace(settings, has_process_per_rank=False), CPU)
    source = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    line = np.random.default_rng(0).integers(3, 90, 9).tolist()
    (outputs,) = engine.generate([engine.parse(ask([line], 6, end_id=NEVER, runtime_top_p=1e-7))])
    engine.close()
    assert generated(outputs) == argmaxes(source, line, generated(outputs))


def test_texts_have_the_tokens_that_shards_give_them(arguments: ExportArguments, tmp_path: Path) -> None:
    build_repository(arguments)
    save_llama("llama", tmp_path / "llama")  # with the same tokenizer
    convert(ConvertArguments(tmp_path / "llama", tmp_path / "1-gpu", 1, "fp32"))
    directories = [(arguments.output / WEIGHTS).parent, tmp_path / "1-gpu", arguments.output / "preprocessing/1"]
    text = "The capital of France"
    evaluated = [load_tokenizer(directory).encode(text) for directory in directories]
    served = [load_texts(directory, 1, 2, False).encode(text) for directory in directories]
    assert evaluated[0] == evaluated[1] == evaluated[2]
    assert served[0] == served[1] == served[2]


@pytest.mark.parametrize("damage", ["content", "size", "gone", "tensor"])
def test_weights_that_are_not_those_of_the_export_are_not_served(damage: str, arguments: ExportArguments) -> None:
    build_repository(arguments)
    weights = arguments.output / WEIGHTS
    content = bytearray(weights.read_bytes())
    weights.unlink()  # the others keep theirs
    content[-1] ^= 1
    if damage == "tensor":
        content = bytearray(bytes(content).replace(b"model.norm.weight", b"model.form.weight"))
    if damage != "gone":
        weights.write_bytes(content[:-4] if damage == "size" else content)
    words = {"content": "model.safetensors  content differs", "size": "truncated", "gone": "neither model.safetensors"}
    (model,) = find_served_models(arguments.output)
    with pytest.raises(ArtefactError, match=words.get(damage, "model.norm.weight: missing")):
        prove_weights(model, arguments.output)


def test_a_killed_conversion_continues_and_never_writes_to_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama("gemma", tmp_path / "source")
    weights, output = tmp_path / "source/model.safetensors", tmp_path / "hf"
    given = ConvertArguments(tmp_path / "source", output, weight_data_type="fp32", format="huggingface")
    before = weights.read_bytes()
    with monkeypatch.context() as killing, pytest.raises(KeyboardInterrupt):
        killing.setattr(target, "write_part", interrupt)
        convert(given)
    assert weights.samefile(output / f"model.safetensors{GROWING}")
    convert(given)
    assert weights.read_bytes() == before
    assert weights.samefile(output / "model.safetensors")
    assert Manifest.read(output).problems(output) == []


def test_where_there_are_no_links_the_same_bytes_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama("gemma", tmp_path / "source")
    monkeypatch.setattr("os.link", without_links)
    convert(ConvertArguments(tmp_path / "source", tmp_path / "hf", weight_data_type="fp32", format="huggingface"))
    source, written = (tmp_path / name / "model.safetensors" for name in ("source", "hf"))
    assert written.read_bytes() == source.read_bytes() and not written.samefile(source)


def without_links(*_: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_another_type_or_smaller_files_are_written_anew(tmp_path: Path) -> None:
    save_llama("qwen2", tmp_path / "source")
    for name, more in (("half", {"weight_data_type": "bf16"}), ("small", {"largest_file_bytes": 60_000})):
        given = {"weight_data_type": "fp32", "format": "huggingface", **more}
        convert(ConvertArguments(tmp_path / "source", tmp_path / name, **given))  # type: ignore[arg-type]
        written_bytes = measure_huggingface(tmp_path / "source", str(given["weight_data_type"]), 1).written_bytes
        assert (written_bytes > 0) == (name == "half")
        assert not any(path.samefile(tmp_path / "source/model.safetensors") for path in (tmp_path / name).iterdir())
    index = json.loads((tmp_path / "small/model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) > 1
