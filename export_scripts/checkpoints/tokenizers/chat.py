"""How a checkpoint's conversations are written, from the files beside its tokenizer or from its configuration."""

from __future__ import annotations

from export_scripts.checkpoints.huggingface.files import refuse_links_out
from export_scripts.checkpoints.source import Source
from handover.chat import CHAT_FILE, TOKENIZERS_FILES, Chat, of_chat_file, of_tokenizer
from handover.errors import CheckpointError


def find_chat(source: Source) -> Chat:
    """Find the chat template; what lies beside the tokenizer goes before what training's configuration says.

    Raises:
        CheckpointError: a file is damaged, or a link to what is no part of the checkpoint.
    """
    archive = source.archive
    folders = {member.rpartition("/")[0] for member in source.tokenizer.members.values()}
    names = (CHAT_FILE, *TOKENIZERS_FILES)
    places = {name: f"{folder}/{name}" if folder else name for folder in folders for name in names}
    refuse_links_out(archive, [place for place in places.values() if place in archive])
    files = {name: archive.read_bytes(place) for name, place in places.items() if place in archive}
    try:
        chat = of_chat_file(files[CHAT_FILE]) if CHAT_FILE in files else of_tokenizer(files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{archive.path}: the tokenizer's chat template cannot be read: {error}",
            f"correct or remove {', '.join(TOKENIZERS_FILES)}",
        ) from error
    tokens = source.tokenizer.special or chat.tokens
    return Chat(chat.template or source.chat_template, tokens, chat.tool_template)


def about_chat(chat: Chat) -> str:
    """Return why conversations are refused in spite of a template; empty: they are not."""
    if not chat.template:
        return ""
    try:
        from export_scripts.repository.tokenizer_models.chat_environment import try_template
    except ImportError:  # an image without Jinja; the endpoint has it, and tries the template when it starts
        return ""
    if not (problem := next(filter(None, map(try_template, chat.all_templates)), "")):
        return ""
    return f"the chat template cannot be used, so that the endpoint will refuse conversations: {problem}"
