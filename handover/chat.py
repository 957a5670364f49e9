"""How a model's conversations are written: a file beside the shards, for whoever turns messages into a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handover.errors import ArtefactError, shortened
from handover.regular_file import SETTINGS_BYTES, read_text

CHAT_FILE = "chat.json"
_TEMPLATE, _TEMPLATE_JSON, _CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
TOOL_USE_FILE = "additional_chat_templates/tool_use.jinja"
TOKENIZERS_FILES = (_TEMPLATE, TOOL_USE_FILE, _TEMPLATE_JSON, _CONFIG, "special_tokens_map.json")
"""Files of a tokenizer of transformers that say it; what the first says goes before the others."""
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that every tokenizer of transformers may have, in its order."""


@dataclass(frozen=True)
class Chat:
    """A template in Jinja, as transformers' ``apply_chat_template`` takes it.

    Attributes:
        template: empty: the model's conversations have no known form.
        tokens: special tokens that a template may name, such as ``bos_token``.
        tool_template: takes its place where tools are given, as ``tool_use`` does in transformers; empty: none does.
    """

    template: str = ""
    tokens: Mapping[str, str] = field(default_factory=dict)
    tool_template: str = ""

    @property
    def all_templates(self) -> tuple[str, ...]:
        """The template, and the one for tools where that is another."""
        return tuple(filter(None, (self.template, self.tool_template)))

    def files(self) -> dict[str, bytes]:
        """Render the file, by its name; nothing where there is no template."""
        if not self.template:
            return {}
        content = {"template": self.template, "tokens": dict(self.tokens)}
        content |= {"tool_template": self.tool_template} if self.tool_template else {}
        return {CHAT_FILE: f"{json.dumps(content, ensure_ascii=False, indent=1)}\n".encode()}


def read_chat(directory: Path) -> Chat:
    """Read what ``Chat.files`` rendered, or else the files of a tokenizer of transformers.

    Raises:
        ArtefactError: a file is damaged.
    """
    path = directory / CHAT_FILE
    names = [name for name in TOKENIZERS_FILES if (directory / name).is_file()]
    try:
        if path.is_file():
            return of_chat_file(read_text(path, SETTINGS_BYTES).encode())
        return of_tokenizer({name: read_text(directory / name, SETTINGS_BYTES).encode() for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtefactError(f"the chat template in {directory} cannot be read: {error}", "convert again") from error


def of_chat_file(content: bytes) -> Chat:
    """Read what ``Chat.files`` rendered; ValueError, KeyError, TypeError or AttributeError: it is damaged."""
    values = json.loads(content)
    tokens = {str(key): _text(text, key) for key, text in values["tokens"].items()}
    for_tools = _text(values.get("tool_template", ""), "tool_template")
    return Chat(_text(values["template"], "template"), tokens, for_tools)


def of_tokenizer(files: Mapping[str, bytes]) -> Chat:
    """Read the files of a tokenizer of transformers, by name; ValueError: one is damaged."""
    config = _parsed(files, _CONFIG)
    given = {**_parsed(files, "special_tokens_map.json"), **config}
    tokens = {name: _token(given[name], name) for name in TOKENS if given.get(name)}
    if _TEMPLATE in files:
        return Chat(files[_TEMPLATE].decode(), tokens, files.get(TOOL_USE_FILE, b"").decode())
    named = _templates(_parsed(files, _TEMPLATE_JSON)) or _templates(config)
    return Chat(named.get("default", ""), tokens, named.get("tool_use", ""))


def _parsed(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    content = json.loads(files[name]) if name in files else {}
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds no object")
    return content


def _templates(content: Mapping[str, Any]) -> dict[str, str]:
    """Read the templates by name; one alone is the default."""
    value = content.get("chat_template")
    if isinstance(value, list):
        value = {_text(each["name"], "a template's name"): each["template"] for each in value}
    named = value if isinstance(value, dict) else {} if value is None else {"default": value}
    return {name: _text(each, "chat_template") for name, each in named.items() if each is not None}


def _token(value: Any, name: str) -> str:
    return _text(value["content"] if isinstance(value, dict) else value, name)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {shortened(json.dumps(value), 80)}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half a character, a lone surrogate, at position {error.start}") from None
    return value
