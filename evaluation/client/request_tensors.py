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

NEVER_END_ID = 2**31 - 1
"""An end_id that no vocabulary holds, so that every requested token is generated. It fits FT's int."""


_GPT_LENGTHS = ("input_lengths", "request_output_len")
_T5_LENGTHS = ("sequence_length", "max_output_len")
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


GREEDY_UNDER_THE_MODEL = Sampling(top_k=0, top_p=1e-6)
"""Greedy, with log probabilities under the model.

With top_k 1 FasterTransformer reports a token's probability among the top 1, so ``output_log_probs`` is 0
(``topk_stage2_sampling``). Its top-p kernels report log softmax over the vocabulary, and the most probable of
fewer than a million tokens alone always fills a nucleus of 1e-6.
"""


@dataclass(frozen=True)
class LearntPrompt:
    """The prompt of a p-tuned task: learnt vectors, which ids beyond the vocabulary stand for. Answers omit these ids.

    Attributes:
        task: number of the task in the checkpoint.
        first_id: the id that stands for the first vector.
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


def prepare_ids(
    prompts: Sequence[Sequence[int]],
    output_lengths: int | Sequence[int],
    *,
    sampling: Sampling | None = None,
    end_id: int | None = None,
    log_probs: bool = False,
    context_log_probs: bool = False,
    prompt_log_probs: bool = False,
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
        end_id: token that ends a row; None for the model's own, NEVER_END_ID for none.
        log_probs: request the log probabilities of generated tokens.
        context_log_probs: add the prompt's tokens to the sum in cum_log_prob; implies log_probs.
        prompt_log_probs: request the log probability of each prompt token or, of an encoder-decoder, of each token of
            the decoder's input; only the drop-in engine returns them.
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
        _tensor(wanted_name, np.array([[length] for length in wanted], np.uint32)),
        *_sampling_tensors(sampling or Sampling(), rows),
    ]
    inputs += _answer_tensors(rows, end_id, context_log_probs, prompt_log_probs, log_probs)
    if any(stop_words):
        inputs.append(_tensor("stop_words_list", word_lists(stop_words)))
    if learnt is not None:
        inputs += _learnt_tensors(learnt, rows, is_encoder_decoder)
        prompts = [[token for token in prompt if token < learnt.first_id] for prompt in prompts]  # as in answers
    if is_encoder_decoder:
        inputs += _begun_tensors(begun)
        prompts = begun or [()] * rows
    return IdsRequest(tuple(map(tuple, prompts)), wanted, tuple(inputs), is_encoder_decoder)


def word_lists(rows: Sequence[Sequence[Sequence[int]]]) -> npt.NDArray[np.int32]:
    """Lay words out as FasterTransformer does, int32 [rows, 2, n]: all tokens, then the end of each word, else -1.

    Args:
        rows: words of each row as token ids; empty words are left out.
    """
    flat = [[token for word in words for token in word] for words in rows]
    lists = np.zeros((len(rows), 2, max(1, *map(len, flat))), np.int32)
    lists[:, 1] = -1
    for row, words in enumerate(rows):
        ends = np.cumsum([len(word) for word in words if word], dtype=np.int32)
        lists[row, 0, : len(flat[row])], lists[row, 1, : len(ends)] = flat[row], ends
    return lists


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
    inputs = [*inputs, *(_tensor(name, np.array([[n]], np.uint32)) for name, n in limits.items() if n is not None)]
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
    tensors = [_tensor(name, np.ones((rows, 1), np.bool_)) for name, is_asked in asked.items() if is_asked]
    return tensors if end_id is None else [_tensor("end_id", np.full((rows, 1), end_id, np.uint32)), *tensors]


def _learnt_tensors(learnt: LearntPrompt, rows: int, is_encoder_decoder: bool) -> list[triton.InferInput]:
    """Build the tensors that name the task or contain its vectors; T5 has no tensor for the kind of prompt."""
    if learnt.table is None:
        return [_tensor("prompt_learning_task_name_ids", np.full((rows, 1), learnt.task, np.uint32))]
    tensors = [
        _tensor("request_prompt_embedding", np.repeat(learnt.table[None], rows, axis=0)),
        _tensor("request_prompt_lengths", np.full((rows, 1), len(learnt.table), np.uint32)),
    ]
    kind = [] if is_encoder_decoder else [_tensor("request_prompt_type", np.full((rows, 1), _P_TUNING, np.uint32))]
    return tensors + kind


def _begun_tensors(begun: Sequence[Sequence[int]]) -> list[triton.InferInput]:
    return _padded("decoder_input_ids", "decoder_input_lengths", begun) if any(begun) else []


def _padded(name: str, lengths_name: str, rows: Sequence[Sequence[int]]) -> list[triton.InferInput]:
    """Build a padded tensor of token ids, and the tensor of their numbers."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.uint32)
    for row, line in enumerate(rows):
        ids[row, : len(line)] = line
    return [_tensor(name, ids), _tensor(lengths_name, np.array([[len(line)] for line in rows], np.uint32))]


def _sampling_tensors(sampling: Sampling, rows: int) -> list[triton.InferInput]:
    def full(name: str, value: float, dtype: npt.DTypeLike) -> triton.InferInput:
        return _tensor(name, np.full((rows, 1), value, dtype))

    beams = [full("beam_width", sampling.beam_width, np.uint32)] if sampling.beam_width > 1 else []
    seeds = sampling.random_seed + np.arange(rows, dtype=np.uint64).reshape(rows, 1)
    return [
        full("runtime_top_k", sampling.top_k, np.uint32),
        full("runtime_top_p", sampling.top_p, np.float32),
        full("temperature", sampling.temperature, np.float32),
        full("repetition_penalty", sampling.repetition_penalty, np.float32),
        _tensor("random_seed", seeds.astype(np.uint64)),
        *beams,
    ]


def _tensor(name: str, values: npt.NDArray[Any]) -> triton.InferInput:
    tensor = triton.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    tensor.set_data_from_numpy(values)
    return tensor
