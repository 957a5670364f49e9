"""How the prompts of p-tuned tasks are written: a file beside the shards, in the words of NeMo's ``task_templates``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from handover.errors import ArtefactError
from handover.regular_file import SETTINGS_BYTES, read_text

TEMPLATES_FILE = "task_templates.json"
_KEYS = (
    *("taskname", "prompt_template", "total_virtual_tokens", "virtual_token_splits"),
    *("truncate_field", "answer_only_loss", "answer_field"),
)


def templates_file(templates: Sequence[Mapping[str, Any]]) -> bytes:
    """Render the templates of tasks, in the order of their numbers."""
    kept = [{key: template[key] for key in _KEYS if key in template} for template in templates]
    return (json.dumps(kept, indent=1, ensure_ascii=False) + "\n").encode("utf-8")


def read_templates(directory: Path) -> list[dict[str, Any]]:
    """Read the templates of the tasks of an FT checkpoint; empty where it has none.

    Raises:
        ArtefactError: the file is damaged.
    """
    path = directory / TEMPLATES_FILE
    if not path.is_file():
        return []
    try:
        templates = json.loads(read_text(path, SETTINGS_BYTES))
        return [dict(template) for template in templates]
    except (OSError, ValueError, TypeError) as error:
        raise ArtefactError(f"{path} cannot be read: {error}", "convert again") from error
