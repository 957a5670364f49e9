"""config.ini in the dialect of FasterTransformer's 3rdparty/INIReader.h."""

from __future__ import annotations

import configparser
import io
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.fastertransformer.engine.errors import ConfigIniError as EngineRefusal
from backends.fastertransformer.engine.model.families import read_config
from deployment.proof import served_models
from evaluation.client.served_model import inspect_endpoint
from evaluation.tasks.prompt_learning import read_task
from export_scripts.arguments import ExportArguments
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.repository.checkpoint import _open_shards
from ft_format.config_ini import FILE_NAME, ConfigIni, ConfigIniError, render
from ft_format.values import COUNT, FLAG, fraction, one_of
from handover.endpoint import Endpoint
from handover.errors import ArtefactError, CheckpointError
from handover.manifest import Manifest
from handover.templates import TEMPLATES_FILE

PROJECT = Path(__file__).resolve().parents[2]
# In the style of FasterTransformer's examples/cpp/multi_gpu_gpt/gpt_config.ini.
COMMENTED = b"""\xef\xbb\xbf; the whole model
# of which this is a copy
[gpt] ; what ParallelGptTritonModel.cc reads
model_name=gpt ; not read
head_num=4     ; heads of every layer
size_per_head : 16
Vocab_Size = 50304 ; padded
end_id = 3 # of the tokenizer
weight_data_type = fp16\t; fp32;fp16
path = a;b
layernorm_eps = 1e-5 ;optional
num_tasks = 2 ;optional
;prompt learning
[task_0] ; task_name_id = 0
task_name=sentiment
[TASK_1]
task_name = intent and slot ; task_name_id = 1
"""


def parsed(content: bytes) -> ConfigIni:
    return ConfigIni(content, "config.ini")


def test_comments_are_no_part_of_values() -> None:
    ini = parsed(COMMENTED)
    assert {name: section.texts for name, section in ini.items()} == {
        "gpt": {
            "model_name": "gpt", "head_num": "4", "size_per_head": "16", "vocab_size": "50304", "end_id": "3",
            "weight_data_type": "fp16", "path": "a;b", "layernorm_eps": "1e-5", "num_tasks": "2",
        },
        "task_0": {"task_name": "sentiment"},
        "task_1": {"task_name": "intent and slot"},
    }  # fmt: skip
    assert ini["gpt"].get("layernorm_eps", fraction()) == 1e-5


def test_of_a_key_that_is_given_twice_the_first_number_counts_and_a_word_is_refused() -> None:
    """INIReader's ValueHandler joins them by line feeds; strtol reads the first, a word equals none that is legal."""
    ini = parsed(
        b"[gpt]\nhead_num = 4\nflag = 1\n[task_0]\ntask_name = a\n[gpt]\nhead_num = 8\nflag = 1\nlong = 1\n 2\n"
    )
    assert ini["gpt"].get("head_num", COUNT) == 4 and ini["gpt"].texts["long"] == "1\n2"
    with pytest.raises(ConfigIniError, match=r"config\.ini: \[gpt\] flag = 1 and 1 is none of 1, true, yes, on, 0, "):
        ini["gpt"].get("flag", FLAG)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[gpt]\nhead_num\n", r"line 2 is 'head_num'; legal lines are \[section\], key = value and ; comment"),
        (b"; first\nhead_num = 4\n", r"line 2 is 'head_num = 4'; a \[section\] must stand before the first key"),
        (b"[gpt ; of all\nhead_num = 4\n", r"line 1 is '\[gpt'; the name of a section ends with \]"),
        (b"[gpt]\nhead_num = \xff\n", "cannot be read: .*invalid start byte"),
    ],
)
def test_what_is_no_line_of_the_dialect_is_refused_with_its_number(content: bytes, words: str) -> None:
    with pytest.raises(ConfigIniError, match=words) as refused:
        parsed(content)
    assert refused.value.hint == "correct the file, or convert the checkpoint again"


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ("gptj", "head_num", r"config\.ini has no section \[gptj\]; it has \['gpt'\]"),
        ("gpt", "num_layer", r"config\.ini: \[gpt\] has no num_layer"),
        ("gpt", "head_num", r"config\.ini: \[gpt\] head_num = many is not a whole number of at least 1"),
        ("gpt", "vocab_size", r"vocab_size = 9{200} is not a whole number"),
    ],
)
def test_a_refusal_names_file_section_key_what_is_found_and_what_is_legal(section: str, key: str, words: str) -> None:
    ini = parsed(b"[gpt]\nhead_num = many\nvocab_size = " + b"9" * 10_000)
    with pytest.raises(ConfigIniError, match=words) as refused:
        ini[section].get(key, COUNT)
    assert refused.value.hint


def test_what_is_written_is_what_configparser_writes_and_is_read_back() -> None:
    """FasterTransformer's converters write with Python's configparser."""
    family: dict[str, dict[str, object]] = {
        "gpt": {"model_name": "gpt", "head_num": 4, "layernorm_eps": 1e-05, "End_ID": 3, "empty": "", "two": "1\n2"}
    }
    extra: dict[str, dict[str, object]] = {
        "gpt": {"head_num": 8, "num_tasks": 1},
        "task_0": {"task_name": "intent and slot"},
    }
    parser, stream = configparser.ConfigParser(interpolation=None), io.StringIO()
    parser.read_dict(family)
    parser.read_dict(extra)
    parser.write(stream)
    text = render(family, extra)
    assert text == stream.getvalue()
    assert parsed(text.encode())["gpt"].texts == dict(parser["gpt"])
    with pytest.raises(ConfigIniError, match="must not contain"):
        render({"task_0": {"task_name": "intent ; slot"}})


def of_the_engine(directory: Path) -> object:
    return read_config(directory)


def of_the_deployment(directory: Path) -> object:
    return served_models.read_config(directory)


def of_the_export(directory: Path) -> object:
    arguments = ExportArguments(directory, directory / "repository", "tiny", 1, 1, "fp32", 0, 0, 8)
    return _open_shards(directory, Manifest("ft_checkpoint", ()), arguments)


def of_a_reshard(directory: Path) -> object:
    (directory / "model.wte.bin").touch()
    return inspect_source(directory, 1, "fp16")


def of_the_evaluation(directory: Path) -> object:
    return inspect_endpoint(Endpoint("localhost", 0, 0, 0), {"model_checkpoint_path": str(directory)})


def of_a_task(directory: Path) -> object:
    (directory / TEMPLATES_FILE).write_text('[{"taskname": "squad", "prompt_template": "{context}"}]')
    return read_task(directory, "squad", ["context"], brings_table=False)


READERS: dict[Callable[[Path], object], tuple[type[Exception], str, str]] = {
    of_the_engine: (EngineRefusal, "head_num", "end_id"),
    of_the_deployment: (ArtefactError, "num_tasks", "num_tasks"),
    of_the_export: (ArtefactError, "start_id", "end_id"),
    of_a_reshard: (CheckpointError, "head_num", "vocab_size"),
    of_the_evaluation: (ArtefactError, "vocab_size", "end_id"),
    of_a_task: (ArtefactError, "prompt_learning_start_id", "weight_data_type"),
}


@pytest.mark.parametrize("read", READERS)
def test_every_reader_refuses_a_value_in_the_same_words(read: Callable[[Path], object], tmp_path: Path) -> None:
    error, *keys = READERS[read]
    for key in keys:
        values = dict.fromkeys(("head_num", "size_per_head", "inter_size", "num_layer", "vocab_size", "end_id"), "8")
        values |= {"start_id": "0", "max_pos_seq_len": "8", "prompt_learning_start_id": "9", "weight_data_type": "fp16"}
        values[key] = "many"
        lines = "".join(f"{name} = {value} ; as trained\n" for name, value in values.items())
        (tmp_path / FILE_NAME).write_text(f"[gpt] ; the model\n{lines}")
        with pytest.raises(
            error, match=rf"config\.ini: \[gpt\] {key} = many is (not a whole number|none of)"
        ) as refused:
            read(tmp_path)
        assert "correct the file, or convert the checkpoint again" in str(refused.value)


def test_nothing_else_reads_or_writes_config_ini() -> None:
    """Tests compare with Python's own parser; the product has one."""
    found = subprocess.run(
        ["git", "grep", "-lw", "configparser", "--", "*.py", ":!tests"], cwd=PROJECT, capture_output=True, text=True
    )
    assert found.stdout.split() == [], "ft_format/config_ini.py reads and writes it"


def test_one_of_takes_upper_and_lower_case() -> None:
    assert one_of({"Gelu": 1})("GELU") == 1
