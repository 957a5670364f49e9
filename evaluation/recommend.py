"""Recommend what to run: ``python3 -m evaluation.recommend RESULTS [...] --output=DIR [--slos=FILE]``.

Reads every measured point below the results directories (a sweep over deployments leaves one each) and ranks them by
throughput: *offline* all of them, *online* those within the latency budget of a YAML file::

    slos: {ttft_ms: 200, e2e_ms: 2000}
    percentile: 95

Writes ``recommendation.json``, ``recommendation.md`` and, for each goal, an override file that is ready to run::

    python main.py --config-dir=DIR +recommended=online stages=[export,deploy]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from evaluation.report.comparable import engines_of
from evaluation.report.data import collect_findings
from evaluation.report.formatting import TextTable, show_figure
from evaluation.report.page import render_page
from evaluation.report.ranking import (
    FIGURES,
    TOP,
    Budget,
    DeploymentCandidate,
    Ranking,
    deployment_text,
    find_candidates,
    group_candidates,
    left_out,
    pareto_front,
    rank_all,
    ranking_table,
    ranking_title,
)
from evaluation.report.thresholds import read_limits
from evaluation.speed.tables.cells import name_of_file
from evaluation.speed.tables.figures import PERCENTILES
from handover.durable import write_atomically
from handover.errors import ConfigError, exit_status, nearest
from handover.provenance import PROGRAM

GROUP = "recommended"
OUR_ENGINE = "slipway"
_FRONT_COLUMNS = ("Lengths", "Load", "Tokens/s/user", "Tokens/s/GPU", "Deployment")


def main(argv: Sequence[str]) -> None:
    """Rank, print, and write the files."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.recommend", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="results directories")
    parser.add_argument("--slos", type=Path, help="YAML file of the latency budget; none: offline only")
    parser.add_argument("--top", type=int, default=TOP, help="how many to show")
    parser.add_argument("--output", type=Path, required=True, help="directory for the files")
    given = parser.parse_args(list(argv))
    candidates = [candidate for path in given.results for candidate in candidates_below(path)]
    if not candidates:
        raise ConfigError(f"there is no measured point below {', '.join(map(str, given.results))}")
    budget = read_budget(given.slos) if given.slos is not None else None
    rankings = rank_all(candidates, budget, given.top)
    given.output.mkdir(parents=True, exist_ok=True)
    text = render_markdown(rankings, candidates, budget)
    write_atomically(given.output / "recommendation.md", text)
    write_atomically(given.output / "recommendation.json", render_json(rankings, candidates, budget))
    (given.output / GROUP).mkdir(exist_ok=True)
    workloads = {ranking.workload for ranking in rankings}
    sys.stdout.write(text)
    for ranking in rankings:
        if ranking.best and not ranking.best[0].is_deployable:
            best = ranking.best[0]
            sys.stdout.write(
                f"{ranking.goal}: {deployment_text(best)} was not deployed from here: no file deploys it\n"
            )
        elif ranking.best:
            name = ranking.goal if len(workloads) == 1 else f"{ranking.goal}_{name_of_file(ranking.workload)}"
            name += f"_{name_of_file(ranking.group)}" if ranking.group else ""
            is_ours = ranking.best[0].engine in ("", OUR_ENGINE)
            override = render_override(ranking, names_engine=not is_ours or len(engines_of(candidates)) > 1)
            write_atomically(given.output / GROUP / f"{name}.yaml", override)
            sys.stdout.write(f"{PROGRAM} --config-dir={given.output} +{GROUP}={name} stages=[export,deploy]\n")


def candidates_below(path: Path) -> list[DeploymentCandidate]:
    """Read the run in a directory, or all runs below it: those with a ``benchmark/`` directory.

    Raises:
        ConfigError: there is no such directory.
    """
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}")
    runs = sorted({found.parent for found in (path / "benchmark", *path.glob("**/benchmark")) if found.is_dir()})
    return [
        candidate
        for run in runs
        for candidate in find_candidates(collect_findings(run, run.name, run / "logs" / "stages.json"), str(run))
    ]


def read_budget(path: Path) -> Budget:
    """Read the YAML file of the latency budget.

    Raises:
        ConfigError: the file cannot be read, has no limits, or has an unknown one.
    """
    content = read_limits(path, "slos", "write slos: {ttft_ms: 200, e2e_ms: 2000}")
    slos = content["slos"]
    legal = [f"{name}_ms" for name in FIGURES]
    for name, limit in slos.items():
        if name not in legal or isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit <= 0:
            raise ConfigError(f"{path}: '{name}: {limit}' is no limit", nearest(str(name), legal))
    percentile = content.get("percentile", 95)
    if percentile not in PERCENTILES:
        raise ConfigError(f"{path}: percentile {percentile}", f"legal: {', '.join(map(str, PERCENTILES))}")
    return Budget({name.removesuffix("_ms"): float(limit) for name, limit in slos.items()}, percentile)


def render_override(ranking: Ranking, names_engine: bool = False) -> str:
    """Render the best candidate's deployment as a file that Hydra merges over the whole configuration.

    Args:
        ranking: with a best candidate.
        names_engine: whether the file chooses the engine too; it must where several were measured.
    """
    best = ranking.best[0]
    nested: dict[str, Any] = {}
    for key, value in (dict(best.settings) | ({"deployment.engine": best.engine} if names_engine else {})).items():
        *parents, leaf = key.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    comment = (
        "# @package _global_\n"
        f"# {ranking.goal}: {best.tokens_per_s:.6g} generated tokens/s at {best.load}, {best.workload} tokens\n"
        f"# measured in {best.source} on model {best.model_digest or 'of unknown digest'}\n"
    )
    return comment + str(yaml.safe_dump(nested, sort_keys=True))


def render_json(rankings: Sequence[Ranking], candidates: Sequence[DeploymentCandidate], budget: Budget | None) -> str:
    """Render everything for programs."""
    content = {
        "budget": None if budget is None else {"percentile": budget.percentile, "limits_ms": dict(budget.limits_ms)},
        "rankings": [
            {
                **{key: value for key, value in dataclasses.asdict(ranking).items() if key != "best"},
                "best": [
                    {**dataclasses.asdict(candidate), "deviation": ranking.deviation(candidate)}
                    for candidate in ranking.best
                ],
            }
            for ranking in rankings
        ],
        "pareto_front": [dataclasses.asdict(candidate) for candidate in _fronts(candidates)],
    }
    return json.dumps(content, indent=1) + "\n"


def render_markdown(
    rankings: Sequence[Ranking], candidates: Sequence[DeploymentCandidate], budget: Budget | None
) -> str:
    """Render everything for people."""
    front = tuple(
        (
            each.workload,
            each.load,
            show_figure(each.tokens_per_s_per_user),
            show_figure(each.tokens_per_s_per_gpu),
            deployment_text(each),
        )
        for each in _fronts(candidates)
    )
    tables = [ranking_table(ranking, budget, deployment_text) for ranking in rankings]
    return render_page(
        "recommendation.md",
        rankings=[
            (ranking_title(r, budget), table, r.considered, left_out(r))
            for r, table in zip(rankings, tables, strict=True)
        ],
        front=TextTable("Pareto front: tokens/s/GPU over tokens/s/user", _FRONT_COLUMNS, front),
    )


def _fronts(candidates: Sequence[DeploymentCandidate]) -> list[DeploymentCandidate]:
    """Return the Pareto front of each workload, one after another; different lengths are not compared.

    Engines that are not comparable have fronts of their own.
    """
    return [kept for _, _, same in group_candidates(candidates) for kept in pareto_front(same)]


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "recommend"))
