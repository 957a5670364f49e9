"""What is refused of a run with another project's engine before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.runs.composed import compose
from support.tiny_models.t5_models import huggingface_t5

from handover.errors import SlipwayError
from launcher.pipeline import ordered_stages, plan_stages
from launcher.plan import checks
from launcher.plan.paths import RunPaths
from launcher.plan.programs import command_of

PROJECT = Path(__file__).resolve().parents[2]
GPT = PROJECT / "examples" / "gpt3_demo" / "checkpoints"
LLAMA = PROJECT / "examples" / "llama_demo" / "checkpoints" / "llama_demo.nemo"
STAGES = "stages=[export,deploy]"
HERE = "deployment.command=python3"
FP8 = "export.model.quantization=fp8"
AT_LOAD = "export.triton_deployment.quantization=fp8"
SAME = ("export.triton_deployment.data_type=fp32",)


def refusal(root: Path, checkpoint: Path, *overrides: str, cluster: str = "interactive") -> SlipwayError:
    given = [f"base_results_dir={root}", f"export.model.checkpoint_path={checkpoint}", f"cluster_type={cluster}"]
    config = compose([*given, STAGES, "export.model.weight_data_type=fp32", *overrides], cluster)
    paths = RunPaths.of(config)
    with pytest.raises(SlipwayError) as refused:
        checks.check(config, paths, ordered_stages(config, paths))
    assert not list(root.iterdir()), "something was written"
    return refused.value


@pytest.mark.parametrize(
    ("checkpoint", "overrides", "words"),
    [
        (
            GPT,
            ("deployment.engine=trtllm_serve", HERE, "export.triton_deployment.data_type=fp32"),
            "TensorRT-LLM does not serve GPT2LMHeadModel",
        ),
        (
            LLAMA,
            ("deployment.engine=sglang", HERE, "export.model.tensor_model_parallel_size=3"),
            "tensor_model_parallel_size=3 does not divide the 8 attention heads",
        ),
        (LLAMA, ("deployment.engine=vllm",), "there is no program 'vllm' on this host"),
        (
            LLAMA,
            ("deployment.engine=vllm", "deployment.command=/no/such/vllm serve"),
            "there is no program '/no/such/vllm' on this host",
        ),
        (LLAMA, ("deployment.engine=vllm", 'deployment.command="vllm \'serve"'), "No closing quotation"),
        (LLAMA, ("deployment.engine=vllm", "deployment.command=[]"), "deployment.command is empty"),
        (LLAMA, ("deployment.engine=vllm", HERE, "deployment.openai_port=0"), "deployment.openai_port is given with"),
        (LLAMA, ("deployment.engine=vllm", HERE, "deployment.server_args=[--verbose]"), "deployment.server_args"),
        (
            LLAMA,
            ("deployment.engine=sglang", HERE, "export.triton_deployment.int8_mode=true"),
            "export.triton_deployment.int8_mode is given with deployment.engine=sglang",
        ),
        (
            LLAMA,
            ("deployment.engine=vllm", HERE, "export.triton_deployment.kv_cache_dtype=fp8"),
            "export.triton_deployment.kv_cache_dtype is given with deployment.engine=vllm",
        ),
        (
            LLAMA,
            ("deployment.engine=trtllm_serve", HERE, "export.triton_deployment.data_type=bf16"),
            "data_type=bf16 with weights in fp32",
        ),
        (LLAMA, ("deployment.engine=vllm_triton",), "Triton's vLLM backend is in NVIDIA's container alone"),
        (
            LLAMA,
            ("deployment.engine=vllm", "export.model.random_weights=true"),
            "random_weights=true with deployment.engine=vllm",
        ),
        (LLAMA, (FP8,), "quantization=fp8 with export.model.format=fastertransformer, which has"),
        (
            LLAMA,
            ("export.model.quantization=int4", "export.model.format=huggingface"),
            "export.model.quantization=int4 with deployment.engine=slipway, which does not read such a directory",
        ),
        (
            LLAMA,
            (FP8, "export.model.format=huggingface", "export.triton_deployment.int8_mode=true"),
            "int8_mode=true with export.model.quantization=fp8",
        ),
        (
            LLAMA,
            (AT_LOAD, FP8, "export.model.format=huggingface"),
            "export.triton_deployment.quantization=fp8 with export.model.quantization=fp8",
        ),
        (LLAMA, (AT_LOAD, "export.triton_deployment.int8_mode=true"), "quantization=fp8 with export.triton_deployment"),
        (LLAMA, (AT_LOAD, "export.model.format=fastertransformer"), "quantization=fp8 with FasterTransformer's shards"),
        (LLAMA, (AT_LOAD, "deployment.engine=vllm", HERE), "export.triton_deployment.quantization is given with"),
        (LLAMA, (FP8, "deployment.engine=trtllm_serve", HERE), "export.model.quantization=fp8 with deployment.engine="),
        (
            LLAMA,
            (f"{FP8}_block", "deployment.engine=vllm", HERE, "export.model.tensor_model_parallel_size=4"),
            "tensor_model_parallel_size=4 divides what export.model.quantization=fp8_block has in common",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    tmp_path: Path, checkpoint: Path, overrides: tuple[str, ...], words: str
) -> None:
    error = refusal(tmp_path, checkpoint, *overrides)
    assert words in error.problem and error.hint


@pytest.mark.parametrize("more", [(), (AT_LOAD,)])
def test_what_asks_for_a_directory_is_what_is_to_be_left_out(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Where nothing is said of the format, FP8 at load makes it Hugging Face's."""
    found = refusal(tmp_path, GPT, "export.model.format=huggingface", *more)
    key = more[0].partition("=")[0] if more else "export.model.format"
    assert "model_type is 'gpt2'" in found.problem and f"leave {key} out" in found.hint


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm_serve", "vllm_triton"])
def test_an_encoder_decoder_is_refused(tmp_path: Path, engine: str) -> None:
    results = tmp_path / "results"
    results.mkdir()
    huggingface_t5().save_pretrained(tmp_path / "t5")
    error = refusal(results, tmp_path / "t5", f"deployment.engine={engine}", HERE, "stages=[export]", *SAME)
    assert "does not serve T5ForConditionalGeneration" in error.problem


TP, PP = "export.model.tensor_model_parallel_size", "export.triton_deployment.pipeline_model_parallel_size"
VLLM, SGLANG, TRTLLM = (f"deployment.engine={engine}" for engine in ("vllm", "sglang", "trtllm_serve"))
COPIES, RAY = "deployment.data_parallel_size", "deployment.distributed_executor=ray"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((VLLM, f"{TP}=4", f"{PP}=3"), "TP 4 x PP 3 = 12 GPUs do not fill nodes of 8 GPUs"),
        ((VLLM, f"{TP}=4", f"{COPIES}=3"), "TP 4 x PP 1 x DP 3 = 12 GPUs do not fill nodes"),
        ((VLLM, f"{TP}=4", "deployment.nodes=3"), "deployment.nodes=3 does not divide TP 4 x PP 1 = 4 ranks"),
        ((VLLM, f"{TP}=8", f"{PP}=4", "deployment.nodes=2"), "= 32 GPUs are 16 on a node, which has 8"),
        ((VLLM, f"{TP}=8", f"{COPIES}=3", f"{PP}=2", "deployment.nodes=6", "cluster.nodes=5"), "but there are 5"),
        ((VLLM, f"{TP}=4", f"{COPIES}=3", "deployment.nodes=2"), "a node has whole copies, or a copy whole nodes"),
        ((SGLANG, f"{TP}=8", f"{COPIES}=2"), "data_parallel_size=2 on 2 nodes: SGLang has copies of a model on one"),
        (
            (SGLANG, f"{TP}=8", f"{PP}=3", "deployment.nodes=4"),
            "size=3 on 4 nodes: SGLang gives a node",
        ),
        ((TRTLLM, *SAME, f"{COPIES}=2"), "with deployment.engine=trtllm_serve, which serves one copy"),
        (
            (TRTLLM, *SAME, f"{TP}=8", f"{PP}=2", "deployment.restart=1"),
            "that MPI has joined cannot be started",
        ),
        (
            (VLLM, f"{TP}=8", f"{PP}=2", "deployment.engine_args=['--node_rank=1']"),
            "--node_rank=1 is given",
        ),
        ((SGLANG, f"{TP}=8", f"{PP}=2", "deployment.command='sglang --nnodes 2'"), "--nnodes is given"),
        (("deployment.engine=vllm_triton", "stages=[export]", f"{TP}=8", f"{PP}=2"), "is one process, on one node"),
        ((SGLANG, f"{TP}=8", f"{PP}=2", RAY), "=ray with deployment.engine=sglang, whose processes are joined here"),
        ((VLLM, RAY), "deployment.distributed_executor=ray on one node: it joins several"),
        ((VLLM, RAY, f"{TP}=8", f"{COPIES}=2"), "=ray with deployment.data_parallel_size=2: copies of a model over"),
        ((RAY,), "deployment.distributed_executor=ray with deployment.engine=slipway"),
        (("deployment.nodes=2",), "deployment.nodes=2 with deployment.engine=slipway"),
        ((f"{COPIES}=2",), "deployment.data_parallel_size=2 with deployment.engine=slipway"),
        (("deployment.expert_parallel=true",), "deployment.expert_parallel=True with deployment.engine=slipway"),
    ],
)
def test_nodes_and_copies_that_an_engine_cannot_be_spread_over_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    error = refusal(tmp_path, LLAMA, *overrides, cluster="bcm")
    assert words in error.problem and error.hint


def test_what_mpi_joins_is_not_started_on_this_host(tmp_path: Path) -> None:
    where = ("cluster.gpus_per_node=8", "cluster.nodes=2", HERE)
    error = refusal(tmp_path, LLAMA, TRTLLM, *SAME, f"{TP}=8", f"{PP}=2", *where)
    assert "TensorRT-LLM joins its processes through MPI, which nothing there starts" in error.problem


def test_a_program_is_not_looked_for_where_it_runs_elsewhere(tmp_path: Path) -> None:
    """On a login node nothing says what compute nodes or containers have."""
    given = [f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={LLAMA}", "cluster_type=bcm", STAGES]
    config = compose([*given, "deployment.engine=vllm", "deployment.command=/only/on/nodes/vllm serve"])
    paths = RunPaths.of(config)
    checks.check(config, paths, ordered_stages(config, paths))
    assert command_of(config) == ("/only/on/nodes/vllm", "serve")


def test_the_directory_is_made_once_for_all_engines(tmp_path: Path) -> None:
    """The conversion's plan is the same word for word, so the second engine finds it current."""
    given = [f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={LLAMA}", STAGES]
    prints, outputs = set(), set()
    for engine in ("vllm", "sglang", "trtllm_serve", "vllm_triton"):
        config = compose([*given, f"deployment.engine={engine}"])
        paths = RunPaths.of(config)
        convert, *_ = plan_stages(config, paths, ordered_stages(config, paths))
        assert convert.stage == "convert"
        prints.add(convert.fingerprint)
        outputs.add(os.fspath(convert.output))
    assert len(prints) == 1 and outputs == {f"{tmp_path}/gpt3_demo/hf_fp16"}
