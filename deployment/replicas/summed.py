"""One page of Prometheus' metrics out of those of several servers. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_COMMENT = re.compile(r"^# (HELP|TYPE) (\S+) ?(.*)$")
_PARTS = ("_bucket", "_sum", "_count", "_total", "_created")
_ADDED = {"counter": ("",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
"""Endings of the samples that are sums already, by type; all others are states of one server."""
Sample = tuple[str, str]
"""A name, and its labels as they are written."""


@dataclass
class Page:
    """A server's page.

    Attributes:
        comments: lines of help and types by the metric's name, in the order of the page.
        sums: samples that can be added up.
        states: samples that belong to one server, such as gauges.
    """

    comments: dict[str, list[str]] = field(default_factory=dict)
    sums: dict[Sample, float] = field(default_factory=dict)
    states: dict[Sample, str] = field(default_factory=dict)


def read_page(text: str) -> Page:
    """Read a page; lines that are none of Prometheus' are left out."""
    page, types = Page(), dict[str, str]()
    for line in text.splitlines():
        if comment := _COMMENT.match(line):
            page.comments.setdefault(comment[2], []).append(line)
            if comment[1] == "TYPE":
                types[comment[2]] = comment[3].strip()
        elif found := _SAMPLE.match(line):
            name, labels, value = found[1], (found[2] or "").rstrip(","), found[3]
            try:
                number = float(value)
            except ValueError:
                continue
            if _is_sum(name, types):
                page.sums[name, labels] = page.sums.get((name, labels), 0.0) + number
            else:
                page.states[name, labels] = value
    return page


def _metric_of(name: str, known: Mapping[str, object]) -> str:
    """Return the name under which a sample's metric is declared."""
    if name in known:
        return name
    return next((name.removesuffix(part) for part in _PARTS if name.removesuffix(part) in known), name)


def _is_sum(name: str, types: Mapping[str, str]) -> bool:
    metric = _metric_of(name, types)
    ending = name.removeprefix(metric)
    endings = _ADDED.get(types.get(metric, ""), ())
    return ending in endings or (types.get(metric) == "counter" and ending == "_total")


class SummedPages:
    """What all servers of a deployment have counted, those that have ended included."""

    def __init__(self) -> None:
        self._ended: dict[Sample, float] = {}
        self._last: dict[int, tuple[Hashable, Page]] = {}

    def add(self, number: int, start: Hashable, text: str) -> None:
        """Take a replica's page.

        Args:
            number: of the replica.
            start: tells one start of its server from another, whose counters begin again.
            text: of the page.
        """
        known = self._last.get(number)
        if known is not None and known[0] != start:
            for sample, value in known[1].sums.items():
                self._ended[sample] = self._ended.get(sample, 0.0) + value
        self._last[number] = start, read_page(text)

    def render(self, present: Mapping[int, bool]) -> str:
        """Write the page: sums over all servers, and the states of those that serve, each with its number.

        Args:
            present: whether each replica serves.
        """
        sums, comments = dict(self._ended), dict[str, list[str]]()
        states: list[tuple[Sample, str]] = []
        for number, (_, page) in sorted(self._last.items()):
            comments = {**page.comments, **comments}
            for sample, count in page.sums.items():
                sums[sample] = sums.get(sample, 0.0) + count
            if present.get(number):
                own = f'replica="{number}"'
                states += [
                    ((name, ",".join(filter(None, (labels, own)))), value)
                    for (name, labels), value in page.states.items()
                ]
        lines: dict[str, list[str]] = {name: list(said) for name, said in comments.items()}
        for (name, labels), value in [*((sample, _number(value)) for sample, value in sums.items()), *states]:
            shown = f"{{{labels}}}" if labels else ""
            lines.setdefault(_metric_of(name, comments), []).append(f"{name}{shown} {value}")
        own_lines = [
            "# HELP slipway_replicas Servers behind this router",
            "# TYPE slipway_replicas gauge",
            f"slipway_replicas {len(present)}",
            "# HELP slipway_replicas_serving Those of them that serve",
            "# TYPE slipway_replicas_serving gauge",
            f"slipway_replicas_serving {sum(present.values())}",
        ]
        return "\n".join([*(line for said in lines.values() for line in said), *own_lines]) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
