"""What is only copied: damage is named by tensor and place, and the checkpoint's digest needs no second reading."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.llama_configs import padded_vocabulary
from support.checkpoints.llama_sources import FORMS as SOURCES
from support.checkpoints.llama_sources import Case
from support.checkpoints.llama_state import core_state
from support.tiny_models.huggingface_models import save

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.digests import crc32_of
from export_scripts.checkpoints.formats import find_archive
from export_scripts.conversion.write import copied_bytes
from export_scripts.convert import convert
from export_scripts.tensors import mapped
from export_scripts.tensors.read_sums import ReadSums, by_path
from handover import digests
from handover.errors import CheckpointError

WEIGHTS = "model.safetensors"
FORMATS = ("huggingface", "fastertransformer")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding of 9 MiB, and layers."""
    path = tmp_path_factory.mktemp("made") / "gpt2"
    save("gpt2", path, tokenizer=False, vocab_size=36_001, n_embd=64)
    return path


def with_value(source: Path, path: Path, row: int, value: float) -> Path:
    path.mkdir()
    state = load_file(source / WEIGHTS)
    state["transformer.wte.weight"][row, 3] = value
    save_file(state, path / WEIGHTS, {"format": "pt"})
    (path / "config.json").write_bytes((source / "config.json").read_bytes())
    return path


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("form", FORMATS)
def test_the_digest_of_a_checkpoint_is_that_of_its_bytes_and_few_are_read_again(
    form: str, processes: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, read_again = crc32_of(find_archive(source)), []
    block_sum = digests._block_sum

    def counted(descriptor: int, number: int) -> bytes:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        read_again.extend([number] if name == str((source / WEIGHTS).resolve()) else [])
        return block_sum(descriptor, number)

    monkeypatch.setattr(digests, "_block_sum", counted)
    arguments = ConvertArguments(source, tmp_path / "out", 1, "fp32", processes=processes, format=form)
    assert convert(arguments).made_from["checkpoint_digest"] == expected
    blocks = -(-(source / WEIGHTS).stat().st_size // digests.BLOCK_BYTES)
    assert blocks >= 9
    assert len(read_again) <= 3, "the header and what two processes have read a half of each"


def test_sums_of_reads_in_any_order_and_taken_at_any_time_are_those_of_the_file(tmp_path: Path) -> None:
    path, random = tmp_path / "weights", Random(1)
    content = random.randbytes(7 * digests.BLOCK_BYTES + 100)
    path.write_bytes(content)
    for _ in range(30):
        sums, at, ranges = ReadSums(), 0, []
        for _ in range(12):
            at = at if random.random() < 0.7 else random.randrange(len(content))  # mostly it goes on
            end = min(at + random.randrange(1, 3 * digests.BLOCK_BYTES), len(content))
            sums.add(str(path), memoryview(content)[at:end], at)
            at = end
            ranges += sums.taken() if random.random() < 0.3 else []
        ranges += sums.taken()
        assert digests.joined_digest(path, by_path(ranges).get(str(path), [])) == digests.file_digest(path, "crc32-1m")


@pytest.mark.parametrize("combines", [True, False])
def test_a_record_that_is_read_in_any_order_is_compared_and_read_once(
    combines: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As query, key and value of a layer, of which each takes rows of every group."""
    if not combines:
        monkeypatch.setattr(mapped, "crc32_combine", None)
    content, path = Random(1).randbytes(300_000), tmp_path / "weights"
    path.write_bytes(b"header" + content)
    read_again: list[object] = []
    again = mapped.Reader._sum_all
    monkeypatch.setattr(mapped.Reader, "_sum_all", lambda *given: read_again.append(given) or again(*given))
    for is_sound in (True, False):
        record = mapped.map_record(path, 6, len(content), digests.crc32(content) ^ (not is_sound))
        groups, reader = record.reshape(10, 6, 5000), mapped.Reader(1 << 20, set())
        for part in (groups[:, :2], groups[:, 2:4], groups[:, 4:]):
            assert (reader.read(part) == part).all()
        if is_sound:
            reader.verify(record)
        else:
            with pytest.raises(CheckpointError, match="is damaged: its bytes 6 to 300006 have the checksum"):
                reader.verify(record)
    assert bool(read_again) != combines


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("row", [0, 20_000, 36_000])
def test_what_is_not_finite_is_named_by_tensor_and_place(row: int, value: float, source: Path, tmp_path: Path) -> None:
    path = with_value(source, tmp_path / "source", row, value)
    arguments = ConvertArguments(path, tmp_path / "out", 1, "fp32", format="huggingface")
    said = f"transformer.wte.weight holds 1 values that are NaN or infinite, the first at [{row}, 3]"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        convert(arguments)
    assert not (tmp_path / "out" / WEIGHTS).exists()
    allowed = ConvertArguments(path, tmp_path / "out", 1, "fp32", format="huggingface", allow_nonfinite=True)
    convert(allowed)
    made, given = load_file(tmp_path / "out" / WEIGHTS), load_file(path / WEIGHTS)
    assert all(torch.equal(made[name].view(torch.int32), given[name].view(torch.int32)) for name in given)


def test_a_number_that_its_new_type_does_not_have_is_named_too(source: Path, tmp_path: Path) -> None:
    path = with_value(source, tmp_path / "source", 30_000, 70_000.0)
    arguments = ConvertArguments(path, tmp_path / "out", 1, "fp16", format="huggingface", allow_nonfinite=True)
    with pytest.raises(CheckpointError, match=re.escape("wte.weight overflows fp16: its largest magnitude is 7e+04")):
        convert(arguments)


def test_a_source_that_ends_early_is_an_error_of_its_tensor(source: Path, tmp_path: Path) -> None:
    path = with_value(source, tmp_path / "source", 0, 1.0)
    weights, reads = path / WEIGHTS, os.preadv

    def shrinking(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset > 4 << 20:
            os.truncate(weights, 4 << 20)
        return reads(descriptor, buffers, offset)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "preadv", shrinking)
        with pytest.raises(CheckpointError, match=r"transformer.wte.weight: .* ends at byte \d+, while it is read"):
            convert(ConvertArguments(path, tmp_path / "out", 1, "fp32", processes=1, format="huggingface"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["Megatron-LM", "zarr", "Bridge", "NeMo 2, layers apart, gate and up apart"])
def test_what_megatron_has_fused_or_cut_is_copied_in_runs_and_rows_side_by_side(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused query, key and value, gate above up, and two ranks' columns; a NaN among them is named by its place."""

    def no_blocks(*_: object, **__: object) -> None:
        raise AssertionError("an array is made of what is only copied")

    monkeypatch.setattr(copied_bytes, "_LEAST_BYTES", 1)
    monkeypatch.setattr(copied_bytes, "blocks", no_blocks)
    for module in (copied_bytes, mapped):
        monkeypatch.setattr(module, "RUN_BYTES", 1 << 10)
    case = Case("llama", form, 2, dtype=torch.bfloat16)
    source = case.source
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 2))
    arguments = ConvertArguments(tmp_path / "source", tmp_path / "out", 1, "bf16", processes=1, format="huggingface")
    convert(replace(arguments, checkpoint=SOURCES[form](case, state, tmp_path / "source")))
    made = load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(made[name], source.tensors[name]) for name in made)
    state = {name: tensor.clone() for name, tensor in state.items()}
    state["decoder.layers.1.self_attention.linear_proj.weight"][3, -2] = float("nan")
    path = SOURCES[form](case, state, tmp_path / "damaged")
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.o_proj.weight holds 1 values .* the first at \[3, "):
        convert(replace(arguments, checkpoint=path, output=tmp_path / "refused"))
