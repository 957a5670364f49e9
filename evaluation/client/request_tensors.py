"""The tensors of a request, named and shaped as in FasterTransformer backend's GPT and T5 guides."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient import grpc as triton
from tritonclient.utils import np_to_triton_dtype

from export_scripts.repository.tokenizer_models.slipway_words import lay_out_words
from ft_format.tensors import ARGMAX_NUCLEUS, INPUTS

_GPT_LENGTHS = ("input_lengths", "request_output_len")
_T5_LENGTHS = ("sequence_length", "max_output_len")
LORA_INPUT = "lora_name"
PROMPT_TOP_INPUT = "num_context_top_log_probs"
_P_TUNING = 3
"""FasterTransformer's ``request_prompt_type`` of p-tuning and prompt tuning."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; the default is greedy decoding.

    Attributes:
        top_k: number of most probable tokens to sample from; 1 is greedy, 0 leaves the limit to top_p.
        top_p: probability mass of the nucleus to sample from; 0 switches it off.
        temperature: divisor of the logits.
        repetition_penalty: 1 for none.
        random_seed: row i of a batch samples with ``random_seed + i``.
        beam_width: number of beams; 1 for no beam search. The first beam is the answer.
    """

    top_k: int = 1
    top_p: float = 0.0
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    random_seed: int = 0
    beam_width: int = 1


GREEDY_UNDER_THE_MODEL = Sampling(top_k=0, top_p=ARGMAX_NUCLEUS)
"""Greedy, with log probabilities under the model."""


@dataclass(frozen=True)
class LearntPrompt:
    """The prompt of a p-tuned task: learnt vectors, which ids beyond the vocabulary stand for. Answers omit these ids.

    Attributes:
        task: number of the task in the checkpoint.
        table: float16 [vectors, hidden], where the request itself contains the vectors.
    """

    task: int
    first_id: int
    table: npt.NDArray[np.float16] | None = None


@dataclass(frozen=True)
class IdsRequest:
    """A batch for a model that takes token ids, ready to be sent.

    Attributes:
        shown: token ids that each row of the answer begins with: its prompt or, of an encoder-decoder, the decoder's
            input.
        output_lengths: number of tokens to generate for each row.
        inputs: the tensors of the request.
        is_encoder_decoder: whether the model is an encoder-decoder; its first shown token follows the start token and
            has a log probability too.
    """

    shown: tuple[tuple[int, ...], ...]
    output_lengths: tuple[int, ...]
    inputs: tuple[triton.InferInput, ...]
    is_encoder_decoder: bool = False


def adapter_input(name: str, rows: int) -> triton.InferInput:
    """Build the tensor that names the LoRA adapter of all rows of a batch."""
    return _tensor(LORA_INPUT, np.full((rows, 1), name.encode(), object))


def prepare_ids(
    prompts: Sequence[Sequence[int]],
    output_lengths: int | Sequence[int],
    *,
    sampling: Sampling | None = None,
    end_id: int | None = None,
    log_probs: bool = False,
    context_log_probs: bool = False,
    prompt_log_probs: bool = False,
    prompt_top: int = 0,
    stop_words: Sequence[Sequence[Sequence[int]]] = (),
    is_encoder_decoder: bool = False,
    begun: Sequence[Sequence[int]] = (),
    learnt: LearntPrompt | None = None,
) -> IdsRequest:
    """Build the tensors of one batch.

    Args:
        prompts: token ids of each row, at least one; shorter rows are padded with token 0, which is not read.
        output_lengths: number of tokens to generate, for all rows or for each.
        sampling: sampling parameters; None for greedy decoding.
        end_id: token that ends a row; None for the model's own, NO_TOKEN for none.
        log_probs: request the log probabilities of generated tokens.
        context_log_probs: add the prompt's tokens to the sum in cum_log_prob; implies log_probs.
        prompt_log_probs: request the log probability of each prompt token or, of an encoder-decoder, of each token of
            the decoder's input; only the drop-in engine returns them.
        prompt_top: most probable tokens to request in the place of each of these; only the drop-in engine returns them.
        stop_words: for each row, token sequences that end it; none by default.
        is_encoder_decoder: whether the model is a T5, whose length tensors have other names.
        begun: for each row, the decoder's input of an encoder-decoder; only the drop-in engine takes it.
        learnt: the vectors that ids beyond the vocabulary stand for.
    """
    rows = len(prompts)
    wanted = (output_lengths,) * rows if isinstance(output_lengths, int) else tuple(output_lengths)
    if not rows or len(wanted) != rows or not all(prompts):
        raise ValueError(f"{rows} prompts with {len(wanted)} output lengths; each prompt needs a token")
    given_name, wanted_name = _T5_LENGTHS if is_encoder_decoder else _GPT_LENGTHS
    inputs = [
        *_padded("input_ids", given_name, prompts),
        _column(wanted_name, wanted),
        *_sampling_tensors(sampling or Sampling(), rows),
    ]
    inputs += _answer_tensors(rows, end_id, context_log_probs, prompt_log_probs, log_probs)
    if prompt_top:
        inputs.append(_column(PROMPT_TOP_INPUT, [prompt_top] * rows))
    if any(stop_words):
        inputs.append(_tensor("stop_words_list", lay_out_words(stop_words)))
    if learnt is not None:
        inputs += _learnt_tensors(learnt, rows, is_encoder_decoder)
        prompts = [[token for token in prompt if token < learnt.first_id] for prompt in prompts]  # as in answers
    if is_encoder_decoder:
        inputs += _begun_tensors(begun)
        prompts = begun or [()] * rows
    return IdsRequest(tuple(map(tuple, prompts)), wanted, tuple(inputs), is_encoder_decoder)


def prepare_texts(
    prompts: Sequence[str],
    output_lengths: int | Sequence[int],
    sampling: Sampling | None = None,
    *,
    end_id: int | None = None,
    context_log_probs: bool = False,
    prompt_log_probs: bool = False,
    begun: Sequence[Sequence[int]] = (),
    stop_words: Sequence[Sequence[str]] = (),
) -> tuple[triton.InferInput, ...]:
    """Build the tensors of one batch for an ensemble, without bad words; see ``prepare_ids``."""
    rows = len(prompts)
    wanted = [output_lengths] * rows if isinstance(output_lengths, int) else list(output_lengths)
    texts = np.array([[prompt.encode()] for prompt in prompts], dtype=np.object_)
    none = np.full((rows, 1), b"", dtype=np.object_)
    return (
        _tensor("INPUT_0", texts),
        _tensor("INPUT_1", np.array(wanted, np.uint32).reshape(rows, 1)),
        _tensor("INPUT_2", none),
        _tensor("INPUT_3", _as_csv(stop_words) if any(stop_words) else none),
        *_sampling_tensors(sampling or Sampling(), rows),
        *_answer_tensors(rows, end_id, context_log_probs, prompt_log_probs),
        *_begun_tensors(begun),
    )


def _as_csv(rows: Sequence[Sequence[str]]) -> npt.NDArray[np.object_]:
    """Write words as FasterTransformer's preprocessing reads them: a row of comma-separated values each."""
    texts = []
    for words in rows:
        csv.writer(text := io.StringIO(), lineterminator="").writerow(words)
        texts.append([text.getvalue().encode()])
    return np.array(texts, dtype=np.object_)


def add_session(
    inputs: Sequence[triton.InferInput], session_len: int | None, memory_len: int | None
) -> tuple[triton.InferInput, ...]:
    """Reshape the tensors of one prompt for a stateful model: [1, n] becomes [1, 1, n].

    Args:
        inputs: tensors of a batch of one.
        session_len: maximum number of tokens of the whole session; None after its first turn.
        memory_len: number of latest tokens that the model attends to; None for all, or after the first turn.
    """
    limits = {"session_len": session_len, "memory_len": memory_len}
    inputs = [*inputs, *(_column(name, [n]) for name, n in limits.items() if n is not None)]
    for tensor in inputs:
        tensor.set_shape([1, *tensor.shape()])
    return tuple(inputs)


def _answer_tensors(
    rows: int, end_id: int | None, context_log_probs: bool, prompt_log_probs: bool, log_probs: bool = False
) -> list[triton.InferInput]:
    """Build the tensors for the end token and for the requested log probabilities."""
    asked = {
        "is_return_log_probs": log_probs or context_log_probs,
        "is_return_context_cum_log_probs": context_log_probs,
        "is_return_context_log_probs": prompt_log_probs,
    }
    tensors = [_column(name, [True] * rows) for name, is_asked in asked.items() if is_asked]
    return tensors if end_id is None else [_column("end_id", [end_id] * rows), *tensors]


def _learnt_tensors(learnt: LearntPrompt, rows: int, is_encoder_decoder: bool) -> list[triton.InferInput]:
    """Build the tensors that name the task or contain its vectors; T5 has no tensor for the kind of prompt."""
    if learnt.table is None:
        return [_column("prompt_learning_task_name_ids", [learnt.task] * rows)]
    tensors = [
        _tensor("request_prompt_embedding", np.repeat(learnt.table[None], rows, axis=0)),
        _column("request_prompt_lengths", [len(learnt.table)] * rows),
    ]
    return tensors if is_encoder_decoder else [*tensors, _column("request_prompt_type", [_P_TUNING] * rows)]


def _begun_tensors(begun: Sequence[Sequence[int]]) -> list[triton.InferInput]:
    return _padded("decoder_input_ids", "decoder_input_lengths", begun) if any(begun) else []


def _padded(name: str, lengths_name: str, rows: Sequence[Sequence[int]]) -> list[triton.InferInput]:
    """Build a padded tensor of token ids, and the tensor of their numbers."""
    ids = np.zeros((len(rows), max(map(len, rows))), INPUTS[name].kind)
    for row, line in enumerate(rows):
        ids[row, : len(line)] = line
    return [_tensor(name, ids), _column(lengths_name, list(map(len, rows)))]


def _sampling_tensors(sampling: Sampling, rows: int) -> list[triton.InferInput]:
    columns: dict[str, Sequence[float]] = {
        "runtime_top_k": [sampling.top_k] * rows,
        "runtime_top_p": [sampling.top_p] * rows,
        "temperature": [sampling.temperature] * rows,
        "repetition_penalty": [sampling.repetition_penalty] * rows,
        "random_seed": [sampling.random_seed + row for row in range(rows)],
        **({"beam_width": [sampling.beam_width] * rows} if sampling.beam_width > 1 else {}),
    }
    return [_column(name, values) for name, values in columns.items()]


def _column(name: str, values: Sequence[float]) -> triton.InferInput:
    """Build a tensor of one value a row."""
    return _tensor(name, np.array(values, INPUTS[name].kind).reshape(-1, 1))


def _tensor(name: str, values: npt.NDArray[Any]) -> triton.InferInput:
    tensor = triton.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    tensor.set_data_from_numpy(values)
    return tensor
