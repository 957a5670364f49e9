"""Prompts that fit a model's positions, and the model's answers to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.arguments import TaskArguments
from evaluation.client.answer_tensors import read_completions
from evaluation.client.client import Client
from evaluation.client.request_tensors import LearntPrompt, Sampling, prepare_ids, prepare_texts
from evaluation.client.served_model import Target
from evaluation.client.tokenizer import Tokenizer
from evaluation.tasks.prompt_template import Template, split_virtual
from evaluation.tasks.target import ask_all, in_batches
from handover.errors import ConfigError

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Prompt:
    """A prompt of a task.

    Attributes:
        text: the prompt for a text model.
        ids: the prompt for a model that takes token ids.
        cut_tokens: number of tokens that were cut from the field that may be cut.
        problem: why the prompt cannot be sent; empty otherwise.
    """

    text: str
    ids: Ids
    cut_tokens: int = 0
    problem: str = ""


@dataclass(frozen=True)
class PromptAnswer:
    """A model's answer to a prompt.

    Attributes:
        text: the answer without the prompt and the end token.
        tokens: token ids of the text.
        generated: number of generated tokens with the end token.
    """

    text: str
    tokens: Ids
    generated: int


class Prompter:
    """Turns samples into prompts.

    Args:
        template: template of the prompts.
        tokenizer: tokenizer of the served model.
        target: the served model.
        output_length: number of positions to leave for the answer.
        learnt: the virtual tokens that the template's marks stand for; None without marks.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        target: Target,
        output_length: int,
        learnt: LearntPrompt | None = None,
    ) -> None:
        self._template, self._tokenizer, self._learnt = template, tokenizer, learnt
        limit = target.served.max_positions
        has_own_positions = target.interface.is_encoder_decoder  # the answer takes the decoder's positions
        self._limit = limit if limit is None or has_own_positions else limit - output_length
        end_id = target.served.end_id
        self._ending = (end_id,) if target.interface.is_encoder_decoder and end_id is not None else ()
        if template.virtual_token_splits and learnt is None:
            raise ConfigError("the prompt has learnt tokens, and no task that learnt them", "give the task's name")
        if learnt is not None and not target.interface.takes_ids:
            raise ConfigError(
                "learnt tokens are ids: a model for text cannot take them", "take model=fastertransformer"
            )
        if self._limit is not None and self._limit < 1:
            raise ConfigError(f"{output_length} tokens of output leave no room for a prompt in {limit} positions")

    def write(self, sample: Mapping[str, str]) -> Prompt:
        """Return the prompt of a sample; one that is too long is cut at the end of the field that may be cut."""
        field = self._template.truncate_field or ""
        text = self._template.render(sample)
        ids = self._encode(text)
        given = self._tokenizer.encode_part(sample[field]) if field in sample and self._is_too_long(ids) else []
        kept = len(given)
        while self._limit is not None and self._is_too_long(ids) and kept:
            kept = max(0, kept - (len(ids) - self._limit))
            shorter = self._tokenizer.decode(given[:kept]) if kept else ""
            text = self._template.render({**sample, field: shorter})
            ids = self._encode(text)
        problem = (
            f"the prompt has {len(ids)} tokens, the model room for {self._limit}" if self._is_too_long(ids) else ""
        )
        return Prompt(text, ids, len(given) - kept, problem)

    def _is_too_long(self, ids: Ids) -> bool:
        return self._limit is not None and len(ids) > self._limit

    def _encode(self, text: str) -> Ids:
        """Encode the texts between the marks separately, as NeMo does with its pseudo tokens."""
        splits, ids, parts = self._template.virtual_token_splits, list[int](), split_virtual(text)
        encode = self._tokenizer.encode_part if parts[1:] else self._tokenizer.encode
        for part in parts:
            if isinstance(part, str):
                ids += encode(part)
            elif self._learnt is not None:
                first = self._learnt.first_id + sum(splits[:part])
                ids += range(first, first + splits[part])
        return (*ids, *self._ending)


@dataclass(frozen=True)
class Completer:
    """Has a model continue prompts up to the end token.

    Attributes:
        target: the served model.
        arguments: model name, concurrency and timeout of the requests.
        tokenizer: tokenizer of the served model.
        output_length: maximum number of tokens of an answer.
        learnt: the virtual tokens that ids beyond the vocabulary stand for.
        sampling: sampling parameters; None for greedy decoding.
    """

    target: Target
    arguments: TaskArguments
    tokenizer: Tokenizer
    output_length: int
    learnt: LearntPrompt | None = None
    sampling: Sampling | None = None

    def complete(self, prompts: Sequence[Prompt]) -> list[PromptAnswer | str]:
        """Send all prompts; a str in place of an answer is the error of its request, or why it was not sent.

        Raises:
            UnreachableError: no server answers.
        """
        sendable = [row for row, prompt in enumerate(prompts) if not prompt.problem]
        sendable.sort(key=lambda row: len(prompts[row].ids), reverse=True)  # long ones must not start last
        batches = in_batches(sendable, self.target.batch_size)
        found = ask_all(
            self.target.url,
            self.arguments.timeout_s,
            batches,
            self.arguments.concurrency,
            lambda client, rows: self._send(client, [prompts[row] for row in rows]),
        )
        return [prompt.problem or found[row] for row, prompt in enumerate(prompts)]

    def _send(self, client: Client, prompts: Sequence[Prompt]) -> list[PromptAnswer]:
        interface, model = self.target.interface, self.arguments.model
        if not interface.takes_ids:
            texts = [prompt.text for prompt in prompts]
            inputs = prepare_texts(texts, self.output_length, self.sampling)
            completions = read_completions(len(texts), client.send(model, inputs))
            given = [0 if interface.is_encoder_decoder else len(prompt.ids) for prompt in prompts]
            return [
                self._of_text(prompt.text if count else "", count, completion.text, completion.length)
                for prompt, count, completion in zip(prompts, given, completions, strict=True)
            ]
        request = prepare_ids(
            [prompt.ids for prompt in prompts],
            self.output_length,
            sampling=self.sampling,
            is_encoder_decoder=interface.is_encoder_decoder,
            learnt=self.learnt,
        )
        generations = client.generate(request, model)
        return [self._of_tokens(generation.tokens) for generation in generations]

    def _of_tokens(self, tokens: Ids) -> PromptAnswer:
        end_id = self.target.served.end_id
        shown = tokens[: tokens.index(end_id)] if end_id in tokens else tokens
        return PromptAnswer(self.tokenizer.decode(shown), shown, len(tokens))

    def _of_text(self, prompt: str, given: int, text: str, length: int | None) -> PromptAnswer:
        tokens = tuple(self.tokenizer.encode(text)[given:])
        return PromptAnswer(text.removeprefix(prompt), tokens, len(tokens) if length is None else length - given)
