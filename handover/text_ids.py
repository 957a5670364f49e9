"""What stands around a text's own tokens: a file beside the shards, for whoever turns texts into tokens and back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from handover.errors import ArtefactError

TEXT_IDS_FILE = "text_ids.json"


@dataclass(frozen=True)
class TextIds:
    """Tokens that a tokenizer adds to a text, and those that end one.

    Attributes:
        before: put before a text's own tokens.
        after: put behind them.
        more_end_ids: tokens that end a text as ``end_id`` of ``config.ini`` does.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    more_end_ids: tuple[int, ...] = ()

    def files(self) -> dict[str, bytes]:
        """Render the file, by its name; nothing where there is nothing to say."""
        if self == TextIds():
            return {}
        return {TEXT_IDS_FILE: f"{json.dumps(asdict(self))}\n".encode()}

    @classmethod
    def parse(cls, content: bytes, where: str) -> TextIds:
        """Read what ``files`` rendered.

        Raises:
            ArtefactError: it is damaged.
        """
        try:
            values = json.loads(content)
            return cls(*(tuple(int(each) for each in values.get(field.name, ())) for field in fields(cls)))
        except (ValueError, TypeError, AttributeError) as error:
            raise ArtefactError(f"{where} cannot be read: {error}", "convert again") from error


def read_text_ids(directory: Path) -> TextIds:
    """Read the file of a directory; ArtefactError: it is damaged."""
    path = directory / TEXT_IDS_FILE
    return TextIds.parse(path.read_bytes(), str(path)) if path.is_file() else TextIds()
