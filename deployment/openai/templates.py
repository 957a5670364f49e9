"""Conversations as prompts: the model's chat template, run in Jinja's sandbox as transformers runs it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deployment.openai.errors import ApiError
from handover.chat import Chat
from handover.errors import ArtefactError

_MARK = "\ufdd0"
"""A code point that is no character of any text: it stands within a special token's name that a client has written."""
_PIPELINE = "tokenizer.json"


class ChatTemplate:
    """Writes conversations.

    Args:
        chat: the template, and the tokens that it may name.
        directory: of the tokenizer's files, whose special tokens the template writes by name.
        plain: encodes a text without special tokens.

    Raises:
        ArtefactError: the template is no Jinja.
    """

    def __init__(self, chat: Chat, directory: Path, plain: Any) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            self._template = environment.from_string(chat.template)
        except TemplateError as error:
            raise ArtefactError(
                f"the chat template of {directory} cannot be read: {error}", "give another with --chat-template"
            ) from error
        self.source, self._tokens, self._plain = chat.template, chat.tokens, plain
        self._pipeline, self._special = _open_pipeline(directory)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text, up to where the answer begins; names of special tokens in it are marked.

        Raises:
            ApiError: the template refuses the conversation.
        """
        given = [{**message, "content": self._marked(message["content"])} for message in messages]
        try:
            return self._template.render(
                messages=given, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **self._tokens
            )
        except ApiError:
            raise
        except Exception as error:  # a template may do anything, and raise anything
            raise ApiError(
                f"the chat template cannot write these messages: {error}",
                "see the model's own examples",
                param="messages",
            ) from error

    def encode(self, rendered: str) -> tuple[int, ...]:
        """Return the tokens of what ``render`` gave; what a client wrote is never a special token."""
        if self._pipeline is None:
            return tuple(self._plain(rendered.replace(_MARK, "")))
        if _MARK not in rendered:
            return tuple(self._pipeline.encode(rendered, add_special_tokens=False).ids)
        ids: list[int] = []
        for part in re.split(f"({self._special.pattern})", rendered):
            token = self._pipeline.token_to_id(part) if self._special.fullmatch(part) else None
            ids += self._plain(part.replace(_MARK, "")) if token is None else [token]
        return tuple(ids)

    def _marked(self, content: str) -> str:
        if self._pipeline is None:
            return content
        return self._special.sub(lambda found: found[0][:1] + _MARK + found[0][1:], content.replace(_MARK, ""))


def _open_pipeline(directory: Path) -> tuple[Any, re.Pattern[str]]:
    """Open ``tokenizer.json`` so that special tokens are found in a text, and match their names; None without it."""
    import tokenizers

    if not (directory / _PIPELINE).is_file():
        return None, re.compile("(?!)")
    pipeline = tokenizers.Tokenizer.from_file(str(directory / _PIPELINE))
    pipeline.no_truncation()
    pipeline.no_padding()
    added = pipeline.get_added_tokens_decoder().values()
    names = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return pipeline, re.compile("|".join(map(re.escape, names)) or "(?!)")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> str:
    raise ApiError(f"the chat template refuses these messages: {message}", param="messages")
