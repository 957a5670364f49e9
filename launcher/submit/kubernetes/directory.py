"""The directory of a run's manifests: written whole, and only over one of ours."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from handover.durable import discard, make_directory, rename_durably, sync_tree, temporary_beside
from handover.errors import ArtefactError
from launcher.clusters.kubernetes_names import Names
from launcher.submit import Job
from launcher.submit.kubernetes.pods import Manifest

KUSTOMIZATION = "kustomization.yaml"
_MARK = "# Rendered by Slipway: the next run replaces it. Changes go to an overlay, see docs/kubernetes.md\n"
_PLANS = "plans"


def files_of(
    manifests: Sequence[Manifest], names: Names, namespace: str | None, jobs: Sequence[Job], router: Mapping[str, str]
) -> dict[str, str]:
    """Return the files of a run by their names in the directory: a manifest each, the plans, and what joins them.

    Args:
        manifests: the objects.
        names: of the run's objects.
        namespace: of them; None: kubectl's own.
        jobs: whose plans they are.
        router: files of a router, by name.
    """
    plans = {
        f"{_PLANS}/{file.name}": plan for job in jobs for plan, file in zip(job.plans, job.plan_files, strict=True)
    }
    objects = {_file_of(manifest, names): as_text(manifest) for manifest in manifests}
    maps = [{"name": names.plans, "files": list(plans)}]
    maps += [{"name": names.router, "files": list(router)}] if router else []
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **({"namespace": namespace} if namespace else {}),
        "resources": list(objects),
        "configMapGenerator": maps,
        # Objects that kustomize does not know refer to them by their plain names.
        "generatorOptions": {"disableNameSuffixHash": True, "labels": names.selector},
    }
    return {
        KUSTOMIZATION: _MARK + as_text(kustomization),
        **objects,
        **{name: plan.to_json() for name, plan in plans.items()},
        **router,
    }


def _file_of(manifest: Manifest, names: Names) -> str:
    of_router = manifest["metadata"]["labels"] == names.labels("router")
    return f"{'router-' if of_router else ''}{manifest['kind'].lower()}.yaml"


def as_text(manifest: Manifest) -> str:
    """Return an object as YAML, its keys in the order in which they are usually read."""
    return str(yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=1_000))


def check_directory(directory: Path) -> None:
    """Refuse a directory that holds something else.

    Raises:
        ArtefactError: it was not rendered here.
    """
    file = directory / KUSTOMIZATION
    is_ours = file.is_file() and file.read_text(errors="replace").startswith(_MARK)
    if directory.exists() and not is_ours and (not directory.is_dir() or any(directory.iterdir())):
        raise ArtefactError(
            f"{directory} is in the way and was not made by Slipway",
            "move it away, or take another kubernetes.directory",
        )


def write(directory: Path, files: Mapping[str, str]) -> None:
    """Write the directory in the place of the one that is there."""
    make_directory(directory.parent)
    growing = temporary_beside(directory)
    try:
        for name, text in files.items():
            file = growing / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        sync_tree(growing)
        if directory.exists():
            discard(directory)
        rename_durably(growing, directory)
    finally:
        shutil.rmtree(growing, ignore_errors=True)


class _Dumper(yaml.SafeDumper):
    """One that repeats what stands in several places, as readers of manifests expect."""

    def ignore_aliases(self, data: object) -> bool:
        return True
