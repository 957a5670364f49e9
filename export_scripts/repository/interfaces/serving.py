"""What every model configuration is made from, and the parts that all families share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from export_scripts.repository.names import ENGINE, PREPROCESSING
from export_scripts.repository.pbtxt import ModelSpec, Step, TensorSpec
from ft_format.families import MODEL_TYPE_OF


@dataclass(frozen=True)
class Serving:
    """What the configurations depend on.

    Attributes:
        family: FasterTransformer's model: gpt, gptj, gptneox, llama or t5.
        tensor_para_size, pipeline_para_size: parallelism of the served model.
        data_type: fp32, fp16 or bf16, of the computation.
        int8_mode: 1: weight-only int8.
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
        text_deltas: whether the ensemble has OUTPUT_DELTA, the text that an answer adds to the one before.
    """

    family: str
    tensor_para_size: int
    pipeline_para_size: int
    data_type: str
    int8_mode: int
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

    def parameters(self) -> dict[str, str]:
        """Parameters of the engine's model, as FasterTransformer's backend reads them."""
        given = {"request_timeout_s": f"{self.request_timeout_s:g}"} if self.request_timeout_s else {}
        if self.prefill_chunk_tokens is not None:
            given["prefill_chunk_tokens"] = str(self.prefill_chunk_tokens)
        return {
            "tensor_para_size": str(self.tensor_para_size),
            "pipeline_para_size": str(self.pipeline_para_size),
            "data_type": self.data_type,
            "model_type": MODEL_TYPE_OF[self.family],
            "model_checkpoint_path": self.model_checkpoint_path,
            "int8_mode": str(self.int8_mode),
            "enable_custom_all_reduce": str(self.enable_custom_all_reduce),
            **given,
        }

    def engine(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> ModelSpec:
        """Configure ``fastertransformer``: token ids in, token ids out."""
        return ModelSpec(
            name=ENGINE,
            backend=ENGINE,
            default_model_filename=f"{self.tensor_para_size}-gpu",
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


def per_request(name: str, data_type: str) -> TensorSpec:
    """Describe an optional tensor of one value a request."""
    return TensorSpec(name, data_type, scalar=True, optional=True)


SAMPLING = (
    per_request("runtime_top_k", "UINT32"),
    per_request("runtime_top_p", "FP32"),
    per_request("beam_search_diversity_rate", "FP32"),
    per_request("temperature", "FP32"),
    per_request("len_penalty", "FP32"),
    per_request("repetition_penalty", "FP32"),
    per_request("presence_penalty", "FP32"),
    per_request("min_length", "INT32"),
    per_request("random_seed", "UINT64"),
    per_request("is_return_log_probs", "BOOL"),
    per_request("beam_width", "UINT32"),
    per_request("start_id", "UINT32"),
    per_request("end_id", "UINT32"),
)
CONTEXT_SCORES = (
    per_request("is_return_context_cum_log_probs", "BOOL"),
    per_request("is_return_context_log_probs", "BOOL"),
)
CONTEXT_SCORE_OUTPUTS = (
    TensorSpec("context_log_probs", "FP32", (-1,)),
    TensorSpec("context_argmax_ids", "UINT32", (-1,)),
)
BEYOND_INPUTS = (
    per_request("frequency_penalty", "FP32"),
    per_request("output_presence_penalty", "FP32"),
    per_request("min_p", "FP32"),
    TensorSpec("logit_bias_ids", "INT32", (-1,), optional=True),
    TensorSpec("logit_bias_values", "FP32", (-1,), optional=True),
    TensorSpec("stop_token_ids", "INT32", (-1,), optional=True),
    per_request("ignore_eos", "BOOL"),
    per_request("is_return_raw_log_probs", "BOOL"),
    per_request("num_top_log_probs", "UINT32"),
    per_request("num_context_top_log_probs", "UINT32"),
    per_request("guided_decoding_guide_type", "STRING"),
    per_request("guided_decoding_guide", "STRING"),
)
"""What the OpenAI API has beyond FasterTransformer, whose backend ignores these tensors; see docs/tensors.md."""
BEYOND_OUTPUTS = (
    TensorSpec("finish_reason", "INT32", (-1,)),
    TensorSpec("output_raw_log_probs", "FP32", (-1, -1)),
    TensorSpec("output_top_log_probs", "FP32", (-1, -1, -1)),
    TensorSpec("output_top_ids", "UINT32", (-1, -1, -1)),
    TensorSpec("context_top_log_probs", "FP32", (-1, -1)),
    TensorSpec("context_top_ids", "UINT32", (-1, -1)),
)
"""What answers them. FasterTransformer's backend gives its own model's tensors alone, whatever is declared."""
WORD_LISTS = (
    TensorSpec("stop_words_list", "INT32", (2, -1), optional=True),
    TensorSpec("bad_words_list", "INT32", (2, -1), optional=True),
)
TEXT_START = TensorSpec("text_start", "INT32", (-1,))
"""Number of tokens before those that the answer before did not have; only the drop-in engine gives it."""
FACTUAL_NUCLEUS = (
    per_request("top_p_decay", "FP32"),
    per_request("top_p_min", "FP32"),
    per_request("top_p_reset_ids", "UINT32"),
)


READING = Step(
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


def with_deltas(serving: Serving, spec: ModelSpec) -> ModelSpec:
    """Add what tells the text that an answer adds, where the export asks for it."""
    if not serving.text_deltas:
        return spec
    if spec.name == ENGINE:
        return replace(spec, outputs=(*spec.outputs, TEXT_START))
    delta = TensorSpec("OUTPUT_DELTA", "STRING", (-1, -1))
    if not spec.steps:
        start = replace(TEXT_START, name="TEXT_START", optional=True)
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
