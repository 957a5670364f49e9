"""Conversations as prompts: the model's chat template, run in Jinja's sandbox as transformers runs it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template

from deployment.openai.errors import ApiError
from deployment.openai.texts.content_form import takes_parts, variables
from export_scripts.repository.tokenizer_models.chat_environment import (
    ChatTemplateError,
    compile_template,
    make_environment,
    to_json,
)
from export_scripts.repository.tokenizer_models.slipway_tokenizer import BREAK, GUARD, FileTokenizer, TextError
from handover.chat import Chat
from handover.errors import ArtefactError

_PIPELINE = "tokenizer.json"
_MARKS = re.compile(f"[{GUARD}{BREAK}]")
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\ufdd1")
"""BREAK as JSON writes it in ASCII."""

_KEYS = frozenset(
    ("type", "text", "content", "name", "id", "role", "function", "arguments", "tool_calls", "tool_call_id")
    + ("description", "parameters", "return", "properties", "required", "items", "enum", "format", "default", "anyOf")
    + ("oneOf", "allOf", "additionalProperties", "title", "minimum", "maximum", "reasoning_content", "$defs", "$ref")
    + ("strict", "nullable", "const", "pattern", "examples", "minItems", "maxItems", "minLength", "maxLength")
)
"""Keys of messages, tools and schemas, which a template asks for by name."""
_KINDS = frozenset(
    ("text", "function", "object", "array", "string", "integer", "number", "boolean", "null", "any", "dict", "list")
)


class ChatTemplate:
    """Writes conversations.

    Args:
        chat: the template, and the tokens that it may name.
        directory: of the tokenizer's files, whose special tokens the template writes by name.
        plain: encodes a text without special tokens.
        tokenizer: of the directory's ``tokenizer.json``, where it is open already.

    Attributes:
        source: the template.
        tokens: special tokens by the name that a template gives them.

    Raises:
        ArtefactError: the template is no Jinja.
    """

    def __init__(self, chat: Chat, directory: Path, plain: Any, tokenizer: FileTokenizer | None = None) -> None:
        try:
            compiled = [_compiled(template) for template in chat.all_templates]
        except (ChatTemplateError, RecursionError) as error:
            raise ArtefactError(
                f"the chat template of {directory} cannot be used: {error}", "give another with --chat-template"
            ) from error
        self._default, self._for_tools = compiled[0], compiled[-1]
        self.source, self.tokens, self._plain = chat.template, chat.tokens, plain
        file = directory / _PIPELINE
        self._tokenizer = tokenizer or (FileTokenizer(file) if file.is_file() else None)
        self._names = _Names(self._tokenizer.special if self._tokenizer else ())

    def variables(self, has_tools: bool) -> frozenset[str]:
        """Return the names of all values that the template takes, with tools or without."""
        return (self._for_tools if has_tools else self._default).variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        further: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text, up to where the answer begins; names of special tokens in it are broken.

        Args:
            messages: of the conversation.
            add_generation_prompt: whether an answer begins behind them.
            tools: that the model is told of; None: there are none.
            documents: that the template may write; None: there are none.
            further: values by the names that the template has for them.

        Raises:
            ApiError: the template refuses the conversation, or names a further value itself.
        """
        broken, template = self._names.broken, self._default if tools is None else self._for_tools
        given = {
            "messages": [self._given(message, template.takes_parts) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": broken(tools),
            "documents": broken(documents),
            **self.tokens,
        }
        takes = sorted(template.variables - given.keys())
        for name in further or ():
            if name not in takes:
                known = f"it takes {', '.join(takes)}" if takes else "it takes no further value"
                raise ApiError(
                    f"chat_template_kwargs has '{name[:80]}', which this model's chat template does not take",
                    known,
                    param="chat_template_kwargs",
                )
        try:
            return template.program.render(given, **broken(dict(further or {})))
        except (ApiError, MemoryError):
            raise
        except Exception as error:  # a template may do anything, and raise anything
            raise ApiError(
                f"the chat template cannot write these messages: {error}",
                "see the model's own examples",
                param="messages",
            ) from error

    def encode(self, rendered: str) -> tuple[int, ...]:
        """Return the tokens of what ``render`` gave; what a client wrote is never a special token.

        Raises:
            ApiError: the tokenizer fails on it.
        """
        try:
            if self._tokenizer is None:
                return tuple(self._plain(_MARKS.sub("", rendered)))
            return tuple(self._tokenizer.encode_written(rendered))
        except TextError as error:
            raise ApiError(str(error), "write another text", param="messages") from error

    def _given(self, message: Mapping[str, Any], takes_parts: bool) -> dict[str, Any]:
        """Return a message in the form that the template expects; every text but the role is the client's."""
        content = message.get("content")
        if isinstance(content, str) and takes_parts:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not takes_parts:
            content = "\n".join(part["text"] for part in content)
        texts = {**message, "content": content}
        return {key: value if key == "role" else self._names.broken(value) for key, value in texts.items()}


class _Compiled(NamedTuple):
    """A template that can be rendered.

    Attributes:
        program: renders it.
        takes_parts: whether it takes contents as parts.
        variables: names of all values that it takes.
    """

    program: Template
    takes_parts: bool
    variables: frozenset[str]


@lru_cache(maxsize=16)
def _compiled(source: str) -> _Compiled:
    """Compile a template.

    Raises:
        ChatTemplateError: it is none.
    """
    environment = make_environment(_refuse)
    environment.filters["tojson"] = _to_json
    template = compile_template(environment, source)
    tree = environment.parse(source)
    return _Compiled(template, takes_parts(tree), variables(tree) - environment.globals.keys())


class _Names:
    """Names of special tokens, to be broken where a client writes them."""

    def __init__(self, names: Any) -> None:
        longest_first = sorted(names, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        cuts = [(name[:place], name[place:]) for name in names for place in range(1, len(name))]
        self._beginnings, self._endings = {each for each, _ in cuts}, {each for _, each in cuts}
        self._longest = max(map(len, self._beginnings), default=0)
        self._inside = "\n".join(name[1:-1] for name in names)

    def broken(self, value: Any) -> Any:
        """Break the names in every text of a value, and what a template could make a name of at a text's ends."""
        if isinstance(value, str):
            return self._broken(_MARKS.sub("", value))
        if isinstance(value, Mapping):
            return {self._key(key): self._of(key, each) for key, each in value.items()}
        return [self.broken(each) for each in value] if isinstance(value, list | tuple) else value

    def _key(self, key: str) -> str:
        """Break a key that is not one of those that templates ask for."""
        return key if key in _KEYS else self._broken(_MARKS.sub("", key))

    def _of(self, key: str, value: Any) -> Any:
        is_kind = key == "type" and isinstance(value, str) and value in _KINDS
        return value if is_kind else self.broken(value)

    def _broken(self, text: str) -> str:
        text = self._whole.sub(lambda found: found[0][:1] + BREAK + found[0][1:], text)
        inner = text.strip()
        if not inner or not self._longest:
            return text
        start = text.index(inner)
        sizes = range(1, min(self._longest, len(inner)) + 1)
        places = {start + len(inner) - size + 1 for size in sizes if inner[-size:] in self._beginnings}
        places |= {start + size - 1 for size in sizes if inner[:size] in self._endings}
        if "\n" not in inner and inner in self._inside:
            places.add(start + 1)
        for place in sorted(places, reverse=True):
            text = text[:place] + BREAK + text[place:]
        return text


def _to_json(value: Any, *given: Any, **named: Any) -> str:
    return _ESCAPED.sub(lambda found: found[1] + BREAK, to_json(value, *given, **named))


def _refuse(message: str) -> str:
    raise ApiError(f"the chat template refuses these messages: {_MARKS.sub('', str(message))}", param="messages")
