"""Parity compares the configuration's numbers themselves: what they change may be less than rounding."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.measurements.parity_runs import limits, run, serve, shards_of
from support.tiny_models.huggingface_models import save

from backends.fastertransformer.engine.model import precision
from evaluation.parity.distances import distances
from evaluation.parity.numbers import compare_numbers
from evaluation.parity.references import HuggingFaceReference, open_reference
from evaluation.tasks.metric import FAILS, HOLDS
from export_scripts.checkpoints.formats import find_archive, open_source

UNBOUNDED = limits(99.0, 99.0, 0.0, 99.0)


def changed(shards: Path, directory: Path, key: str, value: str) -> Path:
    copy = shutil.copytree(shards, directory / "changed")
    path = copy / "config.ini"
    text, count = re.subn(rf"(?m)^{key} *=.*$", f"{key} = {value}", path.read_text())
    path.write_text(text if count else f"{text.rstrip()}\n{key} = {value}\n")
    return copy


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("numbers")
    save("llama", directory / "source")
    shards_of(directory / "source", directory / "bf16", "bf16")
    return directory


@pytest.mark.parametrize(
    ("key", "value", "by_transformers"),
    [
        ("rope_theta", "10100.0", True),
        ("layernorm_eps", "1e-07", True),
        ("head_num", "1", True),
        ("kv_head_num", "1", True),
        ("rope_scaling_factor", "1.01", False),
        ("num_layer", "1", False),
        ("has_untied_head", "0", False),
    ],
)
def test_every_number_that_is_not_the_source_s_is_named(
    key: str, value: str, by_transformers: bool, llama: Path, tmp_path: Path
) -> None:
    reference, _ = open_reference(llama / "source", "huggingface", tmp_path / "scratch")
    assert isinstance(reference, HuggingFaceReference) and reference.source is not None
    assert not compare_numbers(reference.source, llama / "bf16", reference.model).broken
    found = compare_numbers(reference.source, changed(llama / "bf16", tmp_path, key, value), reference.model).broken
    assert all(line.startswith(f"{key} is {value}") for line in found)
    assert [line.endswith("(transformers)") for line in found] == [False, True][: 1 + by_transformers]


def test_an_epsilon_that_rounding_hides_fails_parity(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(precision, "can_keep", lambda dtype: False)
    wrong = changed(llama / "bf16", tmp_path, "layernorm_eps", "1e-07")
    for shards, verdict in ((llama / "bf16", HOLDS), (wrong, FAILS)):
        with serve(shards, "Llama", data_type="bf16") as fake:
            found = run(fake, llama / "source", tmp_path, limits=UNBOUNDED, passages=0)
        assert found["verdict"] == verdict, found
    assert all("layernorm_eps is 1e-07 in the served config.ini" in reason for reason in found["reasons"])


@pytest.mark.parametrize("family", ["gpt2", "gpt_bigcode", "gptj", "gpt_neox", "opt", "bloom"])
def test_a_sound_conversion_of_each_family_has_its_source_s_numbers(family: str, tmp_path: Path) -> None:
    save(family, tmp_path / "source")
    shards_of(tmp_path / "source", tmp_path / "shards")
    found = compare_numbers(open_source(find_archive(tmp_path / "source")), tmp_path / "shards")
    assert not found.broken and "numbers of config.ini are the source's" in found.shown[0]


def test_in_fp32_a_tenth_of_the_floor_is_enough() -> None:
    residuals, exact = [np.full((4, 4), 5e-4)], [np.full((4, 4), 3e-6)]
    assert distances(residuals, exact, 0.0, "fp32").broken and not distances(residuals, exact, 0.0, "bf16").broken
    assert not distances([np.full((4, 4), 1e-5)], exact, 0.0, "fp32").broken


@pytest.mark.parametrize("key", ["rms_norm_eps", "num_key_value_heads", "rope_theta"])
def test_a_served_directory_of_hugging_face_has_its_source_s_numbers_too(key: str, llama: Path, tmp_path: Path) -> None:
    reference, _ = open_reference(llama / "source", "huggingface", tmp_path / "scratch")
    assert isinstance(reference, HuggingFaceReference) and reference.source is not None
    sound = compare_numbers(reference.source, llama / "source", reference.model)
    assert not sound.broken and "numbers of config.json are the source's" in sound.shown[0]
    copy = shutil.copytree(llama / "source", tmp_path / "copy")
    content = json.loads((copy / "config.json").read_text())
    (content if key in content else content["rope_parameters"])[key] *= 2
    (copy / "config.json").write_text(json.dumps(content))
    (line,) = compare_numbers(reference.source, copy, reference.model).broken
    assert key in line and "in the served config.json" in line
