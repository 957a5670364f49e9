"""Clones of git whose index has git-lfs's pointers, made without git-lfs."""

from __future__ import annotations

import subprocess
from pathlib import Path

WEIGHTS = "model.safetensors"


def pointer(digest: str, size_bytes: int) -> str:
    """What git-lfs keeps in a file's place."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size_bytes}\n"


def git(root: Path, *arguments: str | Path, given: str = "") -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    command = ["git", "-C", root, *identity, *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout.strip()


def commit(root: Path, contents: dict[str, str]) -> None:
    """Make a repository that has these blobs, whatever lies in its work tree."""
    git(root, "init", "--quiet")
    for name, content in contents.items():
        blob = git(root, "hash-object", "-w", "--stdin", given=content)
        git(root, "update-index", "--add", "--cacheinfo", f"100644,{blob},{name}")
    git(root, "commit", "--quiet", "--message", "x")


def in_a_clone(root: Path, digest: str) -> None:
    """As git-lfs commits it: the pointer is the blob, the file lies in the work tree."""
    commit(root, {WEIGHTS: pointer(digest, (root / WEIGHTS).stat().st_size)})


def further_up_in_a_packed_clone(root: Path, digest: str) -> None:
    commit(root.parent, {f"{root.name}/{WEIGHTS}": pointer(digest, 7), "other/b.bin": pointer("0" * 64, 70)})
    git(root.parent, "gc", "--quiet")


def in_a_submodule(root: Path, digest: str) -> None:
    in_a_clone(root, digest)
    (root / ".git").rename(root.parent / "modules")
    (root / ".git").write_text("gitdir: ../modules\n")


def in_a_worktree(root: Path, digest: str) -> None:
    (clone := root.parent / "clone").mkdir()
    commit(clone, {WEIGHTS: pointer(digest, 7)})
    git(clone, "worktree", "add", "--quiet", root.parent / "tree")
    (root.parent / "tree/.git").rename(root / ".git")


CLONES = [in_a_clone, further_up_in_a_packed_clone, in_a_submodule, in_a_worktree]
