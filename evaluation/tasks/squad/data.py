"""SQuAD's files as questions, and the check of an evaluation's arguments.

The login node imports this module: no numpy, no client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.arguments import SquadArguments
from evaluation.tasks.prompt_template import Template, read_template
from handover.errors import ConfigError, nearest
from handover.regular_file import read_text
from handover.templates import read_templates

V1, V2 = "1.1", "2.0"
FIELDS = ("context", "question", "answer", "title", "taskname")
"""Fields of a question that a prompt may contain."""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        title: title of the article.
        context: the passage.
        question: text of the question.
        answers: gold answers; empty where the passage has none (v2.0).
    """

    id: str
    title: str
    context: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """The questions of a file, and the version of the rules that score them.

    Attributes:
        version: V1 or V2 according to the file; V2 where the file has no version and a question has no answer.
        questions: in the file's order.
    """

    version: str
    questions: tuple[Question, ...]


def check_files(arguments: SquadArguments, converted: Path | None) -> None:
    """Read the files, and look for the p-tuned task in a checkpoint that was converted before.

    Raises:
        ConfigError: see ``check_squad``, or the checkpoint has no such task.
    """
    check_squad(arguments)
    if arguments.taskname is None or converted is None or not converted.is_dir():
        return
    names = [str(template.get("taskname")) for template in read_templates(converted)]
    if arguments.taskname not in names:
        hint = nearest(arguments.taskname, names) if names else "put the p-tuned .nemo beside the model's, and convert"
        raise ConfigError(f"{converted} has no p-tuned task {arguments.taskname}", hint)


def check_squad(arguments: SquadArguments) -> tuple[Dataset, Template | None]:
    """Read the questions and the prompt's template; None for that of a p-tuned task.

    Raises:
        ConfigError: a file is missing or malformed, there are two prompts or none, or no token may be generated.
    """
    if (arguments.prompt is None) is (arguments.taskname is None):
        raise ConfigError(
            f"prompt is {arguments.prompt}, taskname is {arguments.taskname}",
            "give prompt, a YAML file, or taskname, whose template the checkpoint carries; null for the other",
        )
    if arguments.tokens_to_generate < 1:
        raise ConfigError(f"tokens_to_generate is {arguments.tokens_to_generate}", "it is at least 1")
    if arguments.use_request_prompt_embedding and arguments.taskname is None:
        raise ConfigError("use_request_prompt_embedding is of a p-tuned task", "give taskname, or leave it false")
    dataset = read_dataset(arguments.data_path, arguments.samples)
    return dataset, None if arguments.prompt is None else read_template(arguments.prompt, FIELDS)


def read_dataset(path: Path, samples: int | None) -> Dataset:
    """Read a file of SQuAD v1.1 or v2.0, or NeMo's JSON lines of ``context``, ``question`` and ``answer``.

    Raises:
        ConfigError: the file is missing, damaged, or shorter than the samples asked for; None asks for all.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the SQuAD file {path} cannot be read: {error}") from error
    try:
        version, found = _lines(text) if path.suffix == ".jsonl" else _articles(json.loads(text))
        questions = list(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{path} is not SQuAD: {reason}",
            "it is SQuAD's JSON, v1.1 or v2.0, or JSON lines (.jsonl) with context, question and answer each",
        ) from error
    ids = [question.id for question in questions]
    if len(set(ids)) < len(ids):
        twice = next(id_ for id_ in ids if ids.count(id_) > 1)
        raise ConfigError(f"{path} has two questions with the id {twice}")
    if not questions or (samples is not None and len(questions) < samples):
        raise ConfigError(f"{path} has {len(questions)} questions, but {samples or 'at least 1'} are asked for")
    is_v2 = version.startswith(("v2", "2")) or any(not question.answers for question in questions)
    return Dataset(V2 if is_v2 else V1, tuple(questions[:samples]))


def _articles(content: Mapping[str, Any]) -> tuple[str, Iterator[Question]]:
    def walk() -> Iterator[Question]:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for entry in paragraph["qas"]:
                    answers = () if entry.get("is_impossible") else tuple(str(a["text"]) for a in entry["answers"])
                    title, passage = str(article.get("title", "")), str(paragraph["context"])
                    yield Question(str(entry["id"]), title, passage, str(entry["question"]), answers)

    return str(content.get("version", "")), walk()


def _lines(text: str) -> tuple[str, Iterator[Question]]:
    def walk() -> Iterator[Question]:
        for number, line in enumerate((line for line in text.split("\n") if line), 1):
            entry = json.loads(line)
            answer = str(entry["answer"])
            yield Question(str(number), "", str(entry["context"]), str(entry["question"]), (answer,) if answer else ())

    return "", walk()
