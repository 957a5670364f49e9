"""Tokens and passwords are taken from the environment by name; nothing that is written or printed holds one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hydra
import pytest

from handover.errors import ConfigError
from launcher.config import command_line
from launcher.config.choices import Stage
from launcher.config.schema import PROJECT_DIR, Config, register, to_typed
from launcher.config.secrets import check_secrets, is_secret
from launcher.config.values import check_values
from launcher.pipeline import executor_for, make_jobs, plan_stages
from launcher.plan.paths import RunPaths
from launcher.plan.stages.clients import check_server

VALUE = "hf_opensesame"
NEMO = PROJECT_DIR / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"


def compose(*overrides: str) -> Config:
    register()
    with hydra.initialize_config_dir(str(PROJECT_DIR / "conf"), version_base="1.3"):
        return to_typed(hydra.compose("config", overrides=["cluster_type=bcm", *overrides]))


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MyPassword", "NGC_CLI_APIKEY", "hf_token"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "NCCL_IB_PKEY", "HF_TOKEN_PATH", "KEYBOARD"]
)
def test_names_of_ordinary_variables(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    "word",
    [
        *(f"env_vars.HF_TOKEN={VALUE}", f"++env_vars.HF_TOKEN='{VALUE}'", f"env_vars={{HF_TOKEN: {VALUE}}}"),
        *(f"env_vars.HF_TOKEN={VALUE},b", f"env_vars.HF_TOKEN=${{oc.env:X,{VALUE}}}"),
    ],
)
def test_a_secret_on_the_command_line_is_refused_before_hydra_keeps_it(word: str) -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN looks like a secret") as refused:
        command_line.read([word])
    assert VALUE not in str(refused.value) and "export HF_TOKEN" in refused.value.hint


@pytest.mark.parametrize("word", [f"deployment.endpoint_key_env={VALUE}", f"+deployment.endpoint_key_env='{VALUE}'"])
def test_a_key_in_the_place_of_its_variables_name_is_refused_before_hydra_keeps_it(word: str) -> None:
    with pytest.raises(ConfigError, match="does not name a variable of this environment") as refused:
        command_line.read([word])
    assert VALUE not in str(refused.value)


def test_the_key_of_an_openai_api_is_in_no_plan_and_goes_to_docker_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORK_KEY", VALUE)
    words = ["deployment.endpoint=http://host:8000/v1", "deployment.endpoint_key_env=WORK_KEY", "container=org/image"]
    command_line.read(words)
    config = compose(*words, "cluster.container_runtime=docker")
    paths = RunPaths.of(config)
    plans = plan_stages(config, paths, [Stage.evaluate, Stage.benchmark])
    assert all("--endpoint-key-env=WORK_KEY" in plan.commands[0].argv for plan in plans[:2])  # the third is the report
    files = executor_for(config, paths).preview(make_jobs(config, paths, plans), [])
    assert "--env=WORK_KEY" in files and VALUE not in files
    assert not any(VALUE in plan.to_json() for plan in plans)


def test_a_key_that_is_not_there_is_said_before_anything_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORK_KEY", raising=False)
    config = compose("deployment.endpoint=http://host:8000/v1", "deployment.endpoint_key_env=WORK_KEY")
    with pytest.raises(ConfigError, match=r"\$WORK_KEY, .* is not set in this environment"):
        check_server(config, RunPaths.of(config), [Stage.evaluate])
    monkeypatch.setenv("WORK_KEY", VALUE)
    check_server(config, RunPaths.of(config), [Stage.evaluate])
    alone = compose("deployment.endpoint_key_env=WORK_KEY")
    with pytest.raises(ConfigError, match="given without deployment.endpoint, to which it belongs"):
        check_server(alone, RunPaths.of(alone), [Stage.evaluate])


@pytest.mark.parametrize(
    "override",
    [
        *(f"env_vars.HF_TOKEN={VALUE}", f"cluster.setup=['export HF_TOKEN={VALUE}']"),
        *(f"cluster.srun_args=['--export=ALL,HF_TOKEN={VALUE}']", f"cluster.container_args=['--env=HF_TOKEN={VALUE}']"),
        f"cluster.additional_parameters={{export: 'HF_TOKEN={VALUE}'}}",
    ],
)
def test_a_secret_in_the_configuration_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="looks like a secret") as refused:
        check_secrets(compose(override))
    assert VALUE not in str(refused.value)


@pytest.mark.parametrize("runtime", ["pyxis", "docker", "apptainer"])
def test_a_secret_that_is_named_is_in_no_plan_and_no_job_file(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", VALUE)
    words = ["env_vars.HF_TOKEN=${oc.env:HF_TOKEN}", "env_vars.NCCL_DEBUG=INFO", "container=org/image"]
    config = compose(*words, f"cluster.container_runtime={runtime}")
    check_secrets(config)
    paths = RunPaths.of(config)
    plans = plan_stages(config, paths, [Stage.convert, Stage.deploy])
    executor = executor_for(config, paths)
    commands = [executor.wrap(command, plan.resources, plan.env) for plan in plans for command in plan.commands]
    files = "".join(plan.to_json() for plan in plans) + executor.preview(make_jobs(config, paths, plans), [])
    assert VALUE not in files + str(commands) and '"NCCL_DEBUG": "INFO"' in files
    assert all(("--env=HF_TOKEN" in command) == (runtime == "docker") for command in commands)


def test_no_file_of_a_run_or_a_sweep_holds_a_secret(tmp_path: Path) -> None:
    words = [
        "-m",
        "cluster_type=interactive",
        "stages=[convert]",
        "export.model.processes=1",
        "hydra.output_subdir=own",
    ]
    words += ["env_vars.HF_TOKEN=${oc.env:HF_TOKEN}", "export.model.weight_data_type=fp16,fp32"]
    words += [f"base_results_dir={tmp_path}/results", f"export.model.checkpoint_path={NEMO}"]
    ended = subprocess.run(
        [sys.executable, str(PROJECT_DIR / "main.py"), *words],
        cwd=tmp_path,
        env={**os.environ, "HF_TOKEN": VALUE},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"multirun.yaml", "config.yaml", "convert.plan.json"} <= {file.name for file in written}
    assert not [file for file in written if VALUE.encode() in file.read_bytes()]
    assert VALUE not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "override",
    [
        *('cluster.partition="a\nb"', 'cluster.account="a\rb"', 'cluster.setup=["a\nb"]', 'cluster.srun_args=["\x1b"]'),
        *('cluster.additional_parameters={comment: "a\nb"}', "cluster.additional_parameters={a.b: c}"),
        *('cluster.job_name_prefix="a\n#SBATCH --qos=x"', "env_vars={A.B: c}", 'base_results_dir="/a\nb"'),
    ],
)
def test_what_would_add_a_line_to_a_jobs_file_is_refused(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_values(compose(override))
    assert override.split("=")[0] in refused.value.problem


def test_texts_may_have_several_lines() -> None:
    check_values(compose("evaluation=parity", 'evaluation.parity.prompts=["a\nb"]', 'env_vars.NOTE="a\nb"'))


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("cluster.srun_args=[--mpi=none]", 'cluster.srun_args=["--mpi=none"]'),
        ("a=[--privileged, --device=/dev/infiniband]", 'a=[--privileged, "--device=/dev/infiniband"]'),
        ("a=[-x=1,--y=a:b]", 'a=["-x=1","--y=a:b"]'),
        ('a=["--mpi=none"]', 'a=["--mpi=none"]'),
        ('a=["say [--b=c]"]', 'a=["say [--b=c]"]'),
        ("a=[b=c]", "a=[b=c]"),
        ("--cfg", "--cfg"),
    ],
)
def test_flags_in_lists_need_no_quotes_of_their_own(word: str, read: str) -> None:
    assert command_line.read([word]) == [read]


@pytest.mark.parametrize("word", ["--experimental-rerun=x.pickle", "--experimental-rerun", "--exp=x"])
def test_hydra_loads_no_pickle(word: str) -> None:
    with pytest.raises(ConfigError, match="loads a pickle"):
        command_line.read([word, "x"])


def test_the_examples_of_the_clusters_own_file_are_true() -> None:
    comments = (PROJECT_DIR / "conf" / "cluster" / "bcm.yaml").read_text()
    flags = [line.split(":")[0] for line in comments.splitlines() if line.startswith(("srun_args", "container_args"))]
    for name in flags:
        (line,) = (line for line in comments.splitlines() if line.startswith(name))
        example = line.rpartition(": [")[2].join(("[", ""))
        config = compose(*command_line.read([f"cluster.{name}={example}"]))
        assert getattr(config.cluster, name) == [flag.strip() for flag in example.strip("[]").split(",")]
    assert flags == ["srun_args", "container_args"]
