"""Ask a deployment many questions: in batches, several requests in flight; what is refused is answered by its error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from evaluation.arguments import TaskArguments
from evaluation.client.client import Client, ModelInterface, RequestError
from evaluation.client.served_model import (
    DeployedModel,
    check_identity,
    expected_digest,
    find_endpoint,
    inspect_endpoint,
)
from evaluation.client.tokenizer import Tokenizer, load_tokenizer
from evaluation.tasks.check import check_task
from evaluation.tasks.scoring import may_score
from handover.errors import ConfigError
from handover.progress import Progress

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Target:
    """The model that a task asks.

    Attributes:
        served: the deployment behind it.
        interface: what it takes.
        batch_size: rows a request.
    """

    served: DeployedModel
    interface: ModelInterface
    batch_size: int

    @property
    def url(self) -> str:
        """``host:port`` of gRPC."""
        return self.served.endpoint.grpc_url


def find_target(task: str, arguments: TaskArguments) -> Target:
    """Find the model to ask, and prove that it is the one meant and one that the task can be computed from.

    Raises:
        ServerError: no server answers, it has no such model, or it serves another one than was asked for.
        ConfigError: the task cannot be computed from this model's answers.
    """
    endpoint = find_endpoint(arguments.endpoint)
    check_identity(endpoint, expected_digest(arguments.model_digest, arguments.model_repository))
    with Client(endpoint.grpc_url) as client:
        interface = client.describe(arguments.model)
        # An ensemble has no checkpoint of its own; the one inside has.
        inner = interface if interface.takes_ids or endpoint.model_repository else _engine(client)
    place = f"model '{arguments.model}' at {endpoint.grpc_url}"
    if not (interface.takes_ids or interface.takes_text) or interface.has_sessions:
        raise ConfigError(
            f"{place} takes neither FasterTransformer's token ids nor an ensemble's texts, row by row",
            "take model=fastertransformer or model=ensemble",
        )
    check_task(task, place, interface.is_encoder_decoder, may_score(interface))
    served = inspect_endpoint(endpoint, inner.parameters)
    return Target(served, interface, min(arguments.batch_size, interface.max_batch_size))


def find_tokenizer(target: Target, source: Path | None) -> Tokenizer:
    """Load the served model's tokenizer.

    Args:
        target: the model.
        source: its files, where they are not beside the shards.

    Raises:
        ConfigError: they are not on this machine.
    """
    source = source or target.served.directory
    if source is None:
        raise ConfigError(
            f"the tokenizer of the model at {target.url} is not on this machine",
            "name a directory of tokenizer files with --tokenizer",
        )
    return load_tokenizer(source)


def ask_all(
    url: str,
    timeout_s: float,
    batches: Sequence[Sequence[Question]],
    concurrency: int,
    send: Callable[[Client, Sequence[Question]], Sequence[Answer]],
    label: str = "evaluate",
) -> dict[Question, Answer | str]:
    """Send every batch; of one that is refused or fails each row is sent alone, and answered by its own error, a str.

    Args:
        url: of gRPC.
        timeout_s: limit of one request.
        batches: of questions that are all different.
        concurrency: requests in flight.
        send: asks one batch and gives an answer to each row.
        label: of the progress.

    Raises:
        UnreachableError: no server answers.
    """
    local = threading.local()
    clients: list[Client] = []

    def connect() -> None:
        local.client = Client(url, timeout_s)
        clients.append(local.client)

    def ask(batch: Sequence[Question]) -> Sequence[Answer | str]:
        try:
            return send(local.client, batch)
        except RequestError as error:
            if len(batch) == 1:
                return [str(error)]
        return [answer for question in batch for answer in ask([question])]  # whose fault was it?

    answers: dict[Question, Answer | str] = {}
    with (
        Progress(label, sum(map(len, batches)), "queries") as progress,
        ThreadPoolExecutor(max_workers=max(1, concurrency), initializer=connect) as pool,
    ):
        pending: dict[Future[Sequence[Answer | str]], Sequence[Question]] = {pool.submit(ask, b): b for b in batches}
        try:
            for future in as_completed(pending):
                answers.update(zip(pending[future], future.result(), strict=True))
                progress.advance(len(pending[future]))
        finally:
            pool.shutdown(cancel_futures=True)
            for client in clients:
                client.close()
    return answers


def in_batches(questions: Sequence[Question], batch_size: int) -> list[Sequence[Question]]:
    """Cut into batches, in order."""
    return [questions[start : start + batch_size] for start in range(0, len(questions), batch_size)]


def _engine(client: Client) -> ModelInterface:
    """Describe the model behind an ensemble of a server that is not ours; empty if it has another name."""
    try:
        return client.describe("fastertransformer")
    except RequestError:
        return ModelInterface(frozenset(), 1, {})
