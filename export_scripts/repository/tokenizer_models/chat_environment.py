"""The environment that chat templates run in, as transformers makes it: Jinja's sandbox with a few names of its own.

The endpoint writes conversations in it; the conversion tries a template in it. Rules: transformers 5,
``utils/chat_template_utils.py`` (``_cached_compile_jinja_template``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_CHARACTERS = 1 << 18
"""Characters that a template may have; published ones have some 20,000."""


class ChatTemplateError(ValueError):
    """A template that Jinja cannot compile."""


def make_environment(refuse: Callable[[str], Any]) -> ImmutableSandboxedEnvironment:
    """Make an environment.

    Args:
        refuse: what ``raise_exception`` does.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        optimized=False,
    )
    environment.code_generator_class = _Generator
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=refuse,
        strftime_now=lambda format: datetime.now().strftime(format),
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


def compile_template(environment: ImmutableSandboxedEnvironment, source: str) -> Template:
    """Compile a template.

    Raises:
        ChatTemplateError: it is no Jinja, too long, or nested more deeply than Python compiles.
    """
    if len(source) > MOST_CHARACTERS:
        raise ChatTemplateError(f"it has {len(source)} characters; at most {MOST_CHARACTERS} are read")
    try:
        source.encode()
        return environment.from_string(source)
    except UnicodeEncodeError as error:
        raise ChatTemplateError(f"it has half a character, a lone surrogate, at position {error.start}") from None
    except RecursionError:
        raise ChatTemplateError("it is nested more deeply than can be compiled") from None
    except (Exception, MemoryError) as error:  # TemplateError; SyntaxError and others of what Python makes of it
        raise ChatTemplateError(f"{type(error).__name__}: {error}") from error


def try_template(source: str) -> str:
    """Return why a template cannot be used; empty: it can."""
    try:
        compile_template(make_environment(str), source)
    except ChatTemplateError as error:
        return str(error)
    return ""


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON, without the escapes that Jinja's own filter makes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generator(CodeGenerator):
    """Leaves expressions of constants to be computed when they are reached, and not when the template is read."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Generation(Extension):
    """``{% generation %}``, which tells training what to learn; a prompt is the same without it."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Any) -> nodes.Node:
        """Read a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` in a template: no type, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Make a dictionary of keys."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """``namespace`` in a template, without names that begin with an underscore."""

    def __init__(*args: Any, **named: Any) -> None:  # so that ``namespace(self=...)`` works
        own, given = args[0], args[1:]
        attributes = dict(*given, **named)
        for name in attributes:
            _check(name)
        Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}, which begins with an underscore")
