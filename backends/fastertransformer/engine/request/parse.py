"""Requests: a client's named tensors (see schema.py), checked, as one row per sequence.

Scalars are [B, 1] from clients, or [B] if config.pbtxt reshapes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from operator import add

import numpy as np

from ft_format.tensors import INPUTS

from ..arrays import Array as Array
from ..errors import RequestError
from ..model.config import ModelConfig
from .adapters import Adapter, Adapters, parse_adapters
from .prompts import Context, place_prompts
from .sampling_params import SamplingParams, sampling_params
from .schema import INPUT_SCHEMAS, SCALARS, Inputs, InputSchema, checked, refuse_rows

_SAMPLING_ONLY = [name for name in SCALARS if not INPUTS[name].works_with_beams]


@dataclass(frozen=True)
class Row:
    """One sequence to continue."""

    sampling: SamplingParams
    context: Context  # what its generation starts from, prompts included
    shown: Array  # int64 [n], the input as answers show it: without prompts; of an encoder-decoder the decoder's input
    source: Context | None  # the encoder's input; None: there is no encoder
    adapter: Adapter | None = None  # what is added to the model's weights; None: nothing


@dataclass(frozen=True)
class Request:
    """Sequences to continue."""

    rows: Sequence[Row]
    source_width: int  # of the tensor with the encoder's inputs, padding included
    starts_session: bool  # START
    ends_session: bool  # END: whether it is the session's last request
    # Of the session that it begins; 0: no limit. The first row's values apply to all rows, as in FasterTransformer.
    session_len: int  # the most tokens
    memory_len: int  # tokens whose keys and values are kept

    @property
    def beam_width(self) -> int:
        """The beam width of every row; 1 is sampling."""
        return self.rows[0].sampling.beam_width

    @property
    def is_return_attentions(self) -> bool:
        """Whether any row requests the encoder's attentions."""
        return any(row.sampling.is_return_attentions for row in self.rows)

    @property
    def has_guides(self) -> bool:
        """Whether the output of any row must follow a grammar."""
        return any(row.sampling.guide for row in self.rows)

    @property
    def max_tokens(self) -> int:
        """The most tokens that any row may generate."""
        return max(row.sampling.max_tokens for row in self.rows)


def parse_request(
    tensors: Mapping[str, Array],
    config: ModelConfig,
    prompts: Sequence[Array] | None = None,
    adapters: Adapters | None = None,
) -> Request:
    """Check the tensors of one request, by FasterTransformer's names; for ``prompts`` see prompts.read_prompt_tables.

    Absent optional tensors take FasterTransformer's defaults: greedy, temperature 1, no penalty, seed 0, end_id and
    start_id of config.ini, no log-probabilities, no words.

    Raises:
        RequestError: a tensor is unknown, missing, of another type or shape, out of range, or input plus output is
            longer than max_pos_seq_len. (FasterTransformer logs an error there and reads past the position table.)
    """
    schema = INPUT_SCHEMAS[config.family]
    sent = _read(tensors, schema, config)
    _check_combinations(sent, config)
    begun = place_prompts(sent, config, prompts)
    sources: list[Context | None] = [None] * sent.batch
    if config.encoder:  # the input is the encoder's
        tasks = sent.scalars["ia3_tasks"].tolist()
        sources = [replace(context, ia3_task=task) for (context, _), task in zip(begun, tasks, strict=True)]
        begun = [(context, context.ids[1:]) for context in _decoder_contexts(sent, config)]
    sampling = sampling_params(sent, config.vocab_size)
    starts = zip(sampling, begun, sources, parse_adapters(sent, adapters), strict=True)
    rows = [Row(params, context, shown, source, adapter) for params, (context, shown), source, adapter in starts]
    _check_lengths(rows, config, schema)
    return Request(
        rows,
        source_width=sent.ids.shape[1] if config.encoder else 0,
        starts_session=_is_set(tensors, "START"),
        ends_session=_is_set(tensors, "END"),
        session_len=int(sent.scalars["session_len"][0]),
        memory_len=int(sent.scalars["memory_len"][0]),
    )


def _read(tensors: Mapping[str, Array], schema: InputSchema, config: ModelConfig) -> Inputs:
    """Check the names, and the tensors of one value a row."""
    for name, array in tensors.items():
        if name not in schema.names:
            close = get_close_matches(name, schema.names, n=1)
            hint = f", did you mean '{close[0]}'?" if close else f"; known are {', '.join(sorted(schema.names))}"
            raise RequestError(f"unknown input '{name}' of shape {list(array.shape)}{hint}")
    required = ("input_ids", *filter(None, (schema.lengths, schema.output)))
    if missing := [name for name in required if name not in tensors]:
        raise RequestError(f"missing input: {', '.join(missing)}")
    ids = checked("input_ids", tensors["input_ids"], (np.uint32,), "batch", "n").astype(np.int64)
    batch, width = ids.shape
    if not batch:
        raise RequestError(f"input_ids has shape {list(ids.shape)}, and so no row")
    read = {name: rule.read(name, tensors[name], batch) for name, rule in schema.scalars.items() if name in tensors}
    scalars = {**schema.defaults(batch, start_id=config.start_id, end_id=config.end_id), **read}
    lengths = scalars[schema.lengths]
    if width:
        is_bad = (lengths < 1) | (lengths > width)
        refuse_rows(schema.lengths, lengths, is_bad, f"1 to {width}, input_ids' width")
    return Inputs(tensors, scalars, ids, lengths, scalars[schema.output] if schema.output else np.zeros(batch, int))


def _check_combinations(sent: Inputs, config: ModelConfig) -> None:
    scope = sent.scalars["is_return_context_cum_log_probs"]
    lacks = scope & ~sent.scalars["is_return_log_probs"]
    refuse_rows("is_return_context_cum_log_probs", scope, lacks, "false without is_return_log_probs")
    if "repetition_penalty" in sent.tensors and "presence_penalty" in sent.tensors:
        raise RequestError("repetition_penalty and presence_penalty exclude each other; send one of them")
    width = np.maximum(sent.scalars["beam_width"], 1)
    refuse_rows("beam_width", width, width != width[0], f"the same in all rows of a request, {width[0]} as in row 0")
    for name in _SAMPLING_ONLY if width[0] > 1 else ():
        values = sent.scalars[name]
        rule = f"{values.dtype.type(0)}, or left out, with beam_width {width[0]}: a beam search does not apply it"
        refuse_rows(name, values, values != 0, rule)
    if "ia3_tasks" in sent.tensors:
        if not config.ia3_num_tasks:
            raise RequestError("ia3_tasks: this checkpoint has no IA3 adapters; leave it out")
        tasks = sent.scalars["ia3_tasks"]
        is_beyond = (tasks < 0) | (tasks >= config.ia3_num_tasks)
        refuse_rows("ia3_tasks", tasks, is_beyond, f"0 to {config.ia3_num_tasks - 1}")


def _decoder_contexts(sent: Inputs, config: ModelConfig) -> list[Context]:
    """Return what decoders begin with: each row's start_id, then its decoder_input_ids."""
    starts, lengths, batch = sent.scalars["start_id"], sent.scalars["decoder_input_lengths"], sent.batch
    given = [name for name in ("decoder_input_ids", "decoder_input_lengths") if name in sent.tensors]
    if len(given) == 1:
        raise RequestError(f"{given[0]}: decoder_input_ids and decoder_input_lengths come together; send both or none")
    ids = checked(given[0], sent.tensors[given[0]], (np.uint32,), batch, "n") if given else np.zeros((batch, 0), int)
    width, legal = ids.shape[1], f"below vocab_size {config.vocab_size}"
    refuse_rows("start_id", starts, starts >= config.vocab_size, legal)
    refuse_rows("decoder_input_lengths", lengths, lengths > width, f"at most {width}, decoder_input_ids' width")
    most = np.where(np.arange(width) < lengths[:, None], ids, 0).max(1, initial=0)
    refuse_rows("decoder_input_ids' largest", most, most >= config.vocab_size, legal)
    rows = zip(starts.tolist(), ids, lengths.tolist(), strict=True)
    return [Context(np.array([start, *tokens[:length]], np.int64)) for start, tokens, length in rows]


def _is_set(tensors: Mapping[str, Array], name: str) -> bool:
    if name in tensors and (tensors[name].size != 1 or tensors[name].dtype.kind not in "biu"):
        got = f"{tensors[name].dtype.name} of shape {list(tensors[name].shape)}"
        raise RequestError(f"{name} is {got}, expected one whole number")
    return bool(name in tensors and tensors[name].any())


def _check_lengths(rows: Sequence[Row], config: ModelConfig, schema: InputSchema) -> None:
    inputs = [len((row.source or row.context).ids) for row in rows]
    begun = [len(row.shown) if row.source else 0 for row in rows]
    outputs = [row.sampling.max_tokens + start for row, start in zip(rows, begun, strict=True)]
    totals = list(map(max if config.encoder else add, inputs, outputs))
    row = totals.index(max(totals))
    if totals[row] > config.max_pos_seq_len:
        how = "or" if config.encoder else "+"
        behind = f" + decoder_input_lengths {begun[row]}" if begun[row] else ""
        raise RequestError(
            f"{schema.lengths} {inputs[row]} {how} {schema.output} {rows[row].sampling.max_tokens}{behind}"
            f" = {totals[row]} in row {row} exceeds max_pos_seq_len {config.max_pos_seq_len}"
        )
