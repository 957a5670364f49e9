"""Archives that are damaged, hostile or ambiguous are refused by name, and nothing is written."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from support.checkpoints.nemo_archive import NEMO, gpt_config, gpt_state, torch_bytes, write_gpt, write_nemo

from export_scripts.conversion.plan.check import inspect_source
from handover.errors import CheckpointError

GOOD = NEMO / "gpt122_tp1_pp1.nemo"


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        inspect_source(path, 1, "fp16")
    return str(refused.value)


def test_missing_checkpoint(tmp_path: Path) -> None:
    assert "gone.nemo does not exist" in refusal(tmp_path / "gone.nemo")


@pytest.mark.parametrize("size", [0, 100, 511, 512, 5_000, 300_000, 1_000_000, 1_113_000, GOOD.stat().st_size - 10_000])
def test_truncated_archive(size: int, tmp_path: Path) -> None:
    (tmp_path / "gpt.nemo").write_bytes(GOOD.read_bytes()[:size])
    assert "truncated" in refusal(tmp_path / "gpt.nemo")


def test_archive_cut_between_two_members(tmp_path: Path) -> None:
    with tarfile.open(GOOD) as tar:
        end = max(member.offset_data + -(-member.size // 512) * 512 for member in tar)
    (tmp_path / "gpt.nemo").write_bytes(GOOD.read_bytes()[:end])
    assert "truncated" in refusal(tmp_path / "gpt.nemo")


@pytest.mark.parametrize("keep", [0.3, 0.99])
def test_truncated_gzipped_archive(keep: float, tmp_path: Path) -> None:
    path = write_nemo(tmp_path / "gpt.nemo", gpt_config(), {"model_weights.ckpt": gpt_state()}, mode="w:gz")
    assert vars(inspect_source(path, 2, "fp16").dims)["num_layer"] == 2
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    assert "truncated" in refusal(path)


def test_truncated_torch_file_in_a_directory(tmp_path: Path) -> None:
    with tarfile.open(GOOD) as tar:
        tar.extractall(tmp_path, filter="data")
    weights = tmp_path / "model_weights.ckpt"
    os.truncate(weights, weights.stat().st_size // 2)
    assert "truncated" in refusal(tmp_path)


def test_garbage_is_not_a_tar(tmp_path: Path) -> None:
    (tmp_path / "gpt.nemo").write_bytes(b"not a tar " * 1000)
    assert "is not a tar archive" in refusal(tmp_path / "gpt.nemo")


def test_device_in_place_of_an_archive() -> None:
    assert "neither a file nor a directory" in refusal(Path("/dev/null"))


def hostile(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("member", "word"),
    [
        (hostile("../outside.txt"), "escapes"),
        (hostile("./a/../../outside.txt"), "escapes"),
        (hostile("/etc/outside.txt"), "escapes"),
        (hostile("..\\outside.txt"), "escapes"),
        (hostile("./link", tarfile.SYMTYPE, "/etc/passwd"), "link"),
        (hostile("./link", tarfile.LNKTYPE, "model_config.yaml"), "link"),
        (hostile("./device", tarfile.CHRTYPE), "special file"),
        (hostile("./device", tarfile.BLKTYPE), "special file"),
        (hostile("./pipe", tarfile.FIFOTYPE), "special file"),
    ],
    ids=lambda value: value.name + value.linkname if isinstance(value, tarfile.TarInfo) else value,
)
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_hostile_member_condemns_the_archive(member: tarfile.TarInfo, word: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "gpt.nemo"
    with tarfile.open(GOOD) as source, tarfile.open(path, mode) as tar:
        for good in source:
            tar.addfile(good, source.extractfile(good) if good.isfile() else None)
        tar.addfile(member)
    message = refusal(path)
    assert word in message
    assert repr(member.name) in message
    assert [p.name for p in tmp_path.iterdir()] == ["gpt.nemo"]


class Attack:
    """What a pickle may do when it is loaded without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_pickle_that_calls_a_function_is_refused_and_not_run(tmp_path: Path) -> None:
    state = {**gpt_state(), "attack": Attack(tmp_path / "owned")}
    message = refusal(write_gpt(tmp_path / "gpt.nemo", state))
    assert "posix.mkdir" in message
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "os system", "torch load", "torch._utils _rebuild_tensor_v3", "functools partial"]
)
def test_names_outside_the_list_are_refused(name: str, tmp_path: Path) -> None:
    module, function = name.split()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as records:
        records.writestr("archive/data.pkl", f"c{module}\n{function}\n(S'1'\ntR.".encode())
    path = tmp_path / "tree"
    path.mkdir()
    (path / "model_config.yaml").write_text("{}")
    (path / "model_weights.ckpt").write_bytes(stream.getvalue())
    assert f"{module}.{function}" in refusal(path)


def test_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    assert "not a dictionary of weights" in refusal(write_gpt(tmp_path / "gpt.nemo", [1, 2]))  # type: ignore[arg-type]


def test_tensor_that_reaches_beyond_its_record_is_refused(tmp_path: Path) -> None:
    """A shape in the pickle that the record cannot fill would read a neighbour's bytes."""
    content = torch_bytes(gpt_state())
    source, target = zipfile.ZipFile(io.BytesIO(content)), io.BytesIO()
    with zipfile.ZipFile(target, "w") as records:
        for info in source.infolist():
            data = source.read(info)
            records.writestr(info.filename, data[:8] if info.filename.endswith("/data/0") else data)
    files = {"model_weights.ckpt": target.getvalue(), "vocab.json": b"{}", "merges.txt": b""}
    path = write_nemo(tmp_path / "gpt.nemo", gpt_config(), {}, files=files)
    assert "smaller than its tensor" in refusal(path)


def test_several_candidates_are_listed(tmp_path: Path) -> None:
    for name in ("a.nemo", "b.nemo"):
        (tmp_path / name).write_bytes(GOOD.read_bytes())
    (tmp_path / "c").mkdir()
    (tmp_path / "c/model_config.yaml").write_text("{}")
    message = refusal(tmp_path)
    assert "holds 3 checkpoints" in message
    assert "a.nemo\n  b.nemo\n  c\n" in message


def test_directory_without_a_checkpoint(tmp_path: Path) -> None:
    assert "holds no checkpoint" in refusal(tmp_path)


def test_configuration_that_is_missing_or_broken(tmp_path: Path) -> None:
    (tmp_path / "model_config.yaml").write_text("a: [")
    assert "is not YAML" in refusal(tmp_path)
    with tarfile.open(tmp_path / "empty.nemo", "w"):
        pass
    assert "has no model_config.yaml" in refusal(tmp_path / "empty.nemo")


def test_missing_training_rank_is_named(tmp_path: Path) -> None:
    with tarfile.open(NEMO / "gpt_tp2_pp1.nemo") as tar:
        tar.extractall(tmp_path, filter="data")
    (tmp_path / "mp_rank_01/model_weights.ckpt").unlink()
    assert "lacks mp_rank_01/model_weights.ckpt" in refusal(tmp_path)


def test_inspection_is_quick_and_leaves_torch_alone() -> None:
    code = (
        "import sys, pathlib\n"
        "from export_scripts.conversion.plan.check import inspect_source\n"
        "dims = inspect_source(pathlib.Path(sys.argv[1]), 4, 'fp16').dims\n"
        "print(dims.head_num, dims.vocab_size, sorted({'torch', 'sentencepiece', 'tokenizers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(GOOD)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "4 1024 []"
    started = time.process_time()
    inspect_source(GOOD, 4, "fp16")
    assert time.process_time() - started < 0.3


def test_pickle_protocol_2_bytes_and_streams_are_read(tmp_path: Path) -> None:
    """Transformer Engine keeps its state as bytes or as a BytesIO."""
    state = gpt_state()
    for number, key in enumerate(key for key in state if key.endswith("_extra_state")):
        state[key] = io.BytesIO(pickle.dumps(number)) if number % 2 else b"\x00\xff"
    assert vars(inspect_source(write_gpt(tmp_path / "gpt.nemo", state), 2, "bf16").dims)["head_num"] == 4
