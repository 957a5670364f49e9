"""How many token ids the model behind an OpenAI API has, where that can be found out without guessing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evaluation.client.errors import RequestError
from evaluation.client.openai_client import ModelCard, OpenAIClient
from handover.endpoint import Endpoint

_CONFIG = "config.json"


def find_vocab_size(client: OpenAIClient, endpoint: Endpoint, card: ModelCard) -> int | None:
    """Read it from the Hugging Face directory that is served, or ask ``/tokenizer_info``; None if neither says it."""
    for directory in (endpoint.model_repository, card.root):
        if directory and (size := _of_directory(Path(directory))) is not None:
            return size
    try:
        return _count(client.get("/tokenizer_info"))
    except RequestError:
        return None


def _of_directory(directory: Path) -> int | None:
    try:
        config = json.loads((directory / _CONFIG).read_text())
    except (OSError, ValueError):
        return None
    nested = config.get("text_config") if isinstance(config, dict) else None
    return _count(config) or _count(nested)


def _count(content: Any) -> int | None:
    size = content.get("vocab_size") if isinstance(content, dict) else None
    return size if isinstance(size, int) and size > 0 else None
