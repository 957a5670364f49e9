"""Read an answer as it comes: what of it is a thought, what is said, and what calls a tool."""

from __future__ import annotations

import json
import secrets
import string
from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deployment.openai.tools.declared import Offered
from deployment.openai.tools.dialects import Dialect, Keyed, Thoughts
from deployment.openai.tools.grammar import is_text
from deployment.openai.tools.json_end import JsonEnd
from deployment.openai.tools.literals import Literals, read_argument

_LETTERS = string.ascii_letters + string.digits


@dataclass
class CallPart:
    """What a piece of an answer adds to a call.

    Attributes:
        index: of the call among the answer's.
        arguments: JSON, a part of it.
        id, name: of the call, in its first part; empty in others.
    """

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass
class Part:
    """What a piece of an answer adds.

    Attributes:
        content: of the message.
        reasoning: thoughts.
        calls: parts of calls, one a call.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)


class PieceReader(ABC):
    """Reads one answer, piece by piece.

    Attributes:
        has_called: whether a call has begun.
    """

    has_called = False
    _held, _is_last = "", False
    _step: Callable[[], bool]
    """Reads on of what is held; says whether it has come to another step."""

    def feed(self, text: str, is_last: bool = False) -> Part:
        """Return what a piece adds; what may yet become a mark is held back until it is known, or the last piece."""
        self._held += text
        self._is_last, self._part = is_last, Part()
        while self._step():
            pass
        return self._part


class AnswerReader(PieceReader):
    """Reads an answer in most models' forms.

    Args:
        dialect: of calls; None: there are none.
        offered: tools that the answer may call; None: none.
        thoughts: how the model marks them; None: not at all.
        is_thinking: whether the prompt has begun the thoughts.
    """

    def __init__(
        self, dialect: Dialect | None, offered: Offered | None, thoughts: Thoughts | None, is_thinking: bool = False
    ) -> None:
        self._dialect, self._thoughts = dialect if offered else None, thoughts
        self._schemas = {tool.name: tool.schema for tool in offered.tools} if offered else {}
        self._part = Part()
        self._is_blank = True  # so far, of the content or of the thoughts
        self._name, self._count, self._end = "", 0, JsonEnd()
        self._beginning = dialect.opening + dialect.before if dialect else ""
        self._step = self._begin if thoughts else self._free
        if thoughts and is_thinking:
            self._step = self._thought

    def _begin(self) -> bool:
        """Tell whether the answer begins with thoughts."""
        assert self._thoughts
        begun, mark = self._held.lstrip(), self._thoughts.begin
        if begun.startswith(mark):
            self._held, self._step = begun[len(mark) :], self._thought
        elif not mark.startswith(begun) or self._is_last:
            self._step = self._free
        else:
            return False
        return True

    def _thought(self) -> bool:
        """Read thoughts; a call ends them too, as the grammar has it."""
        assert self._thoughts
        marks = [self._thoughts.end, *([self._dialect.trigger] if self._dialect else [])]
        text, mark = self._take_until(marks)
        self._part.reasoning += self._without_beginning(text)
        if mark:
            self._is_blank, self._step = True, self._free
        if mark and mark != self._thoughts.end:
            self._held = mark + self._held
        return bool(mark)

    def _free(self) -> bool:
        """Read content up to the first call."""
        if self._dialect is None:
            text, self._held = self._held, ""
            self._say(text)
            return False
        if self._dialect.begins_answer:
            return self._begins_with_call(self._dialect)
        text, mark = self._take_until([self._dialect.trigger])
        self._say(text)
        if mark:
            self._held, self._step = mark + self._held, self._before_first
        return bool(mark)

    def _begins_with_call(self, dialect: Dialect) -> bool:
        begun, beginning = self._held.lstrip(" \n\r\t"), dialect.opening + dialect.before
        if self._is_blank and begun.startswith(beginning):
            self._held, self._step = begun, self._before_first
            return True
        if not (self._is_blank and beginning.startswith(begun)) or self._is_last:
            text, self._held = self._held, ""
            self._say(text)
        return False

    def _before_first(self) -> bool:
        """Leave out what begins a call. A special token's name that was spelt by letters begins none."""
        if self._expect(self._beginning, self._called):
            return True
        if not self._beginning.startswith(self._held) or self._is_last:
            self._dialect, self._step = None, self._free
            return True
        return False

    def _called(self) -> bool:
        """Read a call's name."""
        assert self._dialect
        between = self._dialect.between
        name, mark = self._take_whole(between)
        if not mark:
            if self._dialect.before or self._count:
                return False
            if not self._is_last and any(f"{each}{between}".startswith(self._held) for each in self._schemas):
                return False
            name, self._held = self._held, ""
        self._name, number = name, ""
        if self._dialect.counts:
            self._name, _, number = name.rpartition(":")
        if not mark or self._name not in self._schemas:
            self._held = f"{self._beginning}{name}{mark}{self._held}"
            self._dialect, self._step = None, self._free
            return True
        self._part.calls.append(CallPart(self._count, "", self._make_id(number), self._name))
        self._count, self.has_called = self._count + 1, True
        self._end, self._step = JsonEnd(), self._argument if self._dialect.form else self._arguments
        return True

    def _make_id(self, number: str) -> str:
        assert self._dialect
        if number:
            return f"functions.{self._name}:{number}"
        return make_id(self._dialect.id_letters)

    def _arguments(self) -> bool:
        """Read arguments that are one JSON object."""
        size = self._end.find(self._held)
        text, self._held = self._held[:size], self._held[size:]
        self._add_arguments(text)
        if self._end.is_reached:
            self._step = self._after
        return self._end.is_reached

    def _argument(self) -> bool:
        """Read one of the arguments that stand one by one, or their end."""
        assert self._dialect
        is_first = not self._end.depth
        if self._held.startswith(self._dialect.after):
            self._add_arguments("{}" if is_first else "}")
            self._step = self._after
            return True
        form = self._dialect.form
        read = self._keyed(form) if isinstance(form, Keyed) else self._literal(form, is_first) if form else None
        if read is None:
            return False
        key, value, self._held = read
        self._end.depth = 1
        self._add_arguments(f"{'{' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: {value}")
        return True

    def _keyed(self, keyed: Keyed) -> tuple[str, str, str] | None:
        rest = self._held.removeprefix(keyed.before)
        key, found_key, value = rest.partition(keyed.between)
        value, found_value, rest = value.partition(keyed.after)
        if not (self._held.startswith(keyed.before) and found_key and found_value):
            return None
        return key, self._valued(key, value), rest

    def _literal(self, literals: Literals, is_first: bool) -> tuple[str, str, str] | None:
        if not is_first and not self._held.startswith(literals.comma):
            return None
        return read_argument(literals, self._held if is_first else self._held[len(literals.comma) :])

    def _valued(self, key: str, value: str) -> str:
        schema = (self._schemas.get(self._name, {}).get("properties") or {}).get(key)
        return json.dumps(value, ensure_ascii=False) if is_text(schema) else value.strip()

    def _add_arguments(self, text: str) -> None:
        calls = self._part.calls
        if not calls and text:
            calls.append(CallPart(self._count - 1))
        if text:
            calls[-1].arguments += text

    def _after(self) -> bool:
        assert self._dialect
        return self._expect(self._dialect.after, self._next)

    def _next(self) -> bool:
        """Tell whether another call follows."""
        assert self._dialect
        more = self._dialect.separator + self._dialect.before
        if self._held.startswith(more):
            self._held, self._step = self._held[len(more) :], self._called
            return True
        return False

    def _say(self, text: str) -> None:
        self._part.content += self._without_beginning(text) if self._thoughts else text
        self._is_blank = self._is_blank and not text.strip()

    def _without_beginning(self, text: str) -> str:
        """Leave out white space that content or thoughts begin with, beside marks."""
        text = text.lstrip() if self._is_blank else text
        self._is_blank = self._is_blank and not text
        return text

    def _expect(self, literal: str, step: Callable[[], bool]) -> bool:
        """Leave out a text that the grammar has put here."""
        if not self._held.startswith(literal):
            return False
        self._held, self._step = self._held[len(literal) :], step
        return True

    def _take_whole(self, mark: str) -> tuple[str, str]:
        """Take what is before a mark, once that is there."""
        text, found, rest = self._held.partition(mark)
        if found:
            self._held = rest
        return text, found

    def _take_until(self, marks: list[str]) -> tuple[str, str]:
        text, mark, self._held = split_before(marks, self._held, self._is_last)
        return text, mark


def split_before(marks: Sequence[str], text: str, is_last: bool) -> tuple[str, str, str]:
    """Return what is before the first of some marks, that mark, and the rest.

    Without one: all that cannot be the beginning of one, unless it is the last, nothing, and what can.
    """
    places = sorted((place, mark) for mark in marks if (place := text.find(mark)) >= 0)
    if places:
        place, mark = places[0]
        return text[:place], mark, text[place + len(mark) :]
    most = 0 if is_last else min(len(text), max(map(len, marks)) - 1)
    size = next((size for size in range(most, 0, -1) if any(mark.startswith(text[-size:]) for mark in marks)), 0)
    return text[: len(text) - size], "", text[len(text) - size :]


def make_id(letters: int = 0) -> str:
    """Make the id of a call, of that many letters and digits; 0: as OpenAI's are."""
    return "".join(secrets.choice(_LETTERS) for _ in range(letters)) or f"call_{secrets.token_hex(12)}"
