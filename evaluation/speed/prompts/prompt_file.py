"""Prompts from a file: JSON lines of token ids, texts, or ShareGPT's conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evaluation.speed.prompts.workload import LoadPrompt
from handover.errors import ConfigError
from handover.regular_file import read_text


def read_prompt_file(
    path: Path, encode: Callable[[str], list[int]] | None, max_tokens: int | None
) -> tuple[list[LoadPrompt], int]:
    """Read JSON lines of prompts.

    A line holds ``input_ids`` or ``prompt`` with ``output_length`` (tokens), or ``prompt`` and ``completion``, or
    ShareGPT's ``conversations``, whose first two turns are the prompt and, by its length, the answer.

    Args:
        path: path of the file.
        encode: encodes with the served model's tokenizer; None without one.
        max_tokens: positions of the model; longer lines are left out.

    Returns:
        The prompts, and the number of lines that were left out because they have no answer or do not fit.

    Raises:
        ConfigError: a line is none of these or needs a tokenizer that is missing, or no line is left.
    """
    prompts, left_out = [], 0
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        prompt = _prompt(line, f"{path.name}:{number}", encode)
        if prompt is None or (max_tokens is not None and len(prompt.ids) + prompt.output_length > max_tokens):
            left_out += 1
        else:
            prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{path} has no prompt that fits the model ({left_out} lines left out)")
    return prompts, left_out


def _prompt(line: str, where: str, encode: Callable[[str], list[int]] | None) -> LoadPrompt | None:
    """Read one line; None for a conversation without an answer."""
    try:
        content: dict[str, Any] = json.loads(line)
        turns = content.get("conversations")
        if turns is not None:
            if len(turns) < 2:
                return None
            content = {"prompt": turns[0]["value"], "completion": turns[1]["value"]}
        if "input_ids" in content:
            return _checked(tuple(map(int, content["input_ids"])), int(content["output_length"]))
        if encode is None:
            raise ConfigError(f"{where} holds text, but the served model's tokenizer is not on this machine")
        around = len(encode(""))  # start and end tokens are no part of an answer
        wanted = content["output_length"] if "output_length" in content else len(encode(content["completion"])) - around
        return _checked(tuple(encode(content["prompt"])), int(wanted), content["prompt"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where} is no prompt: {error!r}",
            "give input_ids and output_length, prompt and output_length or completion, or conversations",
        ) from error


def _checked(ids: tuple[int, ...], output_length: int, text: str = "") -> LoadPrompt | None:
    return LoadPrompt(ids, output_length, text) if ids and output_length >= 1 else None
