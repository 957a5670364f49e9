"""The served model of a task, and many requests to it: in batches, several in flight, each error with its own row."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from evaluation.arguments import TaskArguments
from evaluation.client.client import ModelInterface
from evaluation.client.connecting import check_tokenizer
from evaluation.client.endpoint_tokenizer import EndpointTokenizer
from evaluation.client.errors import RequestError
from evaluation.client.request_tensors import LORA_INPUT
from evaluation.client.served_model import Target, open_named
from evaluation.client.tokenizer import Tokenizer, load_tokenizer
from evaluation.tasks.check import check_scores
from handover.errors import ConfigError, shortened
from handover.progress import Progress

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")


class Closing(Protocol):
    """What is closed when it is not needed any more."""

    def close(self) -> None:
        """Close it."""


Connection = TypeVar("Connection", bound=Closing)


def find_target(task: str, arguments: TaskArguments) -> Target:
    """Find the model, and check that it is the right one and that the task can be computed from its answers.

    Raises:
        ServerError: no server answers, it has no such model, or it serves other weights than those asked for.
        ConfigError: the task cannot be computed from this model's answers.
    """
    target = with_adapter(open_named(arguments), arguments.lora_name)
    if target.capabilities:
        sys.stdout.write(f"{target.capabilities.line()}\n")
    check_takes_rows(target)
    interface = target.interface
    if arguments.needs_scores:
        check_scores(task, _name(target), interface.is_encoder_decoder, interface.can_score)
    return target


def with_adapter(target: Target, name: str | None) -> Target:
    """Have an adapter of the model answer; without a name the model alone.

    Raises:
        ConfigError: the model does not take the name of an adapter.
    """
    if not name:
        return target
    if isinstance(target.interface, ModelInterface) and LORA_INPUT in target.interface.inputs:
        return replace(target, lora_name=name)
    hint = f"its API names an adapter as a model: take model={name}" if target.is_openai else "ask fastertransformer"
    raise ConfigError(f"{_name(target)} does not take the name of a LoRA adapter", hint)


def check_takes_rows(target: Target) -> None:
    """Refuse a model that takes neither token ids nor texts row by row, such as one with sessions.

    Raises:
        ConfigError: the model is such a one.
    """
    interface = target.interface
    if not (interface.takes_ids or interface.takes_text) or interface.has_sessions:
        raise ConfigError(
            f"{_name(target)} takes neither FasterTransformer's token ids nor an ensemble's texts, row by row",
            "take model=fastertransformer or model=ensemble",
        )


def find_tokenizer(target: Target, source: Path | None) -> Tokenizer:
    """Load the served model's tokenizer from a directory of its files; None for the served checkpoint's.

    Where neither is on this machine, an OpenAI API that has ``/tokenize`` and ``/detokenize`` is asked for each text.

    Raises:
        ConfigError: the files are not on this machine, or they are not those of an OpenAI API.
    """
    source = source or target.served.directory
    if source is None:
        return _ask_endpoint(target)
    tokenizer = load_tokenizer(source)
    check_tokenizer(target, tokenizer)
    return tokenizer


def _ask_endpoint(target: Target) -> Tokenizer:
    try:
        if target.is_openai:
            return EndpointTokenizer(target)
        problem = ""
    except RequestError as error:
        problem = f", and its API does not tokenize: {shortened(error.problem, 200)}"
    raise ConfigError(
        f"the tokenizer of the model at {target.url} is not on this machine{problem}",
        "name a directory of its files: main.py's deployment.endpoint_tokenizer, or --tokenizer of this program",
    )


def ask_all(
    connect: Callable[[], Connection],
    batches: Sequence[Sequence[Question]],
    concurrency: int,
    send: Callable[[Connection, Sequence[Question]], Sequence[Answer]],
    label: str = "evaluate",
) -> dict[Question, Answer | str]:
    """Send every batch; the rows of a batch that fails are sent again one by one, and a str is the error of a row.

    Raises:
        UnreachableError: no server answers.
    """
    local = threading.local()
    connections: list[Connection] = []

    def begin() -> None:
        local.connection = connect()
        connections.append(local.connection)

    def ask(batch: Sequence[Question]) -> Sequence[Answer | str]:
        try:
            return send(local.connection, batch)
        except RequestError as error:
            if len(batch) == 1:
                return [str(error)]
        return [answer for question in batch for answer in ask([question])]  # find the row that fails

    answers: dict[Question, Answer | str] = {}
    with (
        Progress(label, sum(map(len, batches)), "queries") as progress,
        ThreadPoolExecutor(max_workers=max(1, concurrency), initializer=begin) as pool,
    ):
        pending: dict[Future[Sequence[Answer | str]], Sequence[Question]] = {pool.submit(ask, b): b for b in batches}
        try:
            for future in as_completed(pending):
                answers.update(zip(pending[future], future.result(), strict=True))
                progress.advance(len(pending[future]))
        finally:
            pool.shutdown(cancel_futures=True)
            for connection in connections:
                connection.close()
    return answers


def in_batches(questions: Sequence[Question], batch_size: int) -> list[Sequence[Question]]:
    """Split questions into batches, in order."""
    return [questions[start : start + batch_size] for start in range(0, len(questions), batch_size)]


def _name(target: Target) -> str:
    return f"model '{target.model}' at {target.url}"
