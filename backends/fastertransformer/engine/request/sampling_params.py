"""How each row of a request is generated: FasterTransformer's sampling and search tensors, typed, one object a row."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ft_format.tensors import NO_TOKEN

from .guides import Guide, parse_guides
from .schema import SCALARS, Inputs
from .token_lists import LogitBias, parse_logit_bias, parse_stop_token_ids
from .words import WordList, parse_word_lists


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of one row; the names are those of FasterTransformer's tensors where the meaning is the same."""

    max_tokens: int  # 0: only the context is computed
    end_id: int  # one outside the vocabulary is never generated; NO_TOKEN with ignore_eos
    pad_id: int = 0  # behind the row's tokens in an answer: the end_id that was sent
    beam_width: int = 1  # of all rows of the request; 1 is sampling
    top_k: int = 1  # and top_p, as resolve_top_k_top_p gives them
    top_p: float = 1.0
    top_p_decay: float = 1.0  # and top_p_min, in (0, 1]
    top_p_min: float = 1e-6
    top_p_reset_ids: int = NO_TOKEN
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    output_presence_penalty: float = 0.0
    min_p: float = 0.0
    min_length: int = 0
    random_seed: int = 0  # the bits of an unsigned seed, as int64
    is_sampled: bool = False  # whether the token is drawn at random; else it is the argmax
    len_penalty: float = 0.0
    beam_search_diversity_rate: float = 0.0
    max_speculative_tokens: int = -1  # of a draft; -1: as deployed
    is_return_log_probs: bool = False
    is_return_context_cum_log_probs: bool = False
    is_return_context_log_probs: bool = False
    is_return_context_embeddings: bool = False
    is_return_attentions: bool = False
    is_return_raw_log_probs: bool = False
    num_top_log_probs: int = 0  # at most the vocabulary's size; with some, is_return_raw_log_probs is true
    num_context_top_log_probs: int = 0  # likewise, with is_return_context_log_probs
    bad_words: WordList = field(default_factory=WordList)
    stop_words: WordList = field(default_factory=WordList)
    stop_token_ids: frozenset[int] = frozenset()  # end the row as its end_id does
    logit_bias: LogitBias = field(default_factory=LogitBias)
    guide: Guide | None = None  # what the output must follow; None: nothing

    @property
    def has_penalty(self) -> bool:
        """Whether tokens that have occurred are penalised."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    @property
    def has_output_penalty(self) -> bool:
        """Whether tokens are penalised by how often they have been generated."""
        return self.frequency_penalty != 0 or self.output_presence_penalty != 0

    @property
    def keeps_all(self) -> bool:
        """Whether each token is drawn from all, by neither a top-k nor a top-p."""
        return not self.top_k and self.top_p >= 1 and not self.has_moving_top_p

    @property
    def has_moving_top_p(self) -> bool:
        """Whether top_p may change from token to token: factual nucleus sampling."""
        return not self.top_k and (self.top_p_decay != 1 or self.top_p_min > self.top_p)

    @property
    def is_drawn_from_all(self) -> bool:
        """Whether each token is drawn from all that may follow, and nothing else is needed of the logits."""
        return self.is_sampled and self.keeps_all and not (self.min_p or self.needs_token_log_probs)

    @property
    def needs_token_log_probs(self) -> bool:
        """Whether sampling computes the log-probabilities of its tokens; a beam search has them anyway."""
        return self.is_return_log_probs and self.beam_width == 1


_TOPS = {"num_top_log_probs": "is_return_raw_log_probs", "num_context_top_log_probs": "is_return_context_log_probs"}
"""What is requested with top log probabilities."""
_COMPUTED = ("runtime_top_k", "runtime_top_p", "top_p_decay", "top_p_min")
_TAKEN_AS_SENT = {each.name for each in fields(SamplingParams)} & SCALARS.keys() - {"beam_width", *_COMPUTED}


def sampling_params(sent: Inputs, vocab_size: int) -> list[SamplingParams]:
    """Make the parameters of each row of a request."""
    bad_words, stop_words = (parse_word_lists(name, sent) for name in ("bad_words_list", "stop_words_list"))
    stop_token_ids, logit_bias = parse_stop_token_ids(sent, vocab_size), parse_logit_bias(sent, vocab_size)
    guides = parse_guides(sent, vocab_size)
    columns = _columns(sent, vocab_size)
    pad_ids, beam_width = sent.scalars["end_id"].tolist(), max(1, *columns["beam_width"])
    rows = []
    for row, limit in enumerate(sent.limits.tolist()):
        top_k, top_p, decay, least = (columns[name][row] for name in _COMPUTED)
        top_k, top_p = resolve_top_k_top_p(top_k, top_p)
        # Outside (0, 1] they are replaced, as FasterTransformer's ``set_topp_runtime_args`` does.
        decay, least = decay if 0 < decay <= 1 else 1.0, least if 0 < least <= 1 else 0.5
        # The argmax has a probability of at least 1 / V. If top_p never exceeds that, only the argmax can be drawn.
        largest_top_p = top_p if top_k else max(top_p, least)
        rows.append(
            SamplingParams(
                max_tokens=limit,
                pad_id=pad_ids[row],
                beam_width=beam_width,
                top_k=top_k,
                top_p=top_p,
                top_p_decay=decay,
                top_p_min=least,
                is_sampled=top_k != 1 and largest_top_p > 1 / vocab_size and beam_width == 1,
                bad_words=bad_words[row],
                stop_words=stop_words[row],
                stop_token_ids=stop_token_ids[row],
                logit_bias=logit_bias[row],
                guide=guides[row],
                **{name: columns[name][row] for name in _TAKEN_AS_SENT},
            )
        )
    return rows


def _columns(sent: Inputs, vocab_size: int) -> dict[str, list[Any]]:
    """Return each row's value of every scalar, by name, with what follows from others."""
    columns = {name: values.tolist() for name, values in sent.scalars.items()}
    columns["random_seed"] = sent.scalars["random_seed"].astype(np.int64).tolist()
    if any(columns["ignore_eos"]):
        columns["end_id"] = np.where(sent.scalars["ignore_eos"], NO_TOKEN, sent.scalars["end_id"]).tolist()
    for tops, wish in _TOPS.items():
        if any(columns[tops]):
            columns[tops] = [min(count, vocab_size) for count in columns[tops]]
            columns[wish] = [wanted or count > 0 for wanted, count in zip(columns[wish], columns[tops], strict=True)]
    return columns


def resolve_top_k_top_p(top_k: int, top_p: float) -> tuple[int, float]:
    """Translate what clients send into what is meant, as FasterTransformer does.

    top_k 0 and top_p 0: greedy (top_k 1). top_p 0 with top_k: no nucleus (top_p 1). top_k 0 with top_p: nucleus only.
    """
    return (top_k, top_p) if top_p else (max(1, top_k), 1.0)
