"""Write the JSON of a choice, whose log probabilities may be millions of numbers."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any


def write_choice(
    choice: Mapping[str, Any], logprobs: Iterator[dict[str, list[Any]]], encoder: json.JSONEncoder
) -> Generator[None, None, str]:
    """Write a choice with its log probabilities, a few at a time; yields where other work may come between.

    Args:
        choice: but for its log probabilities, in the place of which there is None.
        logprobs: lists by name, batch by batch; no batch: there are no log probabilities.
        encoder: of the form.
    """
    comma, colon = encoder.item_separator, encoder.key_separator
    lists: dict[str, list[str]] = {}
    for batch in logprobs:
        for name, values in batch.items():
            lists.setdefault(name, []).append(encoder.encode(values)[1:-1])
        yield
    yield
    fields = {name: encoder.encode(value) for name, value in choice.items()}
    if lists:
        written = (f'"{name}"{colon}[{comma.join(filter(None, each))}]' for name, each in lists.items())
        fields["logprobs"] = f"{{{comma.join(written)}}}"
    return f"{{{comma.join(f'{encoder.encode(name)}{colon}{value}' for name, value in fields.items())}}}"
