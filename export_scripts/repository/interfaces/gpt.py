"""The tensors of FasterTransformer's GPT, GPT-J, GPT-NeoX and Llama behind Triton, and the configurations made of them.

Names, types, shapes and options are those of FasterTransformer backend's GPT guide and of its published
repository ``all_models/gpt``: a client of one is a client of the other. What differs, and why:

- ``is_return_context_cum_log_probs`` (optional) is an input too. FasterTransformer's ParallelGpt reads it;
  with it ``cum_log_probs`` covers the prompt.
- ``is_return_context_log_probs`` (optional), ``context_log_probs`` and ``context_argmax_ids`` are the drop-in engine's
  alone: they score every token of a text at once. FasterTransformer ignores the first and never gives the others.
- What the OpenAI API has beyond FasterTransformer comes last, is
  optional, and is the drop-in engine's alone too.
- ``presence_penalty`` and ``min_length`` (optional) are inputs too: ParallelGpt reads both, its guide leaves them out.
- With ``text_deltas`` the engine gives ``text_start`` and the ensemble ``OUTPUT_DELTA``; that only the drop-in serves.
- ``max_queue_delay_microseconds`` defaults to 0, so that a lone request never waits for company.
- The dictionaries of bad and stop words are optional in the ensemble.
- ``postprocessing`` also takes ``SEQUENCE_LENGTH``, so that the text ends where the generation ended.
"""

from __future__ import annotations

from dataclasses import replace

from export_scripts.repository.interfaces import serving as serve
from export_scripts.repository.interfaces.serving import (
    Serving,
    declare_inputs,
    declare_outputs,
    same_names,
    with_deltas,
)
from export_scripts.repository.names import ENGINE, POSTPROCESSING
from export_scripts.repository.pbtxt import ModelSpec, Step, TensorSpec
from ft_format import tensors
from ft_format.families.gpt import FAMILY as GPT

_GPT_ALONE = ("is_return_context_embeddings", "response_input_lengths", "context_embeddings")
"""What FasterTransformer's GPT-J, GPT-NeoX and Llama neither read nor give."""

_OUTPUT_LEN = "request_output_len"
ENGINE_INPUTS = tuple(
    replace(each, dims=(-1,), scalar=False)
    if each.name == _OUTPUT_LEN
    else each  # as in FasterTransformer's repository
    for each in declare_inputs(
        each
        for each in tensors.INPUTS.values()
        if "gpt" in each.families and each not in (*tensors.SESSION, *tensors.CONTROLS)
    )
)
ENGINE_OUTPUTS = declare_outputs("gpt")
_PREPROCESSED = {
    "input_ids": "_INPUT_ID",
    "input_lengths": "_REQUEST_INPUT_LEN",
    "request_output_len": "_REQUEST_OUTPUT_LEN",
    "stop_words_list": "_STOP_WORDS_IDS",
    "bad_words_list": "_BAD_WORDS_IDS",
}
_NOT_PASSED_ON = {*_PREPROCESSED, *_GPT_ALONE, "output_ids"}


def engine(serving: Serving) -> ModelSpec:
    """Configure ``fastertransformer``: token ids in, token ids out."""
    spec = serving.engine(_known(serving, ENGINE_INPUTS), _known(serving, ENGINE_OUTPUTS))
    return with_deltas(serving, spec)


def preprocessing(serving: Serving) -> ModelSpec:
    """Configure ``preprocessing``: text in, token ids out."""
    return serve.preprocessing(serving, (-1,), TensorSpec("PROMPT_LEARNING_TASK_NAME_IDS", "UINT32"))


def postprocessing(serving: Serving) -> ModelSpec:
    """Configure ``postprocessing``: token ids in, text out."""
    lengths = TensorSpec("RESPONSE_INPUT_LENGTHS", "INT32", (-1,), optional=serving.family is not GPT)
    return serve.postprocessing(serving, "UINT32", lengths)


def ensemble(serving: Serving) -> ModelSpec:
    """Configure ``ensemble``: text in, text out, through the three other models."""
    passed_on = [each for each in ENGINE_INPUTS if each.name not in _NOT_PASSED_ON]
    outputs = [each for each in ENGINE_OUTPUTS if each.name not in _NOT_PASSED_ON]
    lengths = "_RESPONSE_INPUT_LENGTHS"
    given, read = {"output_ids": "_TOKENS_BATCH"}, {"TOKENS_BATCH": "_TOKENS_BATCH"}
    if serving.family is GPT:
        given["response_input_lengths"] = read["RESPONSE_INPUT_LENGTHS"] = lengths
    inputs = {**_PREPROCESSED, **same_names(passed_on)}
    generating = Step(ENGINE, inputs=inputs, outputs={**given, **same_names(outputs)})
    read["SEQUENCE_LENGTH"] = "sequence_length"
    writing = Step(POSTPROCESSING, inputs=read, outputs={"OUTPUT": "OUTPUT_0"})
    return serve.ensemble(serving, (-1,), passed_on, outputs, generating, writing)


def _known(serving: Serving, declared: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Leave out what the family does not know."""
    unknown = () if serving.family is GPT else _GPT_ALONE
    return tuple(tensor for tensor in declared if tensor.name not in unknown)
