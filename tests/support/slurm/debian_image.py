"""An image of Debian's own packages: fetched by apt, unpacked by dpkg, put together by buildah, started by podman.

No maintainer script runs, so it takes seconds. Nothing of this machine is in the image, and no registry is asked: the
packages come from where apt is configured to find them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
lock_type = "file"
events_logger = "none"
"""
_LIBRARIES = "usr/lib/*-linux-gnu"
_CHOSEN_BY_SCRIPTS = ("blas", "lapack")  # folders of libraries that a maintainer script would have linked


class ImageStore:
    """Images and containers of podman and buildah, all of them below one directory.

    Args:
        directory: for everything that both of them keep.

    Attributes:
        docker: a program that takes docker's command line.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._storage = ["--storage-driver=vfs", f"--root={directory}/root", f"--runroot={directory}/run"]
        configuration = directory / "containers.conf"
        configuration.write_text(CONTAINERS_CONF)
        self._environment = {**os.environ, "CONTAINERS_CONF": str(configuration)}
        self.docker = directory / "docker"
        podman = f"podman {' '.join(self._storage)} --tmpdir={directory}/tmp"
        self.docker.write_text(f'#!/bin/sh\nCONTAINERS_CONF={configuration} exec {podman} "$@"\n')
        self.docker.chmod(0o755)

    def build(self, image: str, root: Path, *options: str) -> None:
        """Make an image of one layer.

        Args:
            image: its name.
            root: the directory that becomes its root.
            options: of ``buildah config``.
        """
        container = self._buildah("from", "scratch")
        self._buildah("add", container, str(root), "/")
        self._buildah("config", *options, container)
        self._buildah("commit", "--quiet", "--rm", container, image)

    def build_recipe(self, image: str, recipe: Path, context: Path, base: str) -> None:
        """Make an image by a recipe of ours, over another one in the place of its own base."""
        ignored = recipe.with_name(f"{recipe.name}.dockerignore")
        options = [f"--file={recipe}", f"--ignorefile={ignored}", f"--build-arg=BASE={base}", f"--tag={image}"]
        self._buildah("build", "--quiet", "--isolation=chroot", *options, str(context))

    def _buildah(self, command: str, *arguments: str) -> str:
        return _run(["buildah", *self._storage, command, *arguments], self._environment).strip()


def unpack_packages(packages: Sequence[str], directory: Path) -> Path:
    """Unpack packages of Debian, and all that they depend on, into a root of their own.

    Args:
        packages: their names.
        directory: empty; for the root and the packages' files.

    Returns:
        The root.
    """
    cache, root, nothing_installed = directory / "packages", directory / "root", directory / "status"
    (cache / "partial").mkdir(parents=True)
    root.mkdir()
    nothing_installed.touch()
    places = {"Dir::State::status": nothing_installed, "Dir::Cache::archives": cache, "Debug::NoLocking": 1}
    settings = [f"--option={key}={value}" for key, value in {**places, "APT::Sandbox::User": "root"}.items()]
    fetch = ["apt-get", "--quiet", "--yes", "--download-only", "--no-install-recommends", *settings, "install"]
    try:
        _run([*fetch, *packages])
    except AssertionError:  # this machine has no list of what there is, or an old one
        _run(["apt-get", "--quiet", "update"])
        _run([*fetch, *packages])
    for package in sorted(cache.glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(root)])
    return root


def library_path(root: Path) -> str:
    """Folders of libraries below a root that its dynamic linker does not search by itself, as it is told of them."""
    folders = [folder for name in _CHOSEN_BY_SCRIPTS for folder in root.glob(f"{_LIBRARIES}/{name}")]
    return ":".join(f"/{folder.relative_to(root)}" for folder in folders)


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
