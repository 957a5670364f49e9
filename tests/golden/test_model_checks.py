"""What the checkpoint says about the stages, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs.composed import FIVE, compose

from export_scripts.arguments import ExportArguments
from handover.errors import ConfigError, SlipwayError
from handover.manifest import Manifest
from launcher.config.choices import Stage
from launcher.pipeline import ordered_stages, plan_stages
from launcher.plan import checks
from launcher.plan.adapter_checks import asked_adapters, served_adapters
from launcher.plan.paths import RunPaths
from launcher.plan.stages import clients, evaluate, export
from launcher.plan.stages.convert import output, plan, with_format

DATA = Path(__file__).parents[1] / "data"
GPT, T5 = DATA / "nemo" / "gpt122_tp1_pp1.nemo", DATA / "nemo" / "t5_abs.nemo"
LLAMA = Path(__file__).parents[2] / "examples" / "llama_demo" / "checkpoints" / "llama_demo.nemo"
T5_CONFIG = "export=t5/export_t5"


def refusal(root: Path, checkpoint: Path, *overrides: str) -> SlipwayError:
    given = [f"base_results_dir={root}", f"export.model.checkpoint_path={checkpoint}", "cluster_type=interactive"]
    config = compose([*given, "export.model.weight_data_type=fp32", *overrides])
    paths = RunPaths.of(config)
    with pytest.raises(SlipwayError) as refused:
        checks.check(config, paths, ordered_stages(config, paths))
    assert not list(root.iterdir()), "something was written"
    return refused.value


def test_lambada_of_a_t5_is_refused_where_fastertransformers_engine_serves_it(tmp_path: Path) -> None:
    error = refusal(tmp_path, T5, FIVE, T5_CONFIG, "deployment.engine=fastertransformer")
    assert "t5_abs.nemo is an encoder-decoder (T5), and lambada scores given words" in error.problem
    assert "stages=[convert,export,deploy,benchmark]" in error.hint


@pytest.mark.parametrize("family", ["t5/export_t5", "mt5/export_mt5"])
def test_a_gpt_is_no_t5(tmp_path: Path, family: str) -> None:
    error = refusal(tmp_path, GPT, f"export={family}", "stages=[convert]")
    assert "gpt122_tp1_pp1.nemo is no encoder-decoder: its family is gpt" in error.problem
    assert "export=gpt3/export_gpt3" in error.hint


@pytest.mark.parametrize(
    ("checkpoint", "overrides", "said"),
    [
        (
            LLAMA,
            [],
            "llama_demo.nemo is megatron-core Llama, of the family llama; export=gpt3/export_gpt3, the default",
        ),
        (T5, [], "t5_abs.nemo is NeMo T5, of the family t5; export=gpt3/export_gpt3, the default"),
        (T5, [T5_CONFIG], ""),
        (GPT, [], ""),
    ],
)
def test_what_another_family_than_the_defaults_is_and_which_default_follows_is_said(
    checkpoint: Path, overrides: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={checkpoint}", "cluster_type=interactive"]
    config = compose([*given, "stages=[convert]", *overrides])
    checks.check(config, RunPaths.of(config), config.stages)
    assert said in capsys.readouterr().err if said else "of the family" not in capsys.readouterr().err


def test_a_t5_holds_no_conversations(tmp_path: Path) -> None:
    error = refusal(tmp_path, T5, "export.triton_deployment.interactive_sessions=4", "stages=[export]")
    assert "is of the family t5: an encoder-decoder has no interactive sessions" in error.problem


def test_only_the_drop_in_holds_conversations_of_a_llama(tmp_path: Path) -> None:
    sessions = "export.triton_deployment.interactive_sessions=4"
    error = refusal(tmp_path, LLAMA, sessions, "stages=[export]", "deployment.engine=fastertransformer")
    assert "is of the family llama: FasterTransformer's own engine has interactive sessions of GPT" in error.problem
    assert "deployment.engine=slipway" in error.hint


def test_a_checkpoint_without_tokenizer_is_converted_and_not_exported(tmp_path: Path) -> None:
    from support.tiny_models.huggingface_models import save

    save("gpt2", tmp_path / "source", tokenizer=False)
    (tmp_path / "root").mkdir()
    error = refusal(tmp_path / "root", tmp_path / "source", "stages=[export]")
    assert "source has no tokenizer, which export needs" in error.problem
    config = compose([f"export.model.checkpoint_path={tmp_path / 'source'}", "cluster_type=interactive"])
    checks.check(config, RunPaths.of(config), [stage for stage in config.stages if stage.name == "convert"])


def test_a_t5_that_was_exported_before_is_not_scored_either(tmp_path: Path) -> None:
    shards = tmp_path / "tiny" / "export_tp1_pp1_fp16_fp16" / "model_repo" / "fastertransformer" / "1" / "1-gpu"
    shards.mkdir(parents=True)
    (shards / "config.ini").write_text("[encoder]\nvocab_size = 9\n[decoder]\nvocab_size = 9\n")
    given = [f"base_results_dir={tmp_path}", "export.run.model_train_name=tiny", "cluster_type=interactive"]
    config = compose([*given, "stages=[evaluate]", "deployment.engine=fastertransformer"])
    with pytest.raises(ConfigError, match="model_repo is an encoder-decoder"):
        checks.check(config, RunPaths.of(config), config.stages)


def described(directory: Path) -> Path:
    import yaml

    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 160, "vocab_size": 384}
    path = directory / "model_config.yaml"
    path.write_text(yaml.safe_dump({**shape, "max_position_embeddings": 48, "encoder_seq_length": 48}))
    return path


def test_random_weights_are_made_of_a_description_alone(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    made_up = "export.model.random_weights=true"
    error = refusal(tmp_path / "root", GPT, FIVE, made_up)
    assert "gpt122_tp1_pp1.nemo is none" in error.problem and "model_config.yaml with vocab_size" in error.hint
    error = refusal(tmp_path / "root", described(tmp_path), FIVE)
    assert "is the description of a checkpoint" in error.problem and made_up in error.hint
    error = refusal(tmp_path / "root", described(tmp_path), T5_CONFIG, "stages=[convert]", made_up)
    assert "its family is gpt" in error.problem
    error = refusal(
        tmp_path / "root", described(tmp_path), "stages=[convert]", made_up, "export.model.format=huggingface"
    )
    assert f"{made_up} with export.model.format=huggingface" in error.problem
    assert "export.model.format=fastertransformer" in error.hint
    stages = "stages=[convert,export,deploy,benchmark]"
    config = compose(
        [stages, f"export.model.checkpoint_path={described(tmp_path)}", made_up, "cluster_type=interactive"]
    )
    paths = RunPaths.of(config)
    checks.check(config, paths, ordered_stages(config, paths))


def test_an_adapter_and_a_tokenizer_are_opened_before_submission_and_given_to_the_conversion(tmp_path: Path) -> None:
    from support.tiny_models.huggingface_models import save, write_tokenizer

    (tmp_path / "root").mkdir()
    save("gpt2", tmp_path / "source", tokenizer=False)
    adapter = DATA / "peft/gpt2"
    for key, what in (("adapter_path", "adapter_path"), ("tokenizer", "tokenizer")):
        error = refusal(
            tmp_path / "root", tmp_path / "source", "stages=[convert]", f"export.model.{key}={tmp_path}/none"
        )
        assert f"export.model.{what} {tmp_path}/none does not exist" in error.problem
    error = refusal(tmp_path / "root", GPT, "stages=[convert]", f"export.model.adapter_path={adapter}")
    assert "the model has no transformer.h.0.attn.c_attn.weight" in error.problem
    (tmp_path / "words").mkdir()
    write_tokenizer(tmp_path / "words")
    model = {"checkpoint_path": tmp_path / "source", "adapter_path": adapter, "tokenizer": tmp_path / "words"}
    given = [f"export.model.{key}={path}" for key, path in model.items()]
    config = compose([*given, "stages=[convert,export]", "cluster_type=interactive"])
    paths = RunPaths.of(config)
    checks.check(config, paths, ordered_stages(config, paths))
    (planned,) = plan(config, paths)
    assert planned.inputs == tuple(model.values())
    assert {f"--adapter={adapter}", f"--tokenizer={tmp_path / 'words'}"} <= set(planned.commands[0].argv)


def test_a_hugging_face_directory_is_served_by_engines_that_read_it(tmp_path: Path) -> None:
    given = "export.model.format=huggingface"
    error = refusal(tmp_path, GPT, "stages=[export,deploy]", given, "deployment.engine=fastertransformer")
    assert "no shards of FasterTransformer are written, which its own engine must have to export" in error.problem
    assert "take export.model.format=fastertransformer" in error.hint
    error = refusal(tmp_path, GPT, FIVE, given)
    assert "the drop-in engine does not read" in error.problem and "model_type is 'gpt2'" in error.problem
    assert "it reads FasterTransformer's shards of this family" in error.hint


@pytest.mark.parametrize(
    ("name", "asked", "is_directory"),
    [
        ("qwen3", [], True),
        ("llama 2 70B", [], False),
        ("llama 2 70B", ["export.triton_deployment.quantization=fp8"], True),
    ],
)
def test_what_fastertransformer_lacks_is_planned_as_a_directory(
    name: str, asked: list[str], is_directory: bool, tmp_path: Path
) -> None:
    """Or has not in its shards: matrices that become FP8."""
    from support.tiny_models.llama_hub_models import save_llama

    changes = {"head_dim": 32, "hidden_size": 256} if name.startswith("llama") else {}
    save_llama(name, tmp_path / "source", **changes)
    given = [*asked, f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={tmp_path}/source"]
    given += ["stages=[convert,export,deploy]", "export.model.tensor_model_parallel_size=2"]
    config = compose([*given, "cluster_type=interactive"])
    paths = RunPaths.of(config)
    config = with_format(config, paths)
    stages = ordered_stages(config, paths)
    checks.check(config, paths, stages)
    converted, exported = (each.commands[0].argv for each in plan_stages(config, paths, stages)[:2])
    place = paths.huggingface if is_directory else paths.ft_checkpoint
    assert ("--format=huggingface" in converted) == is_directory
    assert f"--ft-checkpoint={place}" in exported and "--tensor-para-size=2" in exported
    assert ("--quantization=fp8" in exported) == bool(asked)


def test_a_directory_that_the_engine_does_not_serve_is_refused_before_submission(tmp_path: Path) -> None:
    from support.tiny_models.llama_hub_models import save_llama

    save_llama("qwen3", tmp_path / "source")
    (tmp_path / "root").mkdir()
    ranks = "export.model.tensor_model_parallel_size=3"
    error = refusal(tmp_path / "root", tmp_path / "source", FIVE, "export.model.format=huggingface", ranks)
    assert "3 ranks cannot share 8 heads" in error.problem
    for kind in ("huggingface", "fastertransformer"):
        ways = f"export.model.format={kind}", "export.triton_deployment.speculation=mtp", "stages=[convert,export]"
        checkpoint = tmp_path / "source" if kind == "huggingface" else LLAMA
        error = refusal(tmp_path / "root", checkpoint, *ways)
        assert "speculation mtp, and the model has no layer that predicts further tokens" in error.problem
        head = "export.triton_deployment.speculation=eagle3", f"export.triton_deployment.draft_model={tmp_path}"
        error = refusal(tmp_path / "root", checkpoint, ways[0], *head, ways[2])
        expected = "has neither model.safetensors" if kind == "huggingface" else "with FasterTransformer's shards"
        assert expected in error.problem


def test_what_transformers_cannot_express_is_refused_before_submission(tmp_path: Path) -> None:
    error = refusal(tmp_path, T5, T5_CONFIG, "stages=[convert]", "export.model.format=huggingface")
    assert "no architecture of transformers can express this checkpoint" in error.problem
    assert "position_embedding_type: absolute" in error.problem


def test_the_ranks_of_shards_do_not_matter_to_a_hugging_face_directory(tmp_path: Path) -> None:
    given = [f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={GPT}", "cluster_type=interactive"]
    given += ["stages=[convert]", "export.model.format=huggingface", "export.model.tensor_model_parallel_size=3"]
    config = compose(given)
    checks.check(config, RunPaths.of(config), list(config.stages))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["stages=[convert,export]"], "export.adapter.format=peft writes no model, which export must have"),
        (["export.model.format=huggingface"], "the adapter is written, and no model"),
        ([], "comes with no LoRA adapter"),
        (["export.model.end_id=2"], "export.model.end_id is of the model"),
    ],
)
def test_an_adapter_that_is_written_by_itself_leaves_no_model_to_others(
    overrides: list[str], words: str, tmp_path: Path
) -> None:
    error = refusal(tmp_path, LLAMA, "stages=[convert]", "export.adapter.format=peft", *overrides)
    assert words in error.problem


def test_an_adapter_by_itself_has_a_directory_of_its_own(tmp_path: Path) -> None:
    asked = ["stages=[convert]", "export.adapter.format=peft", "export.adapter.base_model=org/name"]
    given = [f"export.model.checkpoint_path={LLAMA}", "export.model.adapter_path=/adapter", "cluster_type=interactive"]
    config = compose([f"base_results_dir={tmp_path}", *given, *asked])
    [made] = plan(config, RunPaths.of(config))
    assert made.output == tmp_path / "gpt3_demo/peft_fp16" and Path("/adapter") in made.inputs
    assert {"--format=peft", "--base-model=org/name", "--adapter=/adapter"} <= set(made.commands[0].argv)


def test_adapters_that_are_served_reach_the_export(tmp_path: Path) -> None:
    (tmp_path / "many/sql").mkdir(parents=True)
    (tmp_path / "many/chat.nemo").write_bytes(b"")
    given = [f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={LLAMA}", "export.model.format=huggingface"]
    for value, names in (("{a.1: /a, b: /b}", ["a.1", "b"]), (str(tmp_path / "many"), ["chat", "sql"])):
        config = compose([*given, "stages=[convert,export]", f"export.adapters={value}"])
        paths = RunPaths.of(config)
        (stage,) = export.plan(config, paths)
        arguments = ExportArguments.from_argv(stage.commands[0].argv[3:])
        assert arguments.adapters and [name for name, _ in arguments.adapters] == names
        assert {Path(path) for _, path in arguments.adapters} <= set(stage.inputs)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["export.adapters={../a: /b}"], "'../a' is no name of an adapter"),
        (["export.adapters={}"], "export.adapters is '{}'"),
        (["export.adapters=[a]"], "export.adapters is "),
        (["export.adapters=/absent"], "export.adapters is '/absent'"),
        (["export.adapters={a: /b}", "export.model.format=fastertransformer"], "over a Hugging Face directory"),
        (["export.adapters={a: /b}", "deployment.engine=vllm"], "served by the drop-in engine"),
    ],
)
def test_what_no_run_serves_as_adapters_is_refused(overrides: list[str], problem: str, tmp_path: Path) -> None:
    config = compose([f"base_results_dir={tmp_path}", "export.model.format=huggingface", *overrides])
    with pytest.raises(ConfigError) as refused:
        served_adapters(config)
    assert problem in refused.value.problem


def test_evaluations_ask_an_adapter_where_they_can(tmp_path: Path) -> None:
    given = [f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={LLAMA}", "deployment.adapter=sql"]
    config = compose([*given, "stages=[convert,export,deploy,evaluate]"])
    paths = RunPaths.of(config)
    (stage,) = evaluate.plan(config, paths)
    assert "--lora-name=sql" in stage.commands[0].argv
    with pytest.raises(ConfigError, match="deployment.adapter=sql with evaluation=consistency, which asks the model"):
        evaluate.plan(config := compose([*given, "evaluation=[consistency]"]), RunPaths.of(config))
    with pytest.raises(ConfigError, match="with the stage benchmark, which asks the model alone"):
        clients.check_server(config, paths, [Stage.deploy, Stage.benchmark])


def test_the_model_and_its_adapters_are_evaluated_side_by_side(tmp_path: Path) -> None:
    given = [f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={LLAMA}", "evaluation=[lambada,parity]"]
    given += ["export.model.format=huggingface", "export.adapters={sql: /data/sql}"]
    config = compose([*given, "deployment.adapter=[null,sql]", "stages=[deploy,evaluate,benchmark]"])
    paths = RunPaths.of(config)
    stages = evaluate.plan(config, paths)
    names = ["lambada", "parity", "lambada_sql", "parity_sql"]
    assert [stage.output.name for stage in stages] == names == [stage.log.stem[9:] for stage in stages]
    assert [sum("--lora-name=sql" in stage.commands[0].argv for stage in stages[n : n + 2]) for n in (0, 2)] == [0, 2]
    assert {"--lora-name=sql", "--lora-path=/data/sql"} <= set(stages[3].commands[0].argv)
    assert Path("/data/sql") in stages[3].inputs
    with pytest.raises(ConfigError, match="nothing is deployed"):
        clients.check_server(config, paths, [Stage.benchmark])


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        ("[]", "deployment.adapter is "),
        ("[sql,sql]", "deployment.adapter is "),
        ("{sql: 1}", "deployment.adapter is "),
        ("sq", "deployment.adapter=sq is none of export.adapters"),
        ("../a", "'../a' is no name of an adapter"),
    ],
)
def test_what_names_no_adapter_is_refused(adapter: str, problem: str, tmp_path: Path) -> None:
    given = ["export.model.format=huggingface", "export.adapters={sql: /data/sql}"]
    with pytest.raises(ConfigError) as refused:
        asked_adapters(compose([f"base_results_dir={tmp_path}", *given, f"deployment.adapter={adapter}"]))
    assert problem in refused.value.problem


@pytest.mark.parametrize("is_another", [True, False])
def test_a_model_of_the_hub_is_fetched_unless_it_was_converted(tmp_path: Path, is_another: bool) -> None:
    """What lies there of another one, under the same name of a run, does not stand for it."""
    config = compose([f"base_results_dir={tmp_path}", "export.model.checkpoint_path=hf:org/model", "stages=[export]"])
    paths = RunPaths.of(config)
    converted, source = output(config, paths), tmp_path / "another" if is_another else paths.checkpoint
    converted.mkdir(parents=True)
    Manifest("ft_checkpoint", (), {"checkpoint": str(source)}).write(converted)
    assert not paths.checkpoint.exists()
    assert (Stage.convert in ordered_stages(config, paths)) == is_another
