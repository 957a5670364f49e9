"""Export, against FasterTransformer backend's published repository and the official protobuf parser."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from support.servers import beyond
from support.shards.ft_checkpoint_maker import DATA, make_ft_checkpoint, seal
from tritonclient.grpc import model_config_pb2

from export_scripts.arguments import ExportArguments
from export_scripts.repository.interfaces.gpt import engine
from export_scripts.repository.interfaces.serving import Serving, alias
from export_scripts.repository.model_repository import build_repository
from export_scripts.repository.names import check_model_name
from export_scripts.repository.pbtxt import ModelSpec, TensorSpec, parse, to_text
from ft_format.families.gpt import FAMILY as GPT
from ft_format.weight_format import NONE
from handover.digests import file_digest
from handover.errors import ArtefactError, ConfigError
from handover.manifest import Manifest

PUBLISHED = json.loads((DATA / "ft_backend_gpt_repository.json").read_text())
PROJECT = Path(__file__).resolve().parents[2]
HOSTILE = "my \"model\"; touch 'x' $(id) \\ ü"


@pytest.fixture
def arguments(tmp_path: Path) -> ExportArguments:
    return ExportArguments(
        ft_checkpoint=make_ft_checkpoint(tmp_path / "1-gpu"),
        output=tmp_path / "model_repo",
        model_name="gpt3_tiny",
        tensor_para_size=1,
        pipeline_para_size=1,
        data_type="fp32",
        int8_mode=0,
        enable_custom_all_reduce=0,
        max_batch_size=8,
    )


def read_config(repository: Path, model: str) -> model_config_pb2.ModelConfig:
    """Read with the official parser, not with ours."""
    return text_format.Parse((repository / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def facts(config: model_config_pb2.ModelConfig, key: str) -> dict[str, dict[str, Any]]:
    content = json_format.MessageToDict(config, preserving_proto_field_name=True)
    return {entry["name"]: entry for entry in content.get(key, [])}


@pytest.mark.parametrize("model", ["preprocessing", "fastertransformer", "postprocessing", "ensemble"])
@pytest.mark.parametrize("side", ["input", "output"])
def test_every_tensor_is_that_of_the_published_repository(arguments: ExportArguments, model: str, side: str) -> None:
    build_repository(arguments)
    ours = facts(read_config(arguments.output, model), side)
    published = {entry["name"]: entry for entry in PUBLISHED[model][side]}
    added = {"is_return_context_cum_log_probs", "is_return_context_log_probs", "SEQUENCE_LENGTH"}
    added |= {"presence_penalty", "min_length", *beyond.INPUTS}
    made_optional = {"BAD_WORDS_DICT", "STOP_WORDS_DICT", "INPUT_2", "INPUT_3"}
    outputs = {"context_log_probs", "context_argmax_ids", *beyond.OUTPUTS}
    assert ours.keys() - published.keys() <= added | outputs
    for name in published:
        entry = {k: v for k, v in ours[name].items() if not (name in made_optional and k == "optional")}
        assert entry == published[name]
    assert all(ours[name].get("optional") for name in ours.keys() & (added | made_optional))


def test_the_ensemble_connects_what_the_published_one_connects(arguments: ExportArguments) -> None:
    build_repository(arguments)
    steps = json_format.MessageToDict(read_config(arguments.output, "ensemble"), preserving_proto_field_name=True)
    for ours, published in zip(
        steps["ensemble_scheduling"]["step"], PUBLISHED["ensemble"]["ensemble_scheduling"]["step"], strict=True
    ):
        assert ours["model_name"] == published["model_name"]
        assert ours["model_version"] == published["model_version"] == "-1"
        assert ours["input_map"].items() >= published["input_map"].items()
        # The drop-in engine's alone.
        added = {name for name in ours["output_map"] if name.startswith("context_") or name in beyond.OUTPUTS}
        assert {k: v for k, v in ours["output_map"].items() if k not in added} == published["output_map"]


def test_the_engine_has_every_parameter_of_the_guide(arguments: ExportArguments) -> None:
    arguments = replace(arguments, data_type="bf16", int8_mode=1, pipeline_para_size=2)
    build_repository(arguments)
    config = read_config(arguments.output, "fastertransformer")
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert parameters.pop("weights_digest") == Manifest.read(arguments.ft_checkpoint).digest
    assert parameters == {
        "tensor_para_size": "1",
        "pipeline_para_size": "2",
        "data_type": "bf16",
        "model_type": "GPT",
        "model_checkpoint_path": "1/1-gpu",
        "int8_mode": "1",
        "enable_custom_all_reduce": "0",
    }
    assert parameters.keys() == PUBLISHED["fastertransformer"]["parameters"].keys()
    assert config.backend == "fastertransformer"
    assert config.default_model_filename == "1-gpu"
    assert config.HasField("model_transaction_policy") and not config.model_transaction_policy.decoupled
    assert config.HasField("dynamic_batching") and config.dynamic_batching.max_queue_delay_microseconds == 0
    (group,) = config.instance_group
    assert group.kind == model_config_pb2.ModelInstanceGroup.KIND_CPU  # FT's backend refuses any other
    published = PUBLISHED["fastertransformer"]["batch_input"]
    assert json_format.MessageToDict(config, preserving_proto_field_name=True)["batch_input"] == published


def test_settings_reach_the_configurations(arguments: ExportArguments) -> None:
    build_repository(replace(arguments, max_batch_size=3, max_queue_delay_us=250, decoupled=True))
    config = read_config(arguments.output, "fastertransformer")
    assert config.dynamic_batching.max_queue_delay_microseconds == 250
    assert config.model_transaction_policy.decoupled
    models = ["preprocessing", "fastertransformer", "postprocessing", "ensemble", "gpt3_tiny"]
    assert [read_config(arguments.output, model).max_batch_size for model in models] == [3] * 5


def test_the_alias_maps_every_tensor_to_itself(arguments: ExportArguments) -> None:
    build_repository(replace(arguments, model_name=HOSTILE))
    config, target = read_config(arguments.output, HOSTILE), read_config(arguments.output, "fastertransformer")
    assert config.name == HOSTILE
    (step,) = config.ensemble_scheduling.step
    assert step.model_name == "fastertransformer"
    assert dict(step.input_map) == {tensor.name: tensor.name for tensor in target.input}
    assert dict(step.output_map) == {tensor.name: tensor.name for tensor in target.output}
    for ours, theirs in zip(config.input, target.input, strict=True):
        assert (ours.name, ours.data_type, ours.dims, ours.optional) == (
            theirs.name, theirs.data_type, theirs.dims, theirs.optional,
        )  # fmt: skip
    assert (arguments.output / HOSTILE / "1" / "1-gpu" / "model.wte.bin").is_file()


def test_a_model_named_fastertransformer_needs_no_alias(arguments: ExportArguments) -> None:
    build_repository(replace(arguments, model_name="fastertransformer"))
    assert sorted(path.name for path in arguments.output.iterdir() if path.is_dir()) == [
        "ensemble", "fastertransformer", "postprocessing", "preprocessing",
    ]  # fmt: skip


def test_shards_are_linked_and_the_manifest_is_true(arguments: ExportArguments) -> None:
    manifest = build_repository(arguments)
    source = arguments.ft_checkpoint / "model.wte.bin"
    for model in ("fastertransformer", "gpt3_tiny"):
        assert (arguments.output / model / "1" / "1-gpu" / "model.wte.bin").samefile(source)
    assert Manifest.read(arguments.output) == manifest
    assert manifest.kind == "model_repository"
    assert manifest.problems(arguments.output) == []
    present = {path.relative_to(arguments.output).as_posix() for path in arguments.output.rglob("*") if path.is_file()}
    assert present == {record.path for record in manifest.files} | {"manifest.json"}
    assert manifest.made_from["ft_checkpoint_digest"] == Manifest.read(arguments.ft_checkpoint).digest


def test_the_digest_is_of_the_model_and_not_of_where_or_by_which_code_it_was_made(
    arguments: ExportArguments, tmp_path: Path
) -> None:
    first = build_repository(arguments)
    copy = shutil.copytree(arguments.ft_checkpoint, tmp_path / "elsewhere" / "1-gpu")
    origin = {"checkpoint": str(tmp_path / "gpt.nemo"), "source_format": "nemo"}
    manifest = replace(
        Manifest.read(copy), made_from=origin, made_by={"commit": "another"}, fingerprint="of another plan"
    )
    manifest.write(copy)
    second = build_repository(replace(arguments, ft_checkpoint=copy, output=tmp_path / "elsewhere" / "model_repo"))
    assert second.digest == first.digest
    assert second.made_from["ft_checkpoint_origin"] == {**origin, "commit": "another"}
    shards = Manifest.read(tmp_path / "elsewhere" / "model_repo" / "fastertransformer" / "1" / "1-gpu")
    assert shards.digest == manifest.digest
    (copy / "model.wpe.bin").write_bytes(bytes((copy / "model.wpe.bin").stat().st_size))
    seal(copy)
    third = build_repository(replace(arguments, ft_checkpoint=copy, output=tmp_path / "third"))
    assert third.digest != first.digest, "other weights are another model"


def test_shards_are_copied_where_they_cannot_be_linked(
    arguments: ExportArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    manifest = build_repository(arguments)
    copy, source = (
        arguments.output / "fastertransformer/1/1-gpu/model.wte.bin",
        arguments.ft_checkpoint / "model.wte.bin",
    )
    assert not copy.samefile(source)
    assert file_digest(copy) == file_digest(source)
    assert manifest.problems(arguments.output) == []


def test_exporting_twice_does_not_touch_the_checkpoint(arguments: ExportArguments) -> None:
    first = build_repository(arguments)
    assert build_repository(arguments) == first
    assert Manifest.read(arguments.ft_checkpoint).problems(arguments.ft_checkpoint) == []


def test_a_foreign_file_in_the_output_is_refused_by_name(arguments: ExportArguments) -> None:
    arguments.output.mkdir()
    (arguments.output / "thesis.txt").write_text("mine")
    with pytest.raises(ArtefactError, match=r"thesis\.txt"):
        build_repository(arguments)
    assert (arguments.output / "thesis.txt").read_text() == "mine"


def test_an_artefact_of_another_kind_in_the_output_keeps_its_manifest(arguments: ExportArguments) -> None:
    shutil.copytree(arguments.ft_checkpoint, arguments.output)
    with pytest.raises(ArtefactError, match="is no model repository"):
        build_repository(arguments)
    assert Manifest.read(arguments.output).problems(arguments.output) == []


def test_an_incomplete_checkpoint_is_refused_by_name(arguments: ExportArguments) -> None:
    (arguments.ft_checkpoint / "model.wpe.bin").unlink()
    with pytest.raises(ArtefactError, match=r"model\.wpe\.bin  missing"):
        build_repository(arguments)


def test_a_checkpoint_for_another_tensor_para_size_is_refused(arguments: ExportArguments) -> None:
    with pytest.raises(ArtefactError, match="made for tensor_para_size 1, not 2"):
        build_repository(replace(arguments, tensor_para_size=2))


def test_a_checkpoint_without_tokenizer_is_refused(arguments: ExportArguments) -> None:
    (arguments.ft_checkpoint / "merges.txt").unlink()
    seal(arguments.ft_checkpoint)
    with pytest.raises(ArtefactError, match="no tokenizer"):
        build_repository(arguments)


@pytest.mark.parametrize("name", ["a/b", "../x", "", ".hidden", "a\nb", "x\0y", " padded", "ensemble", "preprocessing",
                                  "postprocessing", "n" * 256])  # fmt: skip
def test_a_name_that_cannot_be_served_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        check_model_name(name)


@pytest.mark.parametrize("name", ["gpt3_5b", "my model; touch x", HOSTILE, "fastertransformer", "-rf", "n" * 255])
def test_a_name_with_odd_characters_is_fine(name: str) -> None:
    check_model_name(name)


def test_the_text_form_survives_hostile_values() -> None:
    spec = ModelSpec(HOSTILE, 1, (TensorSpec('a"b\n', "FP32"),), (), parameters={"path": "/tmp/a b\"'\\\n;#"})
    text = to_text(spec, comment="one\ntwo")
    parsed = parse(text)
    assert parsed.name == HOSTILE
    assert parsed.input[0].name == 'a"b\n'
    assert parsed.parameters["path"].string_value == "/tmp/a b\"'\\\n;#"
    assert text.startswith("# one\n# two\n")


def test_a_text_that_is_no_configuration_is_refused_with_its_line() -> None:
    with pytest.raises(ArtefactError, match=r"config\.pbtxt .* 2:"):
        parse('name: "x"\nmax_batch: 3\n')


def test_the_module_is_a_program(arguments: ExportArguments) -> None:
    command = [sys.executable, "-m", "export_scripts.export", *replace(arguments, model_name=HOSTILE).to_argv()]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert str(arguments.output) in ended.stdout
    wrong = subprocess.run(
        [sys.executable, "-m", "export_scripts.export", *replace(arguments, model_name="a/b").to_argv()],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert wrong.returncode == 1
    assert "a/b" in wrong.stderr and "Traceback" not in wrong.stderr


def test_the_engines_inputs_are_named_once() -> None:
    specs = [engine, lambda serving: alias(engine(serving), "x")]
    for make in specs:
        names = [tensor.name for tensor in make(_serving()).inputs]
        assert len(names) == len(set(names)) == 42


def _serving() -> Serving:
    return Serving(GPT, 1, 1, "fp32", NONE, 0, "1/1-gpu", 1, 0, False, 0, 0)


def test_several_processes_may_tokenize_and_texts_have_a_limit(arguments: ExportArguments) -> None:
    build_repository(replace(arguments, tokenizer_instances=3))
    config = read_config(arguments.output, "preprocessing")
    assert [group.count for group in config.instance_group] == [3]
    positions = re.search(r"max_pos_seq_len\s*=\s*(\d+)", (arguments.ft_checkpoint / "config.ini").read_text())
    assert positions
    assert int(config.parameters["max_text_bytes"].string_value) == 128 * int(positions.group(1))
    assert [group.count for group in read_config(arguments.output, "postprocessing").instance_group] == [1]


@pytest.mark.parametrize(("tokens", "written"), [(None, ""), (0, "0"), (512, "512")])
def test_the_engine_is_told_how_to_cut_prompts_only_where_it_is_asked_for(
    arguments: ExportArguments, tokens: int | None, written: str
) -> None:
    build_repository(replace(arguments, prefill_chunk_tokens=tokens))
    parameters = read_config(arguments.output, "fastertransformer").parameters
    assert ("prefill_chunk_tokens" in parameters) == (tokens is not None)
    assert parameters["prefill_chunk_tokens"].string_value == written


def test_the_engine_is_told_of_fp8_only_where_it_is_asked_for(arguments: ExportArguments) -> None:
    build_repository(replace(arguments, kv_cache_dtype="fp8"))
    parameters = read_config(arguments.output, "fastertransformer").parameters
    assert parameters["kv_cache_dtype"].string_value == "fp8" and "fp8_activations" not in parameters
    with pytest.raises(ArtefactError, match="fp8_activations with .*, whose weights are not FP8"):
        build_repository(replace(arguments, fp8_activations=True, output=arguments.output / "other"))
    with pytest.raises(ArtefactError, match="quantization with FasterTransformer's shards, which have int8_mode alone"):
        build_repository(replace(arguments, quantization="fp8", output=arguments.output / "other"))
    for more, words in (
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype=fp4 is none"),
        ({"quantization": "int4"}, "quantization=int4 is none"),
        ({"quantization": "fp8", "int8_mode": 1}, "quantization=fp8 with int8_mode=1"),
    ):
        with pytest.raises(ConfigError, match=words):
            replace(arguments, **more)


def test_the_texts_that_answers_add_are_given_where_they_are_asked_for(arguments: ExportArguments) -> None:
    build_repository(replace(arguments, text_deltas=True))
    ensemble = read_config(arguments.output, "ensemble")
    generating, writing = ensemble.ensemble_scheduling.step[1:]
    assert writing.input_map["TEXT_START"] == generating.output_map["text_start"]
    assert writing.output_map["OUTPUT_DELTA"] == "OUTPUT_DELTA" and "OUTPUT_DELTA" in facts(ensemble, "output")
