"""What lm-evaluation-harness's ``generate_until`` asks for, by token ids or through an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from evaluation.client.answer_tensors import read_completions
from evaluation.client.client import Client
from evaluation.client.request_tensors import Sampling, prepare_texts
from evaluation.client.tokenizer import Tokenizer

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "repetition_penalty")


@dataclass(frozen=True)
class Plan:
    """One text to generate: token ids that it continues, tokens at most, what ends it, how it is chosen."""

    ids: list[int]
    count: int
    until: tuple[str, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Writer:
    """Has a model write.

    Attributes:
        model: Triton's name of it, or of an ensemble.
        by_text: it is asked by texts.
        ids_model: a model that takes token ids, for what no text says; None: there is none.
        tokenizer: the served model's.
        max_length: positions of the model.
        max_gen_toks: tokens to generate where a task does not say.
        start_id: what a text without context starts from.
        end_id: the token that ends a text.
        is_t5: the model is an encoder-decoder.
    """

    model: str
    by_text: bool
    ids_model: str | None
    tokenizer: Tokenizer
    max_length: int
    max_gen_toks: int
    start_id: int
    end_id: int
    is_t5: bool

    def write(self, client: Client, contexts: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Continue contexts as the harness's settings say, up to the first stop string, which is left out."""
        plans = [self._plan(*context) for context in contexts]
        texts = [""] * len(plans)
        for sampling in dict.fromkeys(plan.sampling for plan in plans):  # which rows of a request share
            rows = [row for row, plan in enumerate(plans) if plan.sampling == sampling]
            as_texts = [row for row in rows if self.by_text and (self._is_text(plans[row]) or not self.ids_model)]
            as_ids = [row for row in rows if row not in as_texts]
            for part, send in ((as_texts, self._send_texts), (as_ids, self._send_ids)):
                made = send(client, [plans[row] for row in part], sampling) if part else ()
                for row, text in zip(part, made, strict=True):
                    until = plans[row].until
                    texts[row] = text[: min((text.find(stop) for stop in until if stop in text), default=len(text))]
        return texts

    def _plan(self, context: str, settings: dict[str, Any]) -> Plan:
        how = normalize_gen_kwargs(settings, self.max_gen_toks)
        count = min(int(how["max_gen_toks"]), self.max_length - 1)
        ids = self.tokenizer.encode(context) or [self.start_id]
        end = [self.end_id] if self.is_t5 else []  # an encoder's input has one
        ids = ids[-(self.max_length - (len(end) or count)) :] + end
        return Plan(ids, count, tuple(text for text in how["until"] if text), _sampling(how))

    def _prompt(self, plan: Plan) -> str:
        return self.tokenizer.decode(plan.ids[:-1] if self.is_t5 else plan.ids)

    def _is_text(self, plan: Plan) -> bool:
        """Whether its text is encoded to just its token ids."""
        return self.tokenizer.encode(self._prompt(plan)) + plan.ids[-1:] * self.is_t5 == plan.ids

    def _send_texts(self, client: Client, plans: Sequence[Plan], sampling: Sampling) -> list[str]:
        prompts, counts = [self._prompt(plan) for plan in plans], [plan.count for plan in plans]
        until = [plan.until for plan in plans]
        request = prepare_texts(prompts, counts, sampling, end_id=self.end_id, stop_words=until)
        found = read_completions(len(plans), client.send(self.model, request), self.is_t5)
        shown = [""] * len(plans) if self.is_t5 else prompts
        return [each.text[len(prompt) :] for each, prompt in zip(found, shown, strict=True)]

    def _send_ids(self, client: Client, plans: Sequence[Plan], sampling: Sampling) -> list[str]:
        made = client.generate_ids(
            [plan.ids for plan in plans],
            [plan.count for plan in plans],
            model=self.ids_model or self.model,
            sampling=sampling,
            end_id=self.end_id,
            stop_words=[[self.tokenizer.encode_part(text) for text in plan.until] for plan in plans],
            is_encoder_decoder=self.is_t5,
        )
        return [self._text(plan, generation.tokens) for plan, generation in zip(plans, made, strict=True)]

    def _text(self, plan: Plan, tokens: Sequence[int]) -> str:
        ended = tokens[:-1] if tokens and tokens[-1] == self.end_id else tokens
        given = [] if self.is_t5 else plan.ids  # decoded together: a tokenizer may hide the space before a first token
        return self.tokenizer.decode([*given, *ended])[len(self.tokenizer.decode(given)) :]


def _sampling(how: dict[str, Any]) -> Sampling:
    """Translate the harness's words; greedy where it does not sample."""
    if not how.get("do_sample") or not how.get("temperature"):
        return Sampling()
    given = {name: how[name] for name in _SAMPLING_KEYS if how.get(name) is not None}
    return Sampling(**{"top_k": 0, "top_p": 1.0, **given})
