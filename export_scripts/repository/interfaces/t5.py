"""The tensors of FasterTransformer's T5 behind Triton, and the model configurations made of them.

Names, types, shapes and options of ``fastertransformer`` are those of FasterTransformer backend's T5 guide and of its
published repository ``all_models/t5``. That has no models for text; ours have the names that GPT's have, and:

- ``decoder_input_ids``, ``decoder_input_lengths`` and what GPT's ``is_return_context_log_probs`` asks of them are the
  drop-in engine's alone, and optional: tokens that the decoder begins with, behind its start token.
- What the OpenAI API has beyond FasterTransformer is as for GPT.
- ``preprocessing`` ends each text with the vocabulary's end token, as T5 was trained.
- ``OUTPUT_0`` is the decoder's text; the input is not part of it.
- ``decoupled`` and dynamic batching are as for GPT.
"""

from __future__ import annotations

from export_scripts.repository.interfaces import serving as serve
from export_scripts.repository.interfaces.serving import (
    Serving,
    declare_inputs,
    declare_outputs,
    same_names,
    with_deltas,
)
from export_scripts.repository.names import ENGINE, POSTPROCESSING
from export_scripts.repository.pbtxt import ModelSpec, Step
from ft_format import tensors

_REQUIRED = ("input_ids", "sequence_length", "max_output_len")
_PROMPTS = ("prompt_learning_task_name_ids", "request_prompt_lengths", "request_prompt_embedding")
_TASKS = declare_inputs((*(tensors.INPUTS[name] for name in _PROMPTS), tensors.IA3_TASKS))
_LATER = declare_inputs((*tensors.NUCLEUS, *tensors.DECODER_INPUTS, *tensors.CONTEXT_SCORES, *tensors.BEYOND_INPUTS))
_SAMPLING, _WORDS = declare_inputs(tensors.SAMPLING), declare_inputs(tensors.WORD_LISTS)
_PASSED_ON = (*_SAMPLING, *_TASKS, *_LATER)
_INPUTS = (*declare_inputs(tensors.INPUTS[name] for name in _REQUIRED), *_SAMPLING, *_WORDS, *_TASKS, *_LATER)
_OUTPUTS = declare_outputs("t5")
_TEXT_OUTPUTS = _OUTPUTS[1:]


def engine(serving: Serving) -> ModelSpec:
    """Configure ``fastertransformer``: token ids in, token ids out."""
    return with_deltas(serving, serving.engine(_INPUTS, _OUTPUTS))


def preprocessing(serving: Serving) -> ModelSpec:
    """Configure ``preprocessing``: text in, token ids out."""
    return serve.preprocessing(serving, (1,), ends_inputs="1")


def postprocessing(serving: Serving) -> ModelSpec:
    """Configure ``postprocessing``: token ids in, text out."""
    return serve.postprocessing(serving, "INT32")


def ensemble(serving: Serving) -> ModelSpec:
    """Configure ``ensemble``: text in, text out, through the three other models."""
    return serve.ensemble(serving, (1,), _PASSED_ON, _TEXT_OUTPUTS, _GENERATE, _WRITE)


_GENERATE = Step(
    ENGINE,
    inputs={
        "input_ids": "_INPUT_ID",
        "sequence_length": "_REQUEST_INPUT_LEN",
        "max_output_len": "_REQUEST_OUTPUT_LEN",
        "bad_words_list": "_BAD_WORDS_IDS",
        "stop_words_list": "_STOP_WORDS_IDS",
        **same_names(_PASSED_ON),
    },
    outputs={"output_ids": "_TOKENS_BATCH", **same_names(_TEXT_OUTPUTS)},
)
_WRITE = Step(
    POSTPROCESSING,
    inputs={"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "sequence_length"},
    outputs={"OUTPUT": "OUTPUT_0"},
)
