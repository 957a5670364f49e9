"""What the containers of a run must see of the host, beside the repository, the data and the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from handover.errors import ConfigError
from launcher.clusters.table import cluster_of
from launcher.config.schema import Config
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan, outermost


def usual_mounts(config: Config, paths: RunPaths) -> list[str]:
    """The directories that every container of the run sees."""
    return [*map(str, paths.mounts), *(mount for mount in config.container_mounts if mount)]


def with_mounts(config: Config, paths: RunPaths, plans: Sequence[StagePlan]) -> list[StagePlan]:
    """Mount also what stages read or write elsewhere, such as a checkpoint in another directory.

    All containers of the run get the same mounts, so that one container can serve several stages.

    Raises:
        ConfigError: a path cannot be mounted.
    """
    contained = [plan for plan in plans if plan.resources.container is not None]
    if not contained or not cluster_of(config).starts_containers:
        return list(plans)
    seen = [Path(mount) for mount in usual_mounts(config, paths)]
    wanted = [path for plan in contained for path in (*plan.inputs, plan.output.parent)]
    wanted += [*given_files(config), *_behind_links(wanted)]
    more = outermost(str(path) for path in wanted if not any(path.is_relative_to(mount) for mount in seen))
    check_mountable(more)
    return [
        replace(plan, resources=replace(plan.resources, container_mounts=(*plan.resources.container_mounts, *more)))
        if plan.resources.container is not None
        else plan
        for plan in plans
    ]


def check_mountable(mounts: Iterable[str]) -> None:
    """Every container runtime separates mounts by commas and their two sides by a colon, and has no escape."""
    for path in mounts:
        if not path.startswith("/") or set(",:") & set(path):
            raise ConfigError(
                f"'{path}' cannot be mounted in a container",
                "a mount is an absolute path without comma and colon; it is the same inside and outside "
                "(container_mounts, launcher_scripts_path, data_dir, base_results_dir, and files that stages read)",
            )


def given_files(config: Config) -> Iterator[Path]:
    """Files that a stage is told by name without needing them in order to start."""
    gate, load = config.evaluation.gate, config.benchmark.load
    asked = config.deployment.endpoint, config.deployment.endpoint_tokenizer
    signing = config.signing.key, config.signing.certificates, config.signing.trusted
    for text in (*asked, *signing, gate.thresholds, gate.baseline, load.prompt_file, load.trace):
        if text and (path := Path(text).expanduser().absolute()).exists():
            yield path


def _behind_links(paths: Sequence[Path]) -> Iterator[Path]:
    """Directories that links in an input lead to: a snapshot of the hub's cache is made of links."""
    for path in paths:
        if path.is_dir():
            yield from {entry.resolve().parent for entry in path.iterdir() if entry.is_symlink()}
