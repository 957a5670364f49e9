"""GPT-OSS's form, harmony: an answer is several messages, each in a channel; a call is one that is sent to a function.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``; source:
OpenAI's guide to the harmony response format, and the model's own chat template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from deployment.openai.tools.declared import Offered
from deployment.openai.tools.grammar import TEXT_RULE, json_rule, literal_with
from deployment.openai.tools.reading import CallPart, Part, PieceReader, make_id, split_before

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
_START, _END, _CALL, _RETURN, _CONSTRAIN = "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
_ENDS = (_END, _CALL, _RETURN, _START)
_BEGINNINGS = (CHANNEL, _START, "assistant", " to=")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


def is_harmony(template: str) -> bool:
    """Whether a chat template writes this form."""
    return CHANNEL in template and MESSAGE in template


def write_harmony(offered: Offered, special: Mapping[str, int]) -> str:
    """Write the grammar of an answer: thoughts, then a call, or a text where calls are not asked for.

    Args:
        offered: tools.
        special: ids of the special tokens by name.
    """

    def literal(text: str) -> str:
        return literal_with(special, text)

    names = [f"call_{index}" for index in range(len(offered.tools))]
    again = literal(f"{_END}{_START}assistant")
    texts = "" if offered.must_call else f" | {literal(f'{CHANNEL}final{MESSAGE}')} TEXT"
    before = literal(f"{CHANNEL}commentary to=functions.")
    calls = [
        f'{name}: "{tool.name} " {literal(f"{_CONSTRAIN}json{MESSAGE}")} {json_rule(tool.schema, tool)}'
        for name, tool in zip(names, offered.tools, strict=True)
    ]
    rules = [
        f"start: before* ({before} ({' | '.join(names)}){texts})",
        f'before: {literal(CHANNEL)} ("analysis" | "commentary") {literal(MESSAGE)} TEXT {again}',
        *calls,
        TEXT_RULE,
    ]
    return "\n".join(rules)


class HarmonyReader(PieceReader):
    """Reads an answer in this form.

    Args:
        offered: tools that the answer may call; None: none.
    """

    def __init__(self, offered: Offered | None = None) -> None:
        self._names = {tool.name for tool in offered.tools} if offered else set()
        self._part, self._count = Part(), 0
        self._add: Callable[[str], None] = self._say
        self._step = self._head

    def _head(self) -> bool:
        """Read what stands before a message: its channel, and the function that it is for."""
        head, found, rest = self._held.partition(MESSAGE)
        if found:
            self._held, self._step = rest, self._body
            self._begin(head)
            return True
        begins_otherwise = not any(mark.startswith(head[: len(mark)]) for mark in _BEGINNINGS)
        if head and begins_otherwise:  # the model keeps to no form
            self._add, self._step = self._say, self._body
            return True
        return False

    def _begin(self, head: str) -> None:
        recipient = _RECIPIENT.search(head)
        if recipient and recipient[1] in self._names:
            self._part.calls.append(CallPart(self._count, "", make_id(), recipient[1]))
            self._count, self.has_called, self._add = self._count + 1, True, self._call
        else:
            self._add = self._think if f"{CHANNEL}analysis" in head else self._say

    def _body(self) -> bool:
        text, mark, self._held = split_before(_ENDS, self._held, self._is_last)
        self._add(text)
        if mark:
            self._step = self._head
        return bool(mark)

    def _say(self, text: str) -> None:
        self._part.content += text

    def _think(self, text: str) -> None:
        self._part.reasoning += text

    def _call(self, text: str) -> None:
        if text and not self._part.calls:
            self._part.calls.append(CallPart(self._count - 1))
        if text:
            self._part.calls[-1].arguments += text
