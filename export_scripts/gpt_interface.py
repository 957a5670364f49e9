"""The tensors of FasterTransformer's GPT behind Triton, and the model configurations made of them.

Names, types, shapes and options are those of FasterTransformer backend's GPT guide and of its published
repository ``all_models/gpt``: a client of one is a client of the other. What differs, and why:

- ``is_return_context_cum_log_probs`` (optional) is an input too. FasterTransformer's ParallelGpt reads it;
  with it ``cum_log_probs`` covers the prompt, which is what scoring a text needs.
- ``max_queue_delay_microseconds`` defaults to 0, so that a lone request never waits for company.
- The dictionaries of bad and stop words are optional in the ensemble.
- ``postprocessing`` also takes ``SEQUENCE_LENGTH``, so that the text ends where the generation ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from export_scripts.names import ENGINE, ENSEMBLE, POSTPROCESSING, PREPROCESSING
from export_scripts.pbtxt import ModelSpec, Step, TensorSpec


@dataclass(frozen=True)
class Serving:
    """What the configurations depend on.

    Attributes:
        tensor_para_size, pipeline_para_size: parallelism of the served model.
        data_type: fp32, fp16 or bf16, of the computation.
        int8_mode: 1: weight-only int8.
        enable_custom_all_reduce: 1: FasterTransformer's own all-reduce.
        model_checkpoint_path: where the shards are; relative to the model's directory, or absolute.
        max_batch_size: largest batch.
        max_queue_delay_us: microseconds a request may wait to fill a batch.
        decoupled: stream each token as it is made.
        start_id, end_id: of the vocabulary; pre- and postprocessing need them.
    """

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


def _per_request(name: str, data_type: str) -> TensorSpec:
    return TensorSpec(name, data_type, scalar=True, optional=True)


_SAMPLING = (
    _per_request("runtime_top_k", "UINT32"),
    _per_request("runtime_top_p", "FP32"),
    _per_request("beam_search_diversity_rate", "FP32"),
    _per_request("temperature", "FP32"),
    _per_request("len_penalty", "FP32"),
    _per_request("repetition_penalty", "FP32"),
    _per_request("random_seed", "UINT64"),
    _per_request("is_return_log_probs", "BOOL"),
    _per_request("is_return_context_cum_log_probs", "BOOL"),
    _per_request("is_return_context_embeddings", "BOOL"),
    _per_request("beam_width", "UINT32"),
    _per_request("start_id", "UINT32"),
    _per_request("end_id", "UINT32"),
)
_WORD_LISTS = (
    TensorSpec("stop_words_list", "INT32", (2, -1), optional=True),
    TensorSpec("bad_words_list", "INT32", (2, -1), optional=True),
)
_PROMPT_LEARNING = (
    _per_request("prompt_learning_task_name_ids", "UINT32"),
    TensorSpec("request_prompt_embedding", "FP16", (-1, -1), optional=True),
    _per_request("request_prompt_lengths", "UINT32"),
    _per_request("request_prompt_type", "UINT32"),
)
_FACTUAL_NUCLEUS = (
    _per_request("top_p_decay", "FP32"),
    _per_request("top_p_min", "FP32"),
    _per_request("top_p_reset_ids", "UINT32"),
)

ENGINE_INPUTS = (
    TensorSpec("input_ids", "UINT32", (-1,), ragged=True),
    TensorSpec("input_lengths", "UINT32", scalar=True),
    TensorSpec("request_output_len", "UINT32", (-1,)),
    *_SAMPLING,
    *_WORD_LISTS,
    *_PROMPT_LEARNING,
    *_FACTUAL_NUCLEUS,
)
ENGINE_OUTPUTS = (
    TensorSpec("output_ids", "UINT32", (-1, -1)),
    TensorSpec("sequence_length", "UINT32", (-1,)),
    TensorSpec("response_input_lengths", "INT32", (-1,)),
    TensorSpec("cum_log_probs", "FP32", (-1,)),
    TensorSpec("output_log_probs", "FP32", (-1, -1)),
    TensorSpec("context_embeddings", "FP32", (-1, -1)),
)
_ENSEMBLE_OUTPUTS = ("sequence_length", "cum_log_probs", "output_log_probs")
_PREPROCESSED = {
    "input_ids": "_INPUT_ID",
    "input_lengths": "_REQUEST_INPUT_LEN",
    "request_output_len": "_REQUEST_OUTPUT_LEN",
    "stop_words_list": "_STOP_WORDS_IDS",
    "bad_words_list": "_BAD_WORDS_IDS",
}


def engine(serving: Serving) -> ModelSpec:
    """Configure ``fastertransformer``: token ids in, token ids out."""
    return ModelSpec(
        name=ENGINE,
        backend=ENGINE,
        default_model_filename=f"{serving.tensor_para_size}-gpu",
        max_batch_size=serving.max_batch_size,
        decoupled=serving.decoupled,
        max_queue_delay_us=serving.max_queue_delay_us,
        shape_inputs=("input_ids",),
        inputs=ENGINE_INPUTS,
        outputs=ENGINE_OUTPUTS,
        parameters={
            "tensor_para_size": str(serving.tensor_para_size),
            "pipeline_para_size": str(serving.pipeline_para_size),
            "data_type": serving.data_type,
            "model_type": "GPT",
            "model_checkpoint_path": serving.model_checkpoint_path,
            "int8_mode": str(serving.int8_mode),
            "enable_custom_all_reduce": str(serving.enable_custom_all_reduce),
        },
    )


def preprocessing(serving: Serving) -> ModelSpec:
    """Configure ``preprocessing``: text in, token ids out."""
    return ModelSpec(
        name=PREPROCESSING,
        backend="python",
        max_batch_size=serving.max_batch_size,
        inputs=(
            TensorSpec("QUERY", "STRING", (-1,)),
            TensorSpec("BAD_WORDS_DICT", "STRING", (-1,), optional=True),
            TensorSpec("STOP_WORDS_DICT", "STRING", (-1,), optional=True),
            TensorSpec("REQUEST_OUTPUT_LEN", "UINT32", (-1,)),
        ),
        outputs=(
            TensorSpec("INPUT_ID", "UINT32", (-1,)),
            TensorSpec("REQUEST_INPUT_LEN", "UINT32"),
            TensorSpec("BAD_WORDS_IDS", "INT32", (2, -1)),
            TensorSpec("STOP_WORDS_IDS", "INT32", (2, -1)),
            TensorSpec("REQUEST_OUTPUT_LEN", "UINT32", (-1,)),
            TensorSpec("PROMPT_LEARNING_TASK_NAME_IDS", "UINT32"),
        ),
        parameters=_vocabulary(serving),
    )


def postprocessing(serving: Serving) -> ModelSpec:
    """Configure ``postprocessing``: token ids in, text out."""
    return ModelSpec(
        name=POSTPROCESSING,
        backend="python",
        max_batch_size=serving.max_batch_size,
        inputs=(
            TensorSpec("TOKENS_BATCH", "UINT32", (-1, -1)),
            TensorSpec("RESPONSE_INPUT_LENGTHS", "INT32", (-1,)),
            TensorSpec("SEQUENCE_LENGTH", "UINT32", (-1,), optional=True),
        ),
        outputs=(TensorSpec("OUTPUT", "STRING", (-1, -1)),),
        parameters=_vocabulary(serving),
    )


def ensemble(serving: Serving) -> ModelSpec:
    """Configure ``ensemble``: text in, text out, through the three other models."""
    optional = (*_SAMPLING, *_PROMPT_LEARNING, *_FACTUAL_NUCLEUS)
    passed_on = [tensor for tensor in optional if tensor.name != "is_return_context_embeddings"]
    outputs = {tensor.name: tensor for tensor in ENGINE_OUTPUTS}
    return ModelSpec(
        name=ENSEMBLE,
        max_batch_size=serving.max_batch_size,
        inputs=(
            TensorSpec("INPUT_0", "STRING", (-1,)),
            TensorSpec("INPUT_1", "UINT32", (-1,)),
            TensorSpec("INPUT_2", "STRING", (-1,), optional=True),
            TensorSpec("INPUT_3", "STRING", (-1,), optional=True),
            *(replace(tensor, scalar=False) for tensor in passed_on),
        ),
        outputs=(TensorSpec("OUTPUT_0", "STRING", (-1, -1)), *(outputs[name] for name in _ENSEMBLE_OUTPUTS)),
        steps=_ensemble_steps(passed_on),
    )


def _ensemble_steps(passed_on: Iterable[TensorSpec]) -> tuple[Step, ...]:
    return (
        Step(
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
        ),
        Step(
            ENGINE,
            inputs={**_PREPROCESSED, **_same_names(passed_on)},
            outputs={
                "output_ids": "_TOKENS_BATCH",
                "response_input_lengths": "_RESPONSE_INPUT_LENGTHS",
                **{name: name for name in _ENSEMBLE_OUTPUTS},
            },
        ),
        Step(
            POSTPROCESSING,
            inputs={
                "TOKENS_BATCH": "_TOKENS_BATCH",
                "RESPONSE_INPUT_LENGTHS": "_RESPONSE_INPUT_LENGTHS",
                "SEQUENCE_LENGTH": "sequence_length",
            },
            outputs={"OUTPUT": "OUTPUT_0"},
        ),
    )


def alias(serving: Serving, name: str) -> ModelSpec:
    """Configure the engine under the name that the model was trained under.

    It is an ensemble of one step that maps every tensor to itself, so the weights are loaded once.
    """
    return ModelSpec(
        name=name,
        max_batch_size=serving.max_batch_size,
        inputs=tuple(replace(tensor, scalar=False, ragged=False) for tensor in ENGINE_INPUTS),
        outputs=ENGINE_OUTPUTS,
        steps=(Step(ENGINE, inputs=_same_names(ENGINE_INPUTS), outputs=_same_names(ENGINE_OUTPUTS)),),
    )


def _same_names(tensors: Iterable[TensorSpec]) -> dict[str, str]:
    return {tensor.name: tensor.name for tensor in tensors}


def _vocabulary(serving: Serving) -> dict[str, str]:
    return {"start_id": str(serving.start_id), "end_id": str(serving.end_id)}
