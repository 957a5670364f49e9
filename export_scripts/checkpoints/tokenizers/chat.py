"""How a checkpoint's conversations are written, from the files beside its tokenizer or from its configuration."""

from __future__ import annotations

from export_scripts.checkpoints.source import Source
from handover.chat import TOKENIZERS_FILES, Chat, of_tokenizer
from handover.errors import CheckpointError


def find_chat(source: Source) -> Chat:
    """Find the chat template; what lies beside the tokenizer goes before what training's configuration says.

    Raises:
        CheckpointError: a file is damaged.
    """
    archive = source.archive
    folders = {member.rpartition("/")[0] for member in source.tokenizer.members.values()}
    places = {name: f"{folder}/{name}" if folder else name for folder in folders for name in TOKENIZERS_FILES}
    try:
        chat = of_tokenizer({name: archive.read_bytes(place) for name, place in places.items() if place in archive})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{archive.path}: the tokenizer's chat template cannot be read: {error}",
            f"correct or remove {', '.join(TOKENIZERS_FILES)}",
        ) from error
    return chat if chat.template else Chat(source.chat_template, chat.tokens)
