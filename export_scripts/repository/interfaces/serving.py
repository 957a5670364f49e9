"""What every model configuration is made from, and the parts that all families share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from export_scripts.repository.names import ENGINE, ENSEMBLE, POSTPROCESSING, PREPROCESSING
from export_scripts.repository.pbtxt import ModelSpec, Step, TensorSpec
from ft_format import tensors
from ft_format.families.family import Family
from ft_format.tensors import Tensor
from ft_format.weight_format import KEY, WeightFormat


@dataclass(frozen=True)
class Serving:
    """What the configurations depend on.

    Attributes:
        family: FasterTransformer's model.
        tensor_para_size, pipeline_para_size: parallelism of the served model.
        data_type: fp32, fp16 or bf16, of the computation.
        weights: of the layers' matrices.
        enable_custom_all_reduce: 1: FasterTransformer's own all-reduce.
        model_checkpoint_path: where the shards are; relative to the model's directory, or absolute.
        max_batch_size: largest batch.
        max_queue_delay_us: microseconds a request may wait to fill a batch.
        decoupled: stream each token as it is made.
        start_id, end_id: of the vocabulary; pre- and postprocessing need them.
        max_text_bytes: that a prompt's text may have.
        tokenizer_instances: of preprocessing, which tokenize side by side.
        request_timeout_s: seconds after which the drop-in engine gives up a request; 0: it never does.
        prefill_chunk_tokens: of a step in which the drop-in engine runs a part of a prompt; None: as it chooses.
        kv_cache_dtype, quantization, fp8_activations: see ExportArguments; None: nothing is said of it.
        speculation, max_speculative_tokens: see ExportArguments; None: nothing is said of it.
        max_adapters, max_adapter_rank: room for LoRA adapters in the drop-in engine; None: for those of the checkpoint.
        text_deltas: whether the ensemble has OUTPUT_DELTA, the text that an answer adds to the one before.
    """

    family: Family
    tensor_para_size: int
    pipeline_para_size: int
    data_type: str
    weights: WeightFormat
    enable_custom_all_reduce: int
    model_checkpoint_path: str
    max_batch_size: int
    max_queue_delay_us: int
    decoupled: bool
    start_id: int
    end_id: int
    max_text_bytes: int = 0
    tokenizer_instances: int = 1
    text_deltas: bool = False
    request_timeout_s: float = 0.0
    prefill_chunk_tokens: int | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    fp8_activations: int | None = None
    speculation: str | None = None
    max_speculative_tokens: int | None = None
    max_adapters: int | None = None
    max_adapter_rank: int | None = None

    def parameters(self) -> dict[str, str]:
        """Parameters of the engine's model, as FasterTransformer's backend reads them."""
        given = {"request_timeout_s": f"{self.request_timeout_s:g}"} if self.request_timeout_s else {}
        of_numbers = "prefill_chunk_tokens", "kv_cache_dtype", "quantization", "fp8_activations"
        for name in (*of_numbers, "speculation", "max_speculative_tokens", "max_adapters", "max_adapter_rank"):
            if (value := getattr(self, name)) is not None:
                given[name] = str(value)
        return {
            "tensor_para_size": str(self.tensor_para_size),
            "pipeline_para_size": str(self.pipeline_para_size),
            "data_type": self.data_type,
            "model_type": self.family.model_types[0],
            "model_checkpoint_path": self.model_checkpoint_path,
            KEY: str(self.weights.mode),
            "enable_custom_all_reduce": str(self.enable_custom_all_reduce),
            **given,
        }

    def engine(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> ModelSpec:
        """Configure ``fastertransformer``: token ids in, token ids out."""
        return ModelSpec(
            name=ENGINE,
            backend=ENGINE,
            default_model_filename=self.model_checkpoint_path.rpartition("/")[2],
            max_batch_size=self.max_batch_size,
            decoupled=self.decoupled,
            max_queue_delay_us=self.max_queue_delay_us,
            shape_inputs=("input_ids",),
            inputs=inputs,
            outputs=outputs,
            parameters=self.parameters(),
        )

    def reading(self) -> dict[str, str]:
        """Parameters of the model that tokenizes."""
        return {**self.vocabulary(), "max_text_bytes": str(self.max_text_bytes)}

    def vocabulary(self) -> dict[str, str]:
        """Parameters of the models that know text."""
        return {"start_id": str(self.start_id), "end_id": str(self.end_id)}


_TRITON_TYPES = {
    **{tensors.BOOL: "BOOL", tensors.FLOAT: "FP32", tensors.HALF: "FP16", tensors.TEXT: "STRING"},
    **{tensors.INT: "INT32", tensors.UINT: "UINT32", tensors.SEED: "UINT64"},
}


def declare(tensor: Tensor) -> TensorSpec:
    """Declare an output of the engine."""
    return TensorSpec(tensor.name, _TRITON_TYPES[tensor.kind], tensor.shape or (1,))


def declare_inputs(inputs: Iterable[Tensor]) -> tuple[TensorSpec, ...]:
    """Declare inputs of the engine."""
    return tuple(
        replace(declare(each), scalar=not each.shape, optional=each.is_optional, ragged=each.is_ragged)
        for each in inputs
    )


def declare_outputs(family: str) -> tuple[TensorSpec, ...]:
    """Declare what the engine gives for a family, without what only some exports ask for."""
    known = (each for each in tensors.OUTPUTS if family in each.families and each is not tensors.TEXT_START)
    return tuple(map(declare, known))


_READING = Step(
    PREPROCESSING,
    inputs={
        "QUERY": "INPUT_0",
        "REQUEST_OUTPUT_LEN": "INPUT_1",
        "BAD_WORDS_DICT": "INPUT_2",
        "STOP_WORDS_DICT": "INPUT_3",
    },
    outputs={
        "INPUT_ID": "_INPUT_ID",
        "BAD_WORDS_IDS": "_BAD_WORDS_IDS",
        "STOP_WORDS_IDS": "_STOP_WORDS_IDS",
        "REQUEST_INPUT_LEN": "_REQUEST_INPUT_LEN",
        "REQUEST_OUTPUT_LEN": "_REQUEST_OUTPUT_LEN",
    },
)
"""An ensemble's first step."""


def preprocessing(serving: Serving, length: tuple[int, ...], *outputs: TensorSpec, **more: str) -> ModelSpec:
    """Configure ``preprocessing``: text in, token ids out.

    Args:
        serving: what it depends on.
        length: shape of the numbers of tokens to generate.
        outputs: further ones.
        more: parameters.
    """
    return ModelSpec(
        name=PREPROCESSING,
        backend="python",
        max_batch_size=serving.max_batch_size,
        inputs=(
            TensorSpec("QUERY", "STRING", (-1,)),
            TensorSpec("BAD_WORDS_DICT", "STRING", (-1,), optional=True),
            TensorSpec("STOP_WORDS_DICT", "STRING", (-1,), optional=True),
            TensorSpec("REQUEST_OUTPUT_LEN", "UINT32", length),
        ),
        outputs=(
            TensorSpec("INPUT_ID", "UINT32", (-1,)),
            TensorSpec("REQUEST_INPUT_LEN", "UINT32"),
            TensorSpec("BAD_WORDS_IDS", "INT32", (2, -1)),
            TensorSpec("STOP_WORDS_IDS", "INT32", (2, -1)),
            TensorSpec("REQUEST_OUTPUT_LEN", "UINT32", length),
            *outputs,
        ),
        parameters={**serving.reading(), **more},
        instances=serving.tokenizer_instances,
    )


def postprocessing(serving: Serving, data_type: str, *inputs: TensorSpec) -> ModelSpec:
    """Configure ``postprocessing``: token ids of a type in, text out."""
    spec = ModelSpec(
        name=POSTPROCESSING,
        backend="python",
        max_batch_size=serving.max_batch_size,
        inputs=(
            TensorSpec("TOKENS_BATCH", data_type, (-1, -1)),
            *inputs,
            TensorSpec("SEQUENCE_LENGTH", data_type, (-1,), optional=True),
        ),
        outputs=(TensorSpec("OUTPUT", "STRING", (-1, -1)),),
        parameters=serving.vocabulary(),
    )
    return with_deltas(serving, spec)


def ensemble(
    serving: Serving,
    length: tuple[int, ...],
    passed_on: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    *steps: Step,
) -> ModelSpec:
    """Configure ``ensemble``: text in, text out, through the three other models.

    Args:
        serving: what it depends on.
        length: shape of the number of tokens to generate.
        passed_on: inputs of the engine that a client of the ensemble may give.
        outputs: of the engine that the client gets.
        steps: behind the first.
    """
    spec = ModelSpec(
        name=ENSEMBLE,
        max_batch_size=serving.max_batch_size,
        inputs=(
            TensorSpec("INPUT_0", "STRING", (-1,)),
            TensorSpec("INPUT_1", "UINT32", length),
            TensorSpec("INPUT_2", "STRING", (-1,), optional=True),
            TensorSpec("INPUT_3", "STRING", (-1,), optional=True),
            *(replace(tensor, scalar=False, ragged=False) for tensor in passed_on),
        ),
        outputs=(TensorSpec("OUTPUT_0", "STRING", (-1, -1)), *outputs),
        steps=(_READING, *steps),
    )
    return with_deltas(serving, spec)


def with_deltas(serving: Serving, spec: ModelSpec) -> ModelSpec:
    """Add what tells the text that an answer adds, where the export asks for it."""
    if not serving.text_deltas:
        return spec
    if spec.name == ENGINE:
        return replace(spec, outputs=(*spec.outputs, declare(tensors.TEXT_START)))
    delta = TensorSpec("OUTPUT_DELTA", "STRING", (-1, -1))
    if not spec.steps:
        start = TensorSpec("TEXT_START", "INT32", (-1,), optional=True)
        return replace(spec, inputs=(*spec.inputs, start), outputs=(*spec.outputs, delta))
    *others, generating, writing = spec.steps
    generating = replace(generating, outputs={**generating.outputs, "text_start": "_TEXT_START"})
    writing = replace(
        writing,
        inputs={**writing.inputs, "TEXT_START": "_TEXT_START"},
        outputs={**writing.outputs, "OUTPUT_DELTA": "OUTPUT_DELTA"},
    )
    return replace(spec, outputs=(*spec.outputs, delta), steps=(*others, generating, writing))


def can_be_aliased(engine: ModelSpec) -> bool:
    """Whether an ensemble can stand for the engine: its names are one space, where T5's two sequence_length collide."""
    return not {tensor.name for tensor in engine.inputs} & {tensor.name for tensor in engine.outputs}


def alias(engine: ModelSpec, name: str) -> ModelSpec:
    """Configure the engine under the name that the model was trained under.

    It is an ensemble of one step that maps every tensor to itself, so the weights are loaded once.
    """
    inputs, outputs = engine.inputs, engine.outputs
    return ModelSpec(
        name=name,
        max_batch_size=engine.max_batch_size,
        inputs=tuple(replace(tensor, scalar=False, ragged=False) for tensor in inputs),
        outputs=outputs,
        steps=(Step(ENGINE, inputs=same_names(inputs), outputs=same_names(outputs)),),
    )


def same_names(tensors: Iterable[TensorSpec]) -> dict[str, str]:
    """Map every tensor to itself."""
    return {tensor.name: tensor.name for tensor in tensors}
