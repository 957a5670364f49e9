"""config.pbtxt's parameters and where a checkpoint is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.settings import Settings, find_checkpoint, read_settings

PARAMETERS = {"tensor_para_size": "2", "pipeline_para_size": "3", "data_type": "fp16", "model_type": "GPT"}
PARAMETERS |= {"int8_mode": "0", "enable_custom_all_reduce": "1", "model_checkpoint_path": ""}


def checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.ini").write_text("[gpt]\n")
    return directory


def test_parameters_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_CPU_THREADS", "3")
    place = checkpoint(tmp_path / "1" / "2-gpu")
    settings = read_settings(PARAMETERS, tmp_path, "1")
    assert (settings.checkpoint, settings.tensor_para_size, settings.pipeline_para_size) == (place, 2, 3)
    assert (settings.data_type, settings.cpu_threads) == ("fp16", 3)
    assert read_settings(PARAMETERS | {"cpu_threads": "1"}, tmp_path, "1").cpu_threads == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "BERT"}, "model_type = BERT is none of GPT, GPT-J"),
        ({"int8_mode": "2"}, "int8_mode = 2 is not supported"),
        ({"quantization": "int4"}, "quantization = int4 is none of fp8, fp8_block"),
        ({"quantization": "fp8", "int8_mode": "1"}, "int8_mode = 1 with quantization = fp8: take one of the two"),
        ({"inflight_batching": "yes"}, "inflight_batching = yes"),
        ({"kv_cache_fraction": "1.5"}, "kv_cache_fraction = 1.5"),
        ({"kv_cache_bytes": "much"}, "kv_cache_bytes = much"),
        ({"tensor_para_size": "0"}, "tensor_para_size = 0"),
        ({"pipeline_para_size": "two"}, "pipeline_para_size = two"),
        ({"enable_custom_all_reduce": "2"}, "enable_custom_all_reduce = 2"),
        ({"cpu_threads": "-1"}, "cpu_threads = -1"),
    ],
)
def test_a_parameter_that_does_not_fit_is_named(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    checkpoint(tmp_path / "1" / "2-gpu")
    with pytest.raises(EngineError, match=words):
        read_settings(PARAMETERS | changes, tmp_path, "1")


def test_a_parameter_that_is_nearly_a_known_one_is_said_once_and_others_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FasterTransformer ignores what it does not know: its own stores have parameters that this engine has not."""
    checkpoint(tmp_path / "1" / "1-gpu")
    others = {"is_half": "1", "max_input_len": "512", "decoding_type": "sampling", "model_name": "gpt"}
    given = {"data_type": "fp16", "tensor_para_sise": "2", "model_checkpoint_path": ""} | others
    assert read_settings(given, tmp_path, "1").tensor_para_size == 1
    assert [record.getMessage() for record in caplog.records] == [
        "config.pbtxt: tensor_para_sise is ignored: did you mean tensor_para_size?"
    ]


def test_another_process_reads_what_was_written_down(tmp_path: Path) -> None:
    checkpoint(tmp_path / "it's; a 'name'" / "2-gpu")
    more = {
        "model_type": "GPT-J",
        "int8_mode": "1",
        "kv_cache_fraction": "0.5",
        "process_per_rank": "1",
        "enable_prefix_cache": "0",
        "max_queue_length": "9",
        "max_queue_s": "2.5",
        "prefill_chunk_tokens": "640",
        "cpu_threads": "3",
    }
    settings = read_settings(PARAMETERS | more | {"model_checkpoint_path": "2-gpu"}, tmp_path / "it's; a 'name'", "1")
    assert Settings.from_json(settings.to_json()) == settings and not settings.has_prefix_cache
    assert (settings.max_queue_length, settings.max_queue_s, settings.prefill_chunk_tokens) == (9, 2.5, 640)


def test_a_missing_data_type_is_said(tmp_path: Path) -> None:
    checkpoint(tmp_path / "1" / "2-gpu")
    with pytest.raises(EngineError, match="no parameter data_type"):
        read_settings({key: value for key, value in PARAMETERS.items() if key != "data_type"}, tmp_path, "1")


def test_a_relative_path_is_below_the_version_then_below_the_model(tmp_path: Path) -> None:
    below_model = checkpoint(tmp_path / "weights" / "2-gpu")
    assert find_checkpoint("weights/2-gpu", tmp_path, "1", 2) == below_model
    below_version = checkpoint(tmp_path / "1" / "weights" / "2-gpu")
    assert find_checkpoint("weights/2-gpu", tmp_path, "1", 2) == below_version


def test_an_absolute_path_that_is_gone_falls_back_to_the_moved_repository(tmp_path: Path) -> None:
    moved = checkpoint(tmp_path / "repository" / "1" / "2-gpu")
    given = tmp_path / "elsewhere"
    assert find_checkpoint(str(given), tmp_path / "repository", "1", 2) == moved
    assert find_checkpoint(str(checkpoint(given)), tmp_path / "repository", "1", 2) == given


def test_no_checkpoint_lists_every_place(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught:
        find_checkpoint("/gone/4-gpu", tmp_path, "1", 4)
    assert "/gone/4-gpu, " in str(caught.value) and str(tmp_path / "1" / "4-gpu") in str(caught.value)
