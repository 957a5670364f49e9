"""Prompt templates: a YAML file with the keys of NeMo's ``task_templates``, or the template of a p-tuned task.

``prompt_template`` contains the fields of a sample in braces. The answer is the last field, and is left out of the
prompt that the model continues. ``examples`` precede the sample, with their answers, for few-shot prompts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from handover.errors import ConfigError, nearest
from handover.regular_file import SETTINGS_BYTES, read_text

_FIELD = re.compile(r"\{(\w+)\}")
_VIRTUAL = re.compile(r"<\|VIRTUAL_PROMPT_(\d+)\|>")


@dataclass(frozen=True)
class Template:
    """A template that turns a sample into a prompt.

    Attributes:
        prompt_template: text with fields in braces; ``<|VIRTUAL_PROMPT_0|>`` is a mark that stands for virtual tokens.
        answer_field: the field that the model generates.
        truncate_field: the field that is cut at its end where a prompt is too long; None if no field may be cut.
        examples: samples that precede the prompt, with their answers.
        example_separator: text between two samples.
        stop: an answer ends before the first of these texts, even where that is its beginning.
        no_answer: answers that say that the question has none, as in SQuAD v2.0; case and a final stop are ignored.
        virtual_token_splits: number of virtual tokens that each mark stands for.
    """

    prompt_template: str
    answer_field: str = "answer"
    truncate_field: str | None = None
    examples: tuple[Mapping[str, str], ...] = ()
    example_separator: str = "\n\n"
    stop: tuple[str, ...] = ()
    no_answer: tuple[str, ...] = ()
    virtual_token_splits: tuple[int, ...] = ()

    def render(self, sample: Mapping[str, str]) -> str:
        """Return the prompt of a sample: the examples, and the sample up to its answer."""
        shown = [_fill(self.prompt_template, example) for example in self.examples]
        asked = _fill(self.prompt_template, {**sample, self.answer_field: ""}).rstrip()
        return self.example_separator.join([*shown, asked])

    def label(self, answer: str) -> str:
        """Return an answer as it would follow the prompt: after a space if the template has one before it."""
        before = self.prompt_template.partition(f"{{{self.answer_field}}}")[0]
        return f" {answer}" if before.endswith(" ") else answer

    def read_answer(self, text: str) -> str:
        """Extract the answer from the generated text; empty where the text says that there is none.

        As lm-evaluation-harness does it: the text ends before the first stop, wherever that is, and only then loses its
        outer white space. A text that begins with a stop is no answer.
        """
        for stop in filter(None, self.stop):
            text = text.partition(stop)[0]
        answer = text.strip()
        says_none = answer.rstrip(".").casefold() in {each.rstrip(".").casefold() for each in self.no_answer}
        return "" if says_none else answer

    @property
    def sample_fields(self) -> list[str]:
        """Names of the fields that a sample must have."""
        return [name for name in _FIELD.findall(self.prompt_template) if name != self.answer_field]


def split_virtual(text: str) -> list[str | int]:
    """Split a prompt at its marks: texts, and the numbers of the marks between them."""
    parts: list[str | int] = list(_VIRTUAL.split(text))
    parts[1::2] = [int(number) for number in parts[1::2]]
    return [part for part in parts if part != ""]


def read_template(path: Path, known: Sequence[str]) -> Template:
    """Read a YAML file; ``known`` are the fields of the samples.

    Raises:
        ConfigError: the file cannot be read, or has an unknown key, a field that samples do not have, or no text.
    """
    try:
        content: Any = yaml.safe_load(read_text(path, SETTINGS_BYTES))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the prompt {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no prompt", "write prompt_template: '... {question} ...'")
    return make_template(content, known, str(path))


def make_template(content: Mapping[str, Any], known: Sequence[str], place: str) -> Template:
    """Check a template's keys and values; see ``read_template``. Messages name the place that it was read from."""
    legal = [entry.name for entry in fields(Template)]
    for key in content:
        if key not in legal:
            raise ConfigError(f"{place}: there is no key '{key}'", nearest(str(key), legal))
    text = content.get("prompt_template")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{place} has no prompt_template", "write prompt_template: '... {question} ...'")
    try:
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
        }
        template = Template(**given)
        examples = [{name: str(value) for name, value in example.items()} for example in template.examples]
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{place} is no prompt: {error}", "examples are a list of fields with their texts") from error
    for name in template.sample_fields:
        if name not in known:
            raise ConfigError(f"{place}: prompt_template asks for {{{name}}}", nearest(name, known))
        if any(name not in example for example in examples):
            raise ConfigError(f"{place}: an example has no {name}", "examples have every field of prompt_template")
    marks = _VIRTUAL.findall(text)
    if [int(mark) for mark in marks] != list(range(len(template.virtual_token_splits))):
        raise ConfigError(
            f"{place}: prompt_template has {len(marks)} marks <|VIRTUAL_PROMPT_n|>, virtual_token_splits has "
            f"{len(template.virtual_token_splits)}",
            "there is one for each, numbered from 0",
        )
    return Template(**{**given, "examples": tuple(examples)})


def _fill(text: str, sample: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda match: sample.get(match.group(1), match.group(0)), text)
