"""A stage in a real container, in a job of the real Slurm: podman, which takes docker's command line, over runc.

The image holds what docs/cluster.md says that the stage needs, as Debian packages it, and nothing else; of this machine
only what the product mounts is there. So the stage's Python, numpy and C library are the image's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.slurm.cluster import SlurmCluster
from support.slurm.debian_image import ImageStore, library_path, unpack_packages
from support.slurm.launches import NEMO, launch, override

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.manifest import Manifest

PROJECT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/slipway-test:1"
# The convert stage's row of "What a stage needs in its image", and a shell.
PACKAGES = ("python3-numpy", "python3-yaml", "python3-sentencepiece", "dash")
# Says from within what it sees, and goes on as the image's interpreter.
PYTHON3 = """#!/bin/sh
echo "$NCCL_LAUNCH_MODE" > "$SEEN"
/usr/bin/python3 -c 'import os, numpy; print(numpy.__file__, *os.listdir("/usr/bin"))' >> "$SEEN"
exec /usr/bin/python3 "$@"
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Short, as podman's sockets lie below it; everything that podman and buildah keep goes with it."""
    directory = Path(tempfile.mkdtemp(prefix="podman-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def root(place: Path) -> Path:
    """What the image holds."""
    root = unpack_packages(PACKAGES, place / "debian")
    for name in ("proc", "sys", "dev", "tmp", "image"):
        (root / name).mkdir(exist_ok=True)
    (root / "bin/sh").unlink(missing_ok=True)
    (root / "bin/sh").symlink_to("dash")
    (root / "image/python3").write_text(PYTHON3)
    (root / "image/python3").chmod(0o755)
    return root


@pytest.fixture(scope="module")
def store(place: Path, root: Path) -> ImageStore:
    """The image."""
    store = ImageStore(place)
    store.build(IMAGE, root, "--env=NCCL_LAUNCH_MODE=GROUP", f"--env=LD_LIBRARY_PATH={library_path(root)}")
    return store


@pytest.fixture
def docker(store: ImageStore) -> Path:
    """Directory with a program called docker that has the image."""
    return store.docker.parent


def test_a_stage_in_a_container_of_debians_packages(
    slurm: SlurmCluster, root: Path, docker: Path, tmp_path: Path
) -> None:
    """The checkpoint lies where nothing else of the run does, and the shards are those of this machine's Python."""
    training = tmp_path / "training"
    training.mkdir()
    checkpoint = Path(shutil.copy(NEMO, training))
    (tmp_path / "results").mkdir()
    seen = tmp_path / "results" / "seen"
    launched = launch(
        slurm,
        tmp_path / "results",
        "stages=[convert]",
        "export.run.model_train_name=contained",
        override("export.model.checkpoint_path", checkpoint),
        f"container={IMAGE}",
        "cluster.container_runtime=docker",
        override("+env_vars.PATH", f"/image:{docker}:/usr/bin:/bin"),
        override("+env_vars.SEEN", seen),
        "env_vars.NCCL_LAUNCH_MODE=PARALLEL",
    )
    (job,) = launched.ids
    assert slurm.wait_for_end(job) == {job: "COMPLETED"}, launched.jobs[0].errors + launched.jobs[0].log.read_text()
    mode, numpy, *programs = seen.read_text().split()
    assert mode == "PARALLEL", "the image says GROUP"
    assert numpy == "/usr/lib/python3/dist-packages/numpy/__init__.py", "this is not Debian's numpy"
    assert set(programs) == {path.name for path in (root / "usr/bin").iterdir()}, "this is not the image's /usr"
    (shards,) = launched.results.glob("contained/ft_tp1_fp16/1-gpu")
    here = convert(ConvertArguments(checkpoint, tmp_path / "here", 1, "fp16"))
    assert Manifest.read(shards).files == here.files
    assert os.stat(shards).st_uid == os.getuid()


@pytest.mark.long  # the recipe is linted in CI
def test_the_recipe_of_pods_holds_the_code(store: ImageStore, tmp_path: Path) -> None:
    """docker/Dockerfile.pods over Debian's packages: a stage runs in it, with nothing of this checkout mounted."""
    image = "localhost/slipway-pods:1"
    store.build_recipe(image, PROJECT / "docker" / "Dockerfile.pods", PROJECT, IMAGE)
    (tmp_path / "results").mkdir()
    shutil.copy(NEMO, tmp_path / "results")
    arguments = ConvertArguments(Path("/results", NEMO.name), Path("/results/shards"), 1, "fp16")
    ended = subprocess.run(
        [
            *(store.docker, "run", "--rm", "--network=none", f"--volume={tmp_path / 'results'}:/results", image),
            *("/usr/bin/python3", "-m", "export_scripts.convert", *arguments.to_argv()),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    here = convert(ConvertArguments(NEMO, tmp_path / "here", 1, "fp16"))
    assert Manifest.read(tmp_path / "results" / "shards").files == here.files
