"""What partitions allow, as sinfo says it: Slurm accepts a job beyond that, and lets it wait for ever."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handover.clients import ask
from handover.errors import ConfigError
from launcher.plan.time_limit import limit_s


@dataclass(frozen=True)
class Partition:
    """A partition's limits.

    Attributes:
        name: of it.
        is_default: jobs that name none go there.
        time_limit: in Slurm's notation.
        most_nodes: of one job; empty or ``infinite`` for no limit.
    """

    name: str
    is_default: bool
    time_limit: str
    most_nodes: str

    def refuses(self, time_limit: str, nodes: int) -> str:
        """Return what of a job it never runs; empty if there is nothing."""
        with contextlib.suppress(ConfigError):  # a notation that is not known here says nothing
            if limit_s(time_limit) > limit_s(self.time_limit):
                return f"its time limit {time_limit} is above the {self.time_limit} of partition {self.name}"
        if self.most_nodes.isdecimal() and nodes > int(self.most_nodes):
            return f"its {nodes} nodes are more than the {self.most_nodes} of partition {self.name}"
        return ""


def partitions() -> list[Partition]:
    """All that sinfo lists; empty where it does not answer."""
    rows = [line.split("|") for line in ask("sinfo", "-h", "-o", "%R|%l|%s|%P").printed.splitlines()]
    return [
        Partition(name, shown.endswith("*"), limit, nodes.rpartition("-")[2])
        for name, limit, nodes, shown in (row for row in rows if len(row) == 4)
    ]


def word_of_endless_wait(parameters: Mapping[str, Any], known: list[Partition]) -> str:
    """Return why Slurm would accept a job and never run it; empty where one of its partitions does.

    Args:
        parameters: of the job, as they are rendered.
        known: the cluster's partitions.
    """
    options = {**parameters, **parameters["additional_parameters"]}
    named = str(options.get("partition") or "").split(",")
    chosen = [each for each in known if each.name in named or (each.is_default and named == [""])]
    reasons = [each.refuses(str(options["time"]), int(str(options["nodes"]).rpartition("-")[2])) for each in chosen]
    return "; ".join(reasons) if reasons and all(reasons) else ""
