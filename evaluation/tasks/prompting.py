"""Prompts that fit a model's positions, and the model's answers to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.arguments import TaskArguments
from evaluation.client.connecting import connect
from evaluation.client.model_connection import Continuation, ModelConnection, ModelFiles, WrittenPrompt
from evaluation.client.request_tensors import LearntPrompt, Sampling
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
        ids: the prompt for a model that takes token ids.
        cut_tokens: number of tokens that were cut from the field that may be cut.
        problem: why the prompt cannot be sent; empty otherwise.
    """

    text: str
    ids: Ids
    cut_tokens: int = 0
    problem: str = ""


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
        if target.interface.is_encoder_decoder and target.interface.takes_ids and end_id is None:
            raise ConfigError(
                f"which token ends an encoder's input is not known: config.ini of {target.url}'s model is not here",
                "give the deployment's endpoint.json, or the base URL of Slipway's OpenAI API, which tells it",
            )
        if template.virtual_token_splits and learnt is None:
            raise ConfigError("the prompt has learnt tokens, and no task that learnt them", "give the task's name")
        if learnt is not None and (target.is_openai or not target.interface.takes_ids):
            raise ConfigError(
                "learnt tokens are ids of Triton's model fastertransformer: no text and no OpenAI API can hold them",
                "take model=fastertransformer at host:port of Triton's gRPC",
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

    def complete(self, prompts: Sequence[Prompt]) -> list[Continuation | str]:
        """Send all prompts; a str in place of an answer is the error of its request, or why it was not sent.

        Raises:
            UnreachableError: no server answers.
        """
        sendable = [row for row, prompt in enumerate(prompts) if not prompt.problem]
        sendable.sort(key=lambda row: len(prompts[row].ids), reverse=True)  # long ones must not start last
        batches = in_batches(sendable, self.target.batch_size)
        files = ModelFiles(self.tokenizer, self.target.served.end_id, self.learnt)
        found = ask_all(
            lambda: connect(self.target, self.arguments.timeout_s, files),
            batches,
            self.arguments.concurrency,
            lambda connection, rows: self._send(connection, [prompts[row] for row in rows]),
        )
        return [prompt.problem or found[row] for row, prompt in enumerate(prompts)]

    def _send(self, connection: ModelConnection, prompts: Sequence[Prompt]) -> list[Continuation]:
        written = [WrittenPrompt(prompt.text, prompt.ids) for prompt in prompts]
        return connection.complete(written, self.output_length, self.sampling)
