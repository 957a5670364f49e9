"""The served model against its source: planted defects are found, sound models hold.

Served by the real engine behind a fake Triton; the source is a checkpoint that transformers wrote.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.measurements.parity_runs import (
    LENGTH,
    PROMPTS,
    RANKS,
    SIZE,
    SOUND,
    T5_INPUTS,
    limits,
    prompts_file,
    run,
    serve,
    shards_of,
)
from support.tiny_models.huggingface_models import HEADS, HIDDEN, LAYERS, save
from support.tiny_models.t5_models import ENCODER_IDS, huggingface_t5

from evaluation.client.model_connection import OTHER_TOKEN
from evaluation.parity.arguments import LIMITS, ParityArguments, served_precision
from evaluation.parity.comparison import Served, compare, decide, summarise
from evaluation.parity.nemo_gpt2 import UnfitError, as_gpt2
from evaluation.parity.run import main
from evaluation.tasks.metric import FAILS, HOLDS
from export_scripts.checkpoints.formats import find_archive, open_source
from ft_format.weight_format import find_format
from handover.errors import ConfigError

QKV = "model.layers.1.attention.query_key_value.weight.{}.bin"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt2")
    save("gpt2", directory / "source")
    shards_of(directory / "source", directory / "shards")
    return directory


# OPT's is a GPT's, which the engine's reference shows to be read.
@pytest.mark.in_ci(when=lambda at: at.family != "opt" or at.reference == "engine")
@pytest.mark.parametrize("reference", ["huggingface", "engine"])
@pytest.mark.parametrize(("family", "model_type"), [("gpt2", "GPT"), ("opt", "GPT"), ("gpt_neox", "GPT-NeoX")])
def test_a_sound_model_holds(family: str, model_type: str, reference: str, tmp_path: Path) -> None:
    save(family, tmp_path / "source")
    shards = shards_of(tmp_path / "source", tmp_path / "shards")
    with serve(shards, model_type) as fake:
        summary = run(fake, tmp_path / "source", tmp_path, reference=reference)
    assert summary["verdict"] == HOLDS and summary["first_difference"] is None
    assert summary["identical_continuations"] == summary["greedy_agreement"] == 1.0
    assert 0 < summary["max_log_prob_difference"] < 1e-4
    assert ("transformers" in summary["source"]["computed_by"]) == (reference == "huggingface")
    assert not (tmp_path / "parity" / "reference").exists()
    with (tmp_path / "parity" / "positions.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == sum(len(prompt) - 1 + LENGTH for prompt in PROMPTS)


def test_fastertransformers_own_engine_is_compared_by_prefixes(gpt2: Path, tmp_path: Path) -> None:
    """It takes no ``is_return_context_log_probs``: the prompts' log probabilities are differences of sums."""
    with serve(gpt2 / "shards", inputs=("input_ids",)) as fake:
        summary = run(fake, gpt2 / "source", tmp_path)
        assert all("is_return_context_log_probs" not in request for request in fake.requests)
    assert summary["verdict"] == HOLDS and summary["max_log_prob_difference"] < 1e-4


def swap_two_heads(shards: Path) -> None:
    weight = np.fromfile(shards / QKV.format(1), "<f4").reshape(HIDDEN, 3, HEADS // RANKS, SIZE)
    weight[:, 0, [0, 1]] = weight[:, 0, [1, 0]]
    weight.tofile(shards / QKV.format(1))


def swap_two_shards(shards: Path) -> None:
    first, second = (shards / f"model.layers.0.mlp.dense_h_to_4h.weight.{rank}.bin" for rank in range(RANKS))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def write_heads_side_by_side(shards: Path) -> None:
    """Megatron's order of a fused QKV, q, k, v of one head after another, in place of FasterTransformer's."""
    for layer in range(LAYERS):
        for rank in range(RANKS):
            path = shards / QKV.replace("layers.1", f"layers.{layer}").format(rank)
            weight = np.fromfile(path, "<f4").reshape(HIDDEN, 3, HEADS // RANKS, SIZE)
            np.ascontiguousarray(weight.swapaxes(1, 2)).tofile(path)


# Either reference sees tokens alone; a defect of each is enough for one.
@pytest.mark.in_ci(when=lambda at: at.reference == "engine" or at.defect is swap_two_heads)
@pytest.mark.parametrize("reference", ["huggingface", "engine"])
@pytest.mark.parametrize("defect", [swap_two_heads, swap_two_shards, write_heads_side_by_side])
def test_a_planted_defect_is_found(gpt2: Path, defect: Callable[[Path], None], reference: str, tmp_path: Path) -> None:
    shards = shutil.copytree(gpt2 / "shards", tmp_path / "shards")
    defect(shards)
    with serve(shards) as fake:
        summary = run(fake, gpt2 / "source", tmp_path, reference=reference)
    assert summary["verdict"] == FAILS and "max_log_prob_difference" in summary["error"]
    assert summary["mean_log_prob_difference"] > 10 * SOUND[1]


def test_an_int8_model_holds_by_its_own_limits_and_not_when_it_has_drifted(gpt2: Path, tmp_path: Path) -> None:
    own = dict(limits(*SOUND)) | {"int8": tuple(zip(LIMITS, (0.6, 0.06, 0.9, 0.06), strict=True))}
    with serve(gpt2 / "shards", int8_mode=1) as fake:
        summary = run(fake, gpt2 / "source", tmp_path, limits=tuple(own.items()))
    assert summary["verdict"] == HOLDS and summary["source"]["precision"] == "int8"
    assert summary["max_log_prob_difference"] > 1e-4  # it is quantised

    shards = shutil.copytree(gpt2 / "shards", tmp_path / "shards")
    for path in shards.glob("model.layers.*.weight.?.bin"):  # one scale for a whole matrix, and 3 bits
        weight = np.fromfile(path, "<f4")
        scale = np.abs(weight).max() / 3
        (np.rint(weight / scale) * scale).astype("<f4").tofile(path)
    with serve(shards, int8_mode=1) as fake:
        summary = run(fake, gpt2 / "source", tmp_path, limits=tuple(own.items()))
    assert summary["verdict"] == FAILS


NEMO = Path(__file__).resolve().parents[1] / "data" / "nemo"


@pytest.mark.parametrize(
    ("sample", "tolerance"),
    [
        *((name, 5e-4) for name in ("gpt122_tp1_pp1", "gpt_tp2_pp1", "gpt_tp1_pp2", "gpt_untied", "gpt_spm")),
        ("gpt_O2_bf16", 0.1),  # NeMo computed it in bf16
    ],
)
def test_a_nemo_gpt_is_computed_as_nemo_computes_it(sample: str, tolerance: float) -> None:
    """The oracle is what NeMo 1.23 itself said of the sample."""
    model = as_gpt2(open_source(find_archive(NEMO / f"{sample}.nemo")))
    ids, logits = (np.load(NEMO / f"{sample}.{what}.npy") for what in ("input_ids", "logits"))
    with torch.no_grad():
        found = model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(found, logits, atol=tolerance)


def test_a_served_nemo_gpt_is_compared_by_a_second_account_of_its_tensors(tmp_path: Path) -> None:
    source = NEMO / "gpt_tp2_pp1.nemo"
    shards = shards_of(source, tmp_path / "shards")
    with serve(shards) as fake:
        summary = run(fake, source, tmp_path)
    assert summary["verdict"] == HOLDS and "GPT-2 with the checkpoint's tensors" in summary["source"]["computed_by"]
    assert any("NeMo" in note for note in summary["source"]["notes"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"megatron_legacy": True}, "megatron_legacy"),
        ({"position_embedding_type": "rope"}, "rope"),
        (None, "no uncompressed checkpoint with"),
    ],
)
def test_what_gpt2_cannot_express_is_said(changes: dict[str, Any] | None, words: str) -> None:
    source = open_source(find_archive(NEMO / "gpt122_tp1_pp1.nemo"))
    config = yaml.safe_load(source.archive.read_bytes("model_config.yaml"))

    class Files:
        is_compressed = False

        def __contains__(self, name: str) -> bool:
            return changes is not None

        def read_bytes(self, name: str) -> bytes:
            return yaml.safe_dump(config | (changes or {})).encode()

    with pytest.raises(UnfitError, match=words):
        as_gpt2(dataclasses.replace(source, archive=Files()))  # type: ignore[arg-type]


def test_an_encoder_decoder_is_compared_by_what_it_generates(tmp_path: Path) -> None:
    huggingface_t5().save_pretrained(tmp_path / "source")
    shards = shards_of(tmp_path / "source", tmp_path / "shards")
    prompts = tmp_path / "short.jsonl"
    prompts.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in ENCODER_IDS.tolist()))
    for reference in ("huggingface", "engine"):
        with serve(shards, "T5", T5_INPUTS) as fake:
            summary = run(fake, tmp_path / "source", tmp_path, reference=reference, data_path=prompts)
        assert summary["verdict"] == HOLDS, summary
    with (tmp_path / "parity" / "prompts.csv").open() as stream:
        assert [row["scored_tokens"] for row in csv.DictReader(stream)] == [str(LENGTH)] * len(ENCODER_IDS)


def test_figures_and_verdict_are_those_of_a_calculation_by_hand() -> None:
    """Prompt 0 is (2, 0), continued with (1,); the rows are the source's probabilities of the three tokens."""
    source = np.log(np.array([[0.5, 0.3, 0.2], [0.49, 0.48, 0.03]], np.float32))
    served = Served((2, 0), (1,), (float(np.log(0.5)), float(np.log(0.6))), (0, 1))
    positions = compare(0, served, source, tie=0.001)
    assert [(each.part, each.place, each.token, each.agrees) for each in positions] == [
        ("prompt", 1, 0, True),
        ("generated", 0, 1, False),
    ]
    expected = float(np.log(0.6 / 0.48))
    assert positions[1].difference == pytest.approx(expected, abs=1e-6)
    assert positions[1].margin == pytest.approx(float(np.log(0.49 / 0.48)), abs=1e-6)
    figures = {metric.name: metric.value for metric in summarise(positions)}
    assert figures["greedy_agreement"] == 0.5 and figures["identical_continuations"] == 0.0
    assert figures["max_log_prob_difference"] == pytest.approx(expected, abs=1e-6)
    assert figures["mean_log_prob_difference"] == pytest.approx(expected / 2, abs=1e-6)

    loose = dict(zip(LIMITS, (0.3, 0.2, 0.5, 0.0), strict=True))
    assert decide(positions, loose).verdict == HOLDS
    assert decide(positions, loose).first_difference == (0, 0)
    for name, number in {
        "max_log_prob_difference": 0.2,
        "mean_log_prob_difference": 0.1,
        "greedy_agreement": 0.6,
    }.items():
        outcome = decide(positions, loose | {name: number})
        assert outcome.verdict == FAILS and len(outcome.reasons) == 1 and name in outcome.reasons[0]
    tied = compare(0, served, source, tie=0.03)  # the margin is 0.0206
    assert all(each.agrees for each in tied) and decide(tied, loose).first_difference is None


def test_another_token_than_the_given_one_is_compared_with_the_most_probable_that_it_can_be() -> None:
    """So says a server that names tokens by their texts."""
    source = np.log(np.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.4, 0.39, 0.21]], np.float32))
    served = Served((2, 0, 2, 0), (), (-0.7, -1.6, -0.9), (OTHER_TOKEN, OTHER_TOKEN, OTHER_TOKEN))
    positions = compare(0, served, source, tie=0.03)
    assert [each.agrees for each in positions] == [False, True, True]
    assert [each.margin for each in positions] == pytest.approx(np.log([0.5 / 0.3, 1, 0.4 / 0.39]).tolist(), abs=1e-6)


def test_what_is_no_number_fails_and_is_in_no_mean() -> None:
    source = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    served = Served((0,), (0, 0), (float("nan"), float(np.log(0.9))), (0, 0))
    positions = compare(0, served, source, tie=0.0)
    outcome = decide(positions, dict(zip(LIMITS, (9.0, 9.0, 0.0, 0.0), strict=True)))
    assert outcome.verdict == FAILS and "1 of 2 log probabilities are not finite" in outcome.reasons[0]
    assert {metric.failed for metric in summarise(positions)} == {0, 1}


@pytest.mark.parametrize(
    ("formats", "precision"),
    [
        (("fp32", "fp32", "0"), "fp32"),
        (("fp16", "fp32", "0"), "fp16"),
        (("fp16", "bf16", ""), "bf16"),
        (("fp16", "fp16", "1"), "int8"),
        (("bf16", "bf16", "0", "fp8_block"), "fp8_block"),
        (("bf16", "bf16", "0", "fp8", "fp8_cache"), "fp8"),
        (("bf16", "bf16", "0", "", "fp8_cache"), "fp8_cache"),
        (("bf16", "bf16", "0", "fp8", "fp8_cache", "fp8_activations"), "fp8_activations"),
        (("", "", ""), "fp32"),
    ],
)
def test_limits_go_by_the_coarsest_format(formats: tuple[str, ...], precision: str) -> None:
    on_disk, computed, *modes = formats
    assert served_precision(on_disk, computed, find_format(*modes[:2]), *modes[2:]) == precision


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_path": None}, "no prompts"),
        ({"output_length": 0}, "output_length is 0"),
        ({"reference": "nemo"}, "no reference 'nemo'"),
        ({"limits": limits(*SOUND)[:2]}, "limits.bf16 lacks"),
        ({"limits": limits(float("nan"), 1, 1, 1)}, "is nan"),
        ({"passages": 3}, "passages is 3"),
        ({"longest_passage": 1}, "longest_passage is 1"),
        ({"scale_error": 0.0}, "scale_error is 0"),
        ({"samples": 9}, "3 prompts, 9 are asked for"),
        ({"data_path": Path("/nowhere")}, "/nowhere cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_asked(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"data_path": prompts_file(tmp_path), "limits": limits(*SOUND)} | changes
    with pytest.raises(ConfigError, match=words):
        main(ParityArguments("127.0.0.1:1", tmp_path / "out", tmp_path, **given).to_argv())
    assert not (tmp_path / "out").exists()
