"""Digests beside a checkpoint, one that is pinned, and what is said where there is none."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints.distributed_checkpoints import ZARR
from support.checkpoints.git_clones import CLONES
from support.checkpoints.llama_configs import megatron_lm, padded_vocabulary
from support.checkpoints.llama_files import chunked, write_megatron_lm_tree, write_torch_dist
from support.checkpoints.llama_state import core_state
from support.checkpoints.nemo_archive import write_gpt
from support.checkpoints.nemo_samples import restore, unpacked
from support.tiny_models.huggingface_models import save
from support.tiny_models.llama_models import saved

from export_scripts import inspect
from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.digests import UNPROVED, crc32_of, sha256_of, unproved
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.convert import convert
from handover.errors import ArtefactError, CheckpointError
from handover.manifest import Manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "gpt2"
    save("gpt2", path)
    return path


@pytest.fixture
def gpt2(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "gpt2"))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(content)


def run(checkpoint: Path, output: Path, pinned: str | None = None) -> Manifest:
    return convert(ConvertArguments(checkpoint, output, 1, "fp32", checkpoint_sha256=pinned))


def beside(root: Path, digest: str) -> None:
    (root / f"{WEIGHTS}.sha256").write_text(f"{digest}  {WEIGHTS}\n")


def alone(root: Path, digest: str) -> None:
    (root / f"{WEIGHTS}.sha256").write_text(digest.upper())


def in_a_list(root: Path, digest: str) -> None:
    (root / "SHA256SUMS").write_text(f"{'0' * 64}  README.md\n{digest} *./{WEIGHTS}\n")


def of_a_download(root: Path, digest: str) -> None:
    folder = root / ".cache/huggingface/download"
    folder.mkdir(parents=True)
    (folder / f"{WEIGHTS}.metadata").write_text(f"{'a' * 40}\n{digest}\n1700000000.0\n")


def in_the_hubs_cache(root: Path, digest: str) -> None:
    blobs = root.parent / "blobs"
    blobs.mkdir()
    (root / WEIGHTS).rename(blobs / digest)
    (root / WEIGHTS).symlink_to(blobs / digest)


PUBLISHED = [
    *CLONES,
    beside,
    alone,
    in_a_list,
    of_a_download,
    in_the_hubs_cache,
]


@pytest.mark.parametrize("publish", PUBLISHED)
def test_a_published_digest_is_compared(
    publish: Callable[[Path, str], None], gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = sha256(gpt2 / WEIGHTS)
    publish(gpt2, digest)
    assert run(gpt2, tmp_path / "out").made_from["checkpoint_published"] == {WEIGHTS: f"sha256:{digest}"}
    assert UNPROVED not in capsys.readouterr().err
    flip((gpt2 / WEIGHTS).resolve())
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}  sha256:.* instead of sha256:{digest}"):
        run(gpt2, tmp_path / "out2")
    assert not (tmp_path / "out2/manifest.json").exists()


def megatrons_integrity(folder: Path, **changes: object) -> None:
    """Write ``integrity.json`` as megatron-core does: ``dist_checkpointing/validation.py``, save_integrity_manifest."""
    files = {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files, **changes}, indent=2))


def megatron_lm_run(tmp_path: Path) -> Path:
    source = saved("llama")
    common = {"args": Namespace(**megatron_lm(source.config)), "checkpoint_version": 3.0}
    folder = write_megatron_lm_tree(tmp_path / "run")
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 1))
    write_torch_dist(folder, chunked(state, 1), "", common)
    return folder


def test_megatrons_integrity_json_is_compared(tmp_path: Path) -> None:
    folder = megatron_lm_run(tmp_path)
    megatrons_integrity(folder)
    published = run(tmp_path / "run", tmp_path / "out").made_from["checkpoint_published"]
    assert published == {
        f"{folder.name}/{path.name}": f"sha256:{sha256(path)}"
        for path in folder.iterdir()
        if path.name != "integrity.json"
    }
    flip(next(folder.glob("*.distcp")))
    with pytest.raises(CheckpointError, match=r"iter_0000500/__0_0.distcp  sha256:.* instead of sha256:"):
        run(tmp_path / "run", tmp_path / "out2")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": "md5"}, "has digests of md5"),
        ({"files": {"x": "y"}}, "is no list of SHA-256 digests"),
        ({"files": None}, "is no list of SHA-256 digests"),
        ({"files": {"../secret": "0" * 64}}, "lists 1 files that are not there: ../secret"),
        ({"files": {"__9_0.distcp": "0" * 64}}, "lists 1 files that are not there: __9_0.distcp"),
    ],
)
def test_an_integrity_json_that_cannot_be_compared(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    megatrons_integrity(megatron_lm_run(tmp_path), **changes)
    with pytest.raises(CheckpointError, match=words):
        run(tmp_path / "run", tmp_path / "out")


def test_without_one_it_is_said_once_and_the_manifest_has_a_digest(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(gpt2, tmp_path / "out").made_from["checkpoint_digest"]
    assert capsys.readouterr().err.count(UNPROVED) == 1
    assert first == crc32_of(find_archive(gpt2)) and first.startswith("crc32-1m:")
    flip(gpt2 / WEIGHTS)
    assert run(gpt2, tmp_path / "out2").made_from["checkpoint_digest"] != first


def test_formats_with_checksums_are_not_spoken_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = run(write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out")
    run(tmp_path / "out", tmp_path / "again")
    assert UNPROVED not in capsys.readouterr().err
    assert manifest.made_from["checkpoint_checksums"] == "compared"
    (tmp_path / "out/manifest.json").unlink()
    run(tmp_path / "out", tmp_path / "third")
    assert UNPROVED in capsys.readouterr().err


def test_chunks_of_zarr_are_unproved(tmp_path: Path) -> None:
    source = open_source(find_archive(unpacked(restore(ZARR, tmp_path), tmp_path / "tree")))
    names = unproved(source.archive, source.tensors.values(), {})
    assert "model_weights/model.decoder.layers.mlp.linear_fc1.bias/0.0" in names


_LISTING = (
    "find -L . -type f -not -path './.git/*' -not -path './.cache/*' -not -path ./.fetched.json -print0"
    " | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
)


def test_the_digest_to_pin_is_what_sha256sum_says(gpt2: Path, tmp_path: Path) -> None:
    """Coreutils are the oracle, by the command that the module's documentation gives."""
    (gpt2 / "B").mkdir()
    for name in ("B/a", "b c", ".hidden", "\u00e9"):
        (gpt2 / name).write_text(name)
    of_a_download(gpt2, "0" * 64)
    (gpt2 / ".fetched.json").write_text("{}")
    said = subprocess.run(_LISTING, shell=True, cwd=gpt2, capture_output=True, text=True, check=True)
    assert said.stdout.split()[0] == sha256_of(find_archive(gpt2), 4)
    archive = write_gpt(tmp_path / "gpt.nemo")
    said = subprocess.run(["sha256sum", archive], capture_output=True, text=True, check=True)
    assert said.stdout.split()[0] == sha256_of(find_archive(archive))


def test_a_pinned_digest(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect.main([str(gpt2), "--sha256"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  sha256 ")]
    pinned = line.split()[1]
    assert run(gpt2, tmp_path / "out", pinned.upper()).made_from["checkpoint_sha256"] == pinned
    assert UNPROVED not in capsys.readouterr().err
    flip(gpt2 / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"checkpoint_sha256 pins {pinned}"):
        run(gpt2, tmp_path / "out2", pinned)


@pytest.mark.parametrize("name", ["config.ini", "vocab.json", "merges.txt", "model.wte.bin", "notes.txt"])
def test_an_ft_checkpoint_is_what_its_manifest_says(name: str, tmp_path: Path) -> None:
    """The conversion and ``inspect`` refuse alike, and say the same."""
    run(write_gpt(tmp_path / "gpt.nemo"), root := tmp_path / "1-gpu")
    content = (root / name).read_bytes() if (root / name).exists() else b""
    (root / name).write_bytes(content.replace(b"= 1e-05", b"= 0.500") if name == "config.ini" else content[:-9] + b" ")
    said = []
    for look in (lambda: inspect.main([str(root)]), lambda: run(root, tmp_path / "out")):
        with pytest.raises(ArtefactError, match=f"{name}  ") as refused:
            look()
        said.append(refused.value.problem)
    assert said[0] == said[1] and "1 files are not those of its manifest" in said[0]


@pytest.mark.parametrize(
    "content",
    [
        b"null",
        b"[]",
        b'"x"',
        b'{"files": 3, "digest": ""}',
        b'{"files": [null], "digest": ""}',
        b'{"files": [], "digest": "", "made_from": []}',
        b'{"files": [{"path": 1, "size_bytes": 2, "digest": "", "shape": null}], "digest": ""}',
        b'{"files": [{"path": "../x", "size_bytes": 2, "digest": "", "shape": null}], "digest": ""}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_manifest_of_any_content_is_damaged(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ArtefactError, match="is damaged"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("value", [-1, -1e28, 0, float("nan"), float("inf"), 3, "x", None, [1]])
@pytest.mark.parametrize("kind", ["nemo", "hugging face"])
def test_an_epsilon_that_no_norm_has(value: object, kind: str, gpt2: Path, tmp_path: Path) -> None:
    if kind == "nemo":
        path = write_gpt(tmp_path / "gpt.nemo", layernorm_epsilon=value)
    else:
        path = gpt2
        config = json.loads((gpt2 / "config.json").read_text())
        (gpt2 / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": value}))
    with pytest.raises(CheckpointError, match="epsilon is"):
        run(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.json", b"<!DOCTYPE html>"),
        ("vocab.json", b'{"a": "b"}'),
        ("vocab.json", b'{"a": -Infinity}'),
        ("vocab.json", b'{"a": 0, "a": 1}'),
        ("vocab.json", b"[]"),
        ("merges.txt", b"\xff\xfe"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 1e999}}}'),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 0}}, "added_tokens": [1]}'),
    ],
)
def test_tokenizer_files_are_what_their_names_say(name: str, content: bytes, gpt2: Path, tmp_path: Path) -> None:
    (gpt2 / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        run(gpt2, tmp_path / "out")


def test_an_error_is_cut_and_cannot_steer_a_terminal() -> None:
    said = str(CheckpointError("a" * 100_000 + "\x1b[2J" + "\nline" * 100_000, "b" * 100_000))
    assert len(said) < 20_000 and "characters" in said and "more" in said
    assert str(CheckpointError("clear \x1b[2J \udc80 \u00e9\tx")) == "clear \\x1b[2J \\udc80 \u00e9\tx"
