"""The tensors of a request and of its answer, named and shaped as in FasterTransformer backend's GPT guide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient import grpc as triton
from tritonclient.utils import np_to_triton_dtype

from handover.errors import ServerError

NEVER_END_ID = 2**31 - 1
"""An end_id that no vocabulary holds, so that every requested token is generated. It fits FT's int."""


_GPT_LENGTHS = ("input_lengths", "request_output_len")
_T5_LENGTHS = ("sequence_length", "max_output_len")
_P_TUNING = 3
"""FasterTransformer's ``request_prompt_type`` of p-tuning and prompt tuning."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the default is greedy.

    Attributes:
        top_k: number of candidates; 1 is greedy, 0 leaves the choice to top_p.
        top_p: probability mass of the candidates; 0 switches it off.
        temperature: divisor of the logits.
        repetition_penalty: 1 for none.
        random_seed: row i of a batch samples with ``random_seed + i``.
        beam_width: beams; 1 for none. The first is read.
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
    """What a p-tuned task learnt: rows of a table, for which ids beyond the vocabulary stand. Answers leave them out.

    Attributes:
        task: number of the task, whose table the checkpoint has.
        first_id: the id that stands for the first row.
        table: float16 [rows, hidden], where the request brings it itself.
    """

    task: int
    first_id: int
    table: npt.NDArray[np.float16] | None = None


@dataclass(frozen=True)
class IdsRequest:
    """A batch for a model that takes token ids, ready to be sent.

    Attributes:
        prompts: token ids, one sequence a row.
        output_lengths: tokens to generate for each row.
        inputs: the tensors of the request.
        is_encoder_decoder: the answer holds what was generated alone, not the prompt.
    """

    prompts: tuple[tuple[int, ...], ...]
    output_lengths: tuple[int, ...]
    inputs: tuple[triton.InferInput, ...]
    is_encoder_decoder: bool = False


@dataclass(frozen=True)
class Completion:
    """What an ensemble gave back for one text.

    Attributes:
        text: the prompt and what follows it, or what an encoder-decoder wrote.
        length: tokens of prompt and answer, or of the answer of an encoder-decoder; None if the model does not say.
        scores: what was asked for beside the text; its tokens are not known here, so they are empty.
    """

    text: str
    length: int | None
    scores: Generation


@dataclass(frozen=True)
class Generation:
    """What was generated for one row.

    Attributes:
        tokens: generated token ids, the end token included where it came.
        cum_log_prob: sum of the natural log probabilities of the generated tokens and, if it was asked
            for, of the prompt's tokens but the first; None if not asked for.
        log_probs: of each generated token, with top_k among the top k only; None if not asked for.
        prompt_log_probs: of each of the prompt's tokens but the first; None if not asked for or not known.
        prompt_argmax: the most probable token in each of these places; likewise.
    """

    tokens: tuple[int, ...]
    cum_log_prob: float | None = None
    log_probs: tuple[float, ...] | None = None
    prompt_log_probs: tuple[float, ...] | None = None
    prompt_argmax: tuple[int, ...] | None = None


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
    learnt: LearntPrompt | None = None,
) -> IdsRequest:
    """Build the tensors of one batch.

    Args:
        prompts: token ids, at least one a row; shorter rows are padded with token 0, which is not read.
        output_lengths: tokens to generate, for all rows or for each.
        sampling: greedy if None.
        end_id: token that ends a row; None for the model's own, NEVER_END_ID for none.
        log_probs: ask for the generated tokens' log probabilities.
        context_log_probs: let cum_log_prob sum over the prompt's tokens too; implies log_probs.
        prompt_log_probs: ask for the log probability of each of the prompt's tokens; the drop-in engine alone knows it.
        stop_words: of each row, token sequences that end it; none by default.
        is_encoder_decoder: the model is a T5, whose lengths have other names.
        learnt: what ids beyond the vocabulary stand for.
    """
    rows = len(prompts)
    wanted = (output_lengths,) * rows if isinstance(output_lengths, int) else tuple(output_lengths)
    if not rows or len(wanted) != rows or not all(prompts):
        raise ValueError(f"{rows} prompts with {len(wanted)} output lengths; each prompt needs a token")
    ids = np.zeros((rows, max(map(len, prompts))), np.uint32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    given_name, wanted_name = _T5_LENGTHS if is_encoder_decoder else _GPT_LENGTHS
    inputs = [
        _tensor("input_ids", ids),
        _tensor(given_name, np.array([[len(prompt)] for prompt in prompts], np.uint32)),
        _tensor(wanted_name, np.array([[length] for length in wanted], np.uint32)),
        *_sampling_tensors(sampling or Sampling(), rows),
    ]
    inputs += _answer_tensors(rows, end_id, log_probs, context_log_probs, prompt_log_probs)
    if any(stop_words):
        inputs.append(_tensor("stop_words_list", word_lists(stop_words)))
    if learnt is not None:
        inputs += _learnt_tensors(learnt, rows, is_encoder_decoder)
        prompts = [[token for token in prompt if token < learnt.first_id] for prompt in prompts]  # all that is shown
    return IdsRequest(tuple(map(tuple, prompts)), wanted, tuple(inputs), is_encoder_decoder)


def word_lists(rows: Sequence[Sequence[Sequence[int]]]) -> npt.NDArray[np.int32]:
    """Lay words out as FasterTransformer does, int32 [rows, 2, n]: all tokens, and where each word ends; then -1.

    Args:
        rows: words of each row as token ids; an empty word is left out.
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
    log_probs: bool = False,
    context_log_probs: bool = False,
    prompt_log_probs: bool = False,
) -> tuple[triton.InferInput, ...]:
    """Build the tensors of one batch for an ensemble, without bad and stop words; see ``prepare_ids``."""
    rows = len(prompts)
    wanted = [output_lengths] * rows if isinstance(output_lengths, int) else list(output_lengths)
    texts = np.array([[prompt.encode()] for prompt in prompts], dtype=np.object_)
    none = np.full((rows, 1), b"", dtype=np.object_)
    return (
        _tensor("INPUT_0", texts),
        _tensor("INPUT_1", np.array(wanted, np.uint32).reshape(rows, 1)),
        _tensor("INPUT_2", none),
        _tensor("INPUT_3", none),
        *_sampling_tensors(sampling or Sampling(), rows),
        *_answer_tensors(rows, end_id, log_probs, context_log_probs, prompt_log_probs),
    )


def read_completions(rows: int, answer: triton.InferResult) -> list[Completion]:
    """Take the texts out of an ensemble's answer, with what else it says of each row.

    Raises:
        ServerError: it has another number of texts.
    """
    texts, lengths = answer.as_numpy("OUTPUT_0"), answer.as_numpy("sequence_length")
    if texts is None or texts.size != rows:
        raise ServerError(f"the answer to {rows} prompts has {0 if texts is None else texts.size} texts")
    arrays = _score_arrays(answer)
    return [
        Completion(
            text.decode(errors="replace"),
            None if lengths is None else int(lengths[row].reshape(-1)[0]),
            _scores(arrays, row),
        )
        for row, text in enumerate(texts.reshape(-1))
    ]


def add_session(
    inputs: Sequence[triton.InferInput], session_len: int | None, memory_len: int | None
) -> tuple[triton.InferInput, ...]:
    """Turn the tensors of one prompt into those of a stateful model: [1, n] becomes [1, 1, n].

    Args:
        inputs: of a batch of one.
        session_len: tokens of the whole conversation at most; None where it has begun.
        memory_len: tokens that are remembered; None for all, or where the conversation has begun.
    """
    limits = {"session_len": session_len, "memory_len": memory_len}
    inputs = [*inputs, *(_tensor(name, np.array([[n]], np.uint32)) for name, n in limits.items() if n is not None)]
    for tensor in inputs:
        tensor.set_shape([1, *tensor.shape()])
    return tuple(inputs)


def read_generations(request: IdsRequest, answer: triton.InferResult) -> list[Generation]:
    """Take the generated part out of an answer, and prove that the answer continues the prompts.

    ``output_ids`` is [rows, beams, longest input + longest output] and ``sequence_length`` [rows, beams];
    generated tokens follow directly after each row's own input. The first beam is read. Our engine counts
    ``sequence_length`` from a row's own input, FasterTransformer from the longest input of the batch; both
    are understood. Of an encoder-decoder both hold the generated tokens alone.

    Raises:
        ServerError: a tensor is missing or misshapen, or a row does not begin with its prompt.
    """
    ids, lengths = answer.as_numpy("output_ids"), answer.as_numpy("sequence_length")
    rows = len(request.prompts)
    if ids is None or lengths is None or ids.ndim != 3 or ids.shape[0] != rows or lengths.shape[:1] != (rows,):
        raise ServerError(f"the answer to {rows} prompts has no fitting output_ids and sequence_length")
    arrays, generations = _score_arrays(answer), []
    longest = max(map(len, request.prompts))
    for row, (prompt, wanted) in enumerate(zip(request.prompts, request.output_lengths, strict=True)):
        length = int(lengths[row].reshape(-1)[0])
        shown = () if request.is_encoder_decoder else prompt
        count = length - len(shown)
        if shown and length - longest == wanted:
            count = wanted
        sequence = tuple(int(token) for token in ids[row, 0, : len(shown) + count])
        if sequence[: len(shown)] != shown or not 0 <= count <= wanted:
            raise ServerError(f"row {row} of the answer does not continue its prompt of {len(prompt)} tokens")
        tokens = sequence[len(shown) :]
        generations.append(_scores(arrays, row, tokens, len(tokens), len(prompt)))
    return generations


def _score_arrays(answer: triton.InferResult) -> list[npt.NDArray[Any] | None]:
    names = ("cum_log_probs", "output_log_probs", "context_log_probs", "context_argmax_ids")
    return [answer.as_numpy(name) for name in names]


def _scores(
    arrays: Sequence[npt.NDArray[Any] | None],
    row: int,
    tokens: tuple[int, ...] = (),
    generated: int | None = None,
    given: int | None = None,
) -> Generation:
    """Read what was asked for beside the tokens of a row, given how many were generated and given; None: all."""
    cum_log_probs, log_probs, scores, best = arrays
    return Generation(
        tokens,
        None if cum_log_probs is None else float(cum_log_probs[row].reshape(-1)[0]),
        None if log_probs is None else tuple(map(float, log_probs[row, 0, :generated])),
        None if scores is None else tuple(map(float, scores[row, 1:given])),
        None if best is None else tuple(map(int, best[row, 1:given])),
    )


def _answer_tensors(
    rows: int, end_id: int | None, log_probs: bool, context_log_probs: bool, prompt_log_probs: bool
) -> list[triton.InferInput]:
    """Say where an answer ends and what it shall hold beside the tokens."""
    asked = {
        "is_return_log_probs": log_probs or context_log_probs,
        "is_return_context_cum_log_probs": context_log_probs,
        "is_return_context_log_probs": prompt_log_probs,
    }
    tensors = [_tensor(name, np.ones((rows, 1), np.bool_)) for name, is_asked in asked.items() if is_asked]
    return tensors if end_id is None else [_tensor("end_id", np.full((rows, 1), end_id, np.uint32)), *tensors]


def _learnt_tensors(learnt: LearntPrompt, rows: int, is_encoder_decoder: bool) -> list[triton.InferInput]:
    """Name the task, or bring its table; T5 has no tensor for the kind of prompt."""
    if learnt.table is None:
        return [_tensor("prompt_learning_task_name_ids", np.full((rows, 1), learnt.task, np.uint32))]
    tensors = [
        _tensor("request_prompt_embedding", np.repeat(learnt.table[None], rows, axis=0)),
        _tensor("request_prompt_lengths", np.full((rows, 1), len(learnt.table), np.uint32)),
    ]
    kind = [] if is_encoder_decoder else [_tensor("request_prompt_type", np.full((rows, 1), _P_TUNING, np.uint32))]
    return tensors + kind


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
