"""Generation for lm-evaluation-harness's ``generate_until``, by token ids or through an ensemble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from evaluation.client.answer_tensors import read_completions
from evaluation.client.client import Client
from evaluation.client.model_connection import WrittenPrompt
from evaluation.client.openai_connection import OpenAIConnection
from evaluation.client.request_tensors import Sampling, prepare_ids, prepare_texts
from evaluation.client.tokenizer import Tokenizer

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "repetition_penalty")


@dataclass(frozen=True)
class Continuation:
    """One generation: the prompt's token ids, the maximum number of tokens, the stop strings, and the sampling."""

    ids: list[int]
    count: int
    until: tuple[str, ...]
    sampling: Sampling


@dataclass(frozen=True)
class TextGenerator:
    """Generates texts with one served model.

    Attributes:
        model: Triton's name of the model or ensemble.
        by_text: whether requests contain texts.
        ids_model: Triton's name of a model that takes token ids, for prompts that no text is encoded to; None without
            one.
        max_length: positions of the model.
        max_gen_toks: number of tokens to generate where a task does not say.
        start_id: the prompt where the context is empty.
        end_id: the token that ends a text.
        is_t5: whether the model is an encoder-decoder.
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

    def generate(self, writer: Client | OpenAIConnection, contexts: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Continue contexts with the harness's settings, up to the first stop string, which is left out."""
        entries = [self._entry(*context) for context in contexts]
        texts = [""] * len(entries)
        for sampling in dict.fromkeys(entry.sampling for entry in entries):  # all rows of a request share it
            rows = [row for row, entry in enumerate(entries) if entry.sampling == sampling]
            for row, text in self._write(writer, rows, entries, sampling):
                until = entries[row].until
                texts[row] = text[: min((text.find(stop) for stop in until if stop in text), default=len(text))]
        return texts

    def _write(
        self,
        writer: Client | OpenAIConnection,
        rows: Sequence[int],
        entries: Sequence[Continuation],
        sampling: Sampling,
    ) -> Iterator[tuple[int, str]]:
        """Yield the text of each row."""
        if isinstance(writer, OpenAIConnection):
            for kind in dict.fromkeys((entries[row].count, entries[row].until) for row in rows):
                part = [row for row in rows if (entries[row].count, entries[row].until) == kind]
                prompts = [WrittenPrompt(self._prompt(entries[row]), tuple(entries[row].ids)) for row in part]
                made = writer.complete(prompts, kind[0], sampling, kind[1])
                yield from zip(part, (each.text for each in made), strict=True)
            return
        as_texts = [row for row in rows if self.by_text and (self._is_text(entries[row]) or not self.ids_model)]
        as_ids = [row for row in rows if row not in as_texts]
        for part, send in ((as_texts, self._send_texts), (as_ids, self._send_ids)):
            if part:
                yield from zip(part, send(writer, [entries[row] for row in part], sampling), strict=True)

    def _entry(self, context: str, settings: dict[str, Any]) -> Continuation:
        how = normalize_gen_kwargs(settings, self.max_gen_toks)
        count = min(int(how["max_gen_toks"]), self.max_length - 1)
        ids = self.tokenizer.encode(context) or [self.start_id]
        end = [self.end_id] if self.is_t5 else []  # an encoder's input ends with this token
        ids = ids[-(self.max_length - (len(end) or count)) :] + end
        return Continuation(ids, count, tuple(text for text in how["until"] if text), _sampling(how))

    def _prompt(self, entry: Continuation) -> str:
        return self.tokenizer.decode(entry.ids[:-1] if self.is_t5 else entry.ids)

    def _is_text(self, entry: Continuation) -> bool:
        """Return whether the prompt's text is encoded to the prompt's token ids."""
        return self.tokenizer.encode(self._prompt(entry)) + entry.ids[-1:] * self.is_t5 == entry.ids

    def _send_texts(self, client: Client, entries: Sequence[Continuation], sampling: Sampling) -> list[str]:
        prompts, counts = [self._prompt(entry) for entry in entries], [entry.count for entry in entries]
        until = [entry.until for entry in entries]
        request = prepare_texts(prompts, counts, sampling, end_id=self.end_id, stop_words=until)
        found = read_completions(len(entries), client.send(self.model, request), self.is_t5)
        shown = [""] * len(entries) if self.is_t5 else prompts
        return [each.text[len(prompt) :] for each, prompt in zip(found, shown, strict=True)]

    def _send_ids(self, client: Client, entries: Sequence[Continuation], sampling: Sampling) -> list[str]:
        request = prepare_ids(
            [entry.ids for entry in entries],
            [entry.count for entry in entries],
            sampling=sampling,
            end_id=self.end_id,
            stop_words=[[self.tokenizer.encode_part(text) for text in entry.until] for entry in entries],
            is_encoder_decoder=self.is_t5,
        )
        made = client.generate(request, self.ids_model or self.model)
        return [self._text(entry, generation.tokens) for entry, generation in zip(entries, made, strict=True)]

    def _text(self, entry: Continuation, tokens: Sequence[int]) -> str:
        ended = tokens[:-1] if tokens and tokens[-1] == self.end_id else tokens
        given = [] if self.is_t5 else entry.ids  # decoded together: decoding may drop the space before a first token
        return self.tokenizer.decode([*given, *ended])[len(self.tokenizer.decode(given)) :]


def _sampling(how: dict[str, Any]) -> Sampling:
    """Translate the harness's settings; decoding is greedy where they do not sample."""
    if not how.get("do_sample") or not how.get("temperature"):
        return Sampling()
    given = {name: how[name] for name in _SAMPLING_KEYS if how.get(name) is not None}
    return Sampling(**{"top_k": 0, "top_p": 1.0, **given})
