"""Golden plans: one file a stage and case, reviewed as diffs. ``make golden`` rewrites them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs.composed import FIVE, compare, compose, plans_of

from handover.errors import ConfigError
from handover.ranges import check_ranges
from launcher.pipeline import group
from launcher.plan.paths import RunPaths

HERE = Path(__file__).resolve().parent
CASES = {
    "one_gpu": [FIVE],
    "two_nodes": [
        *(FIVE, "cluster_type=bcm", "export.model.tensor_model_parallel_size=8", "container=nvcr.io/nvidia/nemo:24.05"),
        *("export.triton_deployment.pipeline_model_parallel_size=2", "container_mounts=[/mount/data]"),
    ],
    "hostile_name": [FIVE, 'export.run.model_train_name="it\'s; touch x"'],
    "load": [
        *("stages=[deploy,benchmark]", "benchmark=load", "benchmark.load.lengths=[60/20,uniform:20:400/normal:50:9]"),
        *("benchmark.load.request_rates=[2,4.5]", "benchmark.slos.ttft_ms=200"),
    ],
    "evaluations": [
        *("stages=[deploy,evaluate]", "evaluation=[lambada,squad]", "evaluation.lambada.samples=20"),
        *("evaluation.squad.taskname=squad", "evaluation.squad.prompt=null"),
    ],
    "translation": [
        *("stages=[evaluate]", "evaluation=[translation,summarization]", "deployment.endpoint=server:8001"),
        *("evaluation.translation.data_path=/data/test.en", "evaluation.translation.reference_path=/data/test.de"),
        *("evaluation.translation.beam_width=4", "evaluation.summarization.data_path=/data/news.jsonl"),
    ],
    "parity": [FIVE, "evaluation=parity", "evaluation.parity.data_path=/data/prompts.jsonl"],
    "huggingface": ["stages=[convert]", "export.model.format=huggingface", "export.model.weight_data_type=bf16"],
    "openai": [
        "stages=[deploy]",
        "deployment.openai_port=0",
        "deployment.api_keys_file=/secrets/keys.txt",
        "deployment.openai_access_log=/logs/access.jsonl",
        "deployment.openai_chat_template=/files/chat.jinja",
        "deployment.openai_max_requests=64",
        "deployment.openai_max_sequences=32",
        "deployment.openai_max_body_bytes=65536",
    ],
    "attached": ["stages=[evaluate,benchmark]", "deployment.endpoint=server:8001"],
    "openai_api": [
        *("stages=[evaluate,benchmark]", "deployment.endpoint=http://server:8000/v1", "evaluation=[lambada,parity]"),
        *("deployment.endpoint_key_env=API_KEY", "deployment.endpoint_tokenizer=/models/mine"),
        *("evaluation.parity.precision=bf16", "evaluation.lambada.model=org/model"),
    ],
    "vllm": [
        *("stages=[export,deploy,evaluate,benchmark]", "deployment.engine=vllm", "deployment.max_model_len=2048"),
        *("deployment.command='/opt/vllm venv/bin/vllm serve'", "deployment.engine_args=[--enforce-eager]"),
    ],
    "sglang": [
        *("stages=[export,deploy]", "deployment.engine=sglang", "deployment.gpu_memory_utilization=0.8"),
        *("cluster_type=bcm", "export.model.tensor_model_parallel_size=4", "deployment.container=lmsysorg/sglang:v0.5"),
    ],
    "vllm_triton": ["stages=[export]", "deployment.engine=vllm_triton", "deployment.max_num_seqs=64"],
    "vllm_nodes": [  # by TP x PP x DP: three nodes of 8
        *("stages=[export,deploy,evaluate]", "deployment.engine=vllm", "export.model.tensor_model_parallel_size=8"),
        *("deployment.data_parallel_size=3", "deployment.expert_parallel=true", "container=vllm/vllm-openai:v0.33.0"),
        "cluster_type=bcm",
    ],
    "sglang_nodes": [  # by their number: half of each node's GPUs
        *("stages=[export,deploy]", "deployment.engine=sglang", "export.model.tensor_model_parallel_size=8"),
        *("deployment.nodes=2", "deployment.restart=2", "cluster_type=bcp"),
    ],
    "trtllm_nodes": [  # a task a GPU
        *("stages=[export,deploy]", "deployment.engine=trtllm_serve", "export.model.tensor_model_parallel_size=16"),
    ],
    "trtllm_serve": [
        *("stages=[export,deploy,evaluate]", "deployment.engine=trtllm_serve", "deployment.max_num_seqs=64"),
        *("export.model.tensor_model_parallel_size=8", "cluster_type=bcp", "deployment.exit_timeout_s=300"),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_plans_are_as_reviewed(case: str, request: pytest.FixtureRequest) -> None:
    cluster = "bcp" if "cluster_type=bcp" in CASES[case] else "bcm"
    text = "".join(plan.to_json() for plan in plans_of(compose(CASES[case], cluster)))
    compare(text, HERE / f"{case}.json", request)


def test_engines_that_read_the_same_form_share_one_directory_and_nothing_else() -> None:
    """So a sweep converts once, and no engine's results are another's."""
    engines = ("slipway", "vllm", "sglang", "trtllm_serve", "vllm_triton")
    paths = {engine: RunPaths.of(compose([f"deployment.engine={engine}"])) for engine in engines}
    assert {path.huggingface for path in paths.values()} == {paths["slipway"].huggingface}
    assert len({path.results for path in paths.values()}) == len(engines)
    assert {engine for engine in engines if paths[engine].model_repository == paths[engine].huggingface} == {
        *("vllm", "sglang", "trtllm_serve")
    }


def test_a_server_and_its_clients_are_one_job() -> None:
    jobs = group(plans_of(compose(CASES["one_gpu"])))
    assert [[plan.stage for plan in job] for job in jobs] == [
        ["convert"],
        ["export"],
        ["deploy", "evaluate", "benchmark", "report"],
    ]


def test_evaluations_share_one_job() -> None:
    jobs = group(plans_of(compose(CASES["translation"])))
    assert [[plan.stage for plan in job] for job in jobs] == [["evaluate", "evaluate", "report"]]
    assert len({(plan.name, plan.log, plan.output) for plan in jobs[0]}) == 3


def test_attached_clients_need_no_server() -> None:
    plans = plans_of(compose(CASES["attached"]))
    assert [(plan.stage, plan.needs_server) for plan in plans] == [
        ("evaluate", False),
        ("benchmark", False),
        ("report", False),
    ]


def test_the_results_layout_is_that_of_nemo_megatron_launcher() -> None:
    overrides = ["export.run.model_train_name=gpt3_5b", "export.model.tensor_model_parallel_size=8"]
    config = compose([*overrides, "export.triton_deployment.pipeline_model_parallel_size=2"])
    root = "/mount/results/gpt3_5b"
    assert config.export.model.checkpoint_path == f"{root}/checkpoints"
    expected = f"{root}/export_tp8_pp2_fp16_fp16/model_repo/gpt3_5b"
    assert config.export.triton_deployment.triton_model_dir == expected
    assert str(RunPaths.of(config).ft_checkpoint) == f"{root}/ft_tp8_fp16/8-gpu"


def test_a_checkpoint_of_the_hub_is_fetched_by_the_stage(tmp_path: Path) -> None:
    config = compose([FIVE, "export.model.checkpoint_path=hf:org/name", f"data_dir={tmp_path}"])
    convert = plans_of(config)[0]
    assert convert.inputs == ()
    assert "--hub-name=org/name" in convert.commands[0].argv
    assert f"--checkpoint={tmp_path}/huggingface/org--name" in convert.commands[0].argv
    assert not any(argument.startswith("--hub-name") for argument in plans_of(compose([FIVE]))[0].commands[0].argv)


def test_what_makes_another_model_leads_to_another_results_directory() -> None:
    triton = [
        f"export.triton_deployment.{key}" for key in ("int8_mode=true", "decoupled=true", "interactive_sessions=8")
    ]
    cases = [[], *([key] for key in triton), triton, ["export.model.random_weights=true"]]
    places = [RunPaths.of(compose(case)) for case in cases]
    assert [paths.results.name.removeprefix("export_tp1_pp1_fp16_fp16") for paths in places] == [
        *("", "_int8", "_decoupled", "_sessions8", "_int8_decoupled_sessions8", "_random")
    ]
    assert len({paths.ft_checkpoint for paths in places}) == 2, "made-up weights lie apart from converted ones"


def test_going_on_without_the_gpus_kernels_is_told_to_the_server_alone() -> None:
    name, plans = "SLIPWAY_TORCH_KERNELS", plans_of(compose([FIVE, "deployment.torch_kernels=true"]))
    assert {plan.stage: plan.env.get(name) for plan in plans if name in plan.env} == {"deploy": "1"}
    assert not [plan for plan in plans_of(compose([FIVE])) if name in plan.env]


@pytest.mark.parametrize("kind", ["static", "load"])
def test_the_price_of_a_gpu_reaches_the_benchmark_that_is_given_one(kind: str) -> None:
    def arguments(*more: str) -> tuple[str, ...]:
        plans = plans_of(compose([*CASES["attached"], f"benchmark={kind}", *more]))
        return next(plan for plan in plans if plan.stage == "benchmark").commands[0].argv

    assert "--gpu-hour-price=2.5" in arguments("benchmark.gpu_hour_price=2.5")
    assert not [word for word in arguments() if "price" in word]
    assert "--gpus=4" in arguments("benchmark.gpus=4") and "--label=new" in arguments("deployment.label=new")
    with pytest.raises(ConfigError, match="gpu_hour_price"):
        check_ranges(compose([*CASES["attached"], "benchmark.gpu_hour_price=0"]))
