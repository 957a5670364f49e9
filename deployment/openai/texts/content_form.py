"""What a chat template expects: a message's content as one text or a list of parts, and which values.

A template that walks over parts gets no word out of a text. As vLLM does it, the template's syntax tree is searched for
what it does with contents; here macros, filters and single parts count as well as loops.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

_LISTS = ("selectattr", "rejectattr", "select", "reject", "map", "groupby")
"""Filters that take a list apart."""
_KINDS = ("string", "iterable", "sequence", "mapping")


def takes_parts(tree: nodes.Template) -> bool:
    """Whether a template expects parts, and would lose a text; one that asks what it was given takes either."""
    names = _Names(tree)
    return any(map(names.takes_apart, _unasked(tree, names)))


def variables(tree: nodes.Template) -> frozenset[str]:
    """Return the names of the values that a template takes: those that it reads and does not make itself.

    One that it asks about, or has a default for, is taken though it is assigned. Jinja's own function for this would
    compute the template's constants, which may be of any size.
    """
    made = {name.name for loop in tree.find_all(nodes.For) for name in _named(loop.target)}
    made |= {name.name for each in tree.find_all(nodes.Assign) for name in _named(each.target)}
    for macro in tree.find_all(nodes.Macro):
        made |= {macro.name, *(argument.name for argument in macro.args)}
    asked = [each for each in tree.find_all(nodes.Test) if each.name in ("defined", "undefined", "none")]
    given = [each for each in tree.find_all(nodes.Filter) if each.name in ("default", "d")]
    kept = {each.node.name for each in (*asked, *given) if isinstance(each.node, nodes.Name)}
    read = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "load"}
    return frozenset(read - (made - kept))


def _named(target: nodes.Node) -> Iterator[nodes.Name]:
    yield from [target] if isinstance(target, nodes.Name) else target.find_all(nodes.Name)


def _unasked(node: nodes.Node, names: _Names) -> Iterator[nodes.Node]:
    """Yield every part of a template but those that depend on what kind of content there is."""
    yield node
    if isinstance(node, nodes.If | nodes.CondExpr) and any(
        map(names.asks, (node.test, *node.test.find_all(nodes.Test)))
    ):
        return
    for child in node.iter_child_nodes():
        yield from _unasked(child, names)


class _Names:
    """What a template calls the messages, a message, and a message's content."""

    def __init__(self, tree: nodes.Template) -> None:
        self._lists, self._messages, self._contents = {"messages"}, set[str](), set[str]()
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        bound = [*_assigned(tree), *_passed(tree, macros)]
        loops = [(loop.target, loop.iter) for loop in tree.find_all(nodes.For)]
        before = -1
        while before != (before := self._count()):  # names are made of names
            for target, value in bound:
                self._add(target, value)
            for target, value in loops:
                if isinstance(target, nodes.Name) and self._is_list(value):
                    self._messages.add(target.name)

    def is_content(self, node: nodes.Node | None) -> bool:
        """Whether an expression is a message's content, as it is or filtered."""
        node = _bare(node)
        if isinstance(node, nodes.Name):
            return node.name in self._contents
        return _key(node) == "content" and self._is_message(getattr(node, "node", None))

    def asks(self, node: nodes.Node) -> bool:
        """Whether an expression asks what kind of value a content is."""
        return isinstance(node, nodes.Test) and node.name in _KINDS and self.is_content(node.node)

    def takes_apart(self, node: nodes.Node) -> bool:
        """Whether a loop, a filter or a look-up takes a content for a list of parts."""
        if isinstance(node, nodes.For):
            return self.is_content(node.iter)
        if isinstance(node, nodes.Filter) and node.name in _LISTS:
            return self.is_content(node.node)
        part = getattr(node, "node", None)
        is_one = isinstance(part, nodes.Getitem) and isinstance(_constant(part.arg), int)
        return is_one and _key(node) in ("text", "type") and self.is_content(getattr(part, "node", None))

    def _add(self, target: nodes.Node, value: nodes.Node) -> None:
        if not isinstance(target, nodes.Name):
            return
        for names, is_one in (
            (self._lists, self._is_list(value)),
            (self._messages, self._is_message(value)),
            (self._contents, self.is_content(value)),
        ):
            if is_one:
                names.add(target.name)

    def _is_list(self, node: nodes.Node | None) -> bool:
        node = _bare(node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._is_list(node.node)
        return isinstance(node, nodes.Name) and node.name in self._lists

    def _is_message(self, node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Getitem) and isinstance(_constant(node.arg), int):
            return self._is_list(node.node)
        if isinstance(node, nodes.Filter) and node.name in ("first", "last"):
            return self._is_list(node.node)
        return isinstance(node, nodes.Name) and node.name in self._messages

    def _count(self) -> int:
        return sum(map(len, (self._lists, self._messages, self._contents)))


def _assigned(tree: nodes.Template) -> Iterator[tuple[nodes.Node, nodes.Node]]:
    for each in tree.find_all(nodes.Assign):
        values = each.node.iter_child_nodes() if isinstance(each.node, nodes.CondExpr) else [each.node]
        yield from ((each.target, value) for value in values)


def _passed(tree: nodes.Template, macros: dict[str, nodes.Macro]) -> Iterator[tuple[nodes.Node, nodes.Node]]:
    """Yield each argument of a macro with what its calls pass."""
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            yield from zip(macro.args, call.args, strict=False)
            named = {argument.name: argument for argument in macro.args}
            yield from ((named[each.key], each.value) for each in call.kwargs if each.key in named)


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """Leave out filters, such as ``trim``, and ``or`` of a value in place of none."""
    while isinstance(node, nodes.Filter | nodes.Or):
        node = node.node if isinstance(node, nodes.Filter) else node.left
    return node


def _key(node: nodes.Node | None) -> object:
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem):
        return _constant(node.arg)
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get" and node.args:
        return _constant(node.args[0])
    return None


def _constant(node: nodes.Node) -> object:
    if isinstance(node, nodes.Neg):
        return -value if isinstance(value := _constant(node.node), int) else None
    return node.value if isinstance(node, nodes.Const) else None
