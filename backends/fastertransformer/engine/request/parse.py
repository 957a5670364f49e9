"""Requests: a client's named tensors (see schema.py), checked, as one row per sequence.

Scalars are [B, 1] from clients, or [B] if config.pbtxt reshapes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np

from ..errors import RequestError
from ..model.config import ModelConfig
from .prompts import Context, place_prompts
from .sampling_params import SamplingParams, sampling_params
from .schema import INPUT_SCHEMAS, InputSchema, checked, refuse_rows
from .schema import Array as Array
from .words import parse_word_lists


@dataclass(frozen=True)
class Request:
    """B sequences to continue.

    Attributes:
        shown: B: the part of the input that the answer shows, which is without prompts, int64 [n]; of an
            encoder-decoder what its decoder begins with.
        sampling: B: parameters of each row.
        contexts: B: what each row's generation starts from, prompts included.
        sources: B: the encoder's inputs; empty without an encoder.
        source_width: of the tensor with the encoder's inputs, padding included.
        starts_session: whether it begins a session (START).
        ends_session: whether it is the session's last request (END).
        session_len, memory_len: of the session that it begins: the most tokens, and the tokens whose keys and values
            are kept; 0: no limit. The first row's values apply to all rows, as in FasterTransformer.
    """

    shown: Sequence[Array]
    sampling: Sequence[SamplingParams]
    contexts: Sequence[Context]
    sources: Sequence[Context] = ()
    source_width: int = 0
    starts_session: bool = False
    ends_session: bool = False
    session_len: int = 0
    memory_len: int = 0

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return len(self.sampling)

    @property
    def beam_width(self) -> int:
        """The beam width of every row; 1 is sampling."""
        return self.sampling[0].beam_width

    @property
    def is_return_attentions(self) -> bool:
        """Whether any row requests the encoder's attentions."""
        return any(row.is_return_attentions for row in self.sampling)

    @property
    def max_tokens(self) -> int:
        """The most tokens that any row may generate."""
        return max(row.max_tokens for row in self.sampling)


def parse_request(tensors: Mapping[str, Array], config: ModelConfig, prompts: Sequence[Array] | None = None) -> Request:
    """Check the tensors of one request.

    Args:
        tensors: by FasterTransformer's names; absent optional tensors take FasterTransformer's defaults: greedy,
            temperature 1, no penalty, seed 0, end_id and start_id of config.ini, no log-probabilities, no words.
        config: the model's dimensions.
        prompts: see prompts.read_prompt_tables.

    Raises:
        RequestError: a tensor is unknown, missing, of another type or shape, out of range, or input plus output is
            longer than max_pos_seq_len. (FasterTransformer logs an error there and reads past the position table.)
    """
    schema = INPUT_SCHEMAS[config.family]
    _check_names(tensors, schema)
    ids = checked("input_ids", tensors["input_ids"], (np.uint32,), "batch", "n").astype(np.int64)
    batch, width = ids.shape
    if not batch:
        raise RequestError(f"input_ids has shape {list(ids.shape)}, and so no row")
    defaults = {"start_id": config.start_id, "end_id": config.end_id}
    scalars = {name: rule.read(name, tensors, batch, defaults.get(name)) for name, rule in schema.scalars.items()}
    _check_combinations(tensors, scalars, config)
    lengths = scalars[schema.lengths]
    if width:
        is_bad = (lengths < 1) | (lengths > width)
        refuse_rows(schema.lengths, lengths, is_bad, f"1 to {width}, input_ids' width")
    contexts, shown = place_prompts(tensors, scalars, ids, lengths, config, prompts)
    sources: Sequence[Context] = ()
    if config.encoder:  # the input is the encoder's
        tasks = scalars["ia3_tasks"].tolist()
        sources = [replace(context, ia3_task=task) for context, task in zip(contexts, tasks, strict=True)]
        contexts = _decoder_contexts(tensors, scalars, config)
        shown = [context.ids[1:] for context in contexts]
    limits = scalars[schema.output] if schema.output else np.zeros(batch, np.int64)
    bad_words, stop_words = (parse_word_lists(f"{kind}_words_list", tensors, batch) for kind in ("bad", "stop"))
    request = Request(
        shown=shown,
        sampling=sampling_params(scalars, limits, bad_words, stop_words, config.vocab_size),
        contexts=contexts,
        sources=sources,
        source_width=width if config.encoder else 0,
        starts_session=_is_set(tensors, "START"),
        ends_session=_is_set(tensors, "END"),
        session_len=int(scalars["session_len"][0]),
        memory_len=int(scalars["memory_len"][0]),
    )
    _check_lengths(request, config, schema)
    return request


def _check_names(tensors: Mapping[str, Array], schema: InputSchema) -> None:
    for name, array in tensors.items():
        if name not in schema.names:
            close = get_close_matches(name, schema.names, n=1)
            hint = f", did you mean '{close[0]}'?" if close else f"; known are {', '.join(sorted(schema.names))}"
            raise RequestError(f"unknown input '{name}' of shape {list(array.shape)}{hint}")
    required = ("input_ids", *filter(None, (schema.lengths, schema.output)))
    missing = [name for name in required if name not in tensors]
    if missing:
        raise RequestError(f"missing input: {', '.join(missing)}")


def _decoder_contexts(tensors: Mapping[str, Array], scalars: Mapping[str, Array], config: ModelConfig) -> list[Context]:
    """Give what decoders begin with: each row's start_id, then its decoder_input_ids."""
    starts, lengths, batch = scalars["start_id"], scalars["decoder_input_lengths"], len(scalars["start_id"])
    sent = [name for name in ("decoder_input_ids", "decoder_input_lengths") if name in tensors]
    if len(sent) == 1:
        raise RequestError(f"{sent[0]}: decoder_input_ids and decoder_input_lengths come together; send both or none")
    ids = checked(sent[0], tensors[sent[0]], (np.uint32,), batch, "n") if sent else np.zeros((batch, 0), np.uint32)
    width, legal = ids.shape[1], f"below vocab_size {config.vocab_size}"
    refuse_rows("start_id", starts, starts >= config.vocab_size, legal)
    refuse_rows("decoder_input_lengths", lengths, lengths > width, f"at most {width}, decoder_input_ids' width")
    most = np.where(np.arange(width) < lengths[:, None], ids, 0).max(1, initial=0)
    refuse_rows("decoder_input_ids' largest", most, most >= config.vocab_size, legal)
    rows = zip(starts.tolist(), ids, lengths.tolist(), strict=True)
    return [Context(np.array([start, *tokens[:length]], np.int64)) for start, tokens, length in rows]


def _check_combinations(tensors: Mapping[str, Array], scalars: Mapping[str, Array], config: ModelConfig) -> None:
    scope = scalars["is_return_context_cum_log_probs"]
    lacks = scope & ~scalars["is_return_log_probs"]
    refuse_rows("is_return_context_cum_log_probs", scope, lacks, "false without is_return_log_probs")
    if "repetition_penalty" in tensors and "presence_penalty" in tensors:
        raise RequestError("repetition_penalty and presence_penalty exclude each other; send one of them")
    width = np.maximum(scalars["beam_width"], 1)
    refuse_rows("beam_width", width, width != width[0], f"the same in all rows of a request, {width[0]} as in row 0")

    tasks = scalars["ia3_tasks"]
    if "ia3_tasks" in tensors and not config.ia3_num_tasks:
        raise RequestError("ia3_tasks: this checkpoint has no IA3 adapters; leave it out")
    is_beyond = (tasks < 0) | (tasks >= config.ia3_num_tasks)
    refuse_rows("ia3_tasks", tasks, is_beyond & ("ia3_tasks" in tensors), f"0 to {config.ia3_num_tasks - 1}")


def _is_set(tensors: Mapping[str, Array], name: str) -> bool:
    if name in tensors and (tensors[name].size != 1 or tensors[name].dtype.kind not in "biu"):
        got = f"{tensors[name].dtype.name} of shape {list(tensors[name].shape)}"
        raise RequestError(f"{name} is {got}, expected one whole number")
    return bool(name in tensors and tensors[name].any())


def _check_lengths(request: Request, config: ModelConfig, schema: InputSchema) -> None:
    inputs = np.array([len(context.ids) for context in request.sources or request.contexts])
    begun = np.array([len(row) if request.sources else 0 for row in request.shown])
    limits = np.array([row.max_tokens for row in request.sampling])
    outputs = limits + begun
    total = np.maximum(inputs, outputs) if request.sources else inputs + outputs
    row = int(total.argmax())
    if total[row] > config.max_pos_seq_len:
        how = "or" if request.sources else "+"
        behind = f" + decoder_input_lengths {begun[row]}" if begun[row] else ""
        raise RequestError(
            f"{schema.lengths} {inputs[row]} {how} {schema.output} {limits[row]}{behind}"
            f" = {total[row]} in row {row} exceeds max_pos_seq_len {config.max_pos_seq_len}"
        )
