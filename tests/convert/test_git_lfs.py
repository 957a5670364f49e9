"""Checkpoints in clones of git: pointers in the places of files, and clones that cannot or must not be read."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints.distributed_checkpoints import ZARR
from support.checkpoints.git_clones import WEIGHTS, commit, git, in_a_clone, pointer
from support.checkpoints.nemo_archive import write_gpt
from support.checkpoints.nemo_samples import restore, unpacked
from support.tiny_models.huggingface_models import save

from export_scripts import inspect
from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.digests import UNPROVED
from export_scripts.convert import convert
from handover.errors import CheckpointError
from handover.manifest import Manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "gpt2"
    save("gpt2", path)
    return path


@pytest.fixture
def gpt2(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "gpt2"))


def run(checkpoint: Path, output: Path) -> Manifest:
    return convert(ConvertArguments(checkpoint, output, 1, "fp32"))


@pytest.mark.parametrize("missing", ["git", "object", "index"])
def test_a_clone_that_cannot_be_read_is_no_hindrance(
    missing: str, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_a_clone(gpt2, "0" * 64)
    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif missing == "object":
        shutil.rmtree(gpt2 / ".git/objects")
    else:
        (gpt2 / ".git/index").write_bytes(b"DIRC")
    run(gpt2, tmp_path / "out")
    assert capsys.readouterr().err.count(UNPROVED) == 1


def test_a_clone_runs_nothing_of_its_own(gpt2: Path, tmp_path: Path) -> None:
    """A partial clone that lacks the pointer: git would fetch it by a program that the clone names."""
    in_a_clone(gpt2, hashlib.sha256((gpt2 / WEIGHTS).read_bytes()).hexdigest())
    (program := tmp_path / "program").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    blob = git(gpt2, "rev-parse", f"HEAD:{WEIGHTS}")
    (gpt2 / ".git/objects" / blob[:2] / blob[2:]).unlink()
    settings = {"extensions.partialClone": "origin", "remote.origin.url": "ssh://localhost/x"}
    settings |= dict.fromkeys(("core.sshCommand", "core.fsmonitor"), str(program))
    for key, value in {"core.repositoryFormatVersion": "1", **settings}.items():
        git(gpt2, "config", key, value)
    run(gpt2, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    subprocess.run(["git", "-C", gpt2, "cat-file", "blob", blob], capture_output=True, check=False)
    assert (tmp_path / "ran").exists(), "git by itself does not run it either: this test shows nothing"


@pytest.mark.parametrize("kind", ["weights", "tokenizer", "archive", "zarr", "ft", "ft without manifest"])
@pytest.mark.parametrize("look", [lambda path, _: inspect.main([str(path)]), run])
def test_a_pointer_in_the_place_of_a_file_is_said_to_be_one(
    kind: str, look: Callable[[Path, Path], object], gpt2: Path, tmp_path: Path
) -> None:
    path, name = gpt2, {"weights": WEIGHTS, "tokenizer": "vocab.json"}.get(kind, "")
    if kind == "archive":
        path, name = tmp_path, "gpt.nemo"
    elif kind == "zarr":
        path = unpacked(restore(ZARR, tmp_path), tmp_path / "tree")
        name = "model_weights/model.decoder.layers.mlp.linear_fc1.bias/0.0"
    elif kind.startswith("ft"):
        run(write_gpt(tmp_path / "gpt.nemo"), path := tmp_path / "1-gpu")
        name = "model.wte.bin"
        if kind == "ft without manifest":
            (path / "manifest.json").unlink()
    (path / name).write_text(pointer("5" * 64, 123456))
    with pytest.raises(CheckpointError, match=f"{name} is a git-lfs pointer: .* of 123456 bytes") as refused:
        look(path / name if kind == "archive" else path, tmp_path / "out")
    assert refused.value.hint == f"fetch it, and all others that git-lfs keeps: git -C {(path / name).parent} lfs pull"


def test_pointers_in_the_place_of_files_that_are_not_read(gpt2: Path, tmp_path: Path) -> None:
    """As ``git lfs pull --include`` leaves them."""
    digest = hashlib.sha256((gpt2 / WEIGHTS).read_bytes()).hexdigest()
    (gpt2 / "flax_model.msgpack").write_text(other := pointer("5" * 64, 123456))
    commit(gpt2, {WEIGHTS: pointer(digest, 7), "flax_model.msgpack": other})
    assert run(gpt2, tmp_path / "out").made_from["checkpoint_published"] == {WEIGHTS: f"sha256:{digest}"}
