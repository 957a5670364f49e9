"""What a key may be out of a fixed set. Standard library only: job hosts know the stages by it."""

from __future__ import annotations

from enum import Enum


class Choice(str, Enum):
    """A configuration value out of a fixed set; renders as its name."""

    def __str__(self) -> str:
        return str(self.value)


class Stage(Choice):
    """What a run can do, in this order."""

    convert = "convert"
    export = "export"
    deploy = "deploy"
    evaluate = "evaluate"
    benchmark = "benchmark"


class ClusterType(Choice):
    """Who starts the jobs."""

    auto = "auto"
    bcm = "bcm"
    bcp = "bcp"
    interactive = "interactive"
    kubernetes = "kubernetes"


class Plans(Choice):
    """What becomes of a run's jobs in place of being started."""

    export = "export"


class DataType(Choice):
    """Of weights on disk (weight_data_type) and of the computation (data_type)."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class Engine(Choice):
    """What serves the model: one of two behind ``backend: "fastertransformer"``, or one that reads Hugging Face's form.

    vllm, sglang and trtllm_serve are programs with an OpenAI API of their own; vllm_triton is vLLM as a backend of
    Triton, for which a model repository is written.
    """

    slipway = "slipway"
    fastertransformer = "fastertransformer"
    vllm = "vllm"
    sglang = "sglang"
    trtllm_serve = "trtllm_serve"
    vllm_triton = "vllm_triton"

    @property
    def reads_shards(self) -> bool:
        """Whether it serves FasterTransformer's shards; the others read a Hugging Face directory."""
        return self in (Engine.slipway, Engine.fastertransformer)

    def reads(self, quantization: Quantization) -> bool:
        """Return whether it reads a directory in that format."""
        if self is Engine.slipway:
            return quantization is not Quantization.int4
        return self in (Engine.vllm, Engine.vllm_triton, Engine.sglang)

    @property
    def is_program(self) -> bool:
        """Whether it is started by a program of its own, without a Triton server."""
        return not self.reads_shards and self is not Engine.vllm_triton


class DistributedExecutor(Choice):
    """What joins an engine's processes of several nodes."""

    mp = "mp"
    ray = "ray"


class TritonApi(Choice):
    """What Triton offers its clients and this project closes to them; see docs/serving.md."""

    shared_memory = "shared_memory"
    model_repository = "model_repository"
    logging = "logging"
    trace = "trace"


class Guard(Choice):
    """When the guard stands in front of Triton; see docs/serving.md."""

    auto = "auto"
    always = "always"
    never = "never"


class Router(Choice):
    """What stands before several servers of one model; see docs/serving.md."""

    haproxy = "haproxy"
    sglang = "sglang"
    vllm = "vllm"


class BenchmarkKind(Choice):
    """How a deployment is measured: one request at a time, or under load."""

    static = "static"
    load = "load"


class ContainerRuntime(Choice):
    """What runs ``container`` in a Slurm job."""

    pyxis = "pyxis"
    docker = "docker"
    apptainer = "apptainer"
    none = "none"


class ModelFormat(Choice):
    """What the checkpoint is converted to: FasterTransformer's shards, which are served, or Hugging Face's form."""

    fastertransformer = "fastertransformer"
    huggingface = "huggingface"


class AdapterFormat(Choice):
    """What a LoRA adapter becomes that is not merged into its model."""

    peft = "peft"


class Manifest(Choice):
    """What serves an exported model in a cluster, for which manifests are written beside it."""

    kserve = "kserve"


class Quantization(Choice):
    """What the matrices of the layers become in a Hugging Face directory; see docs/sources.md."""

    fp8 = "fp8"
    fp8_block = "fp8_block"
    int4 = "int4"
    mxfp4 = "mxfp4"


class ModelType(Choice):
    """What the training called its family. The checkpoint says what it is; t5 and mt5 refuse a GPT."""

    gpt3 = "gpt3"
    t5 = "t5"
    mt5 = "mt5"
