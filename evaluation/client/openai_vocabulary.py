"""What tokens the model behind an OpenAI API has, where that can be found out without guessing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from evaluation.client.errors import RequestError
from evaluation.client.openai_client import ModelCard, OpenAIClient
from handover.endpoint import Endpoint
from models.directory import CONFIG_FILE


def find_vocab_size(client: OpenAIClient, endpoint: Endpoint, card: ModelCard) -> int | None:
    """Read it from the Hugging Face directory that is served, or ask ``/tokenizer_info``; None if neither says it."""
    for directory in (endpoint.model_repository, card.root):
        if directory and (size := _of_directory(Path(directory))) is not None:
            return size
    try:
        return _count(client.get("/tokenizer_info"))
    except RequestError:
        return None


def find_end_id(client: OpenAIClient, card: ModelCard) -> int | None:
    """Ask Slipway's own endpoint which token ends an encoder's input; None for any other model."""
    if not card.is_encoder_decoder:
        return None
    found = client.get(f"/tokenizer_info?model={quote(card.id)}")
    number = found.get("eos_token_id") if isinstance(found, dict) else None
    return number if isinstance(number, int) else None


def _of_directory(directory: Path) -> int | None:
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None
    nested = config.get("text_config") if isinstance(config, dict) else None
    return _count(config) or _count(nested)


def _count(content: Any) -> int | None:
    size = content.get("vocab_size") if isinstance(content, dict) else None
    return size if isinstance(size, int) and size > 0 else None
