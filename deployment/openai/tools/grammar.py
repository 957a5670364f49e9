"""What an answer with tools must follow, as a grammar in llguidance's form of Lark.

A call that has begun can only become a call of a declared tool whose arguments match its schema. Before the text that
begins a call an answer is free, unless calls are all that is asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from deployment.openai.tools.declared import Offered, Tool
from deployment.openai.tools.dialects import Dialect, Keyed, Thoughts
from deployment.openai.tools.literal_rules import LiteralRules
from deployment.openai.tools.literals import Literals
from deployment.openai.tools.schemas import ANY_TEXT, escaped, fields_of, text_terminal

TEXT_RULE = f"TEXT: {ANY_TEXT}"
"""The rule of a text that is free."""
_WHITE_SPACE = r"[ \n\r\t]{1,32}"
"""What may stand between JSON's tokens; a model that is unsure would go on with white space for ever."""


def write_grammar(
    dialect: Dialect, offered: Offered, special: Mapping[str, int], thoughts: Thoughts | None, is_thinking: bool
) -> str:
    """Write the grammar of an answer.

    Args:
        dialect: of the model.
        offered: tools.
        special: ids of the special tokens by name; every other mark is text.
        thoughts: how the model marks its thoughts; None: not at all.
        is_thinking: whether the prompt has begun the thoughts.
    """
    writer = _Writer(dialect, special)
    literal, names = writer.literal, [f"call_{index}" for index in range(len(offered.tools))]
    calls, more = " | ".join(names), literal(dialect.separator + dialect.before)
    several = f"({more} ({calls}))*" if offered.has_several else ""
    if offered.must_call:
        start = f"{writer.thinking(thoughts, is_thinking)} calls"
        first = f"{literal(dialect.opening + dialect.before)} ({calls})"
    else:
        start, first = writer.free_or_calls(dict(zip(names, offered.tools, strict=True)), thoughts, is_thinking)
    for name, tool in zip(names, offered.tools, strict=True):
        writer.add_call(name, tool)
    return "\n".join(
        [
            f"start: {start}",
            f"calls: {first} {several} {literal(dialect.closing)}",
            *writer.rules,
            TEXT_RULE,
        ]
    )


class _Writer:
    """Writes rules, which it collects in ``rules``."""

    def __init__(self, dialect: Dialect, special: Mapping[str, int]) -> None:
        self.rules = list[str]()
        self._dialect, self._special = dialect, special

    def literal(self, text: str) -> str:
        """See literal_with."""
        return literal_with(self._special, text)

    def until(self, rule: str, end: str) -> str:
        """Write a free text up to the first place of its end, which is a special token or a text."""
        if end in self._special:
            return f"TEXT <[{self._special[end]}]>"
        self.rules.append(f"{rule}[lazy]: {ANY_TEXT} {_quoted(end)}")
        return rule

    def thinking(self, thoughts: Thoughts | None, has_begun: bool) -> str:
        """Write what may come before calls that are asked for."""
        if not thoughts:
            return ""
        rest = f"{self.until('thoughts', thoughts.end)} /[ \\n]*/"
        self.rules.append(f"thinking: {rest if has_begun else f'({self.literal(thoughts.begin)} {rest})?'}")
        return "thinking"

    def free_or_calls(self, calls: Mapping[str, Tool], thoughts: Thoughts | None, has_begun: bool) -> tuple[str, str]:
        """Write an answer that is free up to its first call; returns that, and the first call.

        Args:
            calls: tools by the names of their calls' rules.
            thoughts: see write_grammar.
            has_begun: whether the prompt has begun them.
        """
        dialect, any_call = self._dialect, f"({' | '.join(calls)})"
        beginning = dialect.opening + dialect.before
        if dialect.begins_answer:
            begun, first = escaped(beginning), f"{self.literal(beginning)} {any_call}"
            if not dialect.before:  # a bracket alone begins many a text
                heads = {name: f"{beginning}{tool.name}{dialect.between}" for name, tool in calls.items()}
                begun = "|".join(map(escaped, heads.values()))
                first = f"({' | '.join(f'{_quoted(head)} {name}_rest' for name, head in heads.items())})"
            return self._text_or_calls(begun, thoughts, has_begun), first
        trigger = dialect.trigger
        rest = self.literal(beginning[len(trigger) :])
        special = next((name for name in self._special if trigger.startswith(name)), trigger)
        rest = f"{self.literal(trigger[len(special) :])} {rest}"
        trigger = special
        return "TEXT | calls", f"{self.until('trigger', trigger)} {rest} {any_call}"

    def _text_or_calls(self, begun: str, thoughts: Thoughts | None, has_begun: bool) -> str:
        """Write an answer, behind its thoughts, that is calls or a text; no text begins by this expression."""
        text = f"{ANY_TEXT} & ~/[ \\n\\r\\t]*({begun})(.|\\n)*/"
        if not thoughts:
            self.rules.append(f"OTHER: {text}")
            return "OTHER | calls"
        self.rules.append(f"OTHER: {text} & ~/{escaped(thoughts.begin)}(.|\\n)*/")
        self.rules.append(f"LATER: {text} & ~/[ \\n](.|\\n)*/")  # white space belongs to the thoughts before it
        later = f"{self.thinking(thoughts, True)} (LATER | calls)"
        return later if has_begun else f"{self.literal(thoughts.begin)} {later} | OTHER | calls"

    def add_call(self, name: str, tool: Tool) -> None:
        """Write a tool's call, from its name to what ends it."""
        dialect = self._dialect
        number = '":" /[0-9]{1,3}/' if dialect.counts else ""
        if isinstance(dialect.form, Keyed):
            arguments = self._keyed(name, tool, dialect.form)
        elif isinstance(dialect.form, Literals):
            arguments = self._literals(name, tool, dialect.form)
        else:
            arguments = json_rule(tool.schema, tool)
        between, after = self.literal(dialect.between), self.literal(dialect.after)
        self.rules += [
            f"{name}: {_quoted(tool.name)} {number} {between} {name}_rest",
            f"{name}_rest: {arguments} {after}",
        ]

    def _literals(self, name: str, tool: Tool, form: Literals) -> str:
        """Write arguments that are literals."""
        definitions = _definitions(tool)

        def json(schema: Mapping[str, Any]) -> str:
            return json_rule({**schema, **definitions}, tool)

        def text(rule: str, schema: Mapping[str, Any]) -> str:
            return self._text(rule, form.mark, schema, tool)

        rules = LiteralRules(form, tool, name, self.literal, text, json)
        written = rules.arguments()
        self.rules += rules.rules
        return written

    def _keyed(self, name: str, tool: Tool, keyed: Keyed) -> str:
        """Write arguments one by one, in the schema's order; those that are not required may be left out."""
        listed = list[str]()
        for index, (key, schema, is_required) in enumerate(fields_of(tool.schema)):
            rule = f"{name}_{index}"
            value = self._value(f"{rule}_text", schema, keyed.after, tool)
            before = f"{self.literal(keyed.before)} {_quoted(key)} {self.literal(keyed.between)}"
            self.rules.append(f"{rule}: {before} {value}")
            listed.append(rule if is_required else f"{rule}?")
        return " ".join(listed)

    def _text(self, rule: str, end: str, schema: Mapping[str, Any], tool: Tool) -> str:
        """Write a text of a schema up to its end, which is not in it."""
        terminal = rule.upper()
        self.rules.append(f"{terminal}: {text_terminal(schema, end, tool)}")
        if end in self._special:
            return f"{terminal} <[{self._special[end]}]>"
        self.rules.append(f"{rule}[lazy]: {terminal} {_quoted(end)}")
        return rule

    def _value(self, rule: str, schema: Any, after: str, tool: Tool) -> str:
        if not is_text(schema):
            whole = {**schema, **_definitions(tool)} if isinstance(schema, dict) else {}
            return f"{json_rule(whole, tool)} {self.literal(after)}"
        if choices := schema.get("enum"):
            return f"({' | '.join(map(_quoted, choices))}) {self.literal(after)}"
        return self._text(rule, after, schema, tool)


def _definitions(tool: Tool) -> dict[str, Any]:
    return {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}


def is_text(schema: Any) -> bool:
    """Whether a value of this schema is a text, which stands as it is among keyed arguments."""
    if not isinstance(schema, Mapping):
        return False
    if isinstance(schema.get("enum"), list):
        return all(isinstance(each, str) for each in schema["enum"])
    return schema.get("type") == "string"


def literal_with(special: Mapping[str, int], text: str) -> str:
    """Write a fixed text; the name of a special token in it is that token."""
    parts, end = list[str](), 0
    longest_first = sorted(special, key=len, reverse=True)
    for found in re.finditer("|".join(map(re.escape, longest_first)) or "(?!)", text):
        parts += [_quoted(text[end : found.start()]), f"<[{special[found[0]]}]>"]
        end = found.end()
    return " ".join(filter(None, [*parts, _quoted(text[end:])]))


def json_rule(schema: Mapping[str, Any], tool: Tool) -> str:
    """Write a value of a schema, one of a tool's."""
    guidance = {"whitespace_pattern": _WHITE_SPACE, "lenient": not tool.is_strict}
    return f"%json {json.dumps({**schema, 'x-guidance': guidance})}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
