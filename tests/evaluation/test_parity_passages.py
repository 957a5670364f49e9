"""Passages of parity: what coarse number formats hide, positions that no prompt reaches, and what is said of both."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.measurements.parity_runs import T5_INPUTS, limits, run, serve, shards_of
from support.tiny_models.huggingface_models import HIDDEN, save
from support.tiny_models.t5_models import huggingface_t5

from backends.fastertransformer.engine.model import precision
from benchmarks.parity.planted import PLANTED, open_shards
from evaluation.parity import twin
from evaluation.parity.twin import LEAST_Z
from evaluation.tasks.metric import FAILS, HOLDS, INCONCLUSIVE

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMATS = [
    *(("fp32", "fp32", 0), ("fp16", "fp16", 0), ("bf16", "bf16", 0), ("fp16", "bf16", 0), ("bf16", "fp16", 0)),
    *(("fp16", "fp16", 1), ("bf16", "bf16", 1)),
]
UNBOUNDED = limits(99.0, 99.0, 0.0, 99.0)  # of prompts: passages alone decide
NORM, ITS_NAME = "model.layers.1.input_layernorm.weight.bin", "transformer.h.1.ln_1.weight"
POSITIONS = 48
SHARE = (
    *("q of two heads swapped", "attention.dense: heads' rows swapped", "two layers swapped"),
    *("post-attention norm x 1.10", "final norm x 1.02", "dense_4h_to_h: bias zeroed", "all biases zeroed"),
    *("positions from 96 on zeroed", "bias of the keys zeroed"),
)
ALIKE = (
    *("attention.dense: heads' rows swapped", "two layers swapped", "post-attention norm x 1.10"),
    "all biases zeroed",
)
FINE = 0.002  # error of a norm's scale


@pytest.fixture(autouse=True)
def arithmetic_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounding hides is the subject, so the engine rounds on processors too that have no bf16 instructions."""
    monkeypatch.setattr(precision, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(precision, "can_keep", lambda dtype: False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and shards of it in each number format beside it."""
    directory = tmp_path_factory.mktemp("passages")
    save("gpt2", directory / "source", n_positions=POSITIONS)
    for data_type in TYPES:
        shards_of(directory / "source", directory / data_type, data_type)
    return directory


def look(checkpoint: Path, shards: Path, directory: Path, *formats: Any, **changes: Any) -> dict[str, Any]:
    """Parity's summary."""
    data_type, int8_mode, *kind = formats
    served = {"data_type": data_type, "int8_mode": int8_mode}
    with serve(shards, *kind, **served) as fake:
        return run(fake, checkpoint, directory, **{"limits": UNBOUNDED, **changes})


def damaged(shards: Path, directory: Path, file: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy whose file holds what the change makes of its numbers."""
    copy = shutil.copytree(shards, directory / "damaged")
    dtype = next(kind for name, kind in TYPES.items() if f"= {name}" in (shards / "config.ini").read_text())
    numbers = torch.from_file(str(copy / file), size=(copy / file).stat().st_size // dtype.itemsize, dtype=dtype)
    (copy / file).write_bytes(change(numbers.float()).to(dtype).view(torch.uint8).numpy().tobytes())
    return copy


# What fp16 rounds it rounds to int8, too; weights in fp16 are computed with in bf16.
@pytest.mark.in_ci(when=lambda at: (at.weights, at.int8_mode) != ("fp16", 0) or at.data_type == "bf16")
@pytest.mark.parametrize(("weights", "data_type", "int8_mode"), FORMATS)
def test_a_norm_that_is_two_percent_too_large_is_named_in_every_format_and_a_sound_model_holds(
    weights: str, data_type: str, int8_mode: int, source: Path, tmp_path: Path
) -> None:
    sound = look(source / "source", source / weights, tmp_path, data_type, int8_mode)
    assert sound["verdict"] == HOLDS, sound
    assert sound["norm_scale_resolution"] < 0.02
    assert not any("not visited" in note for note in sound["source"]["notes"])

    shards = damaged(source / weights, tmp_path, NORM, lambda numbers: numbers * 1.02)
    found = look(source / "source", shards, tmp_path, data_type, int8_mode)
    assert found["verdict"] == FAILS and any(ITS_NAME in reason for reason in found["reasons"]), found["reasons"]
    scale = float(found["error"].partition(f"{ITS_NAME} were ")[2].partition(" ")[0])
    assert scale == pytest.approx(1.02, abs=0.004)


# Of defects of one kind, the one that is hardest to see.
@pytest.mark.in_ci(when=lambda at: at.defect not in ALIKE)
@pytest.mark.parametrize("defect", SHARE)
def test_planted_defects_are_found_in_the_coarsest_format(defect: str, source: Path, tmp_path: Path) -> None:
    """All of them, on the demonstration checkpoint in each format: ``benchmarks.parity.limits --defects=planted``."""
    shards = shutil.copytree(source / "bf16", tmp_path / "damaged")
    planted = PLANTED[defect]
    planted.damage(open_shards(shards))
    found = look(source / "source", shards, tmp_path, "bf16", 1)
    assert found["verdict"] == (HOLDS if planted.is_harmless else FAILS), found["reasons"]


@pytest.mark.parametrize("reference", ["huggingface", "engine"])
def test_a_position_that_no_prompt_reaches_is_looked_at(source: Path, reference: str, tmp_path: Path) -> None:
    def zero_the_last_half(numbers: torch.Tensor) -> torch.Tensor:
        numbers.view(POSITIONS, HIDDEN)[POSITIONS // 2 :] = 0
        return numbers

    shards = damaged(source / "fp16", tmp_path, "model.wpe.bin", zero_the_last_half)
    unseen = look(source / "source", shards, tmp_path, "fp16", 0, reference=reference, passages=0)
    assert unseen["verdict"] == HOLDS  # by prompts of 14 tokens, answers included
    assert any(f"positions 13 to {POSITIONS - 2} of {POSITIONS} were not" in note for note in unseen["source"]["notes"])
    tight = limits(0.1, 0.01, 0.9, 0.01)
    found = look(source / "source", shards, tmp_path, "fp16", 0, reference=reference, limits=tight)
    assert found["verdict"] == FAILS and "difference" in found["error"]


def test_positions_that_are_left_out_are_named(source: Path, tmp_path: Path) -> None:
    found = look(source / "source", source / "fp32", tmp_path, "fp32", 0, longest_passage=20)
    assert f"positions 19 to {POSITIONS - 2} of {POSITIONS} were not visited" in found["source"]["notes"][-1]


def test_as_many_passages_are_scored_as_the_noise_needs(source: Path, tmp_path: Path) -> None:
    """16 passages cannot show an error of 0.2% in bf16: more are scored until they do, and a norm 0.3% off fails."""
    few = {"passages": 16, "scale_error": FINE}
    sound = look(source / "source", source / "bf16", tmp_path, "bf16", 0, **few)
    assert sound["verdict"] == HOLDS and sound["norm_scale_resolution"] <= FINE, sound["reasons"]
    assert any("16 passages would have shown a norm's scale to 0." in note for note in sound["source"]["notes"])

    def move_every_other_number(numbers: torch.Tensor) -> torch.Tensor:
        """One step of bf16, which is 0.4% to 0.8%, upwards."""
        numbers[::2] = (numbers[::2].to(torch.bfloat16).view(torch.int16) + 1).view(torch.bfloat16).float()
        return numbers

    shards = damaged(source / "bf16", tmp_path, NORM, move_every_other_number)
    unseen = look(source / "source", shards, tmp_path, "bf16", 0, **few, max_passages=0)
    assert unseen["verdict"] == INCONCLUSIVE
    assert look(source / "source", shards, tmp_path, "bf16", 0, **few)["verdict"] == FAILS


def test_what_cannot_be_told_is_inconclusive_and_says_what_would_tell(source: Path, tmp_path: Path) -> None:
    few = {"passages": 16, "scale_error": FINE}
    found = look(source / "source", source / "bf16", tmp_path, "bf16", 0, **few, max_passages=20)
    assert found["verdict"] == INCONCLUSIVE
    (reason,) = found["reasons"]
    assert "20 passages were scored" in reason
    enough = int(reason.rpartition("evaluation.parity.max_passages=")[2])
    assert enough > 20
    decided = look(source / "source", source / "bf16", tmp_path, "bf16", 0, **few, max_passages=enough)
    assert decided["verdict"] == HOLDS, decided["reasons"]


def test_a_source_that_its_number_format_cannot_hold_is_inconclusive(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def overflowing(model: Any, data_type: str) -> Iterator[None]:
        weight = next(model.parameters())
        kept = weight.detach().clone()
        weight.fill_(torch.inf)
        try:
            yield
        finally:
            weight.copy_(kept)

    monkeypatch.setattr(twin, "rounded_arithmetic", overflowing)
    summary = look(source / "source", source / "fp16", tmp_path, "fp16", 0)
    assert summary["verdict"] == INCONCLUSIVE and "is not finite there" in summary["reasons"][0]


def test_what_cannot_be_differentiated_is_inconclusive_in_a_coarse_format(source: Path, tmp_path: Path) -> None:
    blind = look(source / "source", source / "bf16", tmp_path, "bf16", 0, reference="engine")
    assert blind["verdict"] == INCONCLUSIVE and "the reference is the engine" in blind["reasons"][0]
    sharp = look(source / "source", source / "fp16", tmp_path, "fp16", 0, reference="engine")
    assert sharp["verdict"] == HOLDS


FAMILIES = {"gptj": "GPT-J", "gpt_neox": "GPT-NeoX"}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_hold_in_bf16_and_not_with_a_scaled_norm(family: str, tmp_path: Path) -> None:
    save(family, tmp_path / "source")
    shards = shards_of(tmp_path / "source", tmp_path / "shards", "bf16")
    kind = FAMILIES[family]
    assert look(tmp_path / "source", shards, tmp_path, "bf16", 0, kind)["verdict"] != FAILS
    scaled = damaged(shards, tmp_path, NORM, lambda numbers: numbers * 1.1)
    assert look(tmp_path / "source", scaled, tmp_path, "bf16", 0, kind)["verdict"] == FAILS


def test_an_encoder_decoder_does_not_fail_in_bf16_but_with_a_scaled_norm(tmp_path: Path) -> None:
    sound, scaled = look_at_t5(tmp_path, 1.0, passages=16, max_passages=32)
    assert sound["verdict"] != FAILS, sound["reasons"]
    assert any("16 passages would have shown" in note for note in sound["source"]["notes"])
    assert scaled["verdict"] == FAILS


def test_what_rounding_does_to_sharp_attention_is_no_alarm(tmp_path: Path) -> None:
    """Rounded scores make it less sharp, which enough passages show as keys that are too small by many errors."""
    sound, scaled = look_at_t5(tmp_path, 4.0, passages=128, max_passages=0)
    with (tmp_path / "sound.csv").open() as stream:
        z = {row["tensor"]: float(row["z"]) for row in csv.DictReader(stream)}
    assert z["decoder.block.2.layer.0.SelfAttention.k.weight"] < -LEAST_Z
    assert sound["verdict"] == INCONCLUSIVE, sound["reasons"]
    assert scaled["verdict"] == FAILS


def look_at_t5(directory: Path, sharpness: float, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What parity says of a T5 in bf16, whose scales are left in sound.csv, and of it with a norm times 1.1."""
    model = huggingface_t5()
    with torch.no_grad():
        for block in model.decoder.block:
            block.layer[0].SelfAttention.q.weight *= sharpness
    model.save_pretrained(directory / "source")
    shards = shards_of(directory / "source", directory / "shards", "bf16")
    kind = ("T5", (*T5_INPUTS, "decoder_input_ids", "is_return_context_log_probs"))
    prompts = directory / "few.jsonl"
    prompts.write_text('{"input_ids": [7, 3, 22]}\n')
    changes["data_path"] = prompts
    sound = look(directory / "source", shards, directory, "bf16", 0, *kind, **changes)
    shutil.copy(directory / "parity" / "scales.csv", directory / "sound.csv")
    (norm,) = shards.glob("decoder.block.1.layer.0.layer_norm.weight*.bin")
    damage = damaged(shards, directory, norm.name, lambda numbers: numbers * 1.1)
    changes["passages"] = 16  # as many show a tenth
    return sound, look(directory / "source", damage, directory, "bf16", 0, *kind, **changes)
