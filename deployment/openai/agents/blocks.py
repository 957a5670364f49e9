"""An answer as blocks, one after the other: thoughts, text, calls; what both APIs for agents write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deployment.openai.tools.reading import Part

THOUGHTS, TEXT, CALL = "thoughts", "text", "call"


@dataclass
class Block:
    """A part of an answer that is of one kind.

    Attributes:
        kind: one of the three above.
        index: of the block in the answer.
        id, name: of a call.
        text: so far: thoughts, text, or a call's arguments.
        is_cut: whether the answer's limit of tokens has ended it.
    """

    kind: str
    index: int
    id: str = ""
    name: str = ""
    text: str = ""
    is_cut: bool = False


@dataclass(frozen=True)
class Change:
    """What happens to a block: it begins, it has more text, or it ends (neither)."""

    block: Block
    text: str = ""
    begins: bool = False


class Blocks:
    """Makes blocks of what a reader reads.

    Attributes:
        all: of the answer so far.
    """

    def __init__(self) -> None:
        self.all = list[Block]()
        self._calls = dict[int, Block]()
        self._open: Block | None = None

    def add(self, part: Part) -> Iterator[Change]:
        """Add what a piece adds; yields the changes in their order."""
        for kind, text in ((THOUGHTS, part.reasoning), (TEXT, part.content)):
            if text:
                yield from self._add(self._open if self._open and self._open.kind == kind else None, kind, text)
        for call in part.calls:
            known = self._calls.get(call.index)
            yield from self._add(known, CALL, call.arguments, call.id, call.name)
            if known is None:
                self._calls[call.index] = self.all[-1]

    def end(self, is_cut: bool = False) -> Iterator[Change]:
        """End the block that is open."""
        if self._open:
            self._open.is_cut = is_cut
            yield Change(self._open)
        self._open = None

    def _add(self, block: Block | None, kind: str, text: str, id_: str = "", name: str = "") -> Iterator[Change]:
        if block is None:
            yield from self.end()
            block = self._open = Block(kind, len(self.all), id_, name)
            self.all.append(block)
            yield Change(block, begins=True)
        block.text += text
        if text:
            yield Change(block, text)
