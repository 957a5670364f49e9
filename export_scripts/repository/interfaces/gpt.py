"""The tensors of FasterTransformer's GPT, GPT-J, GPT-NeoX and Llama behind Triton, and the configurations made of them.

Names, types, shapes and options are those of FasterTransformer backend's GPT guide and of its published
repository ``all_models/gpt``: a client of one is a client of the other. What differs, and why:

- ``is_return_context_cum_log_probs`` (optional) is an input too. FasterTransformer's ParallelGpt reads it;
  with it ``cum_log_probs`` covers the prompt.
- ``is_return_context_log_probs`` (optional), ``context_log_probs`` and ``context_argmax_ids`` are the drop-in engine's
  alone: they score every token of a text at once. FasterTransformer ignores the first and never gives the others.
- What the OpenAI API has beyond FasterTransformer (``serving.BEYOND_INPUTS`` and ``BEYOND_OUTPUTS``) comes last, is
  optional, and is the drop-in engine's alone too.
- ``presence_penalty`` and ``min_length`` (optional) are inputs too: ParallelGpt reads both, its guide leaves them out.
- With ``text_deltas`` the engine gives ``text_start`` and the ensemble ``OUTPUT_DELTA``; that only the drop-in serves.
- ``max_queue_delay_microseconds`` defaults to 0, so that a lone request never waits for company.
- The dictionaries of bad and stop words are optional in the ensemble.
- ``postprocessing`` also takes ``SEQUENCE_LENGTH``, so that the text ends where the generation ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from export_scripts.repository.interfaces.serving import (
    BEYOND_INPUTS,
    BEYOND_OUTPUTS,
    CONTEXT_SCORE_OUTPUTS,
    CONTEXT_SCORES,
    FACTUAL_NUCLEUS,
    READING,
    SAMPLING,
    WORD_LISTS,
    Serving,
    per_request,
    same_names,
    with_deltas,
)
from export_scripts.repository.names import ENGINE, ENSEMBLE, POSTPROCESSING, PREPROCESSING
from export_scripts.repository.pbtxt import ModelSpec, Step, TensorSpec

_CONTEXT_EMBEDDINGS = per_request("is_return_context_embeddings", "BOOL")
_PROMPT_LEARNING = (
    per_request("prompt_learning_task_name_ids", "UINT32"),
    TensorSpec("request_prompt_embedding", "FP16", (-1, -1), optional=True),
    per_request("request_prompt_lengths", "UINT32"),
    per_request("request_prompt_type", "UINT32"),
)
_GPT_ALONE = ("is_return_context_embeddings", "response_input_lengths", "context_embeddings")
"""What FasterTransformer's GPT-J, GPT-NeoX and Llama neither read nor give."""

ENGINE_INPUTS = (
    TensorSpec("input_ids", "UINT32", (-1,), ragged=True),
    TensorSpec("input_lengths", "UINT32", scalar=True),
    TensorSpec("request_output_len", "UINT32", (-1,)),
    *SAMPLING,
    *CONTEXT_SCORES,
    _CONTEXT_EMBEDDINGS,
    *WORD_LISTS,
    *_PROMPT_LEARNING,
    *FACTUAL_NUCLEUS,
    *BEYOND_INPUTS,
)
ENGINE_OUTPUTS = (
    TensorSpec("output_ids", "UINT32", (-1, -1)),
    TensorSpec("sequence_length", "UINT32", (-1,)),
    TensorSpec("response_input_lengths", "INT32", (-1,)),
    TensorSpec("cum_log_probs", "FP32", (-1,)),
    TensorSpec("output_log_probs", "FP32", (-1, -1)),
    TensorSpec("context_embeddings", "FP32", (-1, -1)),
    *CONTEXT_SCORE_OUTPUTS,
    *BEYOND_OUTPUTS,
)
_ENSEMBLE_OUTPUTS = (
    *("sequence_length", "cum_log_probs", "output_log_probs"),
    *("context_log_probs", "context_argmax_ids"),
    *(tensor.name for tensor in BEYOND_OUTPUTS),
)
_PREPROCESSED = {
    "input_ids": "_INPUT_ID",
    "input_lengths": "_REQUEST_INPUT_LEN",
    "request_output_len": "_REQUEST_OUTPUT_LEN",
    "stop_words_list": "_STOP_WORDS_IDS",
    "bad_words_list": "_BAD_WORDS_IDS",
}


def engine(serving: Serving) -> ModelSpec:
    """Configure ``fastertransformer``: token ids in, token ids out."""
    spec = serving.engine(_known(serving, ENGINE_INPUTS), _known(serving, ENGINE_OUTPUTS))
    return with_deltas(serving, spec)


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
        parameters=serving.reading(),
        instances=serving.tokenizer_instances,
    )


def postprocessing(serving: Serving) -> ModelSpec:
    """Configure ``postprocessing``: token ids in, text out."""
    spec = ModelSpec(
        name=POSTPROCESSING,
        backend="python",
        max_batch_size=serving.max_batch_size,
        inputs=(
            TensorSpec("TOKENS_BATCH", "UINT32", (-1, -1)),
            TensorSpec("RESPONSE_INPUT_LENGTHS", "INT32", (-1,), optional=serving.family != "gpt"),
            TensorSpec("SEQUENCE_LENGTH", "UINT32", (-1,), optional=True),
        ),
        outputs=(TensorSpec("OUTPUT", "STRING", (-1, -1)),),
        parameters=serving.vocabulary(),
    )
    return with_deltas(serving, spec)


def ensemble(serving: Serving) -> ModelSpec:
    """Configure ``ensemble``: text in, text out, through the three other models."""
    passed_on = _known(serving, (*SAMPLING, *CONTEXT_SCORES, *_PROMPT_LEARNING, *FACTUAL_NUCLEUS, *BEYOND_INPUTS))
    given = {tensor.name: tensor for tensor in _known(serving, ENGINE_OUTPUTS)}
    outputs = {name: given[name] for name in _ENSEMBLE_OUTPUTS if name in given}
    spec = ModelSpec(
        name=ENSEMBLE,
        max_batch_size=serving.max_batch_size,
        inputs=(
            TensorSpec("INPUT_0", "STRING", (-1,)),
            TensorSpec("INPUT_1", "UINT32", (-1,)),
            TensorSpec("INPUT_2", "STRING", (-1,), optional=True),
            TensorSpec("INPUT_3", "STRING", (-1,), optional=True),
            *(replace(tensor, scalar=False) for tensor in passed_on),
        ),
        outputs=(TensorSpec("OUTPUT_0", "STRING", (-1, -1)), *outputs.values()),
        steps=_ensemble_steps(serving, passed_on, outputs),
    )
    return with_deltas(serving, spec)


def _ensemble_steps(serving: Serving, passed_on: Iterable[TensorSpec], given: Iterable[str]) -> tuple[Step, ...]:
    return (
        READING,
        Step(
            ENGINE,
            inputs={**_PREPROCESSED, **same_names(passed_on)},
            outputs={
                "output_ids": "_TOKENS_BATCH",
                **({"response_input_lengths": "_RESPONSE_INPUT_LENGTHS"} if serving.family == "gpt" else {}),
                **{name: name for name in given},
            },
        ),
        Step(
            POSTPROCESSING,
            inputs={
                "TOKENS_BATCH": "_TOKENS_BATCH",
                **({"RESPONSE_INPUT_LENGTHS": "_RESPONSE_INPUT_LENGTHS"} if serving.family == "gpt" else {}),
                "SEQUENCE_LENGTH": "sequence_length",
            },
            outputs={"OUTPUT": "OUTPUT_0"},
        ),
    )


def _known(serving: Serving, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Leave out what the family does not know."""
    unknown = () if serving.family == "gpt" else _GPT_ALONE
    return tuple(tensor for tensor in tensors if tensor.name not in unknown)
