"""The answers to a request: its output so far, in FasterTransformer's layout or as tokens alone."""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from ..rows.answer import Answer, Outline, Tensors, Tokens
from ..rows.beam import FinishReason
from ..rows.sequence import Job


def answer_so_far(job: Job, is_final: bool) -> Answer:
    """Answer a request with the output so far, in the form that it wants."""
    if not job.wants_tokens_alone:
        return Tensors(output_tensors(job), is_final)
    tokens = job.sequences[0].beams[0].tokens
    return Tokens(tokens, len(tokens), is_final)


def output_tensors(job: Job) -> dict[str, Array]:
    """Lay out the output so far.

    Returns:
        output_ids: uint32 [B, K, L + max request_output_len]: each row's input, its tokens right behind it, then its
            end_id. Of an encoder-decoder int32 [B, K, T + max max_output_len]: what the decoder began with, its
            tokens, then 0; here and below its "input" is decoder_input_ids, [B, T], T = 0 without one.
        sequence_length: uint32 [B, K]: input and generated tokens, a final end_id included. (FasterTransformer counts
            from the longest input of the batch; here it is the row's own, so it does not depend on other rows.) Of an
            encoder-decoder int32.
        finish_reason: int32 [B, K], see FinishReason; LENGTH is of a row that is done and that no token has ended.
        response_input_lengths: int32 [B, K]; not of an encoder-decoder.
        cum_log_probs: fp32 [B, K], and output_log_probs: fp32 [B, K, max request_output_len]: only where a row has
            is_return_log_probs; 0 in the others. With is_return_context_cum_log_probs the first begins with the
            log-probabilities (without temperature and penalty) of the input's tokens that have one. Of a beam
            they are those of its own tokens. (FasterTransformer does not follow a beam back in output_log_probs.)
        output_raw_log_probs: fp32 [B, K, n]: only where a row has is_return_raw_log_probs; 0 in the others. The
            log-probability of each token under the model, without bias, penalties and temperature. n is the most tokens
            that a row has so far.
        output_top_log_probs: fp32 [B, K, n, T], and output_top_ids: uint32 [B, K, n, T]: only where a row has
            num_top_log_probs, of which T is the largest; the largest of these log-probabilities in each token's place,
            descending, and whose they are; 0 behind a row's own number.
        context_embeddings: fp32 [B, K, hidden]: only where a row has is_return_context_embeddings.
        context_log_probs: fp32 [B, L], and context_argmax_ids: uint32 [B, L]: only where a row has
            is_return_context_log_probs. For each input token its log-probability (without temperature and penalty)
            given the tokens before it, and the argmax in its place. 0 for a row's first token (but a decoder's comes
            after start_id), for tokens of a session's earlier requests, in padding and in the other rows.
        context_top_log_probs: fp32 [B, L, T], and context_top_ids: uint32 [B, L, T]: only where a row has
            num_context_top_log_probs, of which T is the largest; see output_top_log_probs.
        output_hidden_state: fp32 [B, S, hidden], of an encoder without a decoder, which has none of the above. S is
            input_ids' width.
        output_attentions: fp32 [B, layers, heads, S, S], beside it if any row has is_return_attentions: the weight of
            each key (last axis) for each query; 0 in padding. (FasterTransformer leaves undefined numbers in the rows
            of queries that are padding.)
    """
    rows, outline = job.sequences, job.outline or _outline(job)
    job.outline = outline
    tensors = {} if "output_hidden_state" in rows[0].context_outputs else _tokens(job, outline)
    if not any(each.context_outputs for each in rows):
        return tensors
    width, source_width = max(len(each.shown) for each in rows), job.request.source_width
    least = {
        "context_embeddings": (0, 0),
        "context_log_probs": (width,),
        "context_argmax_ids": (width,),
        "context_top_log_probs": (width, 0),
        "context_top_ids": (width, 0),
        "output_hidden_state": (source_width, 0),
        "output_attentions": (0, 0, source_width, source_width),
    }
    for name in dict.fromkeys(name for each in rows for name in each.context_outputs):
        given = {row: each.context_outputs[name] for row, each in enumerate(rows) if name in each.context_outputs}
        tensors[name] = _stacked(given, len(rows), least[name])
    return tensors


def _outline(job: Job) -> Outline:
    """Lay out what all answers to a request have in common: a stream has an answer a token."""
    request, samplings = job.request, [row.sampling for row in job.request.rows]
    shape, is_decoder = (len(samplings), request.beam_width), request.rows[0].source is not None
    width = max(len(each.shown) for each in job.sequences)
    ids = np.zeros((*shape, width + request.max_tokens), np.int32 if is_decoder else np.uint32)
    if not is_decoder:
        ids[:] = np.array([each.pad_id for each in samplings])[:, None, None]
    lengths = np.zeros(shape, np.int32)
    for row, sequence in enumerate(job.sequences):
        start = len(sequence.shown)
        lengths[row], ids[row, :, :start] = start, sequence.shown
    has_log_probs = any(each.is_return_log_probs for each in samplings)
    return Outline(ids, lengths, is_decoder, has_log_probs, any(each.is_return_raw_log_probs for each in samplings))


def _tokens(job: Job, outline: Outline) -> dict[str, Array]:
    ids = outline.ids.copy()
    shape, starts, places = ids.shape[:2], outline.lengths[:, 0].tolist(), list[list[int]]()
    reasons = list[list[int]]()
    for row, sequence in enumerate(job.sequences):
        start, rest = starts[row], FinishReason.LENGTH if sequence.is_done else FinishReason.NOT_FINISHED
        for place, beam in enumerate(sequence.beams):
            ids[row, place, start : start + len(beam.tokens)] = beam.tokens
        places.append([start + len(beam.tokens) for beam in sequence.beams])
        reasons.append([int(beam.finish or rest) for beam in sequence.beams])
    tensors: dict[str, Array] = {
        "output_ids": ids,
        "sequence_length": np.array(places, ids.dtype),
        "finish_reason": np.array(reasons, np.int32),
    }
    if not outline.is_decoder:
        tensors["response_input_lengths"] = outline.lengths.copy()
    if outline.has_log_probs:
        tensors |= _log_probs(job, shape)
    return tensors | _raw_scores(job) if outline.has_raw_scores else tensors


def _log_probs(job: Job, shape: tuple[int, ...]) -> dict[str, Array]:
    scores, log_probs = np.zeros(shape, np.float32), np.zeros((*shape, job.request.max_tokens), np.float32)
    for row, sequence in enumerate(job.sequences):
        for place, beam in enumerate(sequence.beams if sequence.sampling.is_return_log_probs else ()):
            scores[row, place], log_probs[row, place, : len(beam.log_probs)] = beam.score, beam.log_probs
    return {"cum_log_probs": scores, "output_log_probs": log_probs}


def _raw_scores(job: Job) -> dict[str, Array]:
    """Lay out the log-probabilities under the model that rows request, see output_tensors; such rows have one beam."""
    rows = [(row, each.beams[0], each.sampling) for row, each in enumerate(job.sequences)]
    asked = [(row, beam, params.num_top_log_probs) for row, beam, params in rows if params.is_return_raw_log_probs]
    shape = len(rows), 1, max(len(beam.tokens) for _, beam, _ in rows)
    most = max(count for _, _, count in asked)
    own, tops = np.zeros(shape, np.float32), np.zeros((*shape, most), np.float32)
    ids = np.zeros(tops.shape, np.uint32)
    for row, beam, count in asked:
        scores = np.frombuffer(beam.raw_scores, np.float32).reshape(-1, 1 + 2 * count)
        place = row, 0, slice(len(scores))
        own[place] = scores[:, 0]
        tops[place][:, :count], ids[place][:, :count] = scores[:, 1 : 1 + count], scores[:, 1 + count :]
    return {"output_raw_log_probs": own} | ({"output_top_log_probs": tops, "output_top_ids": ids} if most else {})


def _stacked(given: dict[int, Array], batch: int, least: tuple[int, ...]) -> Array:
    """Stack arrays, padded with zeros to the largest shape, at least to ``least``; rows without an array are 0."""
    shape = [max(sizes) for sizes in zip(least, *(each.shape for each in given.values()), strict=True)]
    stacked = np.zeros((batch, *shape), next(iter(given.values())).dtype)
    for row, each in given.items():
        stacked[row][tuple(map(slice, each.shape))] = each
    return stacked
