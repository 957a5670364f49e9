"""The prompts of a comparison: texts of the configuration, and lines of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evaluation.client.tokenizer import Tokenizer
from evaluation.parity.arguments import ParityArguments
from handover.errors import ConfigError
from handover.regular_file import read_text

Ids = tuple[int, ...]
_TEXT_KEYS = ("prompt", "text")


def read_prompts(arguments: ParityArguments) -> list[str | Ids]:
    """Read the texts and token ids to compare on, those of the configuration first.

    Raises:
        ConfigError: the file is missing or damaged, or has fewer prompts than requested.
    """
    prompts: list[str | Ids] = [*arguments.prompts, *(read_lines(arguments.data_path) if arguments.data_path else ())]
    wanted = arguments.samples
    if not prompts or not all(prompts) or (wanted is not None and len(prompts) < wanted):
        raise ConfigError(f"parity: {len(prompts)} prompts, {wanted or 'at least 1'} are asked for, and none is empty")
    return prompts[:wanted]


def encode_prompts(
    prompts: list[str | Ids], tokenizer: Tokenizer | None, vocab_size: int | None, room: int | None
) -> list[Ids]:
    """Return every prompt's token ids, cut on the left to the model's positions.

    Raises:
        ConfigError: a text has no tokenizer, an id is not in the vocabulary, or no position is left.
    """
    if room is not None and room < 1:
        raise ConfigError("parity: output_length leaves the model no positions for a prompt", "take a smaller one")
    encoded = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) and tokenizer is None:
            raise ConfigError(
                "parity: the served model's tokenizer is not on this machine",
                "give main.py's deployment.endpoint_tokenizer (--tokenizer of this program), or prompts as input_ids",
            )
        ids: Ids = tuple(tokenizer.encode(prompt)) if isinstance(prompt, str) and tokenizer else tuple(map(int, prompt))
        if not ids or min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
            raise ConfigError(f"parity: prompt {number + 1} has no token ids below {vocab_size}: {str(prompt)[:60]!r}")
        encoded.append(ids[-room:] if room is not None else ids)
    return encoded


def read_lines(path: Path) -> Iterator[str | Ids]:
    """Yield the text or the token ids of each JSON line; ConfigError where a line has neither."""
    try:
        lines = [line for line in read_text(path).split("\n") if line.strip()]
    except OSError as error:
        raise ConfigError(f"the prompts {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            entry: Any = json.loads(line)
            given = [entry[key] for key in ("input_ids", *_TEXT_KEYS) if key in entry]
            yield given[0] if isinstance(given[0], str) else tuple(int(token) for token in given[0])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"{path}, line {number}: {type(error).__name__}: {error}",
                'each line is an object with "text", "prompt" or "input_ids"',
            ) from error
