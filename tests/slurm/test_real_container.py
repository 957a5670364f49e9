"""A stage in a real container, in a job of the real Slurm: podman, which takes docker's command line, over runc.

The image is a root of its own that holds next to nothing; the host's /usr and the interpreter are mounted into it by
``container_mounts``. So what is not mounted is not there.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SlurmCluster
from launches import NEMO, launch, override

IMAGE = "localhost/slipway-test:1"
CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
lock_type = "file"
events_logger = "none"
"""
# Says from within what it sees, and goes on as the interpreter of the tests.
PYTHON3 = f"""#!/bin/sh
echo "$NCCL_LAUNCH_MODE $(ls /)" > "$SEEN"
exec {sys.executable} "$@"
"""


@pytest.fixture(scope="module")
def docker() -> Iterator[Path]:
    """Directory with a program called docker that has the image; everything it keeps goes with it."""
    place = Path(tempfile.mkdtemp(prefix="podman-"))
    (place / "containers.conf").write_text(CONF)
    storage = f"--storage-driver=vfs --root={place}/root --runroot={place}/run --tmpdir={place}/tmp"
    program = place / "docker"
    program.write_text(f'#!/bin/sh\nCONTAINERS_CONF={place}/containers.conf exec podman {storage} "$@"\n')
    program.chmod(0o755)
    archive = place / "image.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("usr", "proc", "sys", "dev", "tmp", "image"):
            add(tar, name, type=tarfile.DIRTYPE, mode=0o755)
        for name in ("bin", "lib", "lib64"):
            add(tar, name, type=tarfile.SYMTYPE, linkname=f"usr/{name}")
        add(tar, "image/python3", PYTHON3.encode(), mode=0o755)
    imported = [str(program), "import", "--change", "ENV NCCL_LAUNCH_MODE=GROUP", str(archive), IMAGE]
    made = subprocess.run(imported, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    yield place
    shutil.rmtree(place, ignore_errors=True)


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **attributes: object) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    for attribute, value in attributes.items():
        setattr(entry, attribute, value)
    tar.addfile(entry, io.BytesIO(content))


def test_a_stage_in_a_container_sees_its_checkpoint_and_our_variables(
    slurm: SlurmCluster, docker: Path, tmp_path: Path
) -> None:
    """The checkpoint lies where nothing else of the run does."""
    training = tmp_path / "training"
    training.mkdir()
    checkpoint = Path(shutil.copy(NEMO, training))
    (tmp_path / "results").mkdir()
    seen = tmp_path / "results" / "seen"
    interpreter = {sys.prefix, sys.base_prefix, str(Path(sys.prefix).resolve()), "/usr"}
    launched = launch(
        slurm,
        tmp_path / "results",
        "stages=[convert]",
        "export.run.model_train_name=contained",
        override("export.model.checkpoint_path", checkpoint),
        f"container={IMAGE}",
        "cluster.container_runtime=docker",
        f"container_mounts=[{','.join(sorted(interpreter))}]",
        override("+env_vars.PATH", f"/image:{docker}:/usr/bin:/bin"),
        override("+env_vars.SEEN", seen),
        "env_vars.NCCL_LAUNCH_MODE=PARALLEL",
    )
    (job,) = launched.ids
    assert slurm.wait_for_end(job) == {job: "COMPLETED"}, launched.jobs[0].errors + launched.jobs[0].log.read_text()
    mode, *root = seen.read_text().split()
    assert mode == "PARALLEL", "the image says GROUP"
    assert "image" in root and not {"home", "var", "opt"} & set(root), "this is not the host's root"
    (shards,) = launched.results.glob("contained/ft_tp1_fp16/1-gpu")
    assert (shards / "config.ini").is_file() and os.stat(shards).st_uid == os.getuid()
