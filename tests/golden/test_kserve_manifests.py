"""KServe's objects of an exported model: golden files, our schemas of KServe's fields, and what is refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.kubernetes.kserve_schemas import SCHEMAS
from support.runs.composed import compare, compose

from handover.errors import ConfigError
from launcher.config.choices import Engine
from launcher.config.schema import Config
from launcher.plan.paths import RunPaths
from launcher.submit.kubernetes import kserve

HERE = Path(__file__).resolve().parent / "kserve"
ASKED = [
    *("stages=[convert,export]", "export.manifest=kserve", "kubernetes.memory.deploy=64Gi"),
    "kubernetes.volumes={results: /mount/results}",
]
VLLM = [*ASKED, "deployment.engine=vllm"]
CASES = {
    "vllm": [
        *(*VLLM, "export.model.tensor_model_parallel_size=2", "deployment.max_model_len=2048"),
        *(
            "kubernetes.secrets={HF_TOKEN: hf/token}",
            "kubernetes.gpu_node_selector={nvidia.com/gpu.product: NVIDIA-L4}",
        ),
        """deployment.engine_args=["--hf-overrides={'a': 1}",--enforce-eager]""",
    ],
    "vllm_elsewhere": [
        *(
            *VLLM,
            "export.manifest_uri=s3://models/mine",
            "deployment.container=registry/vllm:1",
            "deployment.replicas=3",
            "cluster.gpus_per_node=0",
        ),
        "kubernetes.namespace=llms",
    ],
    "triton": [*ASKED, "container=registry/slipway-triton:24.10", "cluster.cpus_per_task=8"],
}


def objects_of(config: Config) -> dict[str, Any]:
    paths = RunPaths.of(config)
    kserve.check(config, paths)
    loaded = [yaml.safe_load(text) for text in kserve.files_of(config, paths).values()]
    return {each["kind"]: each for each in loaded}


@pytest.mark.parametrize("case", CASES)
def test_the_objects_are_as_reviewed_and_have_no_field_that_kserve_lacks(
    case: str, request: pytest.FixtureRequest
) -> None:
    config = compose(CASES[case])
    found = objects_of(config)
    assert list(found) == (["InferenceService"] if case == "triton" else ["InferenceService", "LLMInferenceService"])
    for kind, each in found.items():
        jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(each)
    compare(kserve.preview(config, RunPaths.of(config)), HERE / f"{case}.yaml", request)


def test_both_of_vllms_objects_tell_it_what_the_deploy_stage_would() -> None:
    """By vLLM's own words: what KServe's runtime and template give themselves is not repeated."""
    found = objects_of(compose(CASES["vllm"]))
    told = found["InferenceService"]["spec"]["predictor"]["model"]["args"]
    assert told[:2] == ["--served-model-name", "gpt3_demo"] and told[-1] == "--enforce-eager"
    assert not {"--host", "--port", "--model"} & set(told)
    (container,) = found["LLMInferenceService"]["spec"]["template"]["containers"]
    (flags,) = (each["value"] for each in container["env"] if each["name"] == "VLLM_ADDITIONAL_ARGS")
    size = told.index("--tensor-parallel-size")
    assert shlex.split(flags) == [*told[2:size], *told[size + 2 :]], "a shell takes the words apart again"
    assert found["LLMInferenceService"]["spec"]["parallelism"] == {"tensor": 2}
    assert all(each["spec"] for each in found.values())


def test_the_files_are_written_beside_the_models_of_the_run(tmp_path: Path) -> None:
    config = compose([*CASES["triton"], f"base_results_dir={tmp_path}", f"kubernetes.volumes={{results: {tmp_path}}}"])
    paths = RunPaths.of(config)
    kserve.write(config, paths)
    assert [file.name for file in (paths.model_repository.parent / "kserve").iterdir()] == ["inferenceservice.yaml"]
    without = compose(["stages=[convert,export]"])
    kserve.check(without, RunPaths.of(without))
    assert kserve.preview(without, RunPaths.of(without)) == ""


def test_what_kserve_does_not_serve_is_refused() -> None:
    config = compose(VLLM)
    deployment, export, given = config.deployment, config.export, config.kubernetes
    paths = RunPaths.of(config)

    def refusal() -> str:
        with pytest.raises(ConfigError) as refused:
            kserve.check(config, paths)
        assert refused.value.hint
        return refused.value.problem

    for engine, reason in (
        (Engine.sglang, "deployment.engine=sglang: KServe has no runtime of it"),
        (Engine.vllm_triton, "its model.json names the weights by their path"),
        (Engine.fastertransformer, "counts from the server's working directory"),
        (Engine.slipway, "without container: Triton's own image has not the drop-in engine"),
    ):
        deployment.engine = engine
        assert reason in refusal()
    deployment.engine, deployment.affinity_header = Engine.vllm, "X-User"
    assert "deployment.affinity_header: KServe's gateway chooses" in refusal()
    deployment.affinity_header = None
    given.memory = {"deploy": "lots"}
    assert "kubernetes.memory.deploy is lots" in refusal()
    given.memory = {"deploy": "64Gi"}
    given.volumes = {"other": "/mount/res"}
    assert "is on none of kubernetes.volumes" in refusal()
    export.manifest_uri = "models/mine"
    assert "export.manifest_uri=models/mine is no address" in refusal()
    given.memory = {"deploy": None}
    assert "without kubernetes.memory.deploy: KServe's runtimes give a server 2Gi" in refusal()
    export.model.tensor_model_parallel_size = 16
    assert "16 GPUs on 2 nodes" in refusal()
