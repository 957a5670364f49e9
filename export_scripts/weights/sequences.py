"""Sequences of very many things, of which little is kept: the largest models have 70,000 tensors."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar, overload

Made = TypeVar("Made")


class Lazily(Sequence[Made], Generic[Made]):
    """Things that are made each time they are asked for."""

    __slots__ = ("_make", "_numbers")

    def __init__(self, make: Callable[[int], Made], numbers: range) -> None:
        self._make, self._numbers = make, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Made: ...

    @overload
    def __getitem__(self, index: slice) -> Lazily[Made]: ...

    def __getitem__(self, index: int | slice) -> Made | Lazily[Made]:
        if isinstance(index, slice):
            return Lazily(self._make, self._numbers[index])
        return self._make(self._numbers[index])


class Texts:
    """Texts one behind the other: a process that is forked copies no page when it looks at one."""

    def __init__(self, texts: Iterable[str]) -> None:
        content, self._ends = bytearray(), array("Q", (0,))
        for text in texts:
            content += text.encode()
            self._ends.append(len(content))
        self._content = bytes(content)

    def __getitem__(self, number: int) -> str:
        return self._content[self._ends[number] : self._ends[number + 1]].decode()
