"""How families of models write calls and thoughts: one record a dialect.

The forms are those of the models' own chat templates, by which a dialect is found: what a template writes of earlier
calls is what the model was trained to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deployment.openai.tools.literals import Literals
from handover.errors import ConfigError, nearest, shortened


@dataclass(frozen=True)
class Keyed:
    """Arguments one by one, each between marks: texts as they are, other values as JSON.

    Attributes:
        before, between, after: what stands before a key, between it and its value, and behind that.
    """

    before: str
    between: str
    after: str


@dataclass(frozen=True)
class Dialect:
    """How a family of models writes the calls of an answer.

    ``opening``, calls with ``separator`` between them, ``closing``; a call is ``before``, the name, ``between``, the
    arguments, ``after``.

    Attributes:
        marks: texts of a chat template that has this dialect, all of them.
        before, between, after: of a call.
        opening, closing: of all calls together.
        separator: between two calls.
        form: how arguments are written one by one; None: as a JSON object.
        counts: whether the name is followed by a colon and the call's number, which are its id together.
        begins_answer: whether calls are the whole answer, so that one that begins otherwise has none.
        id_letters: letters of a call's id, where the template counts them; 0: any number.
    """

    marks: tuple[str, ...]
    before: str
    between: str
    after: str
    opening: str = ""
    closing: str = ""
    separator: str = ""
    form: Keyed | Literals | None = None
    counts: bool = False
    begins_answer: bool = False
    id_letters: int = 0

    @property
    def trigger(self) -> str:
        """The text from which on an answer calls."""
        return self.opening or self.before.rstrip() or self.before


DIALECTS: Mapping[str, Dialect] = {
    "qwen3_coder": Dialect(
        marks=("<tool_call>", "<function="),
        before="<tool_call>\n<function=",
        between=">\n",
        after="</function>\n</tool_call>",
        separator="\n",
        form=Keyed("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "glm": Dialect(
        marks=("<tool_call>", "<arg_key>"),
        before="<tool_call>",
        between="\n",
        after="</tool_call>",
        separator="\n",
        form=Keyed("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "functiongemma": Dialect(
        marks=("<start_function_call>",),
        before="<start_function_call>call:",
        between="{",
        after="}<end_function_call>",
        form=Literals(assign=":", comma=",", colon=":", mark="<escape>", is_sorted=True),
    ),
    "gemma4": Dialect(
        marks=("<|tool_call>",),
        before="<|tool_call>call:",
        between="{",
        after="}<tool_call|>",
        form=Literals(assign=":", comma=",", colon=":", mark='<|"|>', is_sorted=True),
    ),
    "hermes": Dialect(
        marks=("<tool_call>",),
        before='<tool_call>\n{"name": "',
        between='", "arguments": ',
        after="}\n</tool_call>",
        separator="\n",
    ),
    "kimi_k2": Dialect(
        marks=("<|tool_calls_section_begin|>",),
        opening="<|tool_calls_section_begin|>",
        before="<|tool_call_begin|>functions.",
        between="<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
        counts=True,
    ),
    "deepseek_v3": Dialect(
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        opening="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        between="\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        separator="\n",
        closing="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v3_1": Dialect(
        marks=("<｜tool▁calls▁begin｜>",),
        opening="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>",
        between="<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    "mistral_v11": Dialect(
        marks=("[TOOL_CALLS]", "[ARGS]"),
        before="[TOOL_CALLS]",
        between="[ARGS]",
        after="",
        id_letters=9,
    ),
    "mistral_v3": Dialect(
        marks=("[TOOL_CALLS] [",),
        opening="[TOOL_CALLS] [",
        before='{"name": "',
        between='", "arguments": ',
        after="}",
        separator=", ",
        closing="]",
        id_letters=9,
    ),
    "mistral": Dialect(
        marks=("[TOOL_CALLS]",),
        opening="[TOOL_CALLS][",
        before='{"name": "',
        between='", "arguments": ',
        after="}",
        separator=", ",
        closing="]",
        id_letters=9,
    ),
    "granite": Dialect(
        marks=("<|tool_call|>",),
        opening="<|tool_call|>[",
        before='{"name": "',
        between='", "arguments": ',
        after="}",
        separator=", ",
        closing="]",
    ),
    "pythonic": Dialect(
        marks=("[func_name1(",),
        opening="[",
        before="",
        between="(",
        after=")",
        separator=", ",
        closing="]",
        form=Literals(assign="=", comma=", ", colon=": ", true="True", false="False", null="None"),
        begins_answer=True,
    ),
    "llama3_json": Dialect(
        marks=('"parameters": dictionary of argument name and its value',),
        before='{"name": "',
        between='", "parameters": ',
        after="}",
        separator="; ",
        begins_answer=True,
    ),
}
"""By the name that ``deployment.openai_tool_dialect`` gives them; the first whose marks a template has is the one."""


@dataclass(frozen=True)
class Thoughts:
    """How a model marks what it thinks before it answers."""

    begin: str
    end: str


_THOUGHTS = (Thoughts("<think>", "</think>"), Thoughts("[THINK]", "[/THINK]"))


def dialect_named(name: str) -> Dialect:
    """Return the dialect of a name; ConfigError: there is none."""
    if name not in DIALECTS:
        raise ConfigError(f"openai_tool_dialect is '{shortened(name, 80)}'", nearest(name, DIALECTS))
    return DIALECTS[name]


def find_dialect(template: str) -> Dialect | None:
    """Return the dialect that a chat template writes earlier calls in; None: it is not known."""
    if "tools" not in template:
        return None
    return next((each for each in DIALECTS.values() if all(mark in template for mark in each.marks)), None)


def find_thoughts(template: str) -> Thoughts | None:
    """Return how a model marks its thoughts by its chat template; None: it marks none."""
    return next((each for each in _THOUGHTS if each.end in template), None)
