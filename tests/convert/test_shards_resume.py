"""A killed conversion continues; a full disk is one clear error; foreign files are left alone."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.nemo_archive import gpt_config, gpt_state, write_gpt, write_nemo

from export_scripts.arguments import ConvertArguments
from export_scripts.conversion.write.journal import FILE_NAME as JOURNAL
from export_scripts.conversion.write.journal import Journal
from export_scripts.conversion.write.shards import write_bytes
from export_scripts.convert import convert
from handover.errors import ArtefactError
from handover.manifest import Manifest


def contents(root: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in root.iterdir()}


def large_archive(path: Path) -> Path:
    """A GPT of 60 MB, so that its conversion can be met half way."""
    hidden, layers = 256, 12
    state = {
        "model.language_model.embedding.word_embeddings.weight": torch.rand(20_000, hidden),
        "model.language_model.embedding.position_embeddings.weight": torch.rand(64, hidden),
        "model.language_model.encoder.final_layernorm.weight": torch.rand(hidden),
    }
    for layer in range(layers):
        prefix = f"model.language_model.encoder.layers.{layer}."
        state[f"{prefix}self_attention.query_key_value.weight"] = torch.rand(3 * hidden, hidden)
        state[f"{prefix}self_attention.dense.weight"] = torch.rand(hidden, hidden)
        state[f"{prefix}mlp.dense_h_to_4h.weight"] = torch.rand(4 * hidden, hidden)
        state[f"{prefix}mlp.dense_4h_to_h.weight"] = torch.rand(hidden, 4 * hidden)
        state[f"{prefix}input_layernorm.weight"] = torch.rand(hidden)
        state[f"{prefix}post_attention_layernorm.weight"] = torch.rand(hidden)
    config = gpt_config(num_layers=layers, hidden_size=hidden, ffn_hidden_size=4 * hidden, max_position_embeddings=64)
    return write_nemo(path, config, {"model_weights.ckpt": state})


def test_conversion_killed_in_the_middle_continues(tmp_path: Path) -> None:
    archive, output = large_archive(tmp_path / "gpt.nemo"), tmp_path / "out"
    argv = ConvertArguments(archive, output, 4, "fp16").to_argv()
    process = subprocess.Popen([sys.executable, "-m", "export_scripts.convert", *argv], stderr=subprocess.DEVNULL)
    while len(list(output.glob("*.bin"))) < 20:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (output / JOURNAL).is_file()
    assert not (output / "manifest.json").exists()
    finished = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in output.glob("*.bin")}
    victim = sorted(finished)[3]
    victim.write_bytes(victim.read_bytes()[:-1])

    convert(ConvertArguments(archive, output, 4, "fp16"))
    del finished[victim]
    assert {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in finished} == finished, "finished shards were kept"
    convert(ConvertArguments(archive, tmp_path / "whole", 4, "fp16"))
    assert contents(output) == contents(tmp_path / "whole")


@pytest.mark.parametrize("change", ["ranks", "data_type", "source", "source of the same time"])
def test_work_for_other_settings_or_another_source_is_not_continued(change: str, tmp_path: Path) -> None:
    """Leave the journal of a finished run behind, as a kill just before the manifest would."""
    archive, output = write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out"
    interrupted(archive, output, 4, "fp16")
    ranks, data_type = (2 if change == "ranks" else 4), ("bf16" if change == "data_type" else "fp16")
    if change.startswith("source"):
        state = {k: v if v is None else v / 2 for k, v in gpt_state().items()}
        was = archive.stat()
        write_gpt(archive, state)
        if change.endswith("time"):
            assert archive.stat().st_size == was.st_size
            os.utime(archive, ns=(was.st_atime_ns, was.st_mtime_ns))
    convert(ConvertArguments(archive, output, ranks, data_type))
    convert(ConvertArguments(archive, tmp_path / "fresh", ranks, data_type))
    assert contents(output) == contents(tmp_path / "fresh")


def interrupted(archive: Path, output: Path, ranks: int, data_type: str) -> None:
    """Convert, then put the directory back to the state before its manifest was written."""
    manifest = convert(ConvertArguments(archive, output, ranks, data_type))
    (output / "manifest.json").unlink()
    made_from = {key: value for key, value in manifest.made_from.items() if key != "checkpoint_checksums"}
    identity = {**made_from, "layout_version": 2}
    with pytest.raises(ArtefactError, match="no conversion wrote"):
        Journal(output, identity)
    lines = [identity, *(dict(vars(record)) for record in manifest.files)]
    (output / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"path": "cut o')


def test_damaged_and_missing_lines_cost_their_shards_and_nothing_else(tmp_path: Path) -> None:
    """What a loss of power, or a full disk under one of several processes, leaves."""
    archive, output = write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out"
    interrupted(archive, output, 4, "fp16")
    first, *lines = (output / JOURNAL).read_text().splitlines()
    torn, zeros, missing, kept = (json.loads(line)["path"] for line in lines[:4])
    lines[:3] = [lines[0][:30], "\0" * len(lines[1])]
    (output / JOURNAL).write_text("\n".join([first, *lines]))
    before = {name: (output / name).stat().st_mtime_ns for name in (torn, zeros, missing, kept)}
    convert(ConvertArguments(archive, output, 4, "fp16"))
    made_again = [name for name in before if (output / name).stat().st_mtime_ns != before[name]]
    assert made_again == [torn, zeros, missing]
    assert Manifest.read(output).problems(output) == []


def test_a_finished_shard_with_other_bytes_is_made_again(tmp_path: Path) -> None:
    """Its name and size reached the disk before the power went, its content did not."""
    archive, output = write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out"
    interrupted(archive, output, 4, "fp16")
    shard = output / "model.wte.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    convert(ConvertArguments(archive, output, 4, "fp16"))
    assert Manifest.read(output).problems(output) == []


def test_a_foreign_file_beside_interrupted_work_is_left_alone(tmp_path: Path) -> None:
    archive, output = write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out"
    interrupted(archive, output, 4, "fp16")
    (output / "notes.bin").write_text("years of work")
    with pytest.raises(ArtefactError, match="notes.bin"):
        convert(ConvertArguments(archive, output, 4, "fp16"))
    assert (output / "notes.bin").read_text() == "years of work"
    assert (output / "model.wte.bin").exists()


def test_interrupted_helper_leaves_work_that_is_continued(tmp_path: Path) -> None:
    archive, output = write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out"
    interrupted(archive, output, 4, "fp16")
    before = (output / "model.wte.bin").stat().st_mtime_ns
    convert(ConvertArguments(archive, output, 4, "fp16"))
    assert (output / "model.wte.bin").stat().st_mtime_ns == before
    assert Manifest.read(output).problems(output) == []


def test_an_interrupt_says_which_tensor_was_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, output = write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out"

    def two_then_ctrl_c(processes: int, count: int, work: Callable[..., Any], advance: Any) -> Iterator[Any]:
        yield work(0, advance)
        yield work(1, advance)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as raised:
        patched.setattr("export_scripts.targets.fastertransformer.convert.run_all", two_then_ctrl_c)
        convert(ConvertArguments(archive, output, 1, "fp32"))
    (said,) = raised.value.args
    found = re.fullmatch(r"after 2 of (\d+) tensors, the last one (model\.\S+\.bin); the next run continues", said)
    assert found, said
    count, name = found.groups()
    assert int(count) > 2 and (output / name).exists() and not (output / "manifest.json").exists()
    convert(ConvertArguments(archive, output, 1, "fp32"))
    assert Manifest.read(output).problems(output) == []


def test_finished_output_is_made_again(tmp_path: Path) -> None:
    archive, output = write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out"
    convert(ConvertArguments(archive, output, 4, "fp16"))
    convert(ConvertArguments(archive, output, 1, "fp32"))
    assert Manifest.read(output).problems(output) == []
    assert not list(output.glob("*.3.bin"))


def test_foreign_files_are_neither_touched_nor_adopted(tmp_path: Path) -> None:
    archive, output = write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out"
    output.mkdir()
    (output / "thesis.tex").write_text("years of work")
    with pytest.raises(ArtefactError, match="thesis.tex"):
        convert(ConvertArguments(archive, output, 1, "fp32"))
    assert [p.name for p in output.iterdir()] == ["thesis.tex"]


def test_too_little_space_is_known_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, output = write_gpt(tmp_path / "gpt.nemo"), tmp_path / "out"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(ArtefactError, match=r"has 1.0 MB free and 16.8 MB are needed"):
        convert(ConvertArguments(archive, output, 1, "fp32"))
    assert not list(output.glob("*.bin"))


def test_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, {})
    full = tmp_path / "full"
    full.symlink_to("/dev/full")  # every write there fails as on a full disk
    monkeypatch.setattr("export_scripts.conversion.write.shard_file.temporary_beside", lambda path: full)
    with pytest.raises(ArtefactError, match="the disk is full: config.ini could not be written"):
        write_bytes(tmp_path / "config.ini", b"[gpt]", journal)
