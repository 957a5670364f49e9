"""Every file of a repository is proved before it is served, and what a person has edited is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.shards.ft_checkpoint_maker import make_ft_checkpoint

from deployment.proof.files import prove_files
from deployment.proof.served_models import find_served_models
from export_scripts.arguments import ExportArguments
from export_scripts.repository.model_repository import build_repository
from handover.errors import ArtefactError


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported")
    checkpoint = make_ft_checkpoint(directory / "1-gpu", "fp32/1")
    build_repository(ExportArguments(checkpoint, directory / "repo", "tiny", 1, 1, "fp32", 0, 0, max_batch_size=4))
    return directory / "repo"


@pytest.fixture
def repository(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "repo"))


def prove(repository: Path, *edited_files: str) -> tuple[int, list[str]]:
    return prove_files(repository, find_served_models(repository), edited_files)


def swap_two_ids(text: str) -> str:
    vocabulary = json.loads(text)
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    return json.dumps(vocabulary)


ALTERATIONS: dict[str, Callable[[str], str]] = {
    "fastertransformer/1/1-gpu/config.ini": lambda text: text.replace("start_id = 0", "start_id = 7"),
    "preprocessing/1/vocab.json": swap_two_ids,
    "preprocessing/1/model.py": lambda text: text + "import os\n",
    "fastertransformer/config.pbtxt": lambda text: text.replace("max_batch_size: 4", "max_batch_size: 8"),
    "ensemble/config.pbtxt": lambda text: text + "#\n",
}


def alter(repository: Path, name: str) -> None:
    path = repository / name
    content = path.read_text()
    altered = ALTERATIONS[name](content)
    assert altered != content
    path.write_text(altered)


def test_what_was_exported_is_proved_file_by_file(repository: Path) -> None:
    """Oracle: the directory itself."""
    files = [path for path in repository.rglob("*") if path.is_file() and path != repository / "manifest.json"]
    assert prove(repository, "*") == (len(files), [])


@pytest.mark.parametrize("name", ALTERATIONS)
def test_an_altered_file_is_refused_by_name(repository: Path, name: str) -> None:
    alter(repository, name)
    with pytest.raises(ArtefactError) as refused:
        prove(repository, "postprocessing/*")
    assert f"\n  {name}  " in refused.value.problem and refused.value.problem.startswith("1 files of")
    assert "deployment.edited_files=[" in refused.value.hint


def test_a_missing_file_is_refused_whatever_was_edited(repository: Path) -> None:
    (repository / "preprocessing/1/merges.txt").unlink()
    with pytest.raises(ArtefactError, match=r"preprocessing/1/merges.txt  missing"):
        prove(repository, "*")


def test_a_file_that_was_edited_on_purpose_is_said(repository: Path) -> None:
    names = ["ensemble/config.pbtxt", "fastertransformer/config.pbtxt"]
    for name in names:
        alter(repository, name)
    assert prove(repository, "*/config.pbtxt")[1] == names
    with pytest.raises(ArtefactError, match="ensemble/config.pbtxt"):
        prove(repository, "fastertransformer/config.pbtxt")


def test_a_shard_cannot_be_called_edited(repository: Path) -> None:
    shard = repository / "tiny/1/1-gpu/model.wpe.bin"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ArtefactError, match=r"tiny/1/1-gpu/model.wpe.bin  \d+ bytes instead of"):
        prove(repository, "*")


def test_a_repository_without_a_manifest_is_served_as_it_is(repository: Path) -> None:
    for manifest in repository.rglob("manifest.json"):
        manifest.unlink()
    alter(repository, "preprocessing/1/vocab.json")
    assert prove(repository) == (0, [])


def test_a_checkpoint_elsewhere_is_proved_by_its_own_manifest(repository: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(repository / "fastertransformer/1/1-gpu", elsewhere)
    config = repository / "fastertransformer/config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "1/1-gpu"', f'string_value: "{elsewhere}"'))
    (repository / "manifest.json").unlink()
    (elsewhere / "config.ini").write_text((elsewhere / "config.ini").read_text() + "; more\n")
    with pytest.raises(ArtefactError, match=f"{elsewhere}/config.ini  "):
        prove(repository)
