"""The Triton repository of a Llama: the tensors of void-main's ``all_models/llama``, and who refuses to serve it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs.composed import compose
from support.servers import beyond
from support.tiny_models.llama_hub_models import save_llama

from backends.fastertransformer.engine.errors import ConfigIniError
from backends.fastertransformer.engine.model.families import read_config
from deployment.proof.served_models import find_served_models
from deployment.proof.weights import prove_weights
from deployment.triton.fitness import check_engine
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from export_scripts.repository.pbtxt import parse
from handover.errors import ArtefactError, CheckpointError, ConfigError
from launcher.config.choices import Stage
from launcher.config.schema import register
from launcher.plan.paths import RunPaths
from launcher.plan.stages import convert as stage
from launcher.plan.stages.settings import Known

INPUTS = {
    *("input_ids", "start_id", "end_id", "input_lengths", "request_output_len", "runtime_top_k", "runtime_top_p"),
    *("beam_search_diversity_rate", "temperature", "len_penalty", "repetition_penalty", "random_seed", "beam_width"),
    *("is_return_log_probs", "bad_words_list", "stop_words_list", "prompt_learning_task_name_ids"),
    *("top_p_decay", "top_p_min", "top_p_reset_ids"),
}
ADDED = {
    *("presence_penalty", "min_length", "is_return_context_cum_log_probs", "is_return_context_log_probs"),
    *("request_prompt_embedding", "request_prompt_lengths", "request_prompt_type"),
    *beyond.INPUTS,
}
"""Optional inputs that the drop-in engine reads too, as it does of the other families."""
OUTPUTS = {"output_ids", "sequence_length", "cum_log_probs", "output_log_probs"}


def exported(name: str, folder: Path, **changes: object) -> Path:
    save_llama(name, folder / "source", **changes)
    convert(ConvertArguments(folder / "source", folder / "2-gpu", 2, "fp16", processes=1))
    build_repository(
        ExportArguments(
            ft_checkpoint=folder / "2-gpu",
            output=folder / "repository",
            model_name="my_llama",
            tensor_para_size=2,
            pipeline_para_size=1,
            data_type="fp16",
            int8_mode=0,
            enable_custom_all_reduce=0,
            max_batch_size=8,
            decoupled=True,
        )
    )
    return folder / "repository"


def test_the_engines_tensors_are_those_of_the_published_repository_and_the_drop_ins(tmp_path: Path) -> None:
    repository = exported("llama 2 70B", tmp_path)
    config = parse((repository / "fastertransformer/config.pbtxt").read_text())
    assert {tensor.name for tensor in config.input} == INPUTS | ADDED
    assert all(tensor.optional for tensor in config.input if tensor.name in ADDED)
    added = {"context_log_probs", "context_argmax_ids", *beyond.OUTPUTS}
    assert {tensor.name for tensor in config.output} == OUTPUTS | added
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    assert (parameters["model_type"], parameters["tensor_para_size"]) == ("Llama", "2")
    assert config.backend == "fastertransformer" and config.model_transaction_policy.decoupled
    ensemble = parse((repository / "ensemble/config.pbtxt").read_text())
    (step,) = [each for each in ensemble.ensemble_scheduling.step if each.model_name == "fastertransformer"]
    assert {*step.input_map} <= INPUTS | ADDED
    models = find_served_models(repository)
    assert [model.family for model in models] == ["llama"]
    assert prove_weights(models[0], repository) > 0


def test_a_model_that_fastertransformer_has_no_kernels_for_is_not_served_by_it(tmp_path: Path) -> None:
    (model,) = find_served_models(exported("llama 2 70B", tmp_path))
    check_engine(model, "slipway")
    with pytest.raises(ArtefactError, match=r"does not compute 'fastertransformer' in .*: size_per_head = 8  \("):
        check_engine(model, "fastertransformer")


def test_a_model_that_it_computes_is_served_by_it(tmp_path: Path) -> None:
    (model,) = find_served_models(exported("llama 2 70B", tmp_path, head_dim=32, hidden_size=256))
    check_engine(model, "fastertransformer")


def test_a_store_of_an_earlier_version_with_keys_of_its_own_is_served_by_neither(tmp_path: Path) -> None:
    repository = exported("llama 2 70B", tmp_path, head_dim=32, hidden_size=256)
    (model,) = find_served_models(repository)
    with (model.checkpoint / "config.ini").open("a") as ini:
        ini.write("qk_norm = 1\n")
    words = "(?s)has qk_norm: an earlier version of Slipway .*convert the checkpoint again"
    with pytest.raises(ArtefactError, match=words):
        check_engine(model, "fastertransformer")
    with pytest.raises(ConfigIniError, match=words):
        read_config(model.checkpoint, "Llama")
    (model.checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=words):
        inspect_source(model.checkpoint, 2, "fp16")


def test_a_run_in_which_fastertransformer_would_serve_another_model_is_refused_when_it_is_planned(
    tmp_path: Path,
) -> None:
    register()
    save_llama("llama", tmp_path / "source")
    given = [f"base_results_dir={tmp_path / 'results'}", f"export.model.checkpoint_path={tmp_path / 'source'}"]
    stages = [Stage.convert, Stage.export, Stage.deploy]
    drop_in = compose([*given, "deployment.engine=slipway"])
    stage.check(drop_in, RunPaths.of(drop_in), stages, Known())
    config = compose([*given, "deployment.engine=fastertransformer"])
    stage.check(config, RunPaths.of(config), stages[:2], Known())
    with pytest.raises(ConfigError, match=r"does not compute .*: size_per_head = 8  \("):
        stage.check(config, RunPaths.of(config), stages, Known())
